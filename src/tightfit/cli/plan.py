"""`tightfit plan`: The best plans for a job on given hardware, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.api import plan as api
from tightfit.api.options.training import PlanOptions, PlanOutput
from tightfit.api.plan import NoPlanError, find_missing_packages
from tightfit.api.training.hardware import note_network
from tightfit.api.training.settings import repeat_plan
from tightfit.cli.terminal.charts import MemoryPanel, check_chart_path, write_memory_chart
from tightfit.cli.terminal.error_report import end_with
from tightfit.cli.terminal.output import announce, progress_bar, show_json, write_err
from tightfit.cli.terminal.screen import (
    VERDICT_STYLES,
    Cell,
    Column,
    heading,
    make_table,
    plain,
    render_gauge,
    render_notes,
    show,
    styled,
)
from tightfit.core.errors import UsageError
from tightfit.core.files import check_writable, write_atomic
from tightfit.core.profiles import DataProfile
from tightfit.core.text import count_of, sanitize
from tightfit.core.trainers import find_trainer
from tightfit.core.units import GIB, render_bytes, render_count, render_seconds, render_usd
from tightfit.estimation.result import TRACED, Verdict
from tightfit.hardware.types import Cluster
from tightfit.planning.buying import Offer
from tightfit.planning.describe import (
    count_examples,
    describe_epochs,
    describe_how,
    describe_levers,
    describe_method,
    describe_precision,
    describe_sharding,
    describe_trainer,
    shorten_gpu,
)
from tightfit.planning.longest import LongestRow
from tightfit.planning.plan import Exclusion, Plan
from tightfit.planning.ranking import explain_order
from tightfit.planning.request import JobRequest
from tightfit.planning.search import GroupBest, SearchResult

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

NUM_DRAWN = 3
"""Plans in the chart."""
NUM_OFFERS_DRAWN = 4
"""Offers in the chart; with more, the bars are too thin to read."""
NUM_CARDS = 6
"""Groups named in the heading."""


def plan(options: PlanOptions, output: PlanOutput) -> None:
    """Search, then show, save and draw."""
    if output.chart is not None:
        check_chart_path(output.chart)
    if output.save is not None:
        check_writable(output.save)
    if output.buy:
        _buy(options, output)
        return
    if output.longest:
        _find_longest(options, output)
        return
    try:
        with progress_bar() as progress:
            options = replace(options, progress=progress)
            found = api.plan(options)
            lengths = api.compare_lengths(options, found)
    except NoPlanError as error:
        # The reasons of all exclusions still go into the JSON.
        if options.explain and not output.as_json:
            show(_render_excluded(error.result, is_explained=True))
        document = _describe_search(error.result)
        raise end_with(error, document, as_json=output.as_json) from None
    if not output.as_json:
        show(
            [
                *render_plans(found.search, cluster=found.cluster, is_explained=options.explain),
                *_render_lengths(lengths, found.best),
            ]
        )
    _save(found.best, output)
    if output.chart is not None:
        _draw(found, output)
    if output.as_json:  # last: should a file fail, JSON stays one document
        described = [_describe_length(cost) for cost in lengths]
        show_json({**_describe_search(found.search), "lengths": described})


def _describe_length(cost: api.LengthCost) -> dict[str, Any]:
    estimate = None if cost.plan is None else cost.plan.estimate
    return {
        "seq_len": cost.profile.seq_len,
        "num_truncated": cost.profile.num_truncated,
        "num_lost_tokens": cost.profile.num_lost_tokens,
        "num_tokens": cost.profile.num_tokens,
        "verdict": None if estimate is None else estimate.verdict.value,
        "gpu_bytes": None if estimate is None else estimate.gpu.peak_reserved_bytes,
        "seconds_per_step": None if estimate is None else estimate.time.seconds_per_step,
        "seconds_per_epoch": None if estimate is None else estimate.time.seconds_per_epoch,
        "strategy": None if cost.plan is None else cost.plan.strategy.model_dump(mode="json"),
    }


def _render_lengths(lengths: Sequence[api.LengthCost], best: Plan) -> Iterator[RenderableType]:
    """What each length cuts and costs; nothing where one alone makes sense."""
    if not lengths:
        return
    columns = (">seq_len", ">rows cut", ">tokens lost", ">GiB", ">a step", ">an epoch", "~how")
    rows: list[tuple[Cell, ...]] = []
    for cost in lengths:
        profile, plan = cost.profile, cost.plan
        share = profile.num_lost_tokens / (profile.num_tokens + profile.num_lost_tokens)
        lost = f"{profile.num_lost_tokens:,} ({share:.1%})" if profile.num_lost_tokens else "0"
        cells = [f"{profile.seq_len:,}", f"{profile.num_truncated:,}", lost]
        if plan is None:
            cells += ["-", "-", "-", "nothing fits"]
        else:
            gpu, time = plan.estimate.gpu, plan.estimate.time
            tight = " tight" if plan.estimate.verdict is Verdict.TIGHT else ""
            strategy = plan.strategy
            how = (
                describe_method(strategy),
                describe_precision(strategy),
                describe_sharding(strategy),
                f"micro-batch {strategy.micro_batch}",
            )
            cells += [
                f"{gpu.peak_reserved_bytes / GIB:.1f}{tight}",
                render_seconds(time.seconds_per_step),
                render_seconds(time.seconds_per_epoch or 0.0),
                ", ".join(how),
            ]
        style = "bold" if profile.seq_len == best.strategy.seq_len else ""
        rows.append(tuple(styled(cell, style) for cell in cells))
    yield ""
    yield heading("What each length costs")
    yield make_table(columns, rows)


def _save(best: Plan, output: PlanOutput) -> None:
    """The same JSON as `plans[0]`, and another trainer's own configuration of it beside it."""
    if output.save is not None:
        text = best.model_dump_json(indent=2) + "\n"
        configs = api.list_config_files(best, output.save)
        for path, content in {output.save: text, **configs}.items():
            write_atomic(path, content)
            announce(path)
        if best.strategy.trainer and not configs:
            trainer = find_trainer(best.strategy.trainer).trainer
            write_err(f"{trainer.title}'s own configuration is not written: tightfit has none\n")


