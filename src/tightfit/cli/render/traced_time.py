"""A traced step's time as text: what each part takes, and what the formulas said."""

from __future__ import annotations

from tightfit.cli.terminal.notes import heading, plain
from tightfit.cli.terminal.screen import Column, make_table, render_bar, show
from tightfit.core.units import render_seconds
from tightfit.estimate.result import StepTime
from tightfit.estimate.trace.step_time import KEPT
from tightfit.estimate.trace.time_result import TracedTime

SHORTEST_TOLD = 0.005
"""Seconds that are still rounded to 0.01."""


def show_traced_time(traced: TracedTime, *, step: StepTime, closed_form: StepTime) -> None:
    """Print the parts of the traced step, transfers between ranks by formula."""
    off = closed_form.seconds_per_step / max(step.seconds_per_step, 1e-12) - 1
    parts = {name: seconds for name, seconds in traced.stages.items() if seconds > 0}
    by_formula = {name: step.components.get(name, 0.0) for name in KEPT}
    parts |= {f"{name}, by formula": seconds for name, seconds in by_formula.items() if seconds > 0}
    whole = max(step.seconds_per_step, 1e-12)
    rows = [
        (name, _say(seconds), render_bar(seconds / whole, width=36))
        for name, seconds in parts.items()
    ]
    columns = (Column(title="part"), Column(title="time", right=True), Column(title="of the step"))
    show(
        [
            "",
            heading(f"Time of a step, traced: {render_seconds(step.seconds_per_step)}"),
            make_table(columns, rows),
            plain(
                f"By itself the device needs {render_seconds(traced.device_seconds)} and the "
                f"host {render_seconds(traced.host_seconds)}. The closed form says "
                f"{render_seconds(closed_form.seconds_per_step)} ({off:+.1%})."
            ),
        ]
    )


def _say(seconds: float) -> str:
    """What is there is not told as nothing."""
    return render_seconds(seconds) if seconds >= SHORTEST_TOLD else "under 0.01 s"
