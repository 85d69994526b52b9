"""`tightfit calibrate`: told, stored, read back, used; and what goes wrong on the way."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from made_calibrations import make_calibration
from tightfit.api import calibrate as verb
from tightfit.core.units import GIB
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.local import probe_cpu
from tightfit.hardware.types import Cluster, Node, NodeGroup
from tightfit.runs.store import write_calibration


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIGHTFIT_LEDGER", str(tmp_path / "data" / "ledger.sqlite"))
    return tmp_path / "data" / "calibrations"


def make_cluster(*names: str) -> Cluster:
    groups = tuple(
        NodeGroup(name=name, node=Node(gpu=find_gpu(name), num_gpus=1), num_nodes=1)
        for name in names
    )
    return Cluster(groups=groups, source="here")


@pytest.fixture
def one_h200(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """An idle machine with a card, and a measurement that takes no time; what it was asked."""
    asked: list[dict[str, Any]] = []

    def measure(node: Node, *, budget_seconds: float, **_: Any) -> Any:
        asked.append({"gpu": node.gpu.name, "seconds": budget_seconds})
        return make_calibration(skipped=("fp8 products: there are none",), warnings=("busy",))

    monkeypatch.setattr(verb, "probe_here", lambda: make_cluster("H200-SXM"))
    monkeypatch.setattr("tightfit.runtime.calibrate.measure.measure_machine", measure)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return asked


def test_measured_told_and_stored(
    run: Run, one_h200: list[dict[str, Any]], data_folder: Path
) -> None:
    reported = run("calibrate", "--seconds", "30", "--force")

    assert reported.code == 0
    assert one_h200 == [{"gpu": "H200-SXM", "seconds": 30.0}]
    (path,) = data_folder.iterdir()
    assert f"wrote {path}" in reported.err
    lines = {line.split("  ")[0]: line.split() for line in reported.out.splitlines()}
    # 400 of the 791e12 that the catalogue's H200 sustains
    assert lines["best bf16 product"][-5:] == ["400", "TFLOP/s", "791", "TFLOP/s", "0.51"]
    assert lines["CUDA context"][-1] == "0.75"
    assert "fp8 products: there are none" in reported.out
    assert "busy" in reported.out


@pytest.mark.usefixtures("one_h200")
def test_json_is_the_whole_calibration(run: Run) -> None:
    reported = run("calibrate", "--json", "--force").json

    stored = run("calibrate", "--show", "--json").json
    assert reported == stored
    assert reported["calibration"]["context_bytes"] == 600_000_000
    rows = {row["name"]: row for row in reported["compared"]}
    assert rows["CUDA context"]["ratio"] == pytest.approx(600e6 / (0.75 * GIB))
    assert rows["pinned host memory to device"]["measured"] == 20e9


@pytest.mark.usefixtures("one_h200")
def test_what_a_busy_machine_gave_is_shown_and_not_kept(run: Run, data_folder: Path) -> None:
    earlier = write_calibration(make_calibration(seconds=1.0))
    before = earlier.read_text()

    reported = run("calibrate")

    assert reported.code == 6
    assert "best bf16 product" in reported.out
    assert "error: Not kept, since busy." in reported.err
    assert "--force keeps it" in reported.err
    assert list(data_folder.iterdir()) == [earlier]
    assert earlier.read_text() == before
    as_json = run("calibrate", "--json")
    assert as_json.code == 6
    assert as_json.json["path"] is None
    assert as_json.json["exit_code"] == 6
    assert as_json.json["calibration"]["warnings"] == ["busy"]


def test_a_machine_that_is_busy_before_is_not_measured(
    run: Run, one_h200: list[dict[str, Any]], data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1e4, 0.0, 0.0))

    reported = run("calibrate", "--seconds", "5", "--json")
    assert (reported.code, reported.json["exit_code"]) == (6, 6)
    assert reported.json["remedy"].startswith("tightfit calibrate --seconds 5")
    assert reported.json["error"].startswith(
        "Not measured, since the machine was busy before (load"
    )
    assert one_h200 == []
    assert list(data_folder.iterdir()) == []

    assert run("calibrate", "--force").code == 0
    assert len(one_h200) == 1


def test_plans_say_where_their_rates_are_doubtful(run: Run) -> None:
    name = probe_cpu().groups[0].node.gpu.name
    words = ("estimate", "SmolLM2-135M", "--on", "cpu", "--json")
    write_calibration(make_calibration(gpu_name=name, is_cpu=True))
    assert not any("not idle" in line for line in run(*words).json["assumptions"])

    write_calibration(make_calibration(gpu_name=name, is_cpu=True, warnings=("busy",)))

    assert any("not idle (2026-11-15)" in line for line in run(*words).json["assumptions"])


def test_show_needs_no_torch(
    run: Run, one_h200: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_calibration(make_calibration())
    monkeypatch.setitem(sys.modules, "torch", None)

    reported = run("calibrate", "--show")

    assert reported.code == 0
    assert "measured 2026-11-15" in reported.out
    assert one_h200 == []


@pytest.mark.usefixtures("one_h200")
def test_show_before_measuring(run: Run) -> None:
    reported = run("calibrate", "--show")

    assert reported.code == 3
    assert "was not calibrated" in reported.err
    assert "try: tightfit calibrate" in reported.err


@pytest.mark.usefixtures("one_h200")
def test_show_names_a_broken_file(run: Run) -> None:
    path = write_calibration(make_calibration())
    path.write_text("{")

    reported = run("calibrate", "--show", columns=400)

    assert reported.code == 3
    assert str(path) in reported.err


@pytest.mark.usefixtures("one_h200")
def test_without_torch_the_remedy_is_a_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )

    reported = run("calibrate")

    assert reported.code == 6
    assert "Calibration needs torch" in reported.err
    assert "pip install 'tightfit[train]'" in reported.err


def test_a_folder_that_cannot_be_written_is_told_before_measuring(
    run: Run, one_h200: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TIGHTFIT_LEDGER", str(tmp_path / "file" / "ledger.sqlite"))

    reported = run("calibrate")

    assert reported.code == 6
    assert "TIGHTFIT_LEDGER" in reported.err
    assert one_h200 == []


def test_cards_that_differ_are_measured_one_kind_at_a_time(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "probe_here", lambda: make_cluster("H200-SXM", "T4"))

    reported = run("calibrate")

    assert reported.code == 6
    assert "CUDA_VISIBLE_DEVICES=0 tightfit calibrate" in reported.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--device", "gpu"), 2, "cuda|cpu"),
        (("--seconds", "0"), 2, "not above 0"),
        (("--seconds", "fast"), 2, "not a number"),
        (("--show", "--seconds", "5"), 2, "would be ignored"),
        (("--show", "--force"), 2, "would be ignored"),
    ],
)
def test_wrong_words(run: Run, words: tuple[str, ...], code: int, said: str) -> None:
    reported = run("calibrate", *words)

    assert reported.code == code
    assert said in reported.err


def test_a_gpu_that_is_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "probe_here", probe_cpu)

    reported = run("calibrate", "--device", "cuda")

    assert reported.code == 6
    assert "tightfit calibrate --device cpu" in reported.err


def test_plans_on_this_machine_use_what_was_measured(run: Run) -> None:
    name = probe_cpu().groups[0].node.gpu.name
    words = ("estimate", "SmolLM2-135M", "--on", "cpu", "--json")
    before = run(*words).json
    write_calibration(make_calibration(gpu_name=name, is_cpu=True, context_bytes=None))

    after = run(*words).json

    line = "rates measured here on 2026-11-15 by tightfit calibrate"
    assert line in after["assumptions"]
    assert line not in before["assumptions"]
    assert after["time"]["seconds_per_step"] != before["time"]["seconds_per_step"]
    elsewhere = run("estimate", "SmolLM2-135M", "--on", "T4", "--json").json
    assert line not in elsewhere["assumptions"]


def test_a_broken_file_does_not_keep_a_plan_from_being_made(run: Run) -> None:
    name = probe_cpu().groups[0].node.gpu.name
    path = write_calibration(make_calibration(gpu_name=name, is_cpu=True))
    path.write_text("{}")

    reported = run("estimate", "SmolLM2-135M", "--on", "cpu", "--json")

    assert reported.code == 0
    assert any(str(path) in line for line in reported.json["assumptions"])
