"""`--trace` on the command line: what is refused at once, what is shown first, what is noted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_examples import CLUSTER, OFFLOADED, STRATEGY, make_estimate, make_plan
from conftest import Run

from tightfit.api.plan import warn_of_missing_packages
from tightfit.api.training import tracing
from tightfit.api.training.tracing import ModelTracer
from tightfit.cli.estimate import render_estimate
from tightfit.cli.plan import render_plans
from tightfit.cli.terminal.screen import show
from tightfit.core.units import GIB
from tightfit.estimation.result import Verdict
from tightfit.hardware import machine
from tightfit.hardware.types import Cluster
from tightfit.models.resolve import resolve_model
from tightfit.planning.search import SearchResult
from tightfit.planning.traced import TraceRequest, apply_trace
from tightfit.trace.tracer import Tracer, TraceResponse
from trace_cases import record_full_tuning, trace

TRACED = trace(record_full_tuning())
TRACE = ("estimate", "Llama-2-7b", "--on", "V100-32GB", "--trace")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[TraceRequest]]:
    """A tracer that answers at once; the wishes of each time it was asked."""
    calls: list[Sequence[TraceRequest]] = []

    def ask(_self: ModelTracer, wishes: Sequence[TraceRequest]) -> list[TraceResponse]:
        calls.append(wishes)
        return [TraceResponse(traced=TRACED)] * len(wishes)

    monkeypatch.setattr(ModelTracer, "_ask", ask)
    monkeypatch.setattr(tracing, "require_packages", lambda *_, **__: None)
    monkeypatch.setattr(tracing, "has_torch", lambda: True)
    return calls


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seq-len", "16777216"), "a batch of 16,777,216 tokens is more than a trace follows"),
        (("--offload", "all", "--sharding", "zero3"), "offloads"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_a_tracer_starts(
    run: Run, asked: list[Any], words: tuple[str, ...], said: str
) -> None:
    reported = run(*TRACE, *words)

    assert reported.code == 2
    assert said in reported.err
    assert "leave --trace out" in reported.err
    assert asked == []


def test_the_zero_table_and_a_trace_exclude_each_other(run: Run) -> None:
    reported = run("estimate", "Llama-2-7b", "--zero-table", "--trace")

    assert reported.code == 2
    assert "--trace would be ignored" in reported.err
    assert reported.out == ""


@pytest.mark.parametrize("verb_name", ["estimate", "plan"])
@pytest.mark.parametrize(
    ("name", "said"),
    [("missing/step.html", "there is no folder"), ("folder.html", "it is a folder")],
)
def test_a_chart_that_cannot_be_written_is_told_before_the_work(
    run: Run, asked: list[Any], tmp_path: Path, verb_name: str, name: str, said: str
) -> None:
    (tmp_path / "folder.html").mkdir()

    reported = run(verb_name, *TRACE[1:], "--chart", str(tmp_path / name), columns=300)

    assert reported.code == 6
    assert said in reported.err
    assert reported.out == ""
    assert asked == []


def test_a_plan_that_cannot_be_saved_is_told_before_the_work(
    run: Run, asked: list[Any], tmp_path: Path
) -> None:
    reported = run("plan", *TRACE[1:], "--save", str(tmp_path / "missing" / "plan.json"))

    assert reported.code == 6
    assert "mkdir -p" in reported.err
    assert reported.out == ""
    assert asked == []


def test_what_is_known_is_shown_before_the_advice_is_traced(
    run: Run, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt during the advice keeps the answer and the chart."""

    def interrupt(_self: ModelTracer, *_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelTracer, "advise", interrupt)
    reported = run(*TRACE, "--chart", str(tmp_path / "step.html"))

    assert reported.code == 130
    assert "Traced, fits" in reported.out
    assert "Peak of each stage, traced" in reported.out
    assert (tmp_path / "step.html").is_file()
    assert len(asked) == 1


def test_advice_comes_last(run: Run, asked: list[Any]) -> None:
    reported = run(*TRACE)

    assert reported.code == 0
    assert len(asked) == 2  # the job, and all changes at once
    assert reported.out.count("Peak of each") == 2  # what is traced, and what is not
    assert "Peak of each phase that is not traced" in reported.out


def test_an_interrupt_says_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tracer, "ask", interrupt)
    monkeypatch.setattr(tracing, "require_packages", lambda *_, **__: None)
    monkeypatch.setattr(tracing, "has_torch", lambda: True)
    reported = run(*TRACE)

    assert reported.code == 130
    assert reported.out == ""
    assert reported.err == "interrupted: tracing was stopped\n"


