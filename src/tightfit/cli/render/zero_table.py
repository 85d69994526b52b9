"""The ZeRO table as text, in the words of DeepSpeed's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from tightfit.cli.terminal.notes import plain
from tightfit.cli.terminal.screen import Column, make_table, show
from tightfit.core.units import GIB
from tightfit.estimate.zero_table import ZeroRow


def show_zero_table(rows: Sequence[ZeroRow], subject: str) -> None:
    show(_render(rows, subject))


def _render(rows: Sequence[ZeroRow], subject: str) -> Iterator[RenderableType]:
    yield plain(subject)
    yield plain(
        "Weights, gradients and Adam only: `tightfit estimate MODEL --sharding zero3` adds the "
        "rest. GB are 2^30 bytes, as in DeepSpeed's table."
    )
    yield ""
    columns = (
        Column(title="per CPU", right=True),
        Column(title="per GPU", right=True),
        Column(title="Options", keep=False),
    )
    yield make_table(columns, [_row(row) for row in rows])


def _row(row: ZeroRow) -> tuple[str, str, str]:
    return (
        f"{row.host_bytes / GIB:,.2f}GB",
        f"{row.gpu_bytes / GIB:,.2f}GB",
        f"offload_param={row.offload_param}, offload_optimizer={row.offload_optimizer}, "
        f"zero_init={row.zero_init}",
    )
