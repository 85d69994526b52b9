"""What `tightfit bench` prints: one plan part by part, or several side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from tightfit.cli.describe import count_of
from tightfit.cli.terminal.notes import heading, plain, render_notes
from tightfit.cli.terminal.screen import Column, make_table, show
from tightfit.ledger.report import Comparison, Unit
from tightfit.ledger.trial import Bench, Trial, TrialStatus
from tightfit.ledger.words import UNKNOWN, render_error, render_quantity, render_short_seconds

_TIME = "time per step"
_MEMORY = ("GPU memory, reserved", "process memory")


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
