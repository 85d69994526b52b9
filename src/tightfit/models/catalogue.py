"""The offline catalogue of models: rows, the names people type for them, their configs."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from tightfit.core.errors import NotFoundError
from tightfit.core.reading import parse_json, read_bytes
from tightfit.core.text import list_some, printable
from tightfit.models.config import read_config
from tightfit.models.spec import ModelSpec

_PACKAGE = "tightfit.catalogue"
_TABLES = ("models.csv", "models_extra_sources.csv")
_FOLDER = "models"


_GATED = ("meta-llama/", "google/gemma")
"""How the ids of models begin whose licence has to be accepted on the hub before a download, by
their pages on huggingface.co."""


def is_gated(hub_id: str) -> bool:
    """Whether the hub gives the model to accounts alone that have accepted its licence."""
    return hub_id.startswith(_GATED)


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


def load_row(row: CatalogueRow) -> ModelSpec:
    """Read one row's config."""
    source = f"catalogue:{row.model}"
    spec = read_config(
        parse_json(read_row(row), source=source, allows_infinity=True),
        name=row.model,
        source=source,
    )
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


# The names people type for the models of the catalogue.

_TUNED = re.compile(r"[-_](instruct|it|chat)(?=$|[-_])", re.IGNORECASE)
_DECORATION = re.compile(r"^meta[-_](?=llama)|[-_]hf$|[-_]v0\.1$", re.IGNORECASE)


def find_exact(name: str, rows: Sequence[CatalogueRow]) -> CatalogueRow | None:
    """The row of exactly this `org/name`, or of this one in another case."""
    folded = name.casefold()
    by_case = next((row for row in rows if row.model == name), None)
    return by_case or next((row for row in rows if row.model.casefold() == folded), None)


def find_alias(name: str, rows: Sequence[CatalogueRow]) -> CatalogueRow | None:
    """The one row that a shortened name means, or None; several is an error that lists them.

    An organisation in the name must be the row's own. In order: the part after
    the slash; without decoration (`Meta-`, `-hf`, `-v0.1`); a tuned model where the
    base is not listed; the start of exactly one name.
    """
    wanted, candidates = _own_part(name, rows)
    for key in (str.casefold, _plain, _base):
        found = [row for row in candidates if key(_tail(row)) == key(wanted)]
        if key is _base:
            found = [row for row in found if _plain(wanted) == _base(wanted)]
        if found:
            return _only(name, found)
    start = wanted.casefold() + "-"
    begun = [row for row in candidates if _bare(_tail(row)).casefold().startswith(start)]
    return _only(name, begun) if begun and wanted else None


def find_base(name: str, rows: Sequence[CatalogueRow]) -> CatalogueRow | None:
    """The base model of a tuned one that is not listed itself: same shapes, other weights."""
    wanted, candidates = _own_part(name, rows)
    if not _TUNED.search(wanted):
        return None
    found = [row for row in candidates if _plain(_tail(row)) == _base(wanted)]
    return found[0] if len(found) == 1 else None


def _own_part(name: str, rows: Sequence[CatalogueRow]) -> tuple[str, list[CatalogueRow]]:
    organisation, _, wanted = name.rpartition("/")
    fold = organisation.casefold()
    own = [row for row in rows if not fold or row.model.rpartition("/")[0].casefold() == fold]
    return wanted, own


def _only(name: str, found: Sequence[CatalogueRow]) -> CatalogueRow:
    if len(found) == 1:
        return found[0]
    listed = list_some([f"`{row.model}`" for row in found], most=8)
    raise NotFoundError(
        f"`{printable(name)}` could be {listed}.",
        remedy=f"name one of them: tightfit models {printable(name)}",
    )


def _tail(row: CatalogueRow) -> str:
    return row.model.rpartition("/")[2]


def _bare(tail: str) -> str:
    return _DECORATION.sub("", _DECORATION.sub("", tail))


def _plain(tail: str) -> str:
    return squeeze(_bare(tail))


def _base(tail: str) -> str:
    return squeeze(_bare(_TUNED.sub("", tail)))


# The config.json behind a ModelSpec, for those who build the model itself.


def read_source_config(spec: ModelSpec) -> dict[str, Any] | None:
    """The parsed config.json that `spec` was read from; None where it came from elsewhere.

    A GGUF file and a mere size have none.
    """
    if spec.source.startswith("catalogue:"):
        name = spec.source.removeprefix("catalogue:")
        data = next((read_row(row) for row in list_models() if row.model == name), None)
    else:
        path = Path(spec.source)
        data = read_bytes(path) if path.suffix == ".json" and path.is_file() else None
    if data is None:
        return None
    config = parse_json(data, source=spec.source, allows_infinity=True)
    return config if isinstance(config, dict) else None