def _draw(found: api.PlanResult, output: PlanOutput) -> None:
    """The traces where there are some, else the estimates by phase."""
    assert output.chart is not None
    name = found.best.model.name
    pairs = zip(found.plans, found.traces, strict=False)
    traced = [(plan, trace) for plan, trace in pairs if trace is not None][:NUM_DRAWN]
    if traced:
        from tightfit.cli.terminal.trace_chart import make_trace_panel, write_trace_chart

        panels = [
            make_trace_panel(
                plan.strategy, plan.hardware.node.gpu, plan.estimate, trace, number=number
            )
            for number, (plan, trace) in enumerate(traced, start=1)
        ]
        write_trace_chart(name, panels, output.chart)
        return
    drawn = found.plans[:NUM_DRAWN]
    is_cut = len(drawn) < len(found.plans)
    write_memory_chart(
        f"{name}: GPU memory by stage",
        [
            MemoryPanel(
                f"{number}. {describe_how(plan.strategy, plan.hardware.node.gpu.name)}",
                describe_levers(plan.strategy),
                plan.estimate,
            )
            for number, plan in enumerate(drawn, start=1)
        ],
        output.chart,
        subtitle=f"the first {len(drawn)} of {len(found.plans)} plans" if is_cut else "",
    )


def _describe_search(result: SearchResult) -> dict[str, Any]:
    """The JSON of a search."""
    return {
        "plans": [found.model_dump(mode="json") for found in result.plans],
        "excluded": [exclusion.model_dump(mode="json") for exclusion in result.excluded],
        "considered": result.num_considered,
        "groups": [
            {
                "name": best.group.name,
                "num_nodes": best.group.num_nodes,
                "num_free_nodes": best.group.num_free_nodes,
                "num_free_gpus": best.group.num_free_gpus,
                "max_seconds": best.group.max_seconds,
                "can_start_now": best.can_start_now,
                "exceeds_limit": best.exceeds_limit,
                "plan": None if best.plan is None else best.plan.model_dump(mode="json"),
            }
            for best in result.by_group
        ],
    }


