"""A traced step as text: its stages, what stays by formula, and what the formulas said."""

from __future__ import annotations

import re

import pytest
from cli_examples import make_estimate

from tightfit.cli.terminal.screen import show
from tightfit.cli.terminal.trace_text import render_traced_time
from tightfit.trace.result import TracedTime


def test_a_traced_step_is_told_by_stage_beside_the_formulas(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    closed = make_estimate().time
    step = closed.model_copy(
        update={
            "seconds_per_step": 4.0,
            "components": {"matmul": 3.5, "communication": 0.5},
            "tier": "traced",
        }
    )
    traced = TracedTime(
        seconds_per_step=3.5,
        stages={"forward": 1.0, "recompute": 0.0, "backward": 2.0, "update": 0.5},
        components={"matmul": 3.5},
        host_seconds=1.25,
        device_seconds=3.25,
        flops=1e12,
    )
    show(render_traced_time(traced, step=step, closed_form=closed))
    text = capsys.readouterr().out
    assert "Time of a step, traced: 4.00 s" in text
    assert re.search(r"^backward +2\.00 s", text, re.MULTILINE)
    assert re.search(r"^communication, by formula +0\.50 s", text, re.MULTILINE)
    assert "recompute" not in text
    words = " ".join(text.split())
    assert "the device needs 3.25 s and the host 1.25 s" in words
    assert f"({closed.seconds_per_step / 4.0 - 1:+.1%})" in words


def test_what_takes_next_to_nothing_is_not_told_as_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    time = make_estimate().time
    traced = TracedTime(
        seconds_per_step=1.0,
        stages={"forward": 0.994, "update": 0.004},
        components={"matmul": 1.0},
        host_seconds=0.1,
        device_seconds=1.0,
        flops=1e12,
    )
    show(render_traced_time(traced, step=time, closed_form=time))
    text = capsys.readouterr().out
    assert re.search(r"^update +under 0\.01 s", text, re.MULTILINE)
    assert "0.00 s" not in text.split("By itself")[0]
