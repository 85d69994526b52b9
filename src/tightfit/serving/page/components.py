"""Parts of the page: sampling controls, event settings, and the HTML of answers,
differences, errors and vote counts. Texts of models and users are escaped.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.sampling import MAX_SEED, SAMPLING_OPTIONS, Sampling
from tightfit.core.text import count_of
from tightfit.core.text import escape_html as text_as_html
from tightfit.core.units import render_seconds
from tightfit.engines.protocol import Done, EngineInfo, FinishReason
from tightfit.serving.page.models import PageModels, PartialAnswer
from tightfit.serving.page.votes import VoteChoice

Handler = TypeVar("Handler", bound=Callable[..., Any])

QUIET_EVENT: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
"""No overlay on text that is being read, and no entry in a public list of endpoints."""
BUSY_EVENT: dict[str, Any] = {"api_visibility": "private", "show_progress": "minimal"}
"""The same, for what takes a second and shows nothing meanwhile."""
ANSWER_EVENT: dict[str, Any] = {**QUIET_EVENT, "trigger_mode": "always_last"}
"""For what is asked again while one types: the last question is always answered."""
LIVE_EVENT: dict[str, Any] = {**ANSWER_EVENT, "queue": False}
"""The same for what takes a moment: one request, which waits for no other."""


def with_request(handler: Handler) -> Handler:
    """Have the argument `request` filled in.

    Gradio goes by the annotation, and cannot resolve one that names a library which is
    imported inside a function.
    """
    import gradio as gr

    handler.__annotations__ = {"request": gr.Request}
    return handler


def visitor_id(request: Any) -> str:
    """One open tab of one browser."""
    return str(request.session_hash or "")


def make_cancel(models: PageModels) -> Callable[..., None]:
    """A handler that cancels the requests of the visitor who clicks or leaves."""

    @with_request
    def cancel(request: Any) -> None:
        models.cancel(visitor_id(request))

    return cancel


def build_line(
    label: str, value: str, info: str, *, hint: str = "", elem_id: str = "", offers: str = ""
) -> Any:
    """A field of one line. `offers`: the id of a `datalist` with words for it."""
    import gradio as gr

    return gr.Textbox(
        value=value,
        label=label,
        info=info or None,
        placeholder=hint or None,
        lines=1,
        max_lines=1,
        min_width=100,
        elem_id=elem_id or None,
        html_attributes=gr.InputHTMLAttributes(
            spellcheck=False, autocomplete="off", autocapitalize="off"
        ),
        elem_classes=[f"tf-offers-{offers}"] if offers else None,
    )


def build_hidden_button(elem_id: str, label: str) -> Any:
    """A button that the page's script clicks a moment after the last key."""
    import gradio as gr

    return gr.Button(label, elem_id=elem_id, elem_classes="tf-visually-hidden")


LABELS = {"temperature": "Temperature", "top_p": "Top-p", "max_new_tokens": "Longest answer"}
SLIDER_MAX_TEMPERATURE = 2.0
"""Where the slider ends, unless the command line asked for more."""


class Controls(NamedTuple):
    """The settings' components."""

    system: Any
    temperature: Any
    top_p: Any
    max_new_tokens: Any
    seed: Any

    def read(self, given: Mapping[Any, Any], defaults: Sampling) -> tuple[str, Sampling]:
        """The system prompt and the sampling, from all that a form sent."""
        system, *rest = (given[component] for component in self)
        return system or "", read_sampling(defaults, *rest)


def build_controls(sampling: Sampling, system_prompt: str) -> Controls:
    """Draw the controls where they are called, with these values in them."""
    import gradio as gr

    system = gr.Textbox(
        label="System prompt", value=system_prompt, lines=2, max_lines=8, placeholder="None"
    )
    with gr.Row():
        temperature = gr.Slider(
            0.0,
            max(SLIDER_MAX_TEMPERATURE, sampling.temperature),
            value=sampling.temperature,
            step=0.05,
            label=LABELS["temperature"],
            info="0: always the likeliest token",
            min_width=220,
        )
        top_p = gr.Slider(
            min(0.05, sampling.top_p),
            1.0,
            value=sampling.top_p,
            step=0.05,
            label=LABELS["top_p"],
            info="Only the likeliest tokens with this share",
            min_width=220,
        )
    with gr.Row():
        most = gr.Number(
            value=sampling.max_new_tokens,
            precision=0,
            minimum=1,
            maximum=int(SAMPLING_OPTIONS["max_new_tokens"].most),
            label=LABELS["max_new_tokens"],
            min_width=160,
        )
        # A number field would turn an empty value into 0.
        seed = gr.Textbox(
            value="" if sampling.seed is None else str(sampling.seed),
            label="Seed",
            placeholder="A new one each time",
            max_lines=1,
            min_width=160,
        )
    return Controls(
        system=system, temperature=temperature, top_p=top_p, max_new_tokens=most, seed=seed
    )


