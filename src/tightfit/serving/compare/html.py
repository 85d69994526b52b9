"""HTML of answers, differences, errors and vote counts. All text from models and users is
escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape

from tightfit.core.errors import UserError
from tightfit.core.units import render_seconds
from tightfit.engines.protocol import Done, EngineInfo, FinishReason
from tightfit.serving.compare.models import PartialAnswer
from tightfit.serving.compare.votes import VoteCounts

# The difference of two answers, word by word.

MAX_DIFF_WORDS = 3_000
"""On one side. Longer answers are compared line by line: the search is quadratic."""
_WORDS = re.compile(r"\s*(?:\w+|[^\w\s])")
_LINES = re.compile(r"\s*\S[^\n]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffPiece:
    """A stretch of one answer."""

    text: str
    is_shared: bool
    """Stands in the other answer too, in the same order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Both answers in pieces, which put together are the answers again."""

    left: tuple[DiffPiece, ...]
    right: tuple[DiffPiece, ...]
    shared_fraction: float
    """Of the words of both; 1 where they say the same, whatever the spaces between."""


def find_difference(left: str, right: str) -> Difference:
    """Words and marks are compared; the space before them is not, so a new line alone is none."""
    pattern = _WORDS
    if max(len(_split(text, _WORDS)) for text in (left, right)) > MAX_DIFF_WORDS:
        pattern = _LINES
    words = _split(left, pattern), _split(right, pattern)
    keys = tuple([word.strip() for word in side] for side in words)
    matcher = SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    is_shared = [False] * len(words[0]), [False] * len(words[1])
    for block in matcher.get_matching_blocks():
        is_shared[0][block.a : block.a + block.size] = [True] * block.size
        is_shared[1][block.b : block.b + block.size] = [True] * block.size
    return Difference(
        left=_join(words[0], is_shared[0]),
        right=_join(words[1], is_shared[1]),
        shared_fraction=matcher.ratio(),
    )


def _split(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Each with the space before it, the last with the space behind it too."""
    words = pattern.findall(text) or [""]
    words[-1] += text[sum(map(len, words)) :]
    return [word for word in words if word]


def _join(words: Sequence[str], is_shared: Sequence[bool]) -> tuple[DiffPiece, ...]:
    """Neighbours of one kind as one piece."""
    pieces: list[DiffPiece] = []
    for word, shared in zip(words, is_shared, strict=True):
        if pieces and pieces[-1].is_shared == shared:
            pieces[-1] = DiffPiece(text=pieces[-1].text + word, is_shared=shared)
        else:
            pieces.append(DiffPiece(text=word, is_shared=shared))
    return tuple(pieces)


_ENDINGS = {
    FinishReason.STOP: "",
    FinishReason.LENGTH: "cut at the longest answer",
    FinishReason.CANCELLED: "stopped",
}
_MARKS = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCard:
    """One side of the page."""

    number: int
    """1 left or on top, 2 right or below."""
    name: str | None
    """None: hidden until the vote."""
    info: EngineInfo | None = None
    side: PartialAnswer | None = None
    """None: nothing was asked yet."""
    pieces: tuple[DiffPiece, ...] | None = None
    """The answer with its differences; None: plain."""
    are_figures_shown: bool = True


def escape_html(text: str) -> str:
    """Text as markup that shows exactly this text.

    Also the marks of the page's own template language are escaped: an answer may hold
    `{{` or `${`, and must not be taken for a template.
    """
    return escape(text, quote=True).translate(_MARKS)


def render_card(card: AnswerCard) -> str:
    """A heading, the answer in whatever state it is, and its figures."""
    name = "hidden until you vote" if card.name is None else card.name
    kind = "" if card.info is None or card.name is None else _describe_engine(card.info)
    is_busy = card.side is not None and not card.side.has_ended
    return (
        f'<section class="tf-side" data-state="{_state(card.side)}" '
        f'aria-busy="{str(is_busy).lower()}" '
        f'aria-label="Answer {card.number}: {escape_html(name)}">'
        f'<h3><span class="tf-number">{card.number}</span>'
        f'<span class="{"tf-hidden" if card.name is None else "tf-name"}">'
        f"{escape_html(name)}</span>"
        f"<small>{escape_html(kind)}</small></h3>"
        f"{_answer(card)}"
        f'<p class="tf-figures">{escape_html(_figures(card))}&nbsp;</p></section>'
    )


