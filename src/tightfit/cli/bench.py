"""`tightfit bench`: run plans for a few steps each and compare prediction with measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import typer
from rich.console import RenderableType

from tightfit.api import bench as api
from tightfit.cli.error_report import report_error
from tightfit.cli.flags.training import BenchFlags
from tightfit.cli.terminal.output import announce, report_progress, show_json, write_err
from tightfit.cli.terminal.run_display import Progress, open_display
from tightfit.cli.terminal.screen import Column, heading, make_table, plain, render_notes, show
from tightfit.clusters.protocol import RunObserver
from tightfit.core.files import write_atomic
from tightfit.core.text import count_of
from tightfit.planning.describe import describe_how, describe_levers
from tightfit.planning.plan import Plan
from tightfit.runs.bench import Bench, Trial, TrialStatus
from tightfit.runs.report import Comparison, Unit
from tightfit.runs.report_words import UNKNOWN, render_error, render_quantity, render_short_seconds

_TIME = "time per step"
_MEMORY = ("GPU memory, reserved", "process memory")


def bench(flags: BenchFlags) -> None:
    """Measure the plans, show and draw the figures."""
    if flags.chart is not None:
        from tightfit.cli.charts.bench import check_bench_chart

        check_bench_chart(flags.chart)
    result = api.measure_plans(replace(flags, progress=report_progress), _Display(flags))
    found, error = result.bench, result.error
    described = {}
    if error is not None:
        described = {
            "error": error.problem,
            "remedy": error.remedy,
            "exit_code": error.exit_code,
        }
    if flags.as_json:
        show_json({**found.model_dump(mode="json"), **described})
    else:
        show_bench(found, command=result.command)
    _write_files(flags, found)
    if error is not None:
        raise typer.Exit(report_error(error, as_json=False))
    if result.exit_code:
        raise typer.Exit(result.exit_code)


@dataclass(frozen=True, slots=True)
class _Display:
    """Plans and steps on stderr; nothing with `--json`."""

    flags: BenchFlags

    @contextmanager
    def open_trial(self, rank: int, num_plans: int, plan: Plan) -> Iterator[RunObserver]:
        if not self.flags.as_json:
            _announce_plan(rank, num_plans, plan)
        num_steps = self.flags.warm_up + self.flags.steps
        progress = Progress(
            num_steps=num_steps, capacity_bytes=max(1, plan.estimate.gpu.capacity_bytes)
        )
        with open_display(
            progress, read_num_steps=lambda: num_steps, is_silent=self.flags.as_json
        ) as display:
            yield display

    def end_trial(self, trial: Trial) -> None:
        if not self.flags.as_json:
            write_err(f"  {_describe_end(trial)}\n")


def _announce_plan(rank: int, num_plans: int, plan: Plan) -> None:
    gpu = plan.hardware.node.gpu
    how = describe_how(plan.strategy, is_cpu=gpu.is_cpu)
    seconds = render_short_seconds(plan.estimate.time.seconds_per_step)
    write_err(
        f"plan {rank} of {num_plans}: {how}, {describe_levers(plan.strategy)}; "
        f"predicted {seconds} per step\n"
    )


def _describe_end(trial: Trial) -> str:
    if trial.measured is None:
        return trial.problem or trial.status.value
    seconds = render_short_seconds(trial.measured.seconds_per_step.median)
    return f"measured {seconds} per step over {count_of(trial.measured.num_steps, 'step')}"


def _write_files(flags: BenchFlags, found: Bench) -> None:
    if flags.out is not None and found.trials:
        write_atomic(flags.out, found.model_dump_json(indent=2) + "\n")
        announce(flags.out)
    if flags.chart is not None and any(trial.measured for trial in found.trials):
        from tightfit.cli.charts.bench import write_bench_chart

        write_bench_chart(found, flags.chart)
        announce(flags.chart)


def show_bench(found: Bench, *, command: str) -> None:
    """`command` names the job; with a trial's words it measures that plan again."""
    is_answer = any(trial.measured for trial in found.trials) or len(found.trials) > 1
    show(_render(found, command) if is_answer else render_notes("Notes", found.notes))


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
    columns = (
        Column(title=""),
        Column(title="predicted", right=True),
        Column(title="measured", right=True),
        Column(title="most steps", right=True),
        Column(title="off by", right=True),
    )
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
    return make_table(columns, rows)


def _render_many(trials: Sequence[Trial]) -> RenderableType:
    columns = (
        Column(title="", right=True),
        Column(title="plan", keep=False),
        Column(title="rank", right=True),
        Column(title="predicted", right=True),
        Column(title="measured", right=True),
        Column(title="most steps", right=True),
        Column(title="off by", right=True),
        Column(title="tokens/s", right=True),
        Column(title="peak", right=True),
    )
    rows = [_make_row(place, trial) for place, trial in enumerate(trials, start=1)]
    return make_table(columns, rows, is_spaced=True)


def _make_row(place: int, trial: Trial) -> tuple[str, ...]:
    time, memory = _find(trial, (_TIME,)), _find(trial, _MEMORY)
    predicted = render_short_seconds(trial.predicted_seconds_per_step)
    head = (f"{place}", _describe(trial), f"{trial.rank}", predicted)
    if trial.measured is None or time is None:
        return (*head, trial.status.value.replace("-", " "), "", "", "", "")
    return (
        *head,
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


def _describe(trial: Trial) -> str:
    is_failed = trial.status is TrialStatus.FAILED
    return f"{trial.description}\n{trial.problem}" if is_failed else trial.description


def _find(trial: Trial, names: Sequence[str]) -> Comparison | None:
    return next((item for item in trial.compared if item.name in names), None)


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
