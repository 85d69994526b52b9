"""Staging places: whose they are, whether a copy fits, what lies there, what may be removed."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from stage_cases import BLOCK, make_nodes, make_source, stage

from tightfit.clusters.site import Site
from tightfit.clusters.staging import transfer
from tightfit.clusters.staging.home import (
    FreeSpace,
    clean_home,
    find_home,
    find_shortage,
    list_copies,
    lock_model,
    read_free_space,
)
from tightfit.clusters.staging.nodes import agent_command, find_nodes
from tightfit.clusters.staging.stage import choose_target
from tightfit.core.errors import NotFoundError, SetupError, UsageError
from tightfit.core.import_path import module_words
from tightfit.core.units import GIB
from tightfit.hardware.slurm import NODES_COMMAND
from tightfit.runtime.staged import home_in

IS_ROOT = os.geteuid() == 0


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TIGHTFIT_STAGE", raising=False)


def test_a_place_that_all_may_rename_in_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SetupError, match="not sticky"):
        find_home(tmp_path)
    tmp_path.chmod(0o1777)

    assert find_home(tmp_path) == home_in(tmp_path)


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    home_in(tmp_path).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(SetupError, match="is a link"):
        find_home(tmp_path)


@pytest.mark.skipif(not IS_ROOT, reason="only root can give a folder away; un-skip: sudo pytest")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    home_in(tmp_path).mkdir()
    os.chown(home_in(tmp_path), 12345, 12345)
    with pytest.raises(SetupError, match="owned by user id 12345"):
        find_home(tmp_path)
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(SetupError, match="belongs to another user"):
        find_home(tmp_path)


def test_no_such_place(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="There is no folder"):
        find_home(tmp_path / "nowhere")


@pytest.mark.skipif(not IS_ROOT, reason="mounting needs root; un-skip: sudo pytest")
def test_a_ram_disk_that_is_too_small_is_refused_before_copying(tmp_path: Path) -> None:
    source = make_source(tmp_path / "model", num_blocks=12)
    small = tmp_path / "small"
    small.mkdir()
    command = (
        f"mount -t tmpfs -o size=8M,mode=1777 none {small} && "
        f"{sys.executable} -m tightfit.cli.app stage {source} --to {small} --leave 0; "
        f"code=$?; ls {small}; exit $code"
    )
    # The model's folder has no real tokenizer to look at, and need not: none is loaded.
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, check=False
    )

    assert done.returncode == 6, done.stderr
    assert "has no room" in done.stderr
    assert "it needs 12.0 MiB and 8.0 MiB are free" in done.stderr
    assert done.stdout == "", "something was copied all the same"


def test_memory_counts_where_the_place_is_memory() -> None:
    room = FreeSpace(
        disk_bytes=100 * GIB, is_memory=True, memory_bytes=20 * GIB, total_memory_bytes=40 * GIB
    )
    disk = FreeSpace(
        disk_bytes=100 * GIB, is_memory=False, memory_bytes=20 * GIB, total_memory_bytes=40 * GIB
    )

    assert find_shortage(room, 14 * GIB) is None
    assert "to stay free for the job" in (find_shortage(room, 19 * GIB) or "")
    assert "16.0 GiB are to stay free" in (
        find_shortage(room, 14 * GIB, leave_bytes=16 * GIB) or ""
    )
    assert find_shortage(disk, 90 * GIB) is None
    assert "100.0 GiB are free" in (find_shortage(disk, 100 * GIB) or "")
    assert find_shortage(disk, 0) is None


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    """cgroup v2: the step has no limit, its job has 4 GiB and has used one, half of it cache."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self/cgroup", "0::/slurm/job_1/step_0\n")
    write(groups / "slurm/job_1/step_0/memory.max", "max\n")
    write(groups / "slurm/job_1/memory.max", f"{4 * GIB}\n")
    write(groups / "slurm/job_1/memory.current", f"{GIB}\n")
    write(groups / "slurm/job_1/memory.stat", f"anon 1\ninactive_file {GIB // 2}\n")
    room = read_free_space(tmp_path, cgroup=groups, proc=proc)

    assert room.total_memory_bytes == 4 * GIB
    assert room.memory_bytes == 4 * GIB - GIB // 2


