"""`tightfit estimate --zero-table`: the field's six-row table, from a model or from two numbers."""

from __future__ import annotations

import dataclasses

from tightfit.cli.choices import read_count
from tightfit.cli.describe import count_of
from tightfit.cli.flags.estimate import EstimateFlags
from tightfit.cli.terminal.json_output import show_json
from tightfit.core.errors import UsageError
from tightfit.core.units import render_count
from tightfit.estimate.zero_table import estimate_zero_table, largest_layer_params
from tightfit.models.resolve import resolve_model


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
    from tightfit.cli.render.zero_table import show_zero_table

    show_zero_table(
        rows,
        f"ZeRO-3 model states of {name or 'a model'}: {render_count(total)} parameters, "
        f"largest layer {render_count(largest)}, {count_of(flags.nodes, 'node')} with "
        f"{count_of(flags.gpus_per_node, 'GPU')} each.",
    )


def _read_sizes(flags: EstimateFlags) -> tuple[int, int, str | None]:
    """Parameters in all, in the largest layer, and the model's name where there is a model."""
    stated = (flags.total_params, flags.largest_layer_params)
    if flags.model is not None:
        if stated != (None, None):
            raise UsageError(
                "The table is made from MODEL or from --total-params, not from both.",
                remedy=f"tightfit estimate {flags.model} --zero-table",
            )
        spec = resolve_model(flags.model)
        return spec.num_params, largest_layer_params(spec), spec.name
    if stated[0] is None or stated[1] is None:
        raise UsageError(
            "`--zero-table` needs MODEL, or both --total-params and --largest-layer-params.",
            remedy="tightfit estimate --zero-table --total-params 2.8B --largest-layer-params 32M",
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
