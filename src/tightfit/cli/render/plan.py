"""Plans as text: the best few side by side, why the first is first, what was excluded, and offers
to rent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import RenderableType
from rich.text import Text

from tightfit.api.plan import find_missing_packages
from tightfit.api.training.hardware import note_network
from tightfit.cli.render.estimate import VERDICT_STYLES
from tightfit.cli.terminal.screen import (
    Cell,
    Column,
    heading,
    make_table,
    plain,
    render_gauge,
    render_notes,
    show,
)
from tightfit.core.data_profile import DataProfile
from tightfit.core.strategy import Offload, Strategy
from tightfit.core.text import count_of, sanitize
from tightfit.core.units import GIB, render_bytes, render_count, render_seconds, render_usd
from tightfit.estimation.result import StepTime, Verdict
from tightfit.hardware.types import Cluster
from tightfit.planning.buying import Offer
from tightfit.planning.describe import (
    describe_how,
    describe_levers,
    describe_method,
    describe_precision,
    describe_sharding,
    shorten_gpu,
)
from tightfit.planning.plan import Exclusion, Plan
from tightfit.planning.ranking import METHOD_HANDICAPS, handicap_total, measure_seconds
from tightfit.planning.request import JobRequest, name_method
from tightfit.planning.search import GroupBest, SearchResult, find_run_seconds
from tightfit.planning.traced import TRACED

# Why a faster plan stands behind the first: the ranking's policy in one line.

LEAST_FACTOR = 1.01
"""A closer race is decided by headroom and simplicity, which the table shows."""


def explain_order(plans: Sequence[Plan]) -> str | None:
    """`2 is 1.17x faster, but ...` for the fastest plan that is not first; None where it is."""
    best = plans[0]
    found = [
        (factor, place, plan)
        for place, plan in enumerate(plans[1:], start=2)
        if (factor := _compare(plan, best)) >= LEAST_FACTOR
    ]
    if not found:
        return None
    factor, place, plan = max(found, key=lambda item: item[0])
    return f"{place} is {factor:.2f}x faster, but {_reason(plan, best)}."


def explain_steps(plans: Sequence[Plan]) -> list[str]:
    """`3 is 1.06x faster than 2, but ...` for each plan behind the first that is faster than the
    one above it, and that `explain_order` has no word on."""
    summary = []
    for place, (above, plan) in enumerate(pairwise(plans), start=2):
        factor = _compare(plan, above)
        if place == 2 or factor < LEAST_FACTOR or _compare(plan, plans[0]) >= LEAST_FACTOR:
            continue
        is_other = above.estimate.tier != plan.estimate.tier
        reason = "what is traced comes first" if is_other else _reason(plan, above)
        summary.append(f"{place} is {factor:.2f}x faster than {place - 1}, but {reason}.")
    return summary


def _compare(plan: Plan, other: Plan) -> float:
    """How many times as fast as the other."""
    seconds = measure_seconds(plan.estimate)
    return measure_seconds(other.estimate) / seconds if seconds > 0 else 0.0


def _reason(plan: Plan, best: Plan) -> str:
    is_tighter = plan.estimate.verdict is not best.estimate.verdict
    if is_tighter and plan.estimate.verdict is Verdict.TIGHT:
        return "it is tight: what fits with room comes first"
    if plan.effective_batch > best.effective_batch:
        return f"it takes {plan.effective_batch:,} sequences a step, more than were asked for"
    if handicap_total(plan.strategy) <= handicap_total(best.strategy):
        return "it leaves less room or needs more levers"
    return next(_prices(plan.strategy, best.strategy), "it asks for more than its speed is worth")


def _prices(strategy: Strategy, best: Strategy) -> Iterator[str]:
    """What the strategy costs that the best does not, dearest first; see ranking.py."""
    method = name_method(strategy)
    if METHOD_HANDICAPS.get(method, 1.0) > METHOD_HANDICAPS.get(name_method(best), 1.0):
        if method == "full":
            yield "full tuning makes a whole model per run: --method full plans it first"
        elif method == "qlora":
            yield "QLoRA costs quality: --method qlora plans it first"
        else:
            weights = strategy.weights.value
            yield (
                f"{describe_method(strategy)} over {weights} costs quality: "
                f"--set weights={weights} plans it first"
            )
    if strategy.offload is not Offload.NONE and best.offload is Offload.NONE:
        setting = f"--set offload={strategy.offload.value}"
        yield f"offload ties up host memory and the bus: {setting} plans it first"
    if strategy.compile and not best.compile:
        yield "compiling takes minutes before the first step: --set compile=true plans it first"
    is_exact = not strategy.optimizer.record.costs_quality
    if strategy.optimizer is not best.optimizer and not is_exact:
        name = strategy.optimizer.value
        yield f"{name} costs some quality: --set optimizer={name} plans it first"
    if strategy.sharding is not best.sharding:
        name = strategy.sharding.value
        yield f"{name} is one more part that can fail: --set sharding={name} plans it first"
    if strategy.num_nodes > best.num_nodes:
        yield "it needs more nodes, which is one more part that can fail"


# The best plan of each partition or node pool: how fast, and whether it can start now.


def render_groups(groups: Sequence[GroupBest], plans: Sequence[Plan]) -> Iterator[RenderableType]:
    """One line per group; nothing where there is one group. Of `plans`, whichever are theirs are
    shown in place of the first search's: they may have been traced since."""
    if len(groups) < 2:
        return
    has_data = plans[0].data is not None
    columns = (
        Column(title="group", style="bold"),
        Column(title="its best", keep=False),
        Column(title="run" if has_data else "tokens/s", right=True),
        Column(title="limit", right=True),
        Column(title="free nodes", right=True),
        Column(title="starts", keep=False),
    )
    shown = {plan.hardware.group: plan for plan in reversed(plans)}
    yield ""
    yield heading("By group")
    yield make_table(columns, [_group_row(best, shown.get(best.group.name)) for best in groups])


