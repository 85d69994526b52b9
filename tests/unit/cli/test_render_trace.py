"""A trace as text: figures with the context, the closed form beside them, and advice to type."""

from __future__ import annotations

import re

import pytest
from cli_examples import make_estimate

from tightfit.cli.terminal.screen import show
from tightfit.cli.terminal.trace_text import (
    describe_advice,
    describe_effort,
    describe_loading,
    render_advice,
    render_trace,
)
from tightfit.core.units import GIB, MIB, render_bytes
from tightfit.estimation.host_and_disk import PROCESS_BYTES
from tightfit.hardware.catalogue import find_gpu
from tightfit.planning.advice import Advice
from tightfit.planning.traced import judge_traced
from tightfit.trace.result import TracedMemory
from trace_cases import record_full_tuning, trace

CONTEXT = 768 * MIB


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(scope="module")
def traced() -> TracedMemory:
    return trace(record_full_tuning())


def make_advice(**fields: object) -> Advice:
    plain: dict[str, object] = {
        "words": "chunked loss",
        "setting": {"loss": "chunked"},
        "saving_bytes": int(3.9 * GIB),
        "new_peak_bytes": 8 * GIB,
        "makes_it_fit": False,
    }
    return Advice.model_validate(plain | fields)


def shown(
    capsys: pytest.CaptureFixture[str], traced: TracedMemory, *advice: Advice, room: int = 32 * GIB
) -> str:
    estimate = make_estimate()
    sizes = {"capacity_bytes": room, "context_bytes": CONTEXT}
    gpu = estimate.gpu.model_copy(update=sizes)
    closed_form = estimate.model_copy(update={"gpu": gpu})
    show(render_trace(traced, closed_form, gpu=find_gpu("RTX 4090")))
    show(render_advice(advice))
    return capsys.readouterr().out


def row_of(text: str, name: str) -> str:
    return next(line for line in text.split("\n") if line.startswith(name))


def test_the_three_figures_stand_with_the_context_and_the_closed_form(
    capsys: pytest.CaptureFixture[str], traced: TracedMemory
) -> None:
    text = shown(capsys, traced)
    closed = make_estimate().gpu
    for name, size, other in (
        ("peak allocated", traced.peak_allocated_bytes, closed.peak_allocated_bytes + CONTEXT),
        ("peak reserved", traced.peak_reserved_bytes, closed.peak_reserved_bytes),
        ("smallest that survives", traced.smallest_capacity_bytes, None),
    ):
        row = row_of(text, name)
        reported = [render_bytes(size), render_bytes(size + CONTEXT)]
        reported += [] if other is None else [render_bytes(other)]
        assert re.findall(r"[\d.,]+ GiB", row) == reported
        if other is not None:
            assert f"{other / (size + CONTEXT) - 1:+.1%}" in row


def test_every_stage_has_a_row(capsys: pytest.CaptureFixture[str], traced: TracedMemory) -> None:
    text = shown(capsys, traced)
    assert [stage.name for stage in traced.stages] == [
        "load", "first step", "steady step", "eval", "save",
    ]  # fmt: skip
    for stage in traced.stages:
        row = row_of(text.split("Peak of each stage")[1], stage.name)
        assert render_bytes(stage.peak_allocated_bytes) in row
        assert render_bytes(stage.peak_reserved_bytes) in row


def test_host_memory_while_loading_is_told_by_rank(
    capsys: pytest.CaptureFixture[str], traced: TracedMemory
) -> None:
    reported = describe_loading([13 * GIB, 0, 0, 0])
    assert reported == [
        f"rank 0: {render_bytes(PROCESS_BYTES + 13 * GIB)}, 13.0 GiB of it weights",
        f"ranks 1 to 3, each: {render_bytes(PROCESS_BYTES)}, no weights",
    ]
    assert len(describe_loading([5 * GIB] * 8)) == 1
    loading = [13 * GIB, 0, 0, 0]
    show(render_trace(traced, make_estimate(), gpu=find_gpu("RTX 4090"), loading_bytes=loading))
    text = capsys.readouterr().out
    assert all(line in text.split("Host RAM while loading")[1] for line in reported)


