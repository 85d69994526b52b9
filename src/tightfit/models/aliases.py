"""The names people type for the models of the catalogue."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tightfit.core.errors import NotFoundError
from tightfit.core.faults import printable
from tightfit.models.catalogue import CatalogueRow, squeeze

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
    listed = ", ".join(f"`{row.model}`" for row in found[:8])
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    raise NotFoundError(
        f"`{printable(name)}` could be {listed}{more}.",
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
