"""`tightfit models`: search the offline catalogue, or show one model part by part."""

from __future__ import annotations

import dataclasses

from tightfit.cli.flags.models import ModelsFlags
from tightfit.cli.terminal.json_output import show_json
from tightfit.core.errors import NotFoundError
from tightfit.models.catalogue import CatalogueRow, load_row
from tightfit.models.parameters import explain_count
from tightfit.models.resolve import list_models, resolve_model, search_models
from tightfit.models.spec import ModelSpec


def models(flags: ModelsFlags) -> None:
    """Show the catalogue, the rows that contain a word, or one model."""
    if flags.name is None:
        _show_list(list(list_models()), as_json=flags.as_json)
        return
    found = search_models(flags.name)
    try:
        spec = resolve_model(flags.name)
    except NotFoundError:
        if not found:
            raise
        _show_list(found, as_json=flags.as_json)
        return
    # `qwen2.5` also leads to one model by its alias; whoever types a part of many names searches.
    if len(found) > 1 and not _is_exact(flags.name, spec):
        _show_list(found, as_json=flags.as_json)
    else:
        _show_one(spec, as_json=flags.as_json)


def _is_exact(name: str, spec: ModelSpec) -> bool:
    """The name is the model's own, with or without its owner and the `-hf` of converted ones."""
    if not spec.source.startswith("catalogue:"):
        return True
    known = {spec.name.lower(), spec.name.lower().rpartition("/")[2]}
    return bool({name.lower(), f"{name.lower()}-hf"} & known)


def _show_list(rows: list[CatalogueRow], *, as_json: bool) -> None:
    specs = [load_row(row) for row in rows]
    if as_json:
        told = [
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
            for row, spec in zip(rows, specs, strict=True)
        ]
        show_json({"models": told})
        return
    from tightfit.cli.render.models import show_models

    show_models(specs)


def _show_one(spec: ModelSpec, *, as_json: bool) -> None:
    row = next((row for row in list_models() if spec.source == f"catalogue:{row.model}"), None)
    if as_json:
        show_json(
            {
                **spec.model_dump(mode="json"),
                "num_params": spec.num_params,
                "num_active_params": spec.num_active_params,
                "count": [dataclasses.asdict(part) for part in explain_count(spec)],
                "catalogue": dataclasses.asdict(row) if row is not None else None,
            }
        )
        return
    from tightfit.cli.render.models import show_model

    show_model(spec, row)