def render_error(error: Exception) -> str:
    """What went wrong and what to do, as the command line says it."""
    if isinstance(error, UserError):
        problem, remedy = error.problem, error.remedy
    else:
        problem = f"The engine failed: {type(error).__name__}: {error}"
        remedy = "try again; if it stays, start the page again"
    return (
        f'<div class="tf-fault" role="alert"><b>{escape_html(problem)}</b>'
        f"<p>try: {escape_html(remedy)}</p></div>"
    )


def render_note(text: str) -> str:
    """One quiet line."""
    return f'<p class="tf-note">{escape_html(text)}</p>'


def render_vote_counts(
    tally: VoteCounts, names: Sequence[str], *, message: str = "", export: str | None = None
) -> str:
    """The counts so far, and where the file of votes can be had."""
    parts = (
        (names[0], tally.a),
        (names[1], tally.b),
        ("tie", tally.tie),
        ("both bad", tally.both_bad),
    )
    counts = "".join(f"<li>{escape_html(name)} <b>{number}</b></li>" for name, number in parts)
    votes = "1 vote" if tally.total == 1 else f"{tally.total:,} votes"
    link = (
        f'<a class="tf-export" href="{escape_html(export)}" download="votes.jsonl">'
        "Download votes</a>"
        if export is not None
        else ""
    )
    return (
        f'<div class="tf-tally"><div role="status"><span>{escape_html(message)}</span>'
        f"<ul><li>{votes} so far:</li>{counts}</ul></div>{link}</div>"
    )


def describe_figures(done: Done) -> str:
    """Tokens, speed and time of one answer in a line."""
    seconds = done.finished_s - done.first_token_s
    num_later = done.num_new_tokens - 1
    parts = [f"{done.num_new_tokens:,} token{'' if done.num_new_tokens == 1 else 's'}"]
    if num_later > 0 and seconds > 0:
        parts.append(f"{num_later / seconds:,.1f} tokens/s")
    if done.num_new_tokens:
        parts.append(f"first after {render_seconds(done.first_token_s - done.submitted_s)}")
    parts.append(f"{render_seconds(done.finished_s - done.submitted_s)} in all")
    ending = _ENDINGS[done.reason]
    return " · ".join([*parts, ending] if ending else parts)


def _describe_engine(info: EngineInfo) -> str:
    return f"{info.format} · {info.engine} · {info.device}"


def _state(side: PartialAnswer | None) -> str:
    if side is None:
        return "empty"
    if side.error is not None:
        return "failed"
    if side.done is not None:
        return "done"
    return "streaming" if side.text else "waiting"


def _answer(card: AnswerCard) -> str:
    side = card.side
    if side is None:
        return '<div class="tf-answer tf-none">The answer will appear here.</div>'
    if side.error is not None:
        message = f'<div class="tf-answer">{escape_html(side.text)}</div>' if side.text else ""
        return message + render_error(side.error)
    if not side.has_ended:
        text = escape_html(side.text) or '<span class="tf-none">reading the prompt</span>'
        return f'<div class="tf-answer">{text}<span class="tf-cursor"></span></div>'
    if not side.text:
        return '<div class="tf-answer tf-none">The model answered with nothing.</div>'
    if card.pieces is None:
        return f'<div class="tf-answer">{escape_html(side.text)}</div>'
    marked = "".join(
        escape_html(piece.text) if piece.is_shared else _mark(piece.text) for piece in card.pieces
    )
    return f'<div class="tf-answer">{marked}</div>'


def _mark(text: str) -> str:
    """The space before a word stays unmarked, else a mark would run over the line's end."""
    bare = text.lstrip()
    return (
        f"{escape_html(text[: len(text) - len(bare)])}<mark>{escape_html(bare)}</mark>"
        if bare
        else text
    )


def _figures(card: AnswerCard) -> str:
    side = card.side
    if side is None or side.done is None:
        return ""
    if not card.are_figures_shown:  # a speed gives away which model it is
        return "figures are hidden until you vote"
    return describe_figures(side.done)
