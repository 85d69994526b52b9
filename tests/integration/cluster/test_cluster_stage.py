"""Staging between hosts on shaped links: the choice, a killed copy, a corrupted byte, a full disk.

Four hosts and a storage host as namespaces. The model lies on the storage host and is mounted by
the others through a FUSE file system whose data crosses the shaped links.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stage_lab import MODEL_BYTES, NODES, SCENARIOS, Scenario, StageLab, open_lab

WITHIN = 1.2
NUM_ROUNDS = 3
"""At most; the fastest counts, since something else may keep the machine busy for a while."""
WAYS = ("all-read", "chain", "tree")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StageLab]:
    with open_lab(tmp_path_factory.mktemp("lab")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _nothing_staged(lab: StageLab) -> Iterator[None]:
    yield
    lab.clean()


def expected(lab: StageLab) -> set[str]:
    return {hashlib.sha256((lab.origin / "model.safetensors").read_bytes()).hexdigest()}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_chosen_way_is_near_the_best(lab: StageLab, scenario: Scenario) -> None:
    lab.shape(scenario)
    fastest = dict.fromkeys(WAYS, math.inf)
    for _ in range(NUM_ROUNDS):
        chosen = stage_anew(lab)
        assert set(chosen["predicted_seconds"]) == set(WAYS)
        others = [stage_anew(lab, "--how", way) for way in WAYS if way != chosen["how"]]
        for done in (chosen, *others):
            seconds = done["copy_seconds"] + done["check_seconds"]
            fastest[done["how"]] = min(fastest[done["how"]], seconds)
        if fastest[chosen["how"]] <= WITHIN * min(fastest.values()):
            return
    pytest.fail(f"{chosen['how']} was chosen: {fastest}, {chosen}")


def stage_anew(lab: StageLab, *options: str) -> Any:
    """Stage where nothing is staged; every copy is right."""
    lab.clean()
    done = lab.stage(*options)
    assert lab.digest_copies() == expected(lab)
    return done


def test_a_killed_staging_goes_on_where_it_stopped(lab: StageLab) -> None:
    """kill -9 for the command and every agent, in the middle of a chain."""
    lab.shape(Scenario(name="slow", storage=4e6, link=50e6))
    words = lab.hosts.command(NODES[0], *lab.command(str(lab.shared), "--how", "chain"))
    command = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and num_staged_bytes(lab, NODES[3]) < MODEL_BYTES // 4:
        time.sleep(0.2)
    command.send_signal(signal.SIGKILL)
    command.wait()
    for node in NODES:
        kill_agents(lab, node)
    assert MODEL_BYTES // 4 <= num_staged_bytes(lab, NODES[3]) < MODEL_BYTES

    lab.shape(SCENARIOS[0])
    done = lab.stage("--how", "chain")

    assert lab.digest_copies() == expected(lab)
    assert [node["state"] for node in done["nodes"]] == ["staged"] * 4
    assert all(node["num_kept_bytes"] > MODEL_BYTES // 5 for node in done["nodes"])
    assert lab.stage()["how"] is None, "nothing is left to do"


def num_staged_bytes(lab: StageLab, node: str) -> int:
    """By the records of the partial copy, 20 bytes for each block of a MiB."""
    found = lab.hosts.on(node, ["sh", "-c", "cat /dev/shm/tightfit-*/*.progress | wc -c"])
    return max(0, int(found.stdout) - 32) // 20 << 20


def kill_agents(lab: StageLab, node: str) -> None:
    """Only what this lab's host runs: they share its network."""
    holder = Path(f"/proc/{lab.hosts[node].holder.pid}/ns/net").readlink()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_agent = b"tightfit.clusters.staging.agent" in (entry / "cmdline").read_bytes()
            if is_agent and (entry / "ns/net").readlink() == holder:
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


def test_a_corrupted_byte_on_one_node_is_found_and_mended(lab: StageLab) -> None:
    lab.shape(SCENARIOS[0])
    lab.stage("--how", "chain")
    flip = (
        "import glob, os; p = glob.glob('/dev/shm/tightfit-*/*/model.safetensors')[0]; "
        "s = os.stat(p); f = open(p, 'r+b'); f.seek(9000000); b = f.read(1)[0]; f.seek(9000000); "
        "f.write(bytes([b ^ 4])); f.close(); os.utime(p, ns=(s.st_atime_ns, s.st_mtime_ns))"
    )
    lab.hosts.do(NODES[2], f'python3 -c "{flip}"')
    assert len(lab.digest_copies()) == 2
    assert lab.stage()["how"] is None, "sizes and times are as they were"

    done = lab.stage("--verify")

    repaired = {node["node"]: node["num_repaired_blocks"] for node in done["nodes"]}
    assert repaired == {"n1": 0, "n2": 0, "n3": 1, "n4": 0}
    assert lab.digest_copies() == expected(lab)


def test_a_node_whose_agent_is_killed_does_not_keep_the_others_from_it(lab: StageLab) -> None:
    lab.shape(Scenario(name="slow", storage=5e6, link=50e6))
    words = lab.hosts.command(NODES[0], *lab.command(str(lab.shared), "--how", "chain"))
    command = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and num_staged_bytes(lab, NODES[2]) < MODEL_BYTES // 8:
        time.sleep(0.2)
    kill_agents(lab, NODES[1])
    out, _ = command.communicate(timeout=300)

    assert command.returncode == 6
    done = json.loads(out)
    states = {node["node"]: node["state"] for node in done["nodes"]}
    assert states == {"n1": "staged", "n2": "lost", "n3": "staged", "n4": "staged"}
    assert "1 of 4 nodes were lost" in done["error"]
    assert lab.stage()["nodes"][1]["state"] == "staged"
    assert lab.digest_copies() == expected(lab)


def test_a_full_ram_disk_is_refused_before_anything_is_copied(lab: StageLab) -> None:
    filled = (3 * MODEL_BYTES >> 20) + 40
    lab.hosts.do(NODES[2], f"dd if=/dev/zero of=/dev/shm/filler bs=1M count={filled}")
    try:
        done = lab.run(str(lab.shared))
    finally:
        lab.hosts.do(NODES[2], "rm /dev/shm/filler")

    assert done.returncode == 6
    reported = json.loads(done.stdout)
    assert "n3: it needs 64.0 MiB and 24.0 MiB are free" in reported["error"]
    assert all(num_staged_bytes(lab, node) == 0 for node in NODES)


def test_what_is_staged_where(lab: StageLab) -> None:
    lab.shape(SCENARIOS[0])
    lab.stage("--how", "tree")
    listed = json.loads(lab.run("--list").stdout)["copies"]

    assert [(row["node"], row["state"]) for row in listed] == [(node, "whole") for node in NODES]
    assert {row["source"] for row in listed} == {str(lab.shared)}
