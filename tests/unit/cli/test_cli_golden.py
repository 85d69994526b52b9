"""What people see, word by word, at 80 and 120 columns.

After a wanted change: TIGHTFIT_GOLDEN=write python -m pytest tests/unit/cli/test_cli_golden.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_examples import CLUSTER, GROUP, SPEC, STRATEGY, make_estimate, make_offers, make_result

from tightfit.cli.hardware import show_cluster
from tightfit.cli.render.checkup import show_checkup
from tightfit.cli.render.estimate import show_estimate, show_zero_table
from tightfit.cli.render.plan import show_offers, show_plans
from tightfit.core.units import GIB
from tightfit.estimation.result import Verdict
from tightfit.estimation.zero_table import estimate_zero_table
from tightfit.hardware.checkup import Checkup, Finding, Status
from tightfit.planning.request import JobRequest

FOLDER = Path(__file__).parents[2] / "golden" / "cli"


def _estimate() -> None:
    show_estimate(make_estimate(), spec=SPEC, strategy=STRATEGY, group=GROUP)


def _estimate_too_big() -> None:
    big = make_estimate(verdict=Verdict.DOES_NOT_FIT, activations=40 * GIB)
    show_estimate(big, spec=SPEC, strategy=STRATEGY, group=GROUP)


def _plan() -> None:
    show_plans(make_result(), cluster=CLUSTER, is_explained=False)


def _plan_explained() -> None:
    show_plans(make_result(), cluster=CLUSTER, is_explained=True)


def _buy() -> None:
    show_offers(make_offers(), JobRequest(spec=SPEC), num_shown=1)


def _zero_table() -> None:
    rows = estimate_zero_table(
        total_params=2_851_000_000, largest_layer_params=32_000_000, gpus_per_node=8, num_nodes=1
    )
    show_zero_table(rows, "ZeRO-3 model states of a model.")


def _doctor() -> None:
    findings = (
        Finding(area="python", name="Python", status=Status.OK, detail="3.12 in a venv"),
        Finding(area="gpu", name="GPU 0", status=Status.INFO, detail="Tesla T4, 14.6 GiB, no bf16"),
        Finding(
            area="gpu",
            name="driver",
            status=Status.WARNING,
            detail="470.82 is too old for the CUDA 12 wheels of torch, which need 525 or newer",
            remedy="ask for driver 550, or install torch built for CUDA 11.8",
        ),
        Finding(
            area="disk",
            name="model cache",
            status=Status.FAULT,
            detail="1.2 GiB free at /home/someone/.cache/huggingface/hub",
            remedy="export HF_HOME=/a/larger/disk",
        ),
    )
    show_checkup(Checkup(findings=findings, worst=Status.FAULT, exit_code=6))


SCREENS: dict[str, Callable[[], None]] = {
    "estimate": _estimate,
    "estimate_too_big": _estimate_too_big,
    "plan": _plan,
    "plan_explained": _plan_explained,
    "buy": _buy,
    "zero_table": _zero_table,
    "doctor": _doctor,
    "cluster": lambda: show_cluster(CLUSTER),
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

    assert "\x1b" not in shown
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns
    assert all(line == line.rstrip() for line in shown.splitlines())
    golden = FOLDER / f"{screen}_{columns}.txt"
    if os.environ.get("TIGHTFIT_GOLDEN") == "write":
        golden.write_text(shown, encoding="utf-8")
    assert shown == golden.read_text(encoding="utf-8")


def test_no_golden_file_is_forgotten() -> None:
    expected = {f"{screen}_{columns}.txt" for screen in SCREENS for columns in (80, 120)}
    assert {path.name for path in FOLDER.glob("*.txt")} == expected
    assert len(expected) == 16