def read_sampling(
    defaults: Sampling,
    temperature: float | None,
    top_p: float | None,
    most: float | None,
    seed: str | None,
) -> Sampling:
    """What a visitor set, checked again here: a request need not come from our page.

    The same for both models; what the page does not show comes from the command line.
    """
    text = (seed or "").strip()
    # Drawn where none is given, so that a vote can be repeated.
    number = secrets.randbelow(MAX_SEED + 1) if not text else -1
    if text.isascii() and text.isdigit() and len(text) <= 10:
        number = int(text)
    if not 0 <= number <= MAX_SEED:
        raise InvalidInputError(
            f"`{text[:20]}` is not a seed.", remedy=f"give a whole number up to {MAX_SEED:,}"
        )
    return replace(
        defaults,
        temperature=_within("temperature", temperature),
        top_p=_within("top_p", top_p),
        max_new_tokens=int(_within("max_new_tokens", most)),
        seed=number,
    )


def _within(name: str, value: float | None) -> float:
    least, most = SAMPLING_OPTIONS[name].least, SAMPLING_OPTIONS[name].most
    if value is None or not math.isfinite(value) or not least <= value <= most:
        given = "empty" if value is None else f"{value:g}"
        raise InvalidInputError(
            f"{LABELS[name]} is {given}.", remedy=f"give a number from {least:g} to {most:g}"
        )
    return value


# The difference of two answers, word by word.

MAX_DIFF_WORDS = 3_000
"""On one side. Longer answers are compared line by line: the search is quadratic."""
_WORDS = re.compile(r"\s*(?:\w+|[^\w\s])")
_LINES = re.compile(r"\s*\S[^\n]*")


class DiffPiece(NamedTuple):
    """A stretch of one answer."""

    text: str
    is_shared: bool
    """The other answer has it too, in the same order."""


class Difference(NamedTuple):
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
    groups = groupby(zip(is_shared, words, strict=True), key=lambda pair: pair[0])
    return tuple(DiffPiece("".join(word for _, word in pairs), kind) for kind, pairs in groups)


_ENDINGS = {
    FinishReason.STOP: "",
    FinishReason.LENGTH: "cut at the longest answer",
    FinishReason.CANCELLED: "stopped",
}
_MARKS = str.maketrans({"{": "&#123;", "}": "&#125;", "$": "&#36;", "`": "&#96;"})


def escape_html(text: str) -> str:
    """Text as markup that shows exactly this text.

    Also the marks of the page's own template language are escaped: an answer may hold
    `{{` or `${`, and must not be taken for a template.
    """
    return text_as_html(text).translate(_MARKS)


def render_card(
    number: int,
    name: str | None,
    info: EngineInfo | None,
    side: PartialAnswer | None,
    pieces: tuple[DiffPiece, ...] | None,
) -> str:
    """A heading, the answer in whatever state it is, and its figures.

    `name` is None while it is hidden, `side` before anything was asked; `pieces` is the answer
    with its differences.
    """
    kind = figures = ""
    if name is not None and info is not None:
        kind = f"{info.format} · {info.engine} · {info.device}"
    if side is not None and side.done is not None:
        # A speed gives away which model it is.
        figures = "figures are hidden until you vote"
        if name is not None:
            figures = describe_figures(side.done)
    is_busy = side is not None and not side.has_ended
    shown = "hidden until you vote" if name is None else name
    return (
        f'<section class="tf-side" data-state="{_state(side)}" '
        f'aria-busy="{str(is_busy).lower()}" '
        f'aria-label="Answer {number}: {escape_html(shown)}">'
        f'<h3><span class="tf-number">{number}</span>'
        f'<span class="{"tf-hidden" if name is None else "tf-name"}">'
        f"{escape_html(shown)}</span>"
        f"<small>{escape_html(kind)}</small></h3>"
        f"{_answer(side, pieces)}"
        f'<p class="tf-figures">{escape_html(figures)}&nbsp;</p></section>'
    )


def render_error(error: Exception) -> str:
    """What went wrong and what to do, as the command line says it."""
    if isinstance(error, UserError):
        problem, remedy = error.problem, error.remedy
    else:
        problem = f"The engine failed: {type(error).__name__}: {error}"
        remedy = "try again; if it stays, start the page again"
    return (
        f'<div class="tf-error" role="alert"><b>{escape_html(problem)}</b>'
        f"<p>try: {escape_html(remedy)}</p></div>"
    )


def render_note(text: str) -> str:
    """One quiet line."""
    return f'<p class="tf-note">{escape_html(text)}</p>'


