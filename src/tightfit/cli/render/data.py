"""Training data as text: errors and warnings by kind, and rows with their loss mask."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tightfit.cli.terminal.output import supports_unicode
from tightfit.cli.terminal.screen import heading, make_console, plain
from tightfit.core.text import count_of
from tightfit.data.report import NUM_SHOWN, DataIssue, DataReport
from tightfit.data.token_store import TokenStore
from tightfit.data.tokenizer import ChatTokenizer

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
        summary = Text.assemble(
            (f"{_words(finding.kind)}, {count_of(finding.num_rows, 'row')}", style),
            plain(f": {finding.says}"),
        )
        yield Padding(summary, (0, 0, 0, 2))
        for line in _list_places(finding):
            yield Padding(plain(_without_folders(line, report)), (0, 0, 0, 4))


def _without_folders(line: str, report: DataReport) -> str:
    """Files by their names: where they lie, the user knows."""
    for path in {path for source in report.sources for path in source.files}:
        line = line.replace(path, _name(path))
    return line


def _words(kind: str) -> str:
    return kind.replace("-", " ")


def _list_places(finding: DataIssue) -> Iterator[str]:
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


# The mask viewer: a row's text with what is trained, what is not, and special tokens apart.

TRAINED = "green"
TRAINED_SPECIAL = "black on green"
UNTRAINED = "dim"
SPECIAL = "magenta"
INDENT = 2


class Piece(NamedTuple):
    """A stretch of a row, all of one kind."""

    text: str
    is_trained: bool
    is_special: bool
    """The tokenizer's special token itself, not letters that spell it."""


class ViewedRow(NamedTuple):
    """A row to be shown."""

    place: str
    num_tokens: int
    num_trained_tokens: int
    pieces: tuple[Piece, ...]

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "place": self.place,
            "num_tokens": self.num_tokens,
            "num_trained_tokens": self.num_trained_tokens,
            "segments": [
                {"text": text, "trained": trained, "special": special}
                for text, trained, special in self.pieces
            ],
        }


def view_row(store: TokenStore, index: int, tokenizer: ChatTokenizer) -> ViewedRow:
    """One row of a store, cut where the mask or the kind of token changes."""
    row = store.row(index)
    special = set(tokenizer.control.ids.values())
    tokens = row.tokens.tolist()
    kinds = [(flag, token in special) for token, flag in zip(tokens, row.trained, strict=True)]
    is_pair = store.description.is_encoder_decoder
    pieces: list[Piece] = []
    start, text_before, side = 0, "", 0
    for (is_trained, is_special), group in groupby(kinds):
        end = start + len(list(group))
        if is_pair and is_trained and not kinds[start - 1][0]:
            side, text_before = start, ""  # the decoder's text begins here
        # Differences of decoded prefixes, so that blanks at the seams stay.
        text = tokenizer.decode(tokens[side:end])
        pieces.append(Piece(text[len(text_before) :], bool(is_trained), is_special))
        start, text_before = end, text
    return ViewedRow(row.place, len(tokens), int(store.num_trained[index]), tuple(pieces))


def is_coloured() -> bool:
    """Whether colour reaches a reader; without it, marks stand around what is trained."""
    console = make_console()
    return console.color_system is not None and not console.no_color


def render_legend() -> Text:
    if not is_coloured():
        opening, closing = _marks()
        return Text(f"{opening}trained{closing}, the rest is not; <...> special tokens")
    return Text.assemble(
        ("trained", TRAINED),
        ("  not trained", UNTRAINED),
        "  special token: ",
        ("trained", TRAINED_SPECIAL),
        "  ",
        ("not trained", SPECIAL),
    )


def render_row(row: ViewedRow, *, most_chars: int | None) -> RenderableType:
    """The text, indented. `most_chars`: longer stretches lose their middle."""
    text = _render_coloured(row, most_chars) if is_coloured() else _render_marked(row, most_chars)
    text.overflow = "fold"
    if text.plain.endswith("\n"):
        text.right_crop(1)  # an empty line more would say nothing
    return Padding(text, (0, 0, 0, INDENT))


def _render_coloured(row: ViewedRow, most_chars: int | None) -> Text:
    text = Text()
    line_end = "↵\n" if supports_unicode() else "\n"
    for piece in row.pieces:
        style = _style(piece)
        for stretch, is_ours in _shorten(piece.text, most_chars):
            shown = make_visible(stretch).replace("\n", line_end)
            text.append(shown, style="italic dim" if is_ours else style)
    return text


def _style(piece: Piece) -> str:
    if piece.is_special:
        return TRAINED_SPECIAL if piece.is_trained else SPECIAL
    return TRAINED if piece.is_trained else UNTRAINED


def _render_marked(row: ViewedRow, most_chars: int | None) -> Text:
    opening, closing = _marks()
    parts: list[str] = []
    for is_trained, group in groupby(row.pieces, key=lambda piece: piece.is_trained):
        piece_text = "".join(
            make_visible(stretch)
            for piece in group
            for stretch, _ in _shorten(piece.text, most_chars)
        )
        parts.append(f"{opening}{piece_text}{closing}" if is_trained else piece_text)
    return Text("".join(parts))


def _marks() -> tuple[str, str]:
    return ("«", "»") if supports_unicode() else ("[[", "]]")


def _shorten(text: str, most_chars: int | None) -> Iterator[tuple[str, bool]]:
    """The text, or its two ends with a word between them that is ours."""
    if most_chars is None or len(text) <= most_chars:
        yield text, False
        return
    half = most_chars // 2
    yield text[:half], False
    yield f" [... {len(text) - 2 * half:,} characters ...] ", True
    yield text[-half:], False


def make_visible(text: str) -> str:
    """Line breaks as they are; whatever else a terminal would obey or hide, spelt out."""
    if text.isprintable():
        return text
    return "".join(map(_spell, text.replace("\r\n", "\n")))


def _spell(char: str) -> str:
    if char == "\n" or char.isprintable():
        return char
    if char == "\t":
        return "    "
    if char.isspace() and ord(char) > 0x9F and char not in "\u2028\u2029":
        return " "
    number = ord(char)
    if number < 0x20 and supports_unicode():
        return chr(0x2400 + number)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


def pick_rows(num_rows: int, wanted: int) -> Sequence[int]:
    """Indices spread evenly over all rows, the first among them."""
    count = min(num_rows, wanted)
    return [number * num_rows // count for number in range(count)]