def _buy(options: PlanOptions, output: PlanOutput) -> None:
    """Print the offers, cheapest first; save and draw the best of them."""
    for option, is_given, why in (
        ("--on", options.on is not None, "tries every card with a price"),
        ("--network", options.network is not None, "rents single nodes"),
        ("--explain", options.explain, "lists offers and keeps no reasons"),
        ("--memory-limit", options.memory_limit is not None, "rents whole cards"),
        ("--longest", output.longest, "looks for the cheapest card"),
    ):
        if is_given:
            raise UsageError(
                f"--buy {why}; {option} would be ignored.",
                remedy=f"{repeat_plan(options)} --buy    (without {option})",
            )
    with progress_bar() as progress:
        found = api.buy(replace(options, progress=progress))
    offers = found.offers
    if not output.as_json:
        show(render_offers(offers, found.request, num_shown=options.top, unused=found.on))
    _save(offers[0].plan, output)
    if output.chart is not None:
        drawn = offers[: min(options.top, NUM_OFFERS_DRAWN)]
        is_cut = len(drawn) < len(offers)
        write_memory_chart(
            f"{offers[0].plan.model.name}: GPU memory by stage, cheapest first",
            [
                MemoryPanel(
                    f"{offer.num_gpus} x {shorten_gpu(offer.gpu.name)}, "
                    f"{render_usd(offer.usd_per_hour)}/h",
                    f"{describe_how(offer.plan.strategy)}, {describe_levers(offer.plan.strategy)}",
                    offer.plan.estimate,
                )
                for offer in drawn
            ],
            output.chart,
            subtitle=f"the cheapest {len(drawn)} of {len(offers)} offers" if is_cut else "",
        )
    if output.as_json:
        show_json({"offers": [_describe_offer(offer) for offer in offers]})


def _find_longest(options: PlanOptions, output: PlanOutput) -> None:
    """Print the longest row by lever."""
    again = repeat_plan(replace(options, seq_len=None, data=None))
    for option, is_given in (
        ("--seq-len", options.seq_len is not None),
        ("--data", options.data is not None),
        ("--save", output.save is not None),
        ("--chart", output.chart is not None),
        ("--trace", options.trace),
        ("--explain", options.explain),
    ):
        if is_given:
            raise UsageError(
                f"--longest looks for the length of a row; {option} would be ignored.",
                remedy=f"{again} --longest    (without {option})",
            )
    found = api.longest(options)
    if output.as_json:
        show_json({"longest": [_describe_longest(row) for row in found.rows], "notes": found.notes})
    else:
        show(render_longest(found))


def _describe_longest(row: LongestRow) -> dict[str, Any]:
    return {
        "levers": row.levers,
        "seq_len": row.seq_len,
        "seconds_per_row": row.seconds_per_row,
        "group": row.group,
        "strategy": None if row.strategy is None else row.strategy.model_dump(mode="json"),
        "gpu_bytes": None if row.summary is None else row.summary.gpu.peak_reserved_bytes,
        "host_bytes": None if row.summary is None else row.summary.host.peak_bytes,
        "tokens_per_second": None if row.summary is None else row.summary.time.tokens_per_second,
    }


def render_longest(found: api.LongestResult) -> Iterator[RenderableType]:
    spec = found.request.spec
    cards = ", ".join(f"{one.name} ({one.node.gpu.name})" for one in found.cluster.groups)
    yield heading(
        f"The longest row of {spec.name} ({render_count(spec.num_params)} parameters) on {cards}"
    )
    yield ""
    columns = ("~levers", ">longest row", ">GiB/GPU", ">host GiB", ">tokens/s", ">a row", "~how")
    rows: list[tuple[Cell, ...]] = []
    for row in found.rows:
        if row.summary is None or row.strategy is None or row.seconds_per_row is None:
            rows.append((row.levers, "none", "", "", "", "", ""))
            continue
        gpu, strategy = row.summary.gpu, row.strategy
        how = (describe_method(strategy), describe_precision(strategy), describe_sharding(strategy))
        rows.append(
            (
                row.levers if row is found.rows[0] else f"+ {row.levers}",
                f"{row.seq_len:,}",
                f"{gpu.peak_reserved_bytes / GIB:.1f}/{gpu.capacity_bytes / GIB:.1f}",
                f"{row.summary.host.peak_bytes / GIB:.0f}",
                f"{row.summary.time.tokens_per_second:,.0f}",
                render_seconds(row.seconds_per_row),
                ", ".join(how),
            )
        )
    yield make_table(columns, rows, is_spaced=True)
    longest = found.longest
    notes = list(found.notes)
    if longest.strategy is not None and longest.seq_len:
        notes.append(f"--seq-len {longest.seq_len} plans the longest")
    yield from render_notes("Notes", notes)


def _describe_offer(offer: Offer) -> dict[str, Any]:
    return {
        "gpu": offer.gpu.name,
        "num_gpus": offer.num_gpus,
        "usd_per_hour": offer.usd_per_hour,
        "usd_per_run": offer.usd_per_run,
        "usd_per_million_tokens": offer.usd_per_million_tokens,
        "usd_per_month": offer.usd_per_month,
        "price_source": offer.price_source,
        "stages": offer.stages,
        "plan": offer.plan.model_dump(mode="json"),
    }