def render_list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape_html(line)}</li>" for line in lines) + "</ul>"


def render_folded(title: str, inside: str, *, is_open: bool = False) -> str:
    """Markup under a line that opens and closes it."""
    return (
        f"<details{' open' if is_open else ''}><summary>{escape_html(title)}</summary>"
        f"{inside}</details>"
    )


def render_tiles(tiles: Iterable[tuple[str, str, str]]) -> str:
    """What a reader wants first: a name, a value and a word on it."""
    return (
        '<dl class="tf-tiles">'
        + "".join(
            f"<div><dt>{escape_html(name)}</dt><dd>{escape_html(value)}"
            f"<small>{escape_html(text)}&nbsp;</small></dd></div>"
            for name, value, text in tiles
        )
        + "</dl>"
    )


def render_commands(commands: Iterable[str]) -> str:
    """Lines for a terminal, each with a button that copies it."""
    return (
        '<div class="tf-commands">'
        + "".join(
            f"<div><code>{escape_html(command)}</code>"
            '<button type="button" class="tf-copy">copy</button></div>'
            for command in commands
        )
        + "</div>"
    )


def render_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    fills: Sequence[tuple[str, str]] = (),
) -> str:
    """Text as a table, on a phone one block per row; a head that begins with `>` is a number's.

    A cell's second line is small print. `fills`: the first cell of each row is a button that
    writes a value into a field, by its id.
    """
    names = [head.removeprefix(">") for head in heads]
    kinds = [' class="tf-right"' if head.startswith(">") else "" for head in heads]

    def cell(place: int, text: str, number: int) -> str:
        first, _, rest = text.partition("\n")
        shown = escape_html(first) + (f"<br><small>{escape_html(rest)}</small>" if rest else "")
        if fills and place == 0:
            field, value = map(escape_html, fills[number])
            shown = (
                f'<button type="button" class="tf-fill" data-field="{field}" '
                f'data-value="{value}">{shown}</button>'
            )
        return f'<td data-label="{escape_html(names[place])}"{kinds[place]}>{shown}</td>'

    top = "".join(
        f"<th{kind}>{escape_html(name)}</th>" for name, kind in zip(names, kinds, strict=True)
    )
    lines = "".join(
        "<tr>" + "".join(cell(place, text, number) for place, text in enumerate(row)) + "</tr>"
        for number, row in enumerate(rows)
    )
    return f'<table class="tf-table"><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>'


def render_vote_counts(
    counts: Mapping[VoteChoice, int], names: Sequence[str], *, message: str, export: str | None
) -> str:
    """The counts so far, and where the file of votes can be had."""
    labels: Iterable[str] = (names[0], names[1], "tie", "both bad")
    listed = "".join(
        f"<li>{escape_html(label)} <b>{counts[choice]}</b></li>"
        for label, choice in zip(labels, VoteChoice, strict=True)
    )
    link = ""
    if export is not None:
        link = (
            f'<a class="tf-export" href="{escape_html(export)}" download="votes.jsonl">'
            "Download votes</a>"
        )
    return (
        f'<div class="tf-tally"><div role="status"><span>{escape_html(message)}</span>'
        f"<ul><li>{count_of(sum(counts.values()), 'vote')} so far:</li>{listed}</ul></div>"
        f"{link}</div>"
    )


def describe_figures(done: Done) -> str:
    """Tokens, speed and time of one answer in a line."""
    seconds = done.finished_s - done.first_token_s
    num_later = done.num_new_tokens - 1
    parts = [count_of(done.num_new_tokens, "token")]
    if num_later > 0 and seconds > 0:
        parts.append(f"{num_later / seconds:,.1f} tokens/s")
    if done.num_new_tokens:
        parts.append(f"first after {render_seconds(done.first_token_s - done.submitted_s)}")
    parts.append(f"{render_seconds(done.finished_s - done.submitted_s)} in all")
    ending = _ENDINGS[done.reason]
    return " · ".join([*parts, ending] if ending else parts)


def _state(side: PartialAnswer | None) -> str:
    if side is None:
        return "empty"
    if side.error is not None:
        return "failed"
    if side.done is not None:
        return "done"
    return "streaming" if side.text else "waiting"


def _answer(side: PartialAnswer | None, pieces: tuple[DiffPiece, ...] | None) -> str:
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
    if pieces is None:
        return f'<div class="tf-answer">{escape_html(side.text)}</div>'
    marked = ""
    for text, is_shared in pieces:
        bare = text.lstrip()
        if is_shared or not bare:
            marked += escape_html(text)
        else:
            # The space before a word stays unmarked, else a mark would run over the line's end.
            marked += f"{text[: len(text) - len(bare)]}<mark>{escape_html(bare)}</mark>"
    return f'<div class="tf-answer">{marked}</div>'
