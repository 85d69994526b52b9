"""A cluster's inventory as text: by partition and kind of node, or each node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from tightfit.cli.describe import count_of
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.notes import plain, render_notes
from tightfit.cli.terminal.screen import Column, make_table, show
from tightfit.core.units import GIB, render_bytes, render_seconds
from tightfit.hardware.inventory import (
    ClusterNode,
    Inventory,
    InventoryRow,
    count_totals,
    free_cores,
    list_assumptions,
    list_rows,
)

MOST_FAULTS = 8
"""Nodes that are named with their reason; --each names all."""


def show_inventory(inventory: Inventory, *, is_each: bool) -> None:
    show(_render(inventory, is_each=is_each))


def _render(inventory: Inventory, *, is_each: bool) -> Iterator[RenderableType]:
    yield plain(_describe_totals(inventory))
    pool = "pool" if inventory.source.startswith("k8s") else "partition"
    yield ""
    if is_each:
        yield _render_nodes(inventory.nodes, f"{pool}s")
        yield ""
        yield "GPUs, cores and memory: what no job holds / all."
    else:
        yield _render_rows(list_rows(inventory), pool)
        yield ""
        yield "Nodes and GPUs: free now / all."
        yield from _render_faults(inventory)
    notes = [*inventory.warnings, *list_assumptions(inventory)]
    is_shared = len(inventory.pools) > 1 and any(len(node.pools) > 1 for node in inventory.nodes)
    if is_shared and not is_each:
        notes.append("A node of several partitions stands in each; the first line counts it once.")
    yield from render_notes("Beware", notes)
    if not is_each:
        yield ""
        yield plain(f"Each node: tightfit hardware --on {inventory.source} --each")


def _describe_totals(inventory: Inventory) -> str:
    totals = count_totals(inventory)
    parts = [
        count_of(totals.num_nodes, "node"),
        count_of(totals.num_gpus, "GPU") + _free(totals.num_free_gpus, totals.num_gpus),
        count_of(totals.num_cores, "core") + _free(totals.num_free_cores, totals.num_cores),
        f"{render_bytes(totals.memory_bytes)} of memory",
    ]
    return f"{inventory.source}: {', '.join(parts)}"


def _free(free: int | None, whole: int) -> str:
    return "" if free is None or not whole else f" ({free:,} free)"


def _render_rows(rows: Sequence[InventoryRow], pool: str) -> RenderableType:
    columns = (
        Column(title=pool, style="bold"),
        Column(title="each node has", keep=False),
        Column(title="nodes", right=True),
        Column(title="GPUs", right=True),
        Column(title="state", keep=False),
        Column(title="limit", right=True),
    )
    return make_table(columns, [_row(row) for row in rows])


def _row(row: InventoryRow) -> tuple[str, ...]:
    states = ", ".join(f"{number} {state.value}" for state, number in row.states.items())
    has = [
        row.kind,
        _span([node.num_cores for node in row.nodes], "{:,} cores"),
        _span([node.memory_bytes for node in row.nodes]),
    ]
    return (
        harmless(row.pool.name or "-"),
        harmless(", ".join(filter(None, has))),
        _part(row.num_free_nodes, len(row.nodes)),
        _part(row.num_free_gpus, row.num_gpus),
        states if row.pool.is_open else f"closed ({states})",
        render_seconds(row.pool.max_seconds) if row.pool.max_seconds else "-",
    )


def _render_nodes(nodes: Sequence[ClusterNode], pools: str) -> RenderableType:
    columns = (
        Column(title="node", style="bold"),
        Column(title=pools, keep=False),
        Column(title="it has", keep=False),
        Column(title="GPUs", right=True),
        Column(title="cores", right=True),
        Column(title="memory", right=True),
        Column(title="state", keep=False),
    )
    return make_table(columns, [_node_row(node) for node in nodes])


def _node_row(node: ClusterNode) -> tuple[str, ...]:
    why = f": {node.reason}" if node.reason else ""
    memory = "not told" if node.memory_bytes is None else render_bytes(node.memory_bytes)
    if node.memory_bytes is not None and node.free_memory_bytes is not None:
        free = node.free_memory_bytes if node.state.takes_jobs else 0
        memory = f"{free / GIB:.1f}/{node.memory_bytes / GIB:.1f} GiB"
    cores = "not told" if node.num_cores is None else _part(free_cores(node), node.num_cores)
    return (
        harmless(node.name),
        harmless(", ".join(filter(None, node.pools)) or "-"),
        harmless(node.kind),
        _part(node.num_free_gpus, node.num_gpus),
        cores,
        memory,
        harmless(f"{node.state.value}{why}"),
    )


def _part(free: int | None, whole: int) -> str:
    if not whole:
        return "-"
    return f"{whole:,}" if free is None else f"{free:,}/{whole:,}"


def _span(amounts: Sequence[int | None], form: str | None = None) -> str:
    """One amount, or the least and the most; nothing where none was told. Bytes without a form."""
    told = [amount for amount in amounts if amount is not None]
    if not told:
        return ""
    least, most = (form.format(n) if form else render_bytes(n) for n in (min(told), max(told)))
    return least if least == most else f"{least} to {most}"


def _render_faults(inventory: Inventory) -> Iterator[RenderableType]:
    broken = [node for node in inventory.nodes if not node.state.takes_jobs]
    told = [
        f"{node.name} is {node.state.value}{f': {node.reason}' if node.reason else ''}"
        for node in broken[:MOST_FAULTS]
    ]
    if len(broken) > MOST_FAULTS:
        told.append(f"{len(broken) - MOST_FAULTS} more (--each lists them)")
    yield from render_notes("Taking no jobs", told)
