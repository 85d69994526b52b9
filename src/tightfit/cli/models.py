"""`tightfit models`: search the offline catalogue, or show one model part by part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding

from tightfit.api.models import ModelsResult
from tightfit.api.models import models as api_models
from tightfit.cli.flags.catalogue import ModelsFlags
from tightfit.cli.terminal.output import show_json
from tightfit.cli.terminal.screen import (
    Column,
    as_text,
    fits,
    heading,
    make_console,
    make_table,
    plain,
    render_notes,
    show,
)
from tightfit.core.text import count_of, sanitize
from tightfit.core.units import render_bytes, render_count
from tightfit.models.catalogue import CatalogueRow
from tightfit.models.spec import ModelSpec, explain_parameter_count

# Models as text.


def show_models(specs: Sequence[ModelSpec]) -> None:
    show(_render_list(specs))


def show_model(spec: ModelSpec, row: CatalogueRow | None) -> None:
    show(_render_one(spec, row))


def _render_list(specs: Sequence[ModelSpec]) -> Iterator[RenderableType]:
    columns = (
        Column(title="model", style="bold"),
        Column(title="family"),
        Column(title="parameters", right=True),
        Column(title="per token", right=True),
        Column(title="context", right=True),
    )
    rows = [[as_text(sanitize(cell)) for cell in _row(spec)] for spec in specs]
    if fits(columns, rows, width=make_console().width):
        yield make_table(columns, rows)
    else:
        # A name is never broken, and a list of a hundred models is not stacked five lines each.
        for spec in specs:
            yield heading(spec.name)
            yield Padding(plain(_describe(spec)), (0, 0, 0, 2))
    yield ""
    reported = count_of(len(specs), "model")
    yield plain(f"{reported}. One of them, part by part: tightfit models NAME")


def _row(spec: ModelSpec) -> tuple[str, ...]:
    is_sparse = spec.num_active_params != spec.num_params
    return (
        spec.name,
        spec.model_type,
        render_count(spec.num_params),
        render_count(spec.num_active_params) if is_sparse else "",
        f"{spec.max_positions:,}" if spec.max_positions else "-",
    )


def _describe(spec: ModelSpec) -> str:
    """The row as a sentence."""
    _, family, size, active, context = _row(spec)
    per_token = f" ({active} per token)" if active else ""
    reach = f", context {context}" if spec.max_positions else ""
    return f"{family}, {size} parameters{per_token}{reach}"


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
    columns = (
        Column(title="part"),
        Column(title="parameters", right=True),
        Column(title="share", right=True),
        Column(title="what", keep=False),
    )
    rows = [
        (
            part.part,
            f"{part.num_params:,}",
            f"{part.num_params / spec.num_params:.1%}",
            plain(part.note),
        )
        for part in explain_parameter_count(spec)
    ]
    yield make_table(columns, rows)
    yield ""
    yield plain(f"LoRA can target: {', '.join(spec.module_names)}")
    yield from _render_sources(spec, row)
    yield from render_notes("Beware", spec.warnings)


def _render_sources(spec: ModelSpec, row: CatalogueRow | None) -> Iterator[RenderableType]:
    notes = [f"config: {spec.source}"]
    if row is not None:
        said = row.config_source.removeprefix(row.config_kind).strip()
        notes = [f"config ({row.config_kind}): {said}"]
        if row.params_stated is not None:
            agrees = {"yes": "equal to ours", "no": "not equal to ours"}.get(row.agree, "")
            notes.append(f"stated elsewhere: {row.params_stated:,} {agrees} ({row.stated_where})")
        if row.note:
            notes.append(row.note)
    if spec.file_bytes:
        notes.append(f"weights on disk: {render_bytes(spec.file_bytes)}")
    yield from render_notes("Sources", notes)


def models(flags: ModelsFlags) -> None:
    """Show the catalogue, the rows that contain a word, or one model."""
    result = api_models(flags)
    if result.is_search:
        _show_list(result, as_json=flags.as_json)
    else:
        _show_one(result.models[0], result.rows[0], as_json=flags.as_json)


def _show_list(result: ModelsResult, *, as_json: bool) -> None:
    if as_json:
        reported = [
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
        show_json({"models": reported})
        return

    show_models(result.models)


def _show_one(spec: ModelSpec, row: CatalogueRow | None, *, as_json: bool) -> None:
    if as_json:
        show_json(
            {
                **spec.model_dump(mode="json"),
                "num_params": spec.num_params,
                "num_active_params": spec.num_active_params,
                "count": [dataclasses.asdict(part) for part in explain_parameter_count(spec)],
                "catalogue": dataclasses.asdict(row) if row is not None else None,
            }
        )
        return

    show_model(spec, row)
