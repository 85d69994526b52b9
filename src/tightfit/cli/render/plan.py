"""Plans as text: the best few side by side, why the first is first, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from tightfit.cli.describe import count_of, describe_how, describe_levers
from tightfit.cli.missing import find_missing
from tightfit.cli.network import note_network
from tightfit.cli.order import explain_order, explain_steps
from tightfit.cli.render.estimate import VERDICT_STYLES
from tightfit.cli.render.plan_groups import render_groups
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.notes import heading, plain, render_notes
from tightfit.cli.terminal.screen import Column, make_table, render_gauge, show
from tightfit.core.units import GIB, render_bytes, render_count, render_seconds, render_usd
from tightfit.core.workload import DataProfile
from tightfit.estimate.result import StepTime, Verdict
from tightfit.hardware.types import Cluster
from tightfit.planning.plan import Exclusion, Plan
from tightfit.planning.search import SearchResult
from tightfit.planning.traced import TRACED

BAR_WIDTH = 16
NUM_CARDS = 6
"""Groups named in the heading."""


def show_plans(result: SearchResult, *, cluster: Cluster | None, is_explained: bool) -> None:
    """Print everything `tightfit plan` shows a person; without a cluster, a saved plan."""
    show(_render(result, cluster=cluster, is_explained=is_explained))


def show_exclusions(result: SearchResult) -> None:
    """Print only what was left out, where nothing is left."""
    show(_render_excluded(result, is_explained=True))


def _render(
    result: SearchResult, *, cluster: Cluster | None, is_explained: bool
) -> Iterator[RenderableType]:
    best = result.plans[0]
    cards = _list_cards(result.plans, cluster)
    yield _render_subject(best, cards)
    if best.data is not None:
        yield plain(describe_data(best.data))
    yield ""
    yield _render_table(result.plans, is_one_group=len(cards) == 1)
    order = explain_order(result.plans)
    lines = [] if order is None else [order]
    lines += explain_steps(result.plans)
    if lines:
        yield ""
        yield from (plain(line) for line in lines)
    yield from render_groups(result.by_group, result.plans)
    yield from render_notes(_name_reasons(best), best.why)
    yield ""
    yield plain(_describe_needs(best))
    assumed = tuple(dict.fromkeys(best.estimate.assumptions))
    if cluster is not None:
        assumed = note_network(cluster, dict.fromkeys((*cluster.warnings, *assumed)))
    yield from render_notes("Assumed", [note for note in assumed if note not in best.warnings])
    yield from render_notes("Beware", best.warnings)
    if cluster is None:
        yield ""
        yield plain(f"A saved plan (tightfit {best.tightfit_version}); nothing was searched.")
    else:
        yield from _render_excluded(result, is_explained=is_explained)


def _name_reasons(best: Plan) -> str:
    """Levers are turned back by formula, whatever the plan's own figures stand on."""
    is_traced = best.estimate.tier == TRACED
    return "Why the first (differences by formula)" if is_traced else "Why the first"


def describe_data(data: DataProfile) -> str:
    """The dataset in one line."""
    lengths = f"half up to {data.percentiles['p50']:,}, longest {data.max_tokens:,}"
    cut = f", {data.num_truncated:,} cut to {data.seq_len:,}" if data.num_truncated else ""
    rows = count_of(data.num_rows, "row")
    return (
        f"{data.source}: {rows} ({data.format}), {render_count(data.num_tokens)} "
        f"tokens, {lengths} tokens{cut}; lengths: {data.tokenizer}"
    )


def _render_exclusions(excluded: Sequence[Exclusion]) -> RenderableType:
    """Each reason once, with how many strategies it ruled out."""
    columns = (Column(title="left out", right=True), Column(title="because", keep=False))
    rows = []
    for exclusion in excluded:
        told = Text(harmless(exclusion.reason))
        told.append(f"\ne.g. {harmless(exclusion.example)}", style="dim")
        if exclusion.link:
            told.append(f"\nsee {exclusion.link}", style="dim")
        rows.append((f"{exclusion.num_strategies:,}", told))
    return make_table(columns, rows, is_spaced=True)


def _list_cards(plans: Sequence[Plan], cluster: Cluster | None) -> list[str]:
    """Every group that was searched, also one that no shown plan uses."""
    named = [(plan.hardware.group, plan.hardware.node.gpu.name) for plan in plans]
    if cluster is not None:
        named = [(group.name, group.node.gpu.name) for group in cluster.groups]
    return [f"{group} ({gpu})" for group, gpu in dict.fromkeys(named)]


