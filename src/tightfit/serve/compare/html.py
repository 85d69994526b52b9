"""Answers, statistics, faults and counts as markup. All text of models and users is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tightfit.core.errors import UserError
from tightfit.core.units import render_seconds
from tightfit.engines.protocol import Done, EngineInfo, FinishReason
from tightfit.serve.compare.diff import Piece
from tightfit.serve.compare.stream import Side
from tightfit.serve.compare.votes import Tally

_ENDINGS = {
    FinishReason.STOP: "",
    FinishReason.LENGTH: "cut at the longest answer",
    FinishReason.CANCELLED: "stopped",
}
_MARKS = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One side of the page."""

    number: int
    """1 left or on top, 2 right or below."""
    name: str | None
    """None: hidden until the vote."""
    info: EngineInfo | None = None
    side: Side | None = None
    """None: nothing was asked yet."""
    pieces: tuple[Piece, ...] | None = None
    """The answer with its differences; None: plain."""
    are_figures_shown: bool = True


def safe(text: str) -> str:
    """Text as markup that shows exactly this text.

    Also the marks of the page's own template language are escaped: an answer may hold
    `{{` or `${`, and must not be taken for a template.
    """
    return escape(text, quote=True).translate(_MARKS)


def render_card(card: Card) -> str:
    """A heading, the answer in whatever state it is, and its figures."""
    name = "hidden until you vote" if card.name is None else card.name
    kind = "" if card.info is None or card.name is None else _describe_engine(card.info)
    is_busy = card.side is not None and not card.side.has_ended
    return (
        f'<section class="tf-side" data-state="{_state(card.side)}" '
        f'aria-busy="{str(is_busy).lower()}" aria-label="Answer {card.number}: {safe(name)}">'
        f'<h3><span class="tf-number">{card.number}</span>'
        f'<span class="{"tf-hidden" if card.name is None else "tf-name"}">{safe(name)}</span>'
        f"<small>{safe(kind)}</small></h3>"
        f"{_answer(card)}"
        f'<p class="tf-figures">{safe(_figures(card))}&nbsp;</p></section>'
    )


def render_fault(fault: Exception) -> str:
    """What went wrong and what to do, as the command line says it."""
    if isinstance(fault, UserError):
        problem, remedy = fault.problem, fault.remedy
    else:
        problem = f"The engine failed: {type(fault).__name__}: {fault}"
        remedy = "try again; if it stays, start the page again"
    return (
        f'<div class="tf-fault" role="alert"><b>{safe(problem)}</b><p>try: {safe(remedy)}</p></div>'
    )


def render_note(text: str) -> str:
    """One quiet line."""
    return f'<p class="tf-note">{safe(text)}</p>'


def render_tally(
    tally: Tally, names: Sequence[str], *, said: str = "", export: str | None = None
) -> str:
    """The counts so far, and where the file of votes can be had."""
    parts = (
        (names[0], tally.a),
        (names[1], tally.b),
        ("tie", tally.tie),
        ("both bad", tally.both_bad),
    )
    counts = "".join(f"<li>{safe(name)} <b>{number}</b></li>" for name, number in parts)
    votes = "1 vote" if tally.total == 1 else f"{tally.total:,} votes"
    link = (
        f'<a class="tf-export" href="{safe(export)}" download="votes.jsonl">Download votes</a>'
        if export is not None
        else ""
    )
    return (
        f'<div class="tf-tally"><div role="status"><span>{safe(said)}</span>'
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


def _state(side: Side | None) -> str:
    if side is None:
        return "empty"
    if side.fault is not None:
        return "failed"
    if side.done is not None:
        return "done"
    return "streaming" if side.text else "waiting"


def _answer(card: Card) -> str:
    side = card.side
    if side is None:
        return '<div class="tf-answer tf-none">The answer will appear here.</div>'
    if side.fault is not None:
        said = f'<div class="tf-answer">{safe(side.text)}</div>' if side.text else ""
        return said + render_fault(side.fault)
    if not side.has_ended:
        text = safe(side.text) or '<span class="tf-none">reading the prompt</span>'
        return f'<div class="tf-answer">{text}<span class="tf-cursor"></span></div>'
    if not side.text:
        return '<div class="tf-answer tf-none">The model answered with nothing.</div>'
    if card.pieces is None:
        return f'<div class="tf-answer">{safe(side.text)}</div>'
    marked = "".join(
        safe(piece.text) if piece.is_shared else _mark(piece.text) for piece in card.pieces
    )
    return f'<div class="tf-answer">{marked}</div>'


def _mark(text: str) -> str:
    """The space before a word stays unmarked, else a mark would run over the line's end."""
    bare = text.lstrip()
    return f"{safe(text[: len(text) - len(bare)])}<mark>{safe(bare)}</mark>" if bare else text


def _figures(card: Card) -> str:
    side = card.side
    if side is None or side.done is None:
        return ""
    if not card.are_figures_shown:  # a speed gives away which model it is
        return "figures are hidden until you vote"
    return describe_figures(side.done)
