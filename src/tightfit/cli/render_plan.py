"""Plans as text: the best few side by side, why the first is first, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from tightfit.cli.describe import describe_how, describe_levers
from tightfit.cli.notes import heading, plain, render_notes
from tightfit.cli.render_estimate import VERDICT_STYLES
from tightfit.cli.screen import Column, make_table, render_gauge, show
from tightfit.core.units import GIB, render_bytes, render_count, render_seconds, render_usd
from tightfit.core.workload import DataProfile
from tightfit.estimate.result import StepTime, Verdict
from tightfit.planning.plan import Exclusion, Plan
from tightfit.planning.search import SearchResult

BAR_WIDTH = 16


def show_plans(result: SearchResult, *, is_explained: bool, notes: Sequence[str]) -> None:
    """Print everything `tightfit plan` shows a person."""
    show(_render(result, is_explained=is_explained, notes=notes))


def show_exclusions(result: SearchResult) -> None:
    """Print only what was left out, where nothing is left."""
    show(_render_excluded(result, is_explained=True))


def _render(
    result: SearchResult, *, is_explained: bool, notes: Sequence[str]
) -> Iterator[RenderableType]:
    best = result.plans[0]
    yield _render_subject(result.plans)
    if best.data is not None:
        yield plain(describe_data(best.data))
    yield ""
    yield _render_table(result.plans)
    yield from render_notes("Why the first", best.why)
    yield ""
    yield plain(_describe_needs(best))
    yield from render_notes("Assumed", tuple(dict.fromkeys((*notes, *best.estimate.assumptions))))
    yield from render_notes("Beware", best.warnings)
    yield from _render_excluded(result, is_explained=is_explained)


def describe_data(data: DataProfile) -> str:
    """The dataset in one line."""
    lengths = f"half up to {data.percentiles['p50']}, longest {data.max_tokens}"
    cut = f", {data.num_truncated:,} cut to {data.seq_len}" if data.num_truncated else ""
    return (
        f"{data.source}: {data.num_rows:,} rows ({data.format}), {render_count(data.num_tokens)} "
        f"tokens, {lengths} tokens{cut}; lengths: {data.tokenizer}"
    )


def _render_exclusions(excluded: Sequence[Exclusion]) -> RenderableType:
    """Each reason once, with how many strategies it ruled out."""
    columns = (Column(title="left out", right=True), Column(title="because", keep=False))
    rows = []
    for exclusion in excluded:
        told = Text(exclusion.reason)
        told.append(f"\ne.g. {exclusion.example}", style="dim")
        if exclusion.link:
            told.append(f"\nsee {exclusion.link}", style="dim")
        rows.append((f"{exclusion.num_strategies:,}", told))
    return make_table(columns, rows, is_spaced=True)


def _render_subject(plans: Sequence[Plan]) -> RenderableType:
    best = plans[0]
    spec = best.model
    cards = dict.fromkeys(f"{p.hardware.group} ({p.hardware.node.gpu.name})" for p in plans)
    length = f"{best.strategy.seq_len:,} tokens a sequence, {best.effective_batch} sequences a step"
    epochs = f", {best.num_epochs:.3g} epoch(s)" if best.data is not None else ""
    return heading(
        f"{spec.name} ({render_count(spec.num_params)} parameters) on {' + '.join(cards)}, "
        f"{length}{epochs}"
    )


def _render_table(plans: Sequence[Plan]) -> RenderableType:
    columns = (
        Column(title="", right=True),
        Column(title="how", keep=False),
        Column(title="GPU memory"),
        Column(title="speed"),
        Column(title="cost"),
    )
    names = {found.hardware.group: found.hardware.node.gpu.name for found in plans}
    gpus = names if len(names) > 1 else dict.fromkeys(names)
    rows = []
    for number, found in enumerate(plans, start=1):
        how = Text(describe_how(found.strategy, gpus[found.hardware.group]))
        how.append("\n" + describe_levers(found.strategy), style="dim")
        rows.append((str(number), how, _memory_cell(found), _speed_cell(found), _cost_cell(found)))
    return make_table(columns, rows, is_spaced=True)


def _memory_cell(found: Plan) -> Text:
    gpu, verdict = found.estimate.gpu, found.estimate.verdict
    fraction = gpu.peak_reserved_bytes / max(gpu.capacity_bytes, 1)
    bar = render_gauge(fraction, width=BAR_WIDTH)
    tight = " tight" if verdict is Verdict.TIGHT else ""
    needs, has = gpu.peak_reserved_bytes / GIB, gpu.capacity_bytes / GIB
    return Text.assemble((bar, VERDICT_STYLES[verdict]), f"\n{needs:.1f}/{has:.1f} GiB{tight}")


def _speed_cell(found: Plan) -> str:
    time = found.estimate.time
    low, high = _range_fractions(time)
    if time.seconds_per_epoch is None:
        slow, fast = time.tokens_per_second / high, time.tokens_per_second / low
        return f"{time.tokens_per_second:,.0f} tokens/s\n{slow:,.0f} to {fast:,.0f}"
    epoch = time.seconds_per_epoch
    shortest, longest = render_seconds(epoch * low), render_seconds(epoch * high)
    return (
        f"{render_seconds(epoch)} an epoch\n{shortest} to {longest}\n"
        f"{time.tokens_per_second:,.0f} tokens/s"
    )


def _range_fractions(time: StepTime) -> tuple[float, float]:
    step = max(time.seconds_per_step, 1e-12)
    low, high = time.seconds_per_step_low / step, time.seconds_per_step_high / step
    return max(low, 1e-12), max(high, 1e-12)


def _cost_cell(found: Plan) -> str:
    cost = found.cost
    if cost is None:
        return "-"
    per_hour = f"{render_usd(cost.usd_per_hour)}/h"
    return per_hour if cost.usd_per_run is None else f"{render_usd(cost.usd_per_run)}\n{per_hour}"


def _describe_needs(best: Plan) -> str:
    host, disk = best.estimate.host, best.estimate.disk
    of = f" of {render_bytes(host.capacity_bytes)}" if host.capacity_bytes else ""
    needs = f"Also needs {render_bytes(host.peak_bytes)}{of} host RAM per node"
    return f"{needs} and {render_bytes(disk.bytes)} of disk."


def _render_excluded(result: SearchResult, *, is_explained: bool) -> Iterator[RenderableType]:
    left_out = sum(exclusion.num_strategies for exclusion in result.excluded)
    told = f"{result.num_considered:,} strategies considered, {left_out:,} left out"
    yield ""
    if is_explained:
        yield heading(f"{told}:")
        yield _render_exclusions(result.excluded)
    else:
        yield plain(f"{told} (--explain lists why).")
