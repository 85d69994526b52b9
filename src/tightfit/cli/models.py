"""`tightfit models`: List, search or show models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tightfit.api.catalogue import ModelsOptions, ModelsResult
from tightfit.api.catalogue import models as api_models
from tightfit.api.options.common import Output
from tightfit.cli.terminal.screen import (
    Column,
    as_text,
    fits,
    heading,
    make_console,
    make_table,
    plain,
    render_notes,
    show_output,
)
from tightfit.core.text import count_of, sanitize
from tightfit.core.units import render_bytes, render_count
from tightfit.models.catalogue import CatalogueRow
from tightfit.models.spec import ModelSpec, explain_parameter_count

if TYPE_CHECKING:
    from rich.console import RenderableType


def models(options: ModelsOptions, output: Output) -> None:
    """Show the catalogue, the rows that contain a word, or one model."""
    result = api_models(options)
    if result.is_search:
        document = {"models": _describe_list(result)}
        show_output(document, _render_list(result.models), as_json=output.as_json)
        return
    spec, row = result.models[0], result.rows[0]
    described = {
        **spec.model_dump(mode="json"),
        "num_params": spec.num_params,
        "num_active_params": spec.num_active_params,
        "count": [dataclasses.asdict(part) for part in explain_parameter_count(spec)],
        "catalogue": dataclasses.asdict(row) if row is not None else None,
    }
    show_output(described, _render_one(spec, row), as_json=output.as_json)


def _describe_list(result: ModelsResult) -> list[dict[str, Any]]:
    return [
        {
            "name": row.model,
            "model_type": spec.model_type,
            "num_params": spec.num_params,
            "num_active_params": spec.num_active_params,
            "num_layers": spec.num_layers,
            "max_positions": spec.max_positions,
            "config_kind": row.config_kind,
            "config_source": row.config_source,
        }
        for row, spec in zip(result.rows, result.models, strict=True)
        if row is not None
    ]


def _render_list(specs: Sequence[ModelSpec]) -> Iterator[RenderableType]:
    from rich.padding import Padding

    columns = [
        Column("model", style="bold"),
        Column("family"),
        Column("parameters", right=True),
        Column("per token", right=True),
        Column("context", right=True),
    ]
    rows = [[as_text(sanitize(cell)) for cell in _row(spec)] for spec in specs]
    if fits(columns, rows, width=make_console().width):
        yield make_table(columns, rows)
    else:
        # A name is never broken, and a list of a hundred models is not stacked five lines each.
        for spec in specs:
            _, family, size, active, context = _row(spec)
            per_token = f" ({active} per token)" if active else ""
            reach = f", context {context}" if spec.max_positions else ""
            yield heading(spec.name)
            yield Padding(plain(f"{family}, {size} parameters{per_token}{reach}"), (0, 0, 0, 2))
    yield ""
    count = count_of(len(specs), "model")
    yield plain(f"{count}. One of them, part by part: tightfit models NAME")


def _row(spec: ModelSpec) -> tuple[str, ...]:
    is_sparse = spec.num_active_params != spec.num_params
    return (
        spec.name,
        spec.model_type,
        render_count(spec.num_params),
        render_count(spec.num_active_params) if is_sparse else "",
        f"{spec.max_positions:,}" if spec.max_positions else "-",
    )


def _render_one(spec: ModelSpec, row: CatalogueRow | None) -> Iterator[RenderableType]:
    yield heading(f"{spec.name}: {spec.num_params:,} parameters")
    shape = [
        spec.model_type,
        count_of(spec.num_layers, "layer"),
        f"hidden {spec.hidden_size:,}",
        f"{count_of(spec.num_heads, 'head')} of {spec.head_dim}",
        f"{spec.num_kv_heads} for keys and values",
        f"vocabulary {spec.vocab_size:,}",
    ]
    if spec.max_positions:
        shape.append(f"context {spec.max_positions:,}")
    yield plain(", ".join(shape))
    yield ""
    rows = [
        (
            part.part,
            f"{part.num_params:,}",
            f"{part.num_params / spec.num_params:.1%}",
            plain(part.note),
        )
        for part in explain_parameter_count(spec)
    ]
    yield make_table(("part", ">parameters", ">share", Column("what", keep=False)), rows)
    yield ""
    yield plain(f"LoRA can target: {', '.join(spec.module_names)}")
    notes = [f"config: {spec.source}"]
    if row is not None:
        where = row.config_source.removeprefix(row.config_kind).strip()
        notes = [f"config ({row.config_kind}): {where}"]
        if row.params_stated is not None:
            agrees = {"yes": "equal to ours", "no": "not equal to ours"}.get(row.agree, "")
            notes.append(f"stated elsewhere: {row.params_stated:,} {agrees} ({row.stated_where})")
        if row.note:
            notes.append(row.note)
    if spec.file_bytes:
        notes.append(f"weights on disk: {render_bytes(spec.file_bytes)}")
    yield from render_notes("Sources", notes)
    yield from render_notes("Beware", spec.warnings)
