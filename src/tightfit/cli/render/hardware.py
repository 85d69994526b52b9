"""GPUs and clusters as text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from tightfit.cli.describe import count_of
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.notes import heading, plain, render_notes
from tightfit.cli.terminal.screen import Column, make_table, show
from tightfit.core.units import GB, TERA, render_bytes, render_seconds, render_usd
from tightfit.hardware.catalogue import GpuRecord
from tightfit.hardware.types import Cluster, Gpu, NodeGroup


def show_gpus(gpus: list[Gpu]) -> None:
    show(_render_gpus(gpus))


def show_gpu(record: GpuRecord) -> None:
    show(_render_gpu(record))


def show_cluster(cluster: Cluster) -> None:
    show(_render_cluster(cluster))


def _render_gpus(gpus: list[Gpu]) -> Iterator[RenderableType]:
    """One line per card."""
    columns = (
        Column(title="GPU", style="bold"),
        Column(title="memory", right=True),
        Column(title="cc", right=True),
        Column(title="fp16", right=True),
        Column(title="bf16", right=True),
        Column(title="GB/s", right=True),
        Column(title="median $/h", right=True),
    )
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
    columns = (
        Column(title="number"),
        Column(title="value", right=True, keep=False),
        Column(title="source", right=True),
        Column(title="note", keep=False),
    )
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
    yield from _render_prices(gpu)
    yield from render_notes("Sources", sources, is_numbered=True)
    yield from render_notes("Notes", (gpu.notes,) if gpu.notes else ())


def _render_cluster(cluster: Cluster) -> Iterator[RenderableType]:
    """One line per group of equal nodes."""
    columns = (
        Column(title="group", keep=False, style="bold"),
        Column(title="nodes", right=True),
        Column(title="GPUs per node", keep=False),
        Column(title="GPU memory", right=True),
        Column(title="host RAM", right=True),
        Column(title="link", keep=False),
        Column(title="limit", right=True),
    )
    yield plain(f"{count_of(cluster.num_gpus, 'GPU')}, from {cluster.source}")
    yield ""
    yield make_table(columns, [_group_row(group) for group in cluster.groups])
    if cluster.network_bytes_per_second is not None:
        yield ""
        yield f"network between nodes: {cluster.network_bytes_per_second / GB:.1f} GB/s"
    yield from render_notes("Beware", cluster.warnings)


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    capability = gpu.compute_capability
    return (
        gpu.name,
        render_bytes(gpu.memory_bytes),
        f"{capability[0]}.{capability[1]}" if capability else "-",
        _peak(gpu, "fp16"),
        _peak(gpu, "bf16"),
        f"{gpu.memory_bytes_per_second / GB:,.0f}",
        render_usd(gpu.cheapest.usd_per_gpu_hour) if gpu.cheapest is not None else "-",
    )


def _peak(gpu: Gpu, kind: str) -> str:
    peak = gpu.peak_flops.get(kind)
    return f"{peak / TERA:.0f}" if peak else "-"


def _render_prices(gpu: Gpu) -> Iterator[RenderableType]:
    if not gpu.prices:
        return
    columns = (
        Column(title="cloud"),
        Column(title="$/GPU-hour", right=True),
        Column(title="lowest", right=True),
        Column(title="spot", right=True),
        Column(title="date"),
    )

    def money(usd: float | None) -> str:
        return "-" if usd is None else render_usd(usd)

    rows = [
        (
            price.cloud,
            money(price.usd_per_gpu_hour),
            money(price.usd_per_gpu_hour_min),
            money(price.usd_per_gpu_hour_spot),
            price.date,
        )
        for price in gpu.prices
    ]
    yield ""
    yield make_table(columns, rows)


def _group_row(group: NodeGroup) -> tuple[str, ...]:
    node = group.node
    free = f" ({group.num_free_nodes:,} free)" if group.num_free_nodes is not None else ""
    return (
        harmless(group.name),
        f"{group.num_nodes:,}{free}",
        f"{node.num_gpus} x {harmless(node.gpu.name)}",
        render_bytes(node.free_gpu_memory_bytes or node.gpu.memory_bytes),
        render_bytes(node.host_memory_bytes) if node.host_memory_bytes else "not stated",
        f"{node.link_bytes_per_second / GB:.0f} GB/s" if node.num_gpus > 1 else "-",
        render_seconds(group.max_seconds) if group.max_seconds else "-",
    )