def test_a_cache_that_cannot_be_written_is_noted_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(tracer: Tracer, jobs: Sequence[Any], _tell: Any) -> list[Any]:
        tracer.write_errors.append("Cannot write '/nowhere/x.json': Permission denied.")
        return [TraceResponse(traced=TRACED)] * len(jobs)

    monkeypatch.setattr(Tracer, "ask", ask)
    monkeypatch.setattr(tracing, "require_packages", lambda *_, **__: None)
    monkeypatch.setattr(tracing, "has_torch", lambda: True)
    monkeypatch.setattr(tracing, "_LOGGED", [])
    reported = run(*TRACE)

    assert reported.code == 0
    assert reported.err.count("note: traces cannot be kept") == 1
    assert "/nowhere/x.json" in reported.err
    assert "TIGHTFIT_CACHE" in reported.err


def test_json_has_both_tiers_under_the_same_names(run: Run, asked: list[Any]) -> None:
    reported = run(*TRACE, "--json").json
    totals, closed = reported["totals"], run(*TRACE[:-1], "--json").json
    context = totals["context_bytes"]

    assert asked
    assert totals["traced_without_context"] == {
        name: reported["trace"][name]
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "smallest_capacity_bytes")
    }
    for tier in ("traced", "closed_form"):
        inside, alone = totals[f"{tier}_with_context"], totals[f"{tier}_without_context"]
        assert inside == {name: size + context for name, size in alone.items()}
    assert (
        totals["traced_with_context"]["peak_reserved_bytes"]
        == reported["gpu"]["peak_reserved_bytes"]
    )
    assert reported["closed_form"] == {
        name: closed[name] for name in ("verdict", "reason", "gpu", "time")
    }
    assert (
        totals["closed_form_with_context"]["peak_reserved_bytes"]
        == closed["gpu"]["peak_reserved_bytes"]
    )


def test_a_total_that_no_card_will_see_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    too_big = TRACED.model_copy(
        update={"smallest_capacity_bytes": 40 * GIB, "peak_reserved_bytes": 50 * GIB}
    )
    group = CLUSTER.groups[0]
    estimate = apply_trace(make_estimate(), too_big, group.node)
    show(render_estimate(estimate, resolve_model("Llama-2-7b"), STRATEGY, group))
    text = capsys.readouterr().out

    assert estimate.verdict is Verdict.DOES_NOT_FIT
    (row,) = (line for line in text.splitlines() if line.startswith("total"))
    assert row.split("  ")[0] == "total, without a limit"
    assert " 50.8 GiB  of 32.0 GiB" in row
    assert "needs at least 40.8 GiB per GPU, traced" in text


def make_result(*tiers: str, source: str = "words") -> SearchResult:
    plans = []
    for tier in tiers:
        estimate = make_estimate().model_copy(update={"tier": tier.partition("+")[0]})
        time = estimate.time.model_copy(update={"tier": tier.partition("+")[2] or "closed-form"})
        plan = make_plan(OFFLOADED, estimate.model_copy(update={"time": time}))
        hardware = plan.hardware.model_copy(update={"source": source})
        plans.append(plan.model_copy(update={"hardware": hardware}))
    return SearchResult(plans=tuple(plans), excluded=(), num_considered=3, shortfall=None)


def shown(result: SearchResult, capsys: pytest.CaptureFixture[str]) -> str:
    cluster: Cluster = CLUSTER
    show(render_plans(result, cluster=cluster, is_explained=False))
    return capsys.readouterr().out


def test_each_row_says_what_it_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(make_result("traced+traced", "traced", "closed-form"), capsys)

    table = text.split("Speeds do not compare")[0]
    found = re.findall(r"memory traced|traced|by formula", table)
    assert found == ["traced", "memory traced", "by formula"]
    assert "Why the first (differences by formula)" in text


def test_without_a_trace_no_row_speaks_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(make_result("closed-form", "closed-form"), capsys)

    assert "by formula" not in text
    assert "traced" not in text


def test_plans_for_this_machine_name_what_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(
        machine, "read_version", lambda name: None if name == "deepspeed" else "1.0"
    )
    here = warn_of_missing_packages(make_result("closed-form", source="here"))
    elsewhere = warn_of_missing_packages(make_result("closed-form", source="words"))

    command = "pip install 'tightfit[zero]'"
    (warning,) = set(here.plans[0].warnings) - set(elsewhere.plans[0].warnings)
    assert warning == f"needs deepspeed, which is not installed here: {command}"
    assert f"needs: {command}" in shown(here, capsys)
    assert command not in shown(elsewhere, capsys)
