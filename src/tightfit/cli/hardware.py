"""`tightfit hardware`: List, search or show GPUs, or a cluster with --on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType

from tightfit.api.catalogue import HardwareOptions
from tightfit.api.catalogue import hardware as api_hardware
from tightfit.api.options.common import Output
from tightfit.cli.terminal.screen import heading, make_table, plain, render_notes, show_output
from tightfit.core.errors import SetupError
from tightfit.core.text import count_of, sanitize
from tightfit.core.units import GB, GIB, TERA, render_bytes, render_seconds, render_usd
from tightfit.hardware.catalogue import GpuRecord
from tightfit.hardware.inventory import (
    ClusterNode,
    Inventory,
    InventoryRow,
    count_totals,
    free_cores,
    list_assumptions,
    list_inventory_rows,
    plannable_cluster,
)
from tightfit.hardware.types import Cluster, Gpu, NodeGroup


def hardware(options: HardwareOptions, output: Output) -> None:
    """Show the catalogue, one card, or what `--on` means."""
    result = api_hardware(options)
    document: Any
    if result.inventory is not None:
        document = _describe_inventory(result.inventory)
        parts = render_inventory(result.inventory, is_each=options.each)
    elif result.cluster is not None:
        document, parts = result.cluster, render_cluster(result.cluster)
    elif result.record is not None:
        document, parts = _describe_gpu(result.record), _render_gpu(result.record)
    else:
        document = {"gpus": [gpu.model_dump(mode="json") for gpu in result.gpus]}
        parts = _render_gpus(result.gpus)
    show_output(document, parts, as_json=output.as_json)


def _describe_gpu(record: GpuRecord) -> dict[str, Any]:
    return {
        **record.gpu.model_dump(mode="json"),
        "family": record.family,
        "aliases": list(record.aliases),
        "numbers": [dataclasses.asdict(number) for number in record.numbers],
    }


def _render_gpus(gpus: Sequence[Gpu]) -> Iterator[RenderableType]:
    """One line per card."""
    columns = ("*GPU", ">memory", ">cc", ">fp16", ">bf16", ">GB/s", ">median $/h")
    yield make_table(columns, [_gpu_row(gpu) for gpu in gpus])
    yield ""
    yield "memory as torch sees it; cc: compute capability; fp16, bf16: dense peak TFLOP/s."
    yield "One card with its sources: tightfit hardware NAME"


def _render_gpu(record: GpuRecord) -> Iterator[RenderableType]:
    """Every number of one card with the place it came from."""
    gpu = record.gpu
    yield heading(gpu.name)
    if record.aliases:
        yield f"also known as {', '.join(record.aliases)}"
    yield f"planned with {render_bytes(gpu.memory_bytes)} of memory"
    yield ""
    columns = ("number", ">~value", ">source", "~note")
    sources = list(dict.fromkeys(number.source for number in record.numbers))
    rows = [
        (
            number.label,
            f"{number.value} {number.unit}".strip(),
            str(sources.index(number.source) + 1),
            plain(number.note),
        )
        for number in record.numbers
    ]
    yield make_table(columns, rows)
    if gpu.prices:
        prices = [
            (
                price.cloud,
                *(
                    "-" if usd is None else render_usd(usd)
                    for usd in (
                        price.usd_per_gpu_hour,
                        price.usd_per_gpu_hour_min,
                        price.usd_per_gpu_hour_spot,
                    )
                ),
                price.date,
            )
            for price in gpu.prices
        ]
        yield ""
        yield make_table(("cloud", ">$/GPU-hour", ">lowest", ">spot", "date"), prices)
    yield from render_notes("Sources", sources, is_numbered=True)
    yield from render_notes("Notes", (gpu.notes,) if gpu.notes else ())


def render_cluster(cluster: Cluster) -> Iterator[RenderableType]:
    """One line per group of equal nodes."""
    columns = ("*~group", ">nodes", "~GPUs per node", ">GPU memory", ">host RAM", "~link", ">limit")
    yield plain(f"{count_of(cluster.num_gpus, 'GPU')}, from {cluster.source}")
    yield ""
    yield make_table(columns, [_group_row(group) for group in cluster.groups])
    if cluster.network_bytes_per_second is not None:
        yield ""
        yield f"network between nodes: {cluster.network_bytes_per_second / GB:.1f} GB/s"
    yield from render_notes("Beware", cluster.warnings)


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    capability = gpu.compute_capability
    peaks = [gpu.peak_flops.get(kind) for kind in ("fp16", "bf16")]
    return (
        gpu.name,
        render_bytes(gpu.memory_bytes),
        f"{capability[0]}.{capability[1]}" if capability else "-",
        *(f"{peak / TERA:.0f}" if peak else "-" for peak in peaks),
        f"{gpu.memory_bytes_per_second / GB:,.0f}",
        render_usd(gpu.cheapest.usd_per_gpu_hour) if gpu.cheapest is not None else "-",
    )


def _group_row(group: NodeGroup) -> tuple[str, ...]:
    node = group.node
    free = f" ({group.num_free_nodes:,} free)" if group.num_free_nodes is not None else ""
    return (
        sanitize(group.name),
        f"{group.num_nodes:,}{free}",
        f"{node.num_gpus} x {sanitize(node.gpu.name)}",
        render_bytes(node.free_gpu_memory_bytes or node.gpu.memory_bytes),
        render_bytes(node.host_memory_bytes) if node.host_memory_bytes else "not stated",
        f"{node.link_bytes_per_second / GB:.0f} GB/s" if node.num_gpus > 1 else "-",
        render_seconds(group.max_seconds) if group.max_seconds else "-",
    )


# A cluster's inventory as text: by partition and kind of node, or each node.

MAX_ERRORS_SHOWN = 8
"""Nodes that are named with their reason; --each names all."""


def render_inventory(inventory: Inventory, *, is_each: bool) -> Iterator[RenderableType]:
    totals = count_totals(inventory)
    counts = [
        count_of(totals.num_nodes, "node"),
        count_of(totals.num_gpus, "GPU") + _free(totals.num_free_gpus, totals.num_gpus),
        count_of(totals.num_cores, "core") + _free(totals.num_free_cores, totals.num_cores),
        f"{render_bytes(totals.memory_bytes)} of memory",
    ]
    yield plain(f"{inventory.source}: {', '.join(counts)}")
    pool = "pool" if inventory.source.startswith("k8s") else "partition"
    yield ""
    if is_each:
        columns = ("*node", f"~{pool}s", "~it has", ">GPUs", ">cores", ">memory", "~state")
        yield make_table(columns, [_node_row(node) for node in inventory.nodes])
        yield ""
        yield "GPUs, cores and memory: what no job holds / all."
    else:
        titles = (f"*{pool}", "~each node has", ">nodes", ">GPUs", "~state", ">limit")
        yield make_table(titles, [_row(row) for row in list_inventory_rows(inventory)])
        yield ""
        yield "Nodes and GPUs: free now / all."
        broken = [
            f"{node.name} is {node.state.value}{f': {node.reason}' if node.reason else ''}"
            for node in inventory.nodes
            if not node.state.takes_jobs
        ]
        shown = broken[:MAX_ERRORS_SHOWN]
        if len(shown) < len(broken):
            shown.append(f"{len(broken) - len(shown)} more (--each lists them)")
        yield from render_notes("Taking no jobs", shown)
    notes = [*inventory.warnings, *list_assumptions(inventory)]
    is_shared = len(inventory.pools) > 1 and any(len(node.pools) > 1 for node in inventory.nodes)
    if is_shared and not is_each:
        notes.append("A node of several partitions stands in each; the first line counts it once.")
    yield from render_notes("Beware", notes)
    if not is_each:
        yield ""
        yield plain(f"Each node: tightfit hardware --on {inventory.source} --each")


def _free(free: int | None, whole: int) -> str:
    return "" if free is None or not whole else f" ({free:,} free)"


def _row(row: InventoryRow) -> tuple[str, ...]:
    states = ", ".join(f"{number} {state.value}" for state, number in row.states.items())
    has = [
        row.kind,
        _span([node.num_cores for node in row.nodes], "{:,} cores"),
        _span([node.memory_bytes for node in row.nodes]),
    ]
    return (
        sanitize(row.pool.name or "-"),
        sanitize(", ".join(filter(None, has))),
        _part(row.num_free_nodes, len(row.nodes)),
        _part(row.num_free_gpus, row.num_gpus),
        states if row.pool.is_open else f"closed ({states})",
        render_seconds(row.pool.max_seconds) if row.pool.max_seconds else "-",
    )


def _node_row(node: ClusterNode) -> tuple[str, ...]:
    why = f": {node.reason}" if node.reason else ""
    memory = "not stated" if node.memory_bytes is None else render_bytes(node.memory_bytes)
    if node.memory_bytes is not None and node.free_memory_bytes is not None:
        free = node.free_memory_bytes if node.state.takes_jobs else 0
        memory = f"{free / GIB:.1f}/{node.memory_bytes / GIB:.1f} GiB"
    cores = "not stated" if node.num_cores is None else _part(free_cores(node), node.num_cores)
    return (
        sanitize(node.name),
        sanitize(", ".join(filter(None, node.pools)) or "-"),
        sanitize(node.kind),
        _part(node.num_free_gpus, node.num_gpus),
        cores,
        memory,
        sanitize(f"{node.state.value}{why}"),
    )


def _part(free: int | None, whole: int) -> str:
    if not whole:
        return "-"
    return f"{whole:,}" if free is None else f"{free:,}/{whole:,}"


def _span(amounts: Sequence[int | None], form: str | None = None) -> str:
    """One amount, or the least and the most; nothing where none is known. Bytes without a form."""
    reported = [amount for amount in amounts if amount is not None]
    if not reported:
        return ""
    least, most = (
        form.format(n) if form else render_bytes(n) for n in (min(reported), max(reported))
    )
    return least if least == most else f"{least} to {most}"


def _describe_inventory(inventory: Inventory) -> dict[str, Any]:
    """The JSON of an inventory: partitions by kind of node, each node, and what is planned over."""
    try:
        cluster = plannable_cluster(inventory)
    except SetupError:  # nothing takes jobs; what there is can be shown all the same
        cluster = Cluster(groups=(), source=inventory.source, warnings=inventory.warnings)
    rows = list_inventory_rows(inventory)
    return {
        **cluster.model_dump(mode="json"),
        "totals": dataclasses.asdict(count_totals(inventory)),
        "partitions": [
            {
                **dataclasses.asdict(pool),
                "kinds": [_describe_row(row) for row in rows if row.pool.name == pool.name],
            }
            for pool in inventory.pools
        ],
        "nodes": [_describe_node(node) for node in inventory.nodes],
    }


def _describe_row(row: InventoryRow) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "num_nodes": len(row.nodes),
        "num_free_nodes": row.num_free_nodes,
        "num_gpus": row.num_gpus,
        "num_free_gpus": row.num_free_gpus,
        "num_free_cores": row.num_free_cores,
        "states": {state.value: number for state, number in row.states.items()},
        "nodes": [node.name for node in row.nodes],
    }


def _describe_node(node: ClusterNode) -> dict[str, Any]:
    gpus = [
        {"kind": one.kind, "gpu": one.name, "count": one.count, "num_free": one.num_free}
        for one in node.devices
    ]
    reported = dataclasses.asdict(node)
    del reported["devices"]
    return {
        **reported,
        "state": node.state.value,
        "takes_jobs": node.state.takes_jobs,
        "gpus": gpus,
    }
