"""`models`: search the offline catalogue, or show one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.api.call import accepts_keywords
from tightfit.api.options.catalogue import ModelsOptions
from tightfit.core.errors import NotFoundError
from tightfit.models.catalogue import CatalogueRow, load_row
from tightfit.models.resolve import list_models, resolve_model, search_models
from tightfit.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsResult:
    """The models that were found, each with its row of the catalogue, where it has one."""

    models: tuple[ModelSpec, ...]
    rows: tuple[CatalogueRow | None, ...]
    is_search: bool
    """False: the name meant exactly one model."""


@accepts_keywords(ModelsOptions)
def models(options: ModelsOptions) -> ModelsResult:
    """The whole catalogue, the models whose name contains a word, or one model."""
    if options.name is None:
        return _list(list_models())
    found = search_models(options.name)
    try:
        spec = resolve_model(options.name)
    except NotFoundError:
        if not found:
            raise
        return _list(found)
    # `qwen2.5` is also the alias of one model, but a part of many names means a search.
    if len(found) > 1 and not _is_exact(options.name, spec):
        return _list(found)
    row = next((row for row in list_models() if spec.source == f"catalogue:{row.model}"), None)
    return ModelsResult(models=(spec,), rows=(row,), is_search=False)


def _list(rows: Sequence[CatalogueRow]) -> ModelsResult:
    specs = tuple(load_row(row) for row in rows)
    return ModelsResult(models=specs, rows=tuple(rows), is_search=True)


def _is_exact(name: str, spec: ModelSpec) -> bool:
    """The name is the model's own, with or without its owner and the `-hf` of converted ones."""
    if not spec.source.startswith("catalogue:"):
        return True
    known = {spec.name.lower(), spec.name.lower().rpartition("/")[2]}
    return bool({name.lower(), f"{name.lower()}-hf"} & known)