def _group_row(best: GroupBest, shown: Plan | None) -> tuple[str, ...]:
    group, plan = best.group, shown or best.plan
    limit = render_seconds(group.max_seconds) if group.max_seconds else "-"
    free = group.num_free_nodes
    nodes = f"{group.num_nodes:,}" if free is None else f"{free:,} of {group.num_nodes:,}"
    if plan is None:
        return sanitize(group.name), "nothing fits", "-", limit, nodes, "-"
    how = describe_how(plan.strategy, plan.hardware.node.gpu.name)
    seconds = find_run_seconds(plan.estimate, plan.num_epochs)
    speed = f"{plan.estimate.time.tokens_per_second:,.0f}"
    run = speed if seconds is None else render_seconds(seconds)
    starts = {True: "now", False: "must wait", None: "unknown"}[best.can_start_now]
    if best.exceeds_limit:
        starts += ", is cut off"
    return sanitize(group.name), how, run, limit, nodes, starts


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
        summary = Text(sanitize(exclusion.reason))
        summary.append(f"\ne.g. {sanitize(exclusion.example)}", style="dim")
        if exclusion.link:
            summary.append(f"\nsee {exclusion.link}", style="dim")
        rows.append((f"{exclusion.num_strategies:,}", summary))
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
        for need in find_missing_packages(found):
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
    return f"{how} ({sanitize(found.hardware.group)})"


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
    summary = f"{considered} considered, {left_out:,} left out"
    yield ""
    if is_explained:
        yield heading(f"{summary}:")
        yield _render_exclusions(result.excluded)
    else:
        yield plain(f"{summary} (--explain lists why).")


# Offers as text.


def show_offers(
    offers: Sequence[Offer], request: JobRequest, *, num_shown: int, unused: str | None = None
) -> None:
    """`unused`: hardware that a recipe names, which buying does not look at."""
    show(_render_offers(offers, request, num_shown=num_shown, unused=unused))


def _render_offers(
    offers: Sequence[Offer], request: JobRequest, *, num_shown: int, unused: str | None
) -> Iterator[RenderableType]:
    spec = request.spec
    has_run = offers[0].usd_per_run is not None
    price = "$ per run" if has_run else "$ per million tokens"
    yield heading(
        f"What to rent for {spec.name} ({render_count(spec.num_params)} parameters), "
        f"{request.planned_seq_len:,} tokens a sequence, cheapest first by {price}"
    )
    yield ""
    columns = (
        Column(title="", right=True),
        Column(title="rent", keep=False),
        Column(title="GiB/GPU", right=True),
        Column(title="time" if has_run else "tokens/s", right=True),
        Column(title="$/run" if has_run else "$/M tokens", right=True),
        Column(title="$/hour", right=True),
        Column(title="$/month", right=True),
    )
    rows = [_offer_row(place, offer) for place, offer in enumerate(offers[:num_shown], start=1)]
    yield make_table(columns, rows, is_spaced=True)
    notes = list(_list_offer_notes(offers, num_shown=num_shown))
    if unused is not None:
        notes.append(f"the recipe's hardware ({unused}) is not used: --buy tries every priced card")
    yield from render_notes("Notes", notes)


def _list_offer_notes(offers: Sequence[Offer], *, num_shown: int) -> Iterator[str]:
    if len(offers) > num_shown:
        yield f"{len(offers) - num_shown} more at a higher price: --top {len(offers)}"
    if offers[0].usd_per_run is None:
        yield "with --data FILE the price of the whole run is known"
    yield (
        "each card at its cheapest cloud's median on-demand price, without host, disk and traffic: "
        f"tightfit hardware {shorten_gpu(offers[0].gpu.name)!r} lists them"
    )


def _offer_row(place: int, offer: Offer) -> tuple[Cell, ...]:
    estimate, strategy = offer.plan.estimate, offer.plan.strategy
    gpu, time = estimate.gpu, estimate.time
    words = (describe_method(strategy), describe_precision(strategy), describe_sharding(strategy))
    rent = Text(f"{offer.num_gpus} x {shorten_gpu(offer.gpu.name)}", style="bold")
    rent.append("\n" + ", ".join(words), style="not bold dim")
    run = offer.usd_per_run
    speed = f"{time.tokens_per_second:,.0f}"
    if time.seconds_per_epoch is not None:
        speed = render_seconds(time.seconds_per_epoch * offer.plan.num_epochs)
    return (
        str(place),
        rent,
        f"{gpu.peak_reserved_bytes / GIB:.1f}/{gpu.capacity_bytes / GIB:.1f}",
        speed,
        render_usd(run) if run is not None else f"${offer.usd_per_million_tokens:.2g}",
        render_usd(offer.usd_per_hour),
        render_usd(offer.usd_per_month),
    )
