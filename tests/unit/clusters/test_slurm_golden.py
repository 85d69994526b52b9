"""Batch scripts word by word, from recipe to sbatch.

After a wanted change:

    TIGHTFIT_GOLDEN=write python -m pytest tests/unit/clusters/test_slurm_golden.py
"""

from __future__ import annotations

import math
import os
import re
import subprocess

import pytest
from slurm_cases import CASES, GOLDEN, make

from tightfit.core.units import GIB


@pytest.mark.parametrize("name", CASES)
def test_script_is_the_golden_one(name: str) -> None:
    path = GOLDEN / f"{name}.sbatch"
    script = make(name).script
    if os.environ.get("TIGHTFIT_GOLDEN") == "write":
        path.write_text(script)

    assert script == path.read_text()


@pytest.mark.parametrize("name", CASES)
def test_bash_can_read_it(name: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=make(name).script, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", CASES)
def test_options_stand_before_the_first_command_and_hold_no_variable(name: str) -> None:
    lines = make(name).script.splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]

    assert options == list(range(1, 1 + len(options)))
    assert not any("$" in lines[number] for number in options)


@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_for_is_what_the_plan_takes_and_a_node_has(name: str) -> None:
    made = make(name)
    strategy, node = made.plan.strategy, made.group.node
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", made.script, re.MULTILINE))

    assert int(asked["nodes"]) == strategy.num_nodes <= made.group.num_nodes
    gpus = 0 if node.gpu.is_cpu else strategy.gpus_per_node
    assert int(asked.get("gres", "gpu:0").rpartition(":")[2]) == gpus <= node.num_gpus
    assert 1 <= int(asked["cpus-per-task"]) <= (node.num_cores or math.inf)
    memory = int(asked["mem"].rstrip("M")) * 2**20
    assert made.plan.estimate.host.peak_bytes <= memory <= (node.host_memory_bytes or math.inf)
    assert ("--requeue" in made.script) == CASES[name].can_requeue


def test_every_golden_file_has_its_case() -> None:
    held = {path.stem for path in GOLDEN.glob("*.sbatch")}

    assert held == set(CASES)
    assert len(held) >= 8


def test_shapes_are_those_that_were_asked_for() -> None:
    shapes = {
        name: (make(name).plan.strategy.num_nodes, make(name).plan.strategy.gpus_per_node)
        for name in CASES
    }

    assert shapes["7b-on-one-v100"] == (1, 1)
    assert shapes["13b-on-four-v100"] == (1, 4)
    assert shapes["13b-on-two-nodes-of-three"] == (2, 3)
    assert shapes["full-on-a100-nodes"] == (4, 8)
    assert shapes["apptainer-on-two-nodes"] == (2, 8)
    assert shapes["cpu"] == (1, 1)


def test_nodes_of_a_mixed_partition_are_singled_out() -> None:
    assert make("13b-on-four-v100").gpu.kind == "v100"
    assert make("untyped-gpus-by-feature").gpu.kind is None
    assert make("untyped-gpus-by-feature").gpu.constraint == "a40"
    assert make("requeue-when-preempted").gpu.kind == "v100"


def test_a_run_longer_than_the_limit_takes_slices() -> None:
    made = make("requeue-when-preempted")

    assert made.group.max_seconds == made.resources.seconds == 4 * 3600
    assert made.resources.num_slices > 1
    assert made.resources.max_requeues >= 2 * made.resources.num_slices


def test_memory_has_a_margin() -> None:
    made = make("7b-on-one-v100")

    assert made.resources.memory_bytes is not None
    assert made.resources.memory_bytes >= made.plan.estimate.host.peak_bytes + 2 * GIB
