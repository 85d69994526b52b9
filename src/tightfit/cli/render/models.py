"""Models as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding

from tightfit.cli.describe import count_of
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.notes import heading, plain, render_notes
from tightfit.cli.terminal.screen import Column, make_console, make_table, show
from tightfit.cli.terminal.table import as_text, fits
from tightfit.core.units import render_bytes, render_count
from tightfit.models.catalogue import CatalogueRow
from tightfit.models.parameters import explain_count
from tightfit.models.spec import ModelSpec


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
    rows = [[as_text(harmless(cell)) for cell in _row(spec)] for spec in specs]
    if fits(columns, rows, width=make_console().width):
        yield make_table(columns, rows)
    else:
        # A name is never broken, and a list of a hundred models is not stacked five lines each.
        for spec in specs:
            yield heading(spec.name)
            yield Padding(plain(_describe(spec)), (0, 0, 0, 2))
    yield ""
    told = count_of(len(specs), "model")
    yield plain(f"{told}. One of them, part by part: tightfit models NAME")


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
        for part in explain_count(spec)
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