def test_a_limit_of_the_older_kind_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self/cgroup", "5:memory:/job\n3:cpu,cpuacct:/job\n")
    write(groups / "memory/job/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(groups / "memory/job/memory.usage_in_bytes", f"{GIB}\n")
    write(groups / "memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    write(groups / "memory/memory.usage_in_bytes", f"{GIB}\n")

    assert read_free_space(tmp_path, cgroup=groups, proc=proc).memory_bytes == GIB


def test_a_ram_disk_is_known_as_one() -> None:
    assert read_free_space(Path("/dev/shm")).is_memory
    assert not read_free_space(Path("/proc/self")).is_memory


def test_listing_and_cleaning(tmp_path: Path) -> None:
    one, two = make_source(tmp_path / "one", num_blocks=2), make_source(tmp_path / "two")
    for source in (one, two):
        stage(source, make_nodes(tmp_path, "a"))
    home = home_in(tmp_path / "node-a")
    (home / "left-123.partial").mkdir()
    (home / "left-123.partial" / "model.safetensors").write_bytes(bytes(5000))
    os.utime(two / "config.json")

    listed = {copy.key.rpartition("-")[0]: copy for copy in list_copies(home)}
    assert {name: copy.state for name, copy in listed.items()} == {
        "left": "partial",
        "one": "whole",
        "two": "stale",
    }
    assert listed["one"].source == str(one)
    assert abs(listed["one"].num_bytes - 2 * BLOCK) < BLOCK
    with lock_model(home, listed["two"].key):
        removed = clean_home(home)
        assert {copy.state for copy in removed} == {"whole", "partial"}
        assert [copy.is_busy for copy in list_copies(home)] == [True]
    clean_home(home)
    assert not home.exists()


def test_parts_that_nobody_works_on_go_where_room_is_short(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    home.mkdir(mode=0o700)
    for key in ("dead-1", "busy-2"):
        (home / f"{key}.partial").mkdir()
        (home / f"{key}.partial" / "f").write_bytes(bytes(10))
    with lock_model(home, "busy-2"):
        assert [copy.key for copy in clean_home(home, only_partial=True)] == ["dead-1"]


def test_a_stranger_is_not_let_in() -> None:
    server, token = transfer.listen("127.0.0.1"), transfer.make_token()
    place = server.getsockname()
    found: list[socket.socket] = []
    waiting = threading.Thread(target=lambda: found.append(transfer.accept(server, token)))
    waiting.start()
    with socket.create_connection(place) as stranger:
        stranger.sendall(b"x" * 32)
        assert stranger.recv(2) == b"", "turned away"
    with transfer.connect(place[0], place[1], token) as friend:
        waiting.join()
        transfer.send_end(friend)
        assert list(transfer.receive_blocks(found[0], block_bytes=BLOCK)) == []
    found[0].close()
    server.close()


def test_which_nodes_are_meant() -> None:
    rows = "".join(
        f"{name}|{partition}|up|(null)|1000|4|{state}|infinite|0|(null)\n"
        for name, partition, state in (
            ("a1", "gpu*", "idle"),
            ("a2", "gpu*", "mix"),
            ("a3", "gpu*", "down"),
            ("b1", "cpu", "idle"),
        )
    )

    def answer(words: Sequence[str], _seconds: float) -> str:
        return rows if tuple(words[: len(NODES_COMMAND)]) == NODES_COMMAND else ""

    def find(nodes: str | None, on: str | None, **environ: str) -> tuple[tuple[str, ...], str]:
        return find_nodes(
            nodes=nodes, on=on, site=Site(), environ=environ, num_bytes=GIB, run=answer
        )

    assert find(None, None) == ((), "")
    assert find("x[1-2]", None)[0] == ("x1", "x2")
    nodes, prefix = find(None, "slurm:gpu")
    assert nodes == ("a1", "a2")
    assert prefix.startswith("srun --partition=gpu")
    assert "--mem=2048M" in prefix
    assert prefix.endswith("--nodelist={node}")
    assert find(None, "slurm", SLURM_JOB_NODELIST="q[1-3]", SLURM_JOB_ID="7")[0] == (
        "q1",
        "q2",
        "q3",
    )
    with pytest.raises(UsageError, match="both name nodes"):
        find("a", "slurm:gpu")
    with pytest.raises(NotFoundError, match="no partition `gpo`"):
        find(None, "slurm:gpo")
    with pytest.raises(UsageError, match="this is none"):
        find(None, "slurm")


def test_where_to() -> None:
    site = Site(stage_to="/local")

    assert choose_target(None, Site(), {}) == Path("/dev/shm")
    assert choose_target(None, site, {}) == Path("/local")
    assert choose_target(None, site, {"TIGHTFIT_STAGE": "/nvme:/x"}) == Path("/nvme")
    assert choose_target("/y", site, {"TIGHTFIT_STAGE": "/nvme"}) == Path("/y")
    with pytest.raises(UsageError, match="not the same folder"):
        choose_target("here", site, {})


def test_the_sites_lines_stand_before_the_agent() -> None:
    assert agent_command(Site(python="/opt/python"))[0] == "/opt/python"
    words = agent_command(Site(setup=("module load x",), python="/opt/python"))

    assert words[:2] == ["bash", "-c"]
    agent = shlex.join(["/opt/python", *module_words("tightfit.clusters.staging.agent")])
    assert words[2] == f"module load x\nexec {agent}"
