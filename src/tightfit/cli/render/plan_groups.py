"""The best plan of each partition or node pool: how fast, and whether it can start now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from tightfit.cli.describe import describe_how
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.notes import heading
from tightfit.cli.terminal.screen import Column, make_table
from tightfit.core.units import render_seconds
from tightfit.planning.by_group import GroupBest, find_run_seconds
from tightfit.planning.plan import Plan


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
    yield make_table(columns, [_row(best, shown.get(best.group.name)) for best in groups])


def _row(best: GroupBest, shown: Plan | None) -> tuple[str, ...]:
    group, plan = best.group, shown or best.plan
    limit = render_seconds(group.max_seconds) if group.max_seconds else "-"
    free = group.num_free_nodes
    nodes = f"{group.num_nodes:,}" if free is None else f"{free:,} of {group.num_nodes:,}"
    if plan is None:
        return harmless(group.name), "nothing fits", "-", limit, nodes, "-"
    how = describe_how(plan.strategy, plan.hardware.node.gpu.name)
    seconds = find_run_seconds(plan.estimate, plan.num_epochs)
    speed = f"{plan.estimate.time.tokens_per_second:,.0f}"
    run = speed if seconds is None else render_seconds(seconds)
    starts = {True: "now", False: "must wait", None: "not told"}[best.can_start_now]
    if best.exceeds_limit:
        starts += ", is cut off"
    return harmless(group.name), how, run, limit, nodes, starts