def render_plans(
    result: SearchResult, *, cluster: Cluster | None, is_explained: bool
) -> Iterator[RenderableType]:
    """The best few side by side, why the first is first; without a cluster, a saved plan."""
    best = result.plans[0]
    cards = _list_cards(result.plans, cluster)
    yield _render_subject(best, cards)
    if best.data is not None:
        yield plain(describe_data(best.data))
    yield ""
    yield _render_table(result.plans, is_one_group=len(cards) == 1)
    order = explain_order(result.plans)
    if order is not None:
        yield ""
        yield plain(order)
    yield from _render_groups(result.by_group, result.plans)
    # Levers are turned back by formula, whatever the plan's own figures stand on.
    by_formula = " (differences by formula)" if best.estimate.tier == TRACED else ""
    yield from render_notes(f"Why the first{by_formula}", best.why)
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


def describe_data(data: DataProfile) -> str:
    """The dataset in one line."""
    lengths = f"median {data.percentiles['p50']:,}, longest {data.max_tokens:,}"
    cut = f", {data.num_truncated:,} cut to {data.seq_len:,}" if data.num_truncated else ""
    rows = count_of(data.num_rows, "row")
    here = f"{Path.cwd()}/"  # the files are named as they are typed from here
    source = ", ".join(name.removeprefix(here) for name in data.source.split(", "))
    return (
        f"{source}: {rows} ({data.format}), {render_count(data.num_tokens)} "
        f"tokens, {lengths} tokens{cut}; lengths: {data.tokenizer}"
    )


def _render_exclusions(excluded: Sequence[Exclusion]) -> RenderableType:
    """Each reason once, with how many strategies it ruled out."""
    columns = (">left out", "~because")
    rows = []
    for exclusion in excluded:
        summary = styled(exclusion.reason)
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
    examples = count_examples(best.strategy, best.effective_batch)
    length = f"{best.strategy.seq_len:,} tokens a sequence, {examples} a step"
    epochs = f", {describe_epochs(best.num_epochs)}" if best.data is not None else ""
    shown = " + ".join(cards[:NUM_CARDS])
    more = f" and {len(cards) - NUM_CARDS} more" if len(cards) > NUM_CARDS else ""
    return heading(
        f"{spec.name} ({render_count(spec.num_params)} parameters) on {shown}{more}, "
        f"{length}{epochs}{describe_trainer(best.strategy)}"
    )


def _render_table(plans: Sequence[Plan], *, is_one_group: bool) -> RenderableType:
    has_data = plans[0].data is not None
    columns = (
        ">",
        "~how",
        Column("memory" if plans[0].hardware.node.gpu.is_cpu else "GPU memory"),
        Column("time" if has_data else "speed"),
        "cost",
    )
    has_traced = any(found.estimate.tier == TRACED for found in plans)
    rows = []
    for number, found in enumerate(plans, start=1):
        strategy, gpu = found.strategy, found.hardware.node.gpu
        if is_one_group:
            how = styled(describe_how(strategy, is_cpu=gpu.is_cpu))
        else:
            how = styled(f"{describe_how(strategy, gpu.name)} ({found.hardware.group})")
        how.append("\n" + describe_levers(strategy), style="dim")
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


def _memory_cell(found: Plan) -> Text:
    from rich.text import Text

    gpu, verdict = found.estimate.gpu, found.estimate.verdict
    fraction = gpu.peak_reserved_bytes / max(gpu.capacity_bytes, 1)
    bar = render_gauge(fraction, width=16)
    tight = " tight" if verdict is Verdict.TIGHT else ""
    needs, has = gpu.peak_reserved_bytes / GIB, gpu.capacity_bytes / GIB
    return Text.assemble(
        (bar, VERDICT_STYLES[verdict.value]), f"\n{needs:.1f}/{has:.1f} GiB{tight}"
    )