def test_what_stands_at_the_peak_sums_to_it(
    capsys: pytest.CaptureFixture[str], traced: TracedMemory
) -> None:
    text = shown(capsys, traced)
    peak = traced.peak
    assert f"At the traced peak ({peak.stage}: {peak.op}" in text
    table = text.split("At the traced peak")[1]
    sizes = re.findall(r"^ *([\d.,]+) (GiB|MiB) ", table, re.MULTILINE)
    assert len(sizes) == 9  # eight groups and the rest
    total = sum(float(size) * (1024 if unit == "GiB" else 1) for size, unit in sizes)
    assert total == pytest.approx(traced.peak_allocated_bytes / MIB, rel=0.02)
    assert "model.layers.*.mlp.gate_proj" in table
    assert "16 x bfloat16 [8192, 5632]" in table


@pytest.mark.parametrize(("room", "word"), [(32, "fits"), (13.02, "tight"), (12, "does not fit")])
def test_the_verdict_goes_by_what_survives(
    capsys: pytest.CaptureFixture[str], traced: TracedMemory, room: float, word: str
) -> None:
    squeezed = traced.model_copy(
        update={
            "smallest_capacity_bytes": int(12.2 * GIB),
            "peak_reserved_bytes": int(12.4 * GIB),
        }
    )
    text = shown(capsys, squeezed, room=int(room * GIB))
    assert f"Traced, {word}: survives in {12.2 + 0.75:.1f} GiB; RTX 4090 has" in text
    assert (" short)" in text) == (word == "does not fit")


def test_the_edge_of_a_verdict(traced: TracedMemory) -> None:
    def judge(capacity: int) -> str:
        return judge_traced(traced, context_bytes=CONTEXT, capacity_bytes=capacity).value

    least = traced.smallest_capacity_bytes + CONTEXT
    most = traced.peak_reserved_bytes + CONTEXT
    assert judge(max(least, most)) == "fits"
    assert judge(least - 1) == "does_not_fit"


def test_advice_can_be_typed(capsys: pytest.CaptureFixture[str], traced: TracedMemory) -> None:
    assert describe_advice(make_advice()) == (
        "chunked loss saves 3.9 GiB (peak 8.0 GiB): --set loss=chunked"
    )
    half = make_advice(
        words="micro-batch 2 x 8",
        setting={"micro_batch": "2", "grad_accum": "8"},
        makes_it_fit=True,
    )
    text = shown(capsys, traced, make_advice(), half)
    listed = text.split("Less memory")[1]
    assert "chunked loss saves 3.9 GiB" in listed
    assert "then it fits: --set micro_batch=2 --set grad_accum=8" in " ".join(listed.split())
    assert "Less memory" not in shown(capsys, traced)


def test_how_much_was_traced_is_said(traced: TracedMemory) -> None:
    assert describe_effort(traced).startswith("16 layers from 4 traced in 4.20 s, with torch 2.13")
    whole = traced.model_copy(update={"num_traced_layers": 16})
    assert describe_effort(whole).startswith("All 16 layers traced in 4.20 s, with")
    refused = whole.model_copy(update={"refusal": "layers differ (hybrid attention)"})
    assert "All 16 layers traced in 4.20 s: layers differ (hybrid attention)" in describe_effort(
        refused
    )


@pytest.mark.parametrize("columns", [50, 80, 160])
def test_no_line_is_wider_than_the_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    traced: TracedMemory,
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = shown(capsys, traced, make_advice())
    assert max(map(len, text.split("\n"))) <= columns
    assert "steady step" in text


def test_names_of_modules_are_no_markup_and_obey_nothing(
    capsys: pytest.CaptureFixture[str], traced: TracedMemory
) -> None:
    tensors = tuple(
        tensor.model_copy(update={"module": "[bold]m\x1b[31m"}) for tensor in traced.peak.tensors
    )
    peak = traced.peak.model_copy(update={"module": "[red]x\x1b]0;", "tensors": tensors})
    text = shown(capsys, traced.model_copy(update={"peak": peak}))
    assert "\x1b" not in text
    assert "[bold]m?[31m" in text
    assert "[red]x?]0;" in text
