"""Parts of a dataset as people write them: `10`, `1%`, `[:10%]`, `train[10:20]`, `x.jsonl[:5]`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from tightfit.core.errors import InvalidInputError

SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "eval",
    "valid": "eval",
    "val": "eval",
    "dev": "eval",
    "eval": "eval",
    "test": "test",
}
_WORD = re.compile(r"[A-Za-z]+")
_BOUND = re.compile(r"([+-]?)(\d+(?:\.\d+)?)(%?)")
_SUFFIX = re.compile(r"\[[^\[\]]*\]$")
_REMEDY = "write it like 10, 1%, [:10%], train[:10%] or [100:200]"


class Bound(NamedTuple):
    """One end of a slice: a row number, or a share of all rows."""

    value: float
    is_percent: bool

    def at(self, num_rows: int) -> int:
        """Rounded to the nearest row, as the `datasets` library rounds."""
        place = round(num_rows * self.value / 100) if self.is_percent else int(self.value)
        return min(max(place + num_rows if self.value < 0 else place, 0), num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """Which rows of a source."""

    text: str = ""
    word: str | None = None
    """`train`, `validation`, ...: which files of a folder."""
    start: Bound | None = None
    stop: Bound | None = None

    @property
    def is_whole(self) -> bool:
        return self.start is None and self.stop is None

    @property
    def needs_count(self) -> bool:
        """Shares and places from the end are known only when all rows are counted."""
        bounds = [bound for bound in (self.start, self.stop) if bound is not None]
        return any(bound.is_percent or bound.value < 0 for bound in bounds)

    def range(self, num_rows: int | None, source: str) -> tuple[int, int | None]:
        """First row and the row to stop before, counted from 0; None: to the end."""
        count = num_rows if num_rows is not None else 2**62
        first = self.start.at(count) if self.start else 0
        last = self.stop.at(count) if self.stop else None
        if last is not None and last <= first:
            counted = "" if num_rows is None else f" of its {num_rows:,} rows"
            raise InvalidInputError(
                f"`{self.text}` takes none{counted} from {source}.", remedy=_REMEDY
            )
        return first, last


def parse_take(text: str) -> Take:
    """A part as people write it. A bare number or share counts from the first row."""
    rest = text.strip()
    word = None
    if found := _WORD.match(rest):
        word, rest = found[0].lower(), rest[found.end() :].strip()
        if word not in SPLIT_WORDS:
            raise _bad(text, f"`{found[0]}` is no split; known are {', '.join(SPLIT_WORDS)}")
    if not rest:
        if word is None:
            raise _bad(text, "it is empty")
        return Take(text=text, word=word)
    if not rest.startswith("["):
        if word is not None:
            raise _bad(text, "after a split's name comes a slice in square brackets")
        return Take(text=text, stop=_bound(rest, text, allow_negative=False))
    if not rest.endswith("]") or rest.count(":") != 1:
        raise _bad(text, "a slice is two places with a colon between, in square brackets")
    low, high = rest[1:-1].split(":")
    return Take(text=text, word=word, start=_end(low, text), stop=_end(high, text))


def split_suffix(path: str) -> tuple[str, str | None]:
    """`train.jsonl[:10%]` as path and part."""
    found = _SUFFIX.search(path)
    return (path, None) if found is None else (path[: found.start()], found[0])


def _end(written: str, text: str) -> Bound | None:
    return _bound(written.strip(), text, allow_negative=True) if written.strip() else None


def _bound(written: str, text: str, *, allow_negative: bool) -> Bound:
    found = _BOUND.fullmatch(written.replace("_", "").replace(",", ""))
    if found is None:
        raise _bad(text, f"`{written}` is neither a number of rows nor a percentage")
    value, is_percent = float(found[2]), bool(found[3])
    if is_percent and value > 100:
        raise _bad(text, f"{written} is more than all rows")
    if not is_percent and not value.is_integer():
        raise _bad(text, f"{written} is no whole number of rows; add % for a share")
    if found[1] == "-":
        if not allow_negative:
            raise _bad(text, "a number of rows is not negative")
        value = -value
    if not allow_negative and value == 0:
        raise _bad(text, "it takes no rows")
    return Bound(value, is_percent)


def _bad(text: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"`{text}` names no part of a dataset: {why}.", remedy=_REMEDY)
