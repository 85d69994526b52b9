"""What people see, word by word, at 80 and 120 columns.

After a wanted change: TIGHTFIT_GOLDEN=write python -m pytest tests/unit/cli/test_cli_golden.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from cli_examples import CLUSTER, GROUP, SPEC, STRATEGY, make_estimate, make_offers, make_result
from rich.console import RenderableType

from tightfit.cli.doctor import render_checkup
from tightfit.cli.estimate import render_estimate, render_zero_table
from tightfit.cli.hardware import render_cluster
from tightfit.cli.plan import render_offers, render_plans
from tightfit.cli.terminal.screen import show
from tightfit.core.findings import Finding, Status
from tightfit.core.units import GIB
from tightfit.estimation.result import Verdict
from tightfit.estimation.state import estimate_zero_table
from tightfit.hardware.checkup import Checkup
from tightfit.planning.request import JobRequest

FOLDER = Path(__file__).parents[2] / "golden" / "cli"


def _checkup() -> Checkup:
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
            status=Status.ERROR,
            detail="1.2 GiB free at /home/someone/.cache/huggingface/hub",
            remedy="export HF_HOME=/a/larger/disk",
        ),
    )
    return Checkup(findings=findings, worst=Status.ERROR, exit_code=6)


SCREENS: dict[str, Callable[[], Iterable[RenderableType]]] = {
    "estimate": lambda: render_estimate(make_estimate(), SPEC, STRATEGY, GROUP),
    "estimate_too_big": lambda: render_estimate(
        make_estimate(verdict=Verdict.DOES_NOT_FIT, activations=40 * GIB), SPEC, STRATEGY, GROUP
    ),
    "plan": lambda: render_plans(make_result(), cluster=CLUSTER, is_explained=False),
    "plan_explained": lambda: render_plans(make_result(), cluster=CLUSTER, is_explained=True),
    "buy": lambda: render_offers(make_offers(), JobRequest(spec=SPEC), num_shown=1),
    "zero_table": lambda: render_zero_table(
        estimate_zero_table(
            total_params=2_851_000_000,
            largest_layer_params=32_000_000,
            gpus_per_node=8,
            num_nodes=1,
        ),
        "ZeRO-3 model states of a model.",
    ),
    "doctor": lambda: render_checkup(_checkup()),
    "cluster": lambda: render_cluster(CLUSTER),
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
    show(SCREENS[screen]())
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
