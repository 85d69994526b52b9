"""What is wrong or odd in a dataset, kind by kind, with the places."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tightfit.cli.describe import count_of
from tightfit.cli.terminal.notes import heading, plain
from tightfit.data.findings import NUM_SHOWN, Finding
from tightfit.data.report import DataReport

ONE_PER_LINE = ("unreadable", "refused", "mojibake")
"""Kinds whose detail is a sentence."""
GRAVE = ("unreadable", "refused", "empty-answer", "answer-cut-off", "truncated", "in-both")
_PLACE = re.compile(r"(?P<file>.+?) (?P<unit>\w+) (?P<number>\d+)(?:: (?P<detail>.*))?", re.DOTALL)


class _Place(NamedTuple):
    file: str
    unit: str
    number: str
    detail: str


def render_findings(report: DataReport) -> Iterator[RenderableType]:
    yield ""
    if not report.findings:
        yield Text.assemble(
            heading("Faults"),
            "  none: no row is unreadable, empty, cut, repeated or wrongly decoded",
        )
        return
    yield heading("Faults")
    for finding in report.findings:
        style = "bold yellow" if finding.kind in GRAVE else "bold"
        told = Text.assemble(
            (f"{_words(finding.kind)}, {count_of(finding.num_rows, 'row')}", style),
            plain(f": {finding.says}"),
        )
        yield Padding(told, (0, 0, 0, 2))
        for line in _list_places(finding):
            yield Padding(plain(_without_folders(line, report)), (0, 0, 0, 4))


def _without_folders(line: str, report: DataReport) -> str:
    """Files by their names: where they lie, the user knows."""
    for path in {path for source in report.sources for path in source.files}:
        line = line.replace(path, _name(path))
    return line


def _words(kind: str) -> str:
    return kind.replace("-", " ")


def _list_places(finding: Finding) -> Iterator[str]:
    """The first places by file; a line each where there is a sentence to say."""
    shown = finding.shown[:NUM_SHOWN]
    more = finding.num_rows - len(shown)
    rest = f" and {more:,} more" if more else ""
    places = [_read_place(line) for line in shown]
    if finding.kind in ONE_PER_LINE or None in places:
        yield from shown
        if rest:
            yield rest.strip()
        return
    known = [place for place in places if place is not None]
    groups = [(key, list(group)) for key, group in groupby(known, key=lambda p: (p.file, p.unit))]
    for at, ((file, unit), group) in enumerate(groups):
        is_last = at == len(groups) - 1
        yield f"{_name(file)} {unit} {_listed(group)}{rest if is_last else ''}"


def _read_place(line: str) -> _Place | None:
    found = _PLACE.fullmatch(line)
    if found is None:
        return None
    return _Place(found["file"], found["unit"], found["number"], found["detail"] or "")


def _listed(places: Sequence[_Place]) -> str:
    return ", ".join(
        f"{place.number} ({_shorter(place)})" if place.detail else place.number for place in places
    )


def _shorter(place: _Place) -> str:
    """`same as 12` where that is a line of the same file."""
    first = _read_place(place.detail.removeprefix("same as "))
    if first is None or not place.detail.startswith("same as "):
        return place.detail
    where = "" if first.file == place.file else f"{_name(first.file)} {first.unit} "
    return f"as {where}{first.number}"


def _name(file: str) -> str:
    return file.rsplit("/", 1)[-1]
