"""`tightfit hardware --on slurm` and `--on k8s`: tables, each node, JSON, and what is refused.

After a wanted change: TIGHTFIT_GOLDEN=write python -m pytest -k inventory tests/unit/cli
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_run import Answer
from tightfit.cli.hardware import render_inventory
from tightfit.cli.terminal.screen import show
from tightfit.hardware.inventory import Inventory
from tightfit.hardware.kubernetes import probe_kubernetes_inventory
from tightfit.hardware.slurm import probe_slurm_inventory

Run = Callable[..., Answer]
RECORDED = Path(__file__).parents[2] / "golden" / "hardware"
FOLDER = Path(__file__).parents[2] / "golden" / "inventory"


def _slurm(name: str) -> Inventory:
    def run(arguments: object, _seconds: float) -> str:
        kind = "nodes" if "-o" in arguments else "used"  # type: ignore[operator]
        return (RECORDED / f"{name}.{kind}.txt").read_text()

    return probe_slurm_inventory(run=run)


def _kubernetes() -> Inventory:
    return probe_kubernetes_inventory(
        run=lambda arguments, _s: (RECORDED / f"kubernetes_{arguments[2]}.json").read_text()
    )


SCREENS: dict[str, Callable[[], None]] = {
    "slurm": lambda: show(render_inventory(_slurm("slurm_22_05_lab"), is_each=False)),
    "slurm_each": lambda: show(render_inventory(_slurm("slurm_22_05_lab"), is_each=True)),
    "slurm_mixed": lambda: show(render_inventory(_slurm("slurm_22_05_mixed"), is_each=False)),
    "k8s": lambda: show(render_inventory(_kubernetes(), is_each=False)),
    "k8s_each": lambda: show(render_inventory(_kubernetes(), is_each=True)),
}


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("screen", SCREENS)
def test_the_screen_is_as_agreed(
    screen: str,
    columns: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    SCREENS[screen]()
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    golden = FOLDER / f"{screen}_{columns}.txt"
    if os.environ.get("TIGHTFIT_GOLDEN") == "write":
        golden.write_text(shown, encoding="utf-8")
    assert shown == golden.read_text(encoding="utf-8")


def test_no_golden_file_is_forgotten() -> None:
    expected = {f"{screen}_{columns}.txt" for screen in SCREENS for columns in (80, 120)}
    assert {path.name for path in FOLDER.glob("*.txt")} == expected


@pytest.fixture
def recorded_sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `sinfo` that prints what a real one printed."""
    lab = RECORDED / "slurm_22_05_lab"
    script = tmp_path / "sinfo"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *-O*) cat {lab}.used.txt;; *) cat {lab}.nodes.txt;; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.usefixtures("recorded_sinfo")
def test_the_json_holds_partitions_nodes_and_groups(run: Run) -> None:
    reported = run("hardware", "--on", "slurm", "--json").json
    assert reported["totals"]["num_gpus"] == 4
    partitions = {partition["name"]: partition for partition in reported["partitions"]}
    assert partitions["cpu"]["kinds"][0]["states"] == {"mixed": 1, "drained": 1}
    assert partitions["gpu"]["max_seconds"] == 3600
    nodes = {node["name"]: node for node in reported["nodes"]}
    assert nodes["cpu02"]["reason"] == "bad fan, ask Eva"
    assert nodes["big01"]["gpus"] == [
        {"kind": "a100", "gpu": "A100-SXM4-40GB", "count": 2, "num_free": 1}
    ]
    assert [group["name"] for group in reported["groups"]] == [
        "gpu/2xa100",
        "gpu/1xv100d32q",
        "low/2xa100",
        "low/1xv100d32q",
    ]


@pytest.mark.usefixtures("recorded_sinfo")
def test_a_partition_that_is_not_there(run: Run) -> None:
    answer = run("hardware", "--on", "slurm:gpus")
    assert answer.code == 3
    assert "Did you mean `gpu`" in answer.err
    assert "choose one of: cpu, gpu, low" in answer.err


def test_each_is_of_a_cluster(run: Run) -> None:
    for words in (("hardware", "--each"), ("hardware", "--on", "4xT4", "--each")):
        answer = run(*words)
        assert answer.code == 2
        assert "tightfit hardware --on slurm --each" in answer.err
