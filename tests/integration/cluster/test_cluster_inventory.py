"""What tightfit tells of a real Slurm: its inventory, plans per partition, arrays of jobs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import slurm_lab
from slurm_lab import SlurmLab
from tightfit.clusters.site import Site
from tightfit.clusters.slurm.queue import JobState, cancel_jobs, read_jobs, submit_script
from tightfit.clusters.slurm.script import BatchJob, GpuRequest, JobResources, write_script

pytest_plugins = ("slurm_lab",)

Submit = Callable[..., str]
MODEL = "SmolLM2-135M"


def tell(*words: str) -> Any:
    """The JSON of a verb, run as a user would."""
    command = [sys.executable, "-m", "tightfit", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def list_nodes(on: str = "slurm") -> dict[str, Any]:
    return {node["name"]: node for node in tell("hardware", "--on", on)["nodes"]}


def wait_until(is_so: Callable[[], bool], *, seconds: float = 90) -> None:
    assert slurm_lab.wait_until(is_so, seconds=seconds)


@pytest.fixture
def submit(lab: SlurmLab, tmp_path: Path) -> Iterator[Submit]:
    """Submits a job with our own script; none outlives the test."""
    assert lab.is_up
    started: list[str] = []

    def start(name: str, *lines: str, **wishes: Any) -> str:
        job = BatchJob(name=name, log=str(tmp_path / f"{name}.%j.log"), body=lines, **wishes)
        path = tmp_path / f"{name}.sh"
        path.write_text(write_script(job, Site()))
        started.append(submit_script(path))
        return started[-1]

    yield start
    cancel_jobs(started)
    wait_until(lambda: all(status.state.is_over for status in read_jobs(started)))


def is_running(job: str) -> bool:
    return any(status.state is JobState.RUNNING for status in read_jobs([job]))


def shown_by_scontrol() -> dict[str, dict[str, str]]:
    """The same from another command: `scontrol show node`, one line per node."""
    text = subprocess.check_output(["scontrol", "-o", "show", "node"], text=True)
    lines = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines() if line.strip()]
    return {line["NodeName"]: line for line in lines}


@pytest.mark.usefixtures("lab")
def test_the_inventory_is_what_slurm_says() -> None:
    reported, shown = tell("hardware", "--on", "slurm"), shown_by_scontrol()
    nodes = {node["name"]: node for node in reported["nodes"]}
    assert nodes.keys() == shown.keys() == {"gpu01", "gpu02", "big01", "cpu01", "cpu02"}
    for name, node in nodes.items():
        there = shown[name]
        assert node["num_cores"] == int(there["CPUTot"])
        assert node["memory_bytes"] == int(there["RealMemory"]) * 2**20
        assert sorted(node["pools"]) == sorted(there["Partitions"].split(","))
        gres = [f"gpu:{gpu['kind']}:{gpu['count']}" for gpu in node["gpus"]]
        assert (",".join(gres) or "(null)") == there["Gres"]
    assert reported["totals"]["num_gpus"] == 4, "nodes of two partitions count once"
    listed = {(p["name"], kind["kind"]) for p in reported["partitions"] for kind in p["kinds"]}
    assert ("cpu", "CPU") in listed
    assert ("low", "2 x A100-SXM4-40GB") in listed
    assert {p["name"]: p["max_seconds"] for p in reported["partitions"]} == dict.fromkeys(
        ("cpu", "gpu", "low"), 3600.0
    )


def test_a_gpu_that_a_job_holds_is_not_free(submit: Submit) -> None:
    wait_until(lambda: list_nodes()["big01"]["gpus"][0]["num_free"] == 2)
    job = submit("hold", "sleep 300", partition="gpu", gpus_per_node=1, gpu=GpuRequest(kind="a100"))
    wait_until(lambda: is_running(job))
    node = list_nodes()["big01"]
    assert (node["state"], node["gpus"][0]["num_free"], node["num_free_cores"]) == ("mixed", 1, 3)
    groups = {g["name"]: g for g in tell("hardware", "--on", "slurm:gpu")["groups"]}
    assert groups["gpu/2xa100"]["num_free_gpus"] == 1
    assert groups["gpu/2xa100"]["num_free_nodes"] == 0
    cancel_jobs([job])
    wait_until(lambda: list_nodes()["big01"]["gpus"][0]["num_free"] == 2)


def test_a_drained_node_is_shown_with_its_reason(lab: SlurmLab) -> None:
    drain = ["scontrol", "update", "NodeName=cpu02", "State=DRAIN", "Reason=a fan, says Eva"]
    subprocess.run(drain, check=True)
    try:
        node = list_nodes()["cpu02"]
        assert (node["state"], node["takes_jobs"]) == ("drained", False)
        assert node["reason"].startswith("a fan, says Eva")
        (group,) = tell("hardware", "--on", "slurm:cpu")["groups"]
        assert group["num_nodes"] == 1
    finally:
        subprocess.run(["scontrol", "update", "NodeName=cpu02", "State=RESUME"], check=True)
    wait_until(lambda: lab.state("cpu02") == "idle")


def test_a_node_without_power_is_down(lab: SlurmLab) -> None:
    lab.poweroff("gpu02")
    try:
        wait_until(lambda: list_nodes()["gpu02"]["state_word"] == "down*", seconds=120)
        reported = tell("hardware", "--on", "slurm")
        groups = {group["name"]: group for group in reported["groups"]}
        assert groups["gpu/1xv100d32q"]["num_nodes"] == 1
        assert any("gpu02 (down*" in warning for warning in reported["warnings"])
        assert reported["totals"]["num_gpus"] == 4
        assert reported["totals"]["num_free_gpus"] <= 3
    finally:
        lab.poweron("gpu02")
    wait_until(lambda: list_nodes()["gpu02"]["state"] == "idle", seconds=120)


def test_plans_are_made_per_partition(submit: Submit) -> None:
    job = submit("hold", "sleep 300", partition="gpu", gpus_per_node=2, gpu=GpuRequest(kind="a100"))
    wait_until(lambda: is_running(job))
    reported = tell("plan", MODEL, "--on", "slurm")
    groups = {group["name"]: group for group in reported["groups"]}
    kinds = ("1xv100d32q", "2xa100")
    assert groups.keys() == {f"{where}/{kind}" for where in ("gpu", "low") for kind in kinds}
    for name, group in groups.items():
        assert group["plan"]["hardware"]["group"] == name
        assert group["can_start_now"] is ("a100" not in name)


@pytest.mark.usefixtures("lab")
def test_a_partition_without_gpus_is_planned_when_it_is_named() -> None:
    reported = tell("plan", MODEL, "--on", "slurm:cpu")
    hardware = reported["plans"][0]["hardware"]
    assert hardware["group"] == "cpu"
    assert hardware["node"]["gpu"]["is_cpu"]
    assert hardware["node"]["num_cores"] == 4


def test_an_array_takes_the_nodes_in_turns(submit: Submit, tmp_path: Path) -> None:
    """The first two hold both nodes until they are told to go on."""
    number = "${SLURM_ARRAY_TASK_ID}"
    job = submit(
        "many",
        f"hostname > {tmp_path}/answer.{number}",
        f"until [ -e {tmp_path}/go ]; do sleep 0.2; done",
        partition="cpu",
        resources=JobResources(cores=4, warn_seconds=0),
        array_size=4,
    )
    wait_until(lambda: is_running(job))
    wait_until(lambda: sum(node["num_free_cores"] for node in cpus()) == 0)
    assert {node["state"] for node in cpus()} == {"allocated"}
    assert over(job) == []
    (tmp_path / "go").touch()
    wait_until(lambda: len(over(job)) == 4, seconds=120)
    assert all(status is JobState.COMPLETED for status in over(job))
    answers = [(tmp_path / f"answer.{task}").read_text().strip() for task in range(4)]
    assert set(answers) == {"cpu01", "cpu02"}
    wait_until(lambda: sum(node["num_free_cores"] for node in cpus()) == 8)


def cpus() -> list[dict[str, Any]]:
    return list(list_nodes("slurm:cpu").values())


def over(job: str) -> list[JobState]:
    return [status.state for status in read_jobs([job]) if status.state.is_over]


def test_a_table_for_people(lab: SlurmLab) -> None:
    assert lab.is_up
    wide = {**os.environ, "COLUMNS": "140"}
    command = [sys.executable, "-m", "tightfit", "hardware", "--on", "slurm"]
    text = subprocess.check_output(command, text=True, env=wide)
    assert text.startswith("slurm: 5 nodes, 4 GPUs")
    rows = [line.split() for line in text.splitlines()]
    assert sum(row[:2] == ["low", "CPU,"] for row in rows) == 1
    each = subprocess.check_output([*command, "--each"], text=True, env=wide)
    assert {"gpu01", "gpu02", "big01", "cpu01", "cpu02"} <= {
        line.split()[0] for line in each.splitlines() if line.strip()
    }
