"""`tightfit estimate --zero-table`: the field's six-row table, from a model or from two numbers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tightfit.cli.choices import read_count
from tightfit.cli.estimate_flags import EstimateFlags
from tightfit.cli.screen import Column, make_table, show, show_json
from tightfit.core.errors import UsageError
from tightfit.core.units import GIB, render_count
from tightfit.estimate.zero_table import ZeroRow, estimate_zero_table, largest_layer_params

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_zero_table(flags: EstimateFlags) -> None:
    """Print the table for `--gpus-per-node` times `--nodes`."""
    total, largest, name = _read_sizes(flags)
    rows = estimate_zero_table(
        total_params=total,
        largest_layer_params=largest,
        gpus_per_node=flags.gpus_per_node,
        num_nodes=flags.nodes,
    )
    if flags.as_json:
        show_json(
            {
                "model": name,
                "total_params": total,
                "largest_layer_params": largest,
                "gpus_per_node": flags.gpus_per_node,
                "nodes": flags.nodes,
                "rows": [dataclasses.asdict(row) for row in rows],
            }
        )
        return
    gpus = f"{flags.nodes} node(s) with {flags.gpus_per_node} GPU(s) each"
    show(
        f"ZeRO-3 model states of {name or 'a model'}: {render_count(total)} parameters, "
        f"largest layer {render_count(largest)}, on {gpus}.",
        "Weights, gradients and Adam only; `tightfit estimate MODEL --sharding zero3` counts",
        "activations, logits and buckets too. GB here are 2^30 bytes, as this table always had them.",
        "",
        _render(rows),
    )


def _read_sizes(flags: EstimateFlags) -> tuple[int, int, str | None]:
    stated = (flags.total_params, flags.largest_layer_params)
    if flags.model is not None:
        if stated != (None, None):
            raise UsageError(
                "The table is made from MODEL or from --total-params, not from both.",
                remedy=f"tightfit estimate {flags.model} --zero-table",
            )
        from tightfit.models.resolve import resolve_model

        spec = resolve_model(flags.model)
        return spec.num_params, largest_layer_params(spec), spec.name
    if stated[0] is None or stated[1] is None:
        raise UsageError(
            "`--zero-table` needs MODEL, or both --total-params and --largest-layer-params.",
            remedy="tightfit estimate --zero-table --total-params 2851e6 --largest-layer-params 32e6",
        )
    total = read_count(stated[0], option="--total-params")
    largest = read_count(stated[1], option="--largest-layer-params")
    if largest > total:
        raise UsageError(
            f"The largest layer ({render_count(largest)}) is larger than the model "
            f"({render_count(total)}).",
            remedy="swap --total-params and --largest-layer-params",
        )
    return total, largest, None


def _render(rows: list[ZeroRow]) -> RenderableType:
    """In the words of DeepSpeed's own table, whose GB are 2^30 bytes."""
    columns = (
        Column(title="per CPU", right=True),
        Column(title="per GPU", right=True),
        Column(title="Options"),
    )
    return make_table(
        columns,
        [
            (
                f"{row.host_bytes / GIB:.2f}GB",
                f"{row.gpu_bytes / GIB:.2f}GB",
                f"offload_param={row.offload_param}, offload_optimizer={row.offload_optimizer}, "
                f"zero_init={row.zero_init}",
            )
            for row in rows
        ],
    )
