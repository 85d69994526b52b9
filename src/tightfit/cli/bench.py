"""`tightfit bench`: Run a plan for a few steps here; predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer

from tightfit.api import bench as api
from tightfit.api.options.training import BenchOptions, BenchOutput
from tightfit.cli.terminal.charts import check_chart_path, write_bench_chart
from tightfit.cli.terminal.error_report import describe_error, report_error
from tightfit.cli.terminal.output import announce, report_progress, show_json, write_err
from tightfit.cli.terminal.run_display import open_display
from tightfit.cli.terminal.screen import heading, make_table, plain, render_notes, show
from tightfit.clusters.protocol import RunObserver
from tightfit.core.files import write_atomic
from tightfit.core.text import count_of
from tightfit.planning.describe import describe_how, describe_levers
from tightfit.planning.plan import Plan
from tightfit.runs.bench import Bench, Trial, TrialStatus
from tightfit.runs.report import UNKNOWN, Unit, render_error, render_quantity, render_short_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

_TIME = "time per step"
_MEMORY = ("GPU memory, reserved", "process memory")


def bench(options: BenchOptions, output: BenchOutput) -> None:
    """Measure the plans, show and draw the figures."""
    if output.chart is not None:
        check_chart_path(output.chart, (".png",))
    display = _Display(options, is_silent=output.as_json)
    result = api.measure_plans(replace(options, progress=report_progress), display)
    found, error = result.bench, result.error
    if output.as_json:
        described = {} if error is None else describe_error(error)
        show_json({**found.model_dump(mode="json"), **described})
    elif any(trial.measured for trial in found.trials) or len(found.trials) > 1:
        show(_render(found, result.command))
    else:
        show(render_notes("Notes", found.notes))
    if options.out is not None and found.trials:
        write_atomic(options.out, found.model_dump_json(indent=2) + "\n")
        announce(options.out)
    if output.chart is not None and any(trial.measured for trial in found.trials):
        write_bench_chart(found, output.chart)
    if error is not None:
        raise typer.Exit(report_error(error, as_json=False))
    if result.exit_code:
        raise typer.Exit(result.exit_code)


@dataclass(frozen=True, slots=True)
class _Display:
    """Plans and steps on stderr; nothing with `--json`."""

    options: BenchOptions
    is_silent: bool

    @contextmanager
    def open_trial(self, rank: int, num_plans: int, plan: Plan) -> Iterator[RunObserver]:
        how = describe_how(plan.strategy, is_cpu=plan.hardware.node.gpu.is_cpu)
        seconds = render_short_seconds(plan.estimate.time.seconds_per_step)
        self._write(
            f"plan {rank} of {num_plans}: {how}, {describe_levers(plan.strategy)}; "
            f"predicted {seconds} per step\n"
        )
        num_steps = self.options.warm_up + self.options.steps
        capacity = max(1, plan.estimate.gpu.capacity_bytes)
        with open_display(capacity, lambda: num_steps, is_silent=self.is_silent) as display:
            yield display

    def end_trial(self, trial: Trial) -> None:
        if trial.measured is None:
            self._write(f"  {trial.problem or trial.status.value}\n")
            return
        seconds = render_short_seconds(trial.measured.seconds_per_step.median)
        steps = count_of(trial.measured.num_steps, "step")
        self._write(f"  measured {seconds} per step over {steps}\n")

    def _write(self, text: str) -> None:
        if not self.is_silent:
            write_err(text)


def _render(found: Bench, command: str) -> Iterator[RenderableType]:
    yield heading(f"{found.model} on {found.hardware}")
    weights = ", random weights" if found.has_random_weights else ""
    yield plain(
        f"{count_of(found.num_steps, 'step')} after {found.num_warmup_steps:,} to warm up; "
        f"{found.data}{weights}"
    )
    yield ""
    measured = [trial for trial in found.trials if trial.measured is not None]
    if found.num_plans == 1 and measured:
        yield plain(measured[0].description)
        yield ""
        yield _render_one(measured[0])
    elif found.num_plans > 1:
        yield _render_many(found.trials)
        yield from _render_verdict(found)
        yield from _render_words(found.trials, command)
    yield from render_notes("Notes", found.notes)


def _render_one(trial: Trial) -> RenderableType:
    rows = [
        (
            item.name,
            render_quantity(item.predicted, item.unit),
            render_quantity(item.measured, item.unit),
            _render_spread(trial) if item.name == _TIME else "",
            render_error(item.error_percent),
        )
        for item in trial.compared
    ]
    return make_table(("", ">predicted", ">measured", ">most steps", ">off by"), rows)


def _render_many(trials: Sequence[Trial]) -> RenderableType:
    speeds = (">rank", ">predicted", ">measured", ">most steps", ">off by", ">tokens/s", ">peak")
    rows = [_make_row(place, trial) for place, trial in enumerate(trials, start=1)]
    return make_table((">", "~plan", *speeds), rows, is_spaced=True)


def _make_row(place: int, trial: Trial) -> tuple[str, ...]:
    compared = {item.name: item for item in trial.compared}
    time = compared.get(_TIME)
    memory = next((compared[name] for name in _MEMORY if name in compared), None)
    is_failed = trial.status is TrialStatus.FAILED
    how = f"{trial.description}\n{trial.problem}" if is_failed else trial.description
    head = (f"{place}", how, f"{trial.rank}")
    predicted = render_short_seconds(trial.predicted_seconds_per_step)
    if trial.measured is None or time is None:
        return (*head, predicted, trial.status.value.replace("-", " "), "", "", "", "")
    return (
        *head,
        predicted,
        render_short_seconds(trial.measured.seconds_per_step.median),
        _render_spread(trial),
        render_error(time.error_percent),
        render_quantity(trial.measured.tokens_per_second, Unit.TOKENS_PER_SECOND),
        UNKNOWN if memory is None else render_quantity(memory.measured, memory.unit),
    )


def _render_words(trials: Sequence[Trial], command: str) -> Iterator[RenderableType]:
    """How to have one plan alone: what all share once, then what each has of its own."""
    pairs = [list(zip(trial.words[::2], trial.words[1::2], strict=True)) for trial in trials]
    shared = [pair for pair in pairs[0] if all(pair in others for others in pairs)]
    yield ""
    yield heading("One of them alone")
    yield plain(f"{command} {_join(shared)}")
    if len(trials) > 1:
        own = [_join([pair for pair in mine if pair not in shared]) for mine in pairs]
        yield from render_notes("and behind it", own, is_numbered=True)


def _join(pairs: Sequence[tuple[str, str]]) -> str:
    return " ".join(f"{option} {value}" for option, value in pairs)


def _render_spread(trial: Trial) -> str:
    if trial.measured is None:
        return ""
    spread = trial.measured.seconds_per_step
    return f"{render_short_seconds(spread.low)} to {render_short_seconds(spread.high)}"


def _render_verdict(found: Bench) -> Iterator[RenderableType]:
    fastest, ratio = found.trials[0], found.first_over_fastest
    if ratio is None or sum(trial.measured is not None for trial in found.trials) < 2:
        return
    yield ""
    if fastest.rank == 1:
        yield plain("The plan that the planner ranks first is the fastest of them.")
    else:
        yield plain(
            f"The plan ranked first runs at {ratio:.0%} of the fastest one's speed, which is "
            f"ranked {fastest.rank}."
        )