def _render_subject(best: Plan, cards: Sequence[str]) -> RenderableType:
    spec = best.model
    sequences = count_of(best.effective_batch, "sequence")
    length = f"{best.strategy.seq_len:,} tokens a sequence, {sequences} a step"
    epochs = f", {_describe_epochs(best)}" if best.data is not None else ""
    shown = " + ".join(cards[:NUM_CARDS])
    more = f" and {len(cards) - NUM_CARDS} more" if len(cards) > NUM_CARDS else ""
    return heading(
        f"{spec.name} ({render_count(spec.num_params)} parameters) on {shown}{more}, "
        f"{length}{epochs}"
    )


def _describe_epochs(plan: Plan) -> str:
    return "1 epoch" if plan.num_epochs == 1 else f"{plan.num_epochs:,.4g} epochs"


def _render_table(plans: Sequence[Plan], *, is_one_group: bool) -> RenderableType:
    has_data = plans[0].data is not None
    columns = (
        Column(title="", right=True),
        Column(title="how", keep=False),
        Column(title="memory" if plans[0].hardware.node.gpu.is_cpu else "GPU memory"),
        Column(title="time" if has_data else "speed"),
        Column(title="cost"),
    )
    has_traced = any(found.estimate.tier == TRACED for found in plans)
    rows = []
    for number, found in enumerate(plans, start=1):
        how = Text(_describe_place(found, is_one_group=is_one_group))
        how.append("\n" + describe_levers(found.strategy), style="dim")
        for need in find_missing(found):
            how.append(f"\nneeds: {need.command}", style="yellow")
        memory = _memory_cell(found)
        if has_traced:
            memory.append("\n" + describe_tier(found), style="dim")
        rows.append((str(number), how, memory, _speed_cell(found), _cost_cell(found)))
    return make_table(columns, rows, is_spaced=True)


def describe_tier(found: Plan) -> str:
    """What a row's figures stand on."""
    if found.estimate.tier != TRACED:
        return "by formula"
    return "traced" if found.estimate.time.tier == TRACED else "memory traced"


def _describe_place(found: Plan, *, is_one_group: bool) -> str:
    """The method and the GPUs; where there are several groups, by name."""
    if is_one_group:
        return describe_how(found.strategy, is_cpu=found.hardware.node.gpu.is_cpu)
    how = describe_how(found.strategy, found.hardware.node.gpu.name)
    return f"{how} ({harmless(found.hardware.group)})"


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
    lines = [f"{render_seconds(epoch)} an epoch", f"{shortest} to {longest}"]
    if found.num_epochs != 1:
        lines.append(f"{_describe_epochs(found)}: {render_seconds(epoch * found.num_epochs)}")
    return "\n".join([*lines, f"{time.tokens_per_second:,.0f} tokens/s"])


def _range_fractions(time: StepTime) -> tuple[float, float]:
    step = max(time.seconds_per_step, 1e-12)
    low, high = time.seconds_per_step_low / step, time.seconds_per_step_high / step
    return max(low, 1e-12), max(high, 1e-12)


def _cost_cell(found: Plan) -> str:
    cost = found.cost
    if cost is None:
        return "-"
    per_hour = f"{render_usd(cost.usd_per_hour)}/h"
    if cost.usd_per_run is None:
        return per_hour
    run = render_usd(cost.usd_per_run) if cost.usd_per_run >= 0.005 else "under $0.01"
    return f"{run} a run\n{per_hour}"


def _describe_needs(best: Plan) -> str:
    host, disk = best.estimate.host, best.estimate.disk
    if best.hardware.node.gpu.is_cpu:
        return f"Also needs {render_bytes(disk.bytes)} of disk."
    of = f" of {render_bytes(host.capacity_bytes)}" if host.capacity_bytes else ""
    needs = f"Also needs {render_bytes(host.peak_bytes)}{of} host RAM per node"
    return f"{needs} and {render_bytes(disk.bytes)} of disk."


def _render_excluded(result: SearchResult, *, is_explained: bool) -> Iterator[RenderableType]:
    left_out = sum(exclusion.num_strategies for exclusion in result.excluded)
    considered = (
        "1 strategy" if result.num_considered == 1 else f"{result.num_considered:,} strategies"
    )
    told = f"{considered} considered, {left_out:,} left out"
    yield ""
    if is_explained:
        yield heading(f"{told}:")
        yield _render_exclusions(result.excluded)
    else:
        yield plain(f"{told} (--explain lists why).")