def _speed_cell(found: Plan) -> str:
    time = found.estimate.time
    step = max(time.seconds_per_step, 1e-12)
    low = max(time.seconds_per_step_low / step, 1e-12)
    high = max(time.seconds_per_step_high / step, 1e-12)
    if time.seconds_per_epoch is None:
        slow, fast = time.tokens_per_second / high, time.tokens_per_second / low
        return f"{time.tokens_per_second:,.0f} tokens/s\n{slow:,.0f} to {fast:,.0f}"
    epoch = time.seconds_per_epoch
    shortest, longest = render_seconds(epoch * low), render_seconds(epoch * high)
    lines = [f"{render_seconds(epoch)} an epoch", f"{shortest} to {longest}"]
    run_seconds = time.run_seconds(found.num_epochs)
    if run_seconds is not None and run_seconds != epoch:
        lines.append(f"{describe_epochs(found.num_epochs)}: {render_seconds(run_seconds)}")
    return "\n".join([*lines, f"{time.tokens_per_second:,.0f} tokens/s"])


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
    compiling = best.estimate.time.compile_seconds
    first = f" The first start compiles for about {render_seconds(compiling)}." if compiling else ""
    if best.hardware.node.gpu.is_cpu:
        return f"Also needs {render_bytes(disk.bytes)} of disk.{first}"
    of = f" of {render_bytes(host.capacity_bytes)}" if host.capacity_bytes else ""
    needs = f"Also needs {render_bytes(host.peak_bytes)}{of} host RAM per node"
    return f"{needs} and {render_bytes(disk.bytes)} of disk.{first}"


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


def _render_groups(groups: Sequence[GroupBest], plans: Sequence[Plan]) -> Iterator[RenderableType]:
    """One line per group; nothing where there is one group. Of `plans`, whichever are theirs are
    shown in place of the first search's: they may have been traced since."""
    if len(groups) < 2:
        return
    has_data = plans[0].data is not None
    columns = (
        "*group",
        "~its best",
        Column("run" if has_data else "tokens/s", right=True),
        ">limit",
        ">free nodes",
        "~starts",
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
    seconds = plan.estimate.time.run_seconds(plan.num_epochs)
    speed = f"{plan.estimate.time.tokens_per_second:,.0f}"
    run = speed if seconds is None else render_seconds(seconds)
    starts = {True: "now", False: "must wait", None: "unknown"}[best.can_start_now]
    if best.exceeds_limit:
        starts += ", is cut off"
    return sanitize(group.name), how, run, limit, nodes, starts


def render_offers(
    offers: Sequence[Offer], request: JobRequest, *, num_shown: int, unused: str | None = None
) -> Iterator[RenderableType]:
    """`unused`: hardware that a recipe names, which buying does not look at."""
    spec = request.spec
    has_run = offers[0].usd_per_run is not None
    price = "$ per run" if has_run else "$ per million tokens"
    yield heading(
        f"What to rent for {spec.name} ({render_count(spec.num_params)} parameters), "
        f"{request.planned_seq_len:,} tokens a sequence, cheapest first by {price}"
    )
    yield ""
    columns = (
        ">",
        "~rent",
        ">GiB/GPU",
        Column("time" if has_run else "tokens/s", right=True),
        Column("$/run" if has_run else "$/M tokens", right=True),
        ">$/hour",
        ">$/month",
    )
    rows = [_offer_row(place, offer) for place, offer in enumerate(offers[:num_shown], start=1)]
    yield make_table(columns, rows, is_spaced=True)
    notes = []
    if len(offers) > num_shown:
        notes.append(f"{len(offers) - num_shown} more at a higher price: --top {len(offers)}")
    if not has_run:
        notes.append("with --data FILE the price of the whole run is known")
    notes.append(
        "each card at its cheapest cloud's median on-demand price, without host, disk and traffic: "
        f"tightfit hardware {shorten_gpu(offers[0].gpu.name)!r} lists them"
    )
    if unused is not None:
        notes.append(f"the recipe's hardware ({unused}) is not used: --buy tries every priced card")
    yield from render_notes("Notes", notes)


def _offer_row(place: int, offer: Offer) -> tuple[Cell, ...]:
    estimate, strategy = offer.plan.estimate, offer.plan.strategy
    gpu, time = estimate.gpu, estimate.time
    words = (describe_method(strategy), describe_precision(strategy), describe_sharding(strategy))
    rent = styled(f"{offer.num_gpus} x {shorten_gpu(offer.gpu.name)}", "bold")
    rent.append("\n" + ", ".join(words), style="not bold dim")
    run = offer.usd_per_run
    speed = f"{time.tokens_per_second:,.0f}"
    run_seconds = time.run_seconds(offer.plan.num_epochs)
    if run_seconds is not None:
        speed = render_seconds(run_seconds)
    return (
        str(place),
        rent,
        f"{gpu.peak_reserved_bytes / GIB:.1f}/{gpu.capacity_bytes / GIB:.1f}",
        speed,
        render_usd(run) if run is not None else f"${offer.usd_per_million_tokens:.2g}",
        render_usd(offer.usd_per_hour),
        render_usd(offer.usd_per_month),
    )
