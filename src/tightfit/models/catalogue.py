"""The offline catalogue of models: rows of two tables, configs read only when asked for."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from tightfit.models.config import parse_json, read_config
from tightfit.models.spec import ModelSpec

_PACKAGE = "tightfit.catalogue"
_TABLES = ("models.csv", "models_extra_sources.csv")
_FOLDER = "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueRow:
    """One model of the catalogue and where its facts come from."""

    model: str
    file: str
    config_kind: str
    """`verbatim` (the published file), `built` (from published facts) or `unverified`."""
    config_source: str
    params_stated: int | None
    """A count somebody else published, if one was found."""
    agree: str
    """`yes`, `no` or empty: whether that count equals the one computed from the config."""
    stated_where: str
    sha256: str
    note: str


@cache
def list_models() -> tuple[CatalogueRow, ...]:
    """Every row, in the order of the tables. Opens no config."""
    folder = files(_PACKAGE)
    rows: list[CatalogueRow] = []
    for table in _TABLES:
        if not folder.joinpath(table).is_file():
            continue
        text = folder.joinpath(table).read_text(encoding="utf-8")
        rows.extend(_row(record) for record in csv.DictReader(text.splitlines()))
    return tuple({row.model: row for row in reversed(rows)}.values())[::-1]


def list_config_files() -> tuple[str, ...]:
    """Names of the config files in the catalogue, sorted."""
    entries = files(_PACKAGE).joinpath(_FOLDER).iterdir()
    return tuple(sorted(entry.name for entry in entries if entry.name.endswith(".json")))


def load_row(row: CatalogueRow) -> ModelSpec:
    """Read one row's config."""
    source = f"catalogue:{row.model}"
    spec = read_config(parse_json(read_row(row), source=source), name=row.model, source=source)
    if row.config_kind != "unverified":
        return spec
    warning = "No public copy of this config was found; its sizes are not verified."
    return spec.model_copy(update={"warnings": (*spec.warnings, warning)})


def read_row(row: CatalogueRow) -> bytes:
    """One row's config.json as it lies in the catalogue."""
    return files(_PACKAGE).joinpath(_FOLDER).joinpath(row.file).read_bytes()


def search_models(word: str) -> list[CatalogueRow]:
    """Rows whose name holds every part of `word`, case and punctuation ignored."""
    parts = [squeeze(part) for part in word.split()]
    return [row for row in list_models() if all(part in squeeze(row.model) for part in parts)]


def squeeze(text: str) -> str:
    """Letters, digits, dots and slashes alone, folded: `Llama-2 7b` and `llama2-7B` meet."""
    return "".join(char for char in text.casefold() if char.isalnum() or char in "./")


def _row(record: dict[str, str | None]) -> CatalogueRow:
    def cell(key: str) -> str:
        return (record.get(key) or "").strip()

    stated = cell("params_stated").replace(",", "")
    is_exact = stated.isdecimal()  # a rounded figure such as 3.5B is kept as text
    return CatalogueRow(
        model=cell("model"),
        file=cell("file").removeprefix(f"{_FOLDER}/"),
        config_kind=cell("config_kind"),
        config_source=cell("config_source"),
        params_stated=int(stated) if is_exact else None,
        agree=cell("agree"),
        stated_where=cell("stated_where")
        if is_exact
        else f"{stated} {cell('stated_where')}".strip(),
        sha256=cell("sha256"),
        note=cell("note"),
    )
