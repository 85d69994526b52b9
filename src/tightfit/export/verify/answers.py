"""Greedy answers of an engine, and where two engines' answers part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.data.jinja import TemplateFault
from tightfit.engines.protocol import (
    Delta,
    Done,
    Engine,
    Event,
    Failed,
    FinishReason,
    Request,
    Sampling,
)
from tightfit.export.verify.sample import Prompt
from tightfit.export.verify.verdict import Answered, Finding, Level

ANSWER_TOKENS = 48
LEAST_STOPPED = 3
"""Answers that end by themselves before their absence says something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back for one prompt."""

    text: str
    tokens: tuple[int, ...]
    is_stopped: bool
    """It ended by itself, not at the limit."""
    is_empty: bool = False
    """The prompt could not be asked."""


_NONE = Answer(text="", tokens=(), is_stopped=False, is_empty=True)


def ask_all(engine: Engine, prompts: Sequence[Prompt], watch: Callable[[], None]) -> list[Answer]:
    """Each prompt by the engine's own template and tokenizer, greedily."""
    return [_ask(engine, prompt, watch) for prompt in prompts]


def compare_answers(
    prompts: Sequence[Prompt], reference: Sequence[Answer], other: Sequence[Answer]
) -> tuple[tuple[Answered, ...], list[Finding]]:
    """The answers side by side, and what they say about ends."""
    rows = []
    for prompt, one, two in zip(prompts, reference, other, strict=True):
        rows.append(
            Answered(
                prompt=prompt[-1].content,
                reference=one.text,
                other=two.text,
                first_difference=_first_difference(one, two),
                reference_stopped=one.is_stopped,
                other_stopped=two.is_stopped,
            )
        )
    return tuple(rows), list(_judge_ends(rows))


def _judge_ends(rows: Sequence[Answered]) -> list[Finding]:
    """A model that says the same and then does not stop has lost its end."""
    runs_on = [
        row
        for row in rows
        if row.reference_stopped
        and not row.other_stopped
        and row.reference.strip()
        and row.other.startswith(row.reference)
    ]
    ended = [row for row in rows if row.reference_stopped]
    never = len(ended) >= LEAST_STOPPED and not any(row.other_stopped for row in rows)
    if not runs_on and not never:
        return []
    told = (
        f"gives the same answer to {runs_on[0].prompt[:40]!r} and runs on where the reference stops"
        if runs_on
        else f"never ends an answer by itself; the reference ends {len(ended)} of {len(rows)}"
    )
    return [
        Finding(
            level=Level.FAIL,
            text=f"It {told}.",
            remedy="the end-of-turn token is lost: compare eos_token_id in generation_config.json "
            "and tokenizer_config.json with the reference's, and make this one again",
        )
    ]


def _ask(engine: Engine, prompt: Prompt, watch: Callable[[], None]) -> Answer:
    events: SimpleQueue[Event] = SimpleQueue()
    tokens: list[int] = []
    try:
        ids = engine.prompter.chat(prompt)
        room = max(1, min(ANSWER_TOKENS, engine.info.max_context - len(ids) - 1))
        engine.submit(Request(prompt=ids, sampling=Sampling(max_new_tokens=room)), events.put)
    except (UserError, TemplateFault):
        watch()
        return _NONE
    while True:
        event = events.get()
        if isinstance(event, Delta):
            tokens.extend(event.tokens)
        elif isinstance(event, Failed):
            if not isinstance(event.fault, InvalidInputError):
                raise event.fault
            watch()  # scores that are no numbers; they are judged where scores are
            return _NONE
        elif isinstance(event, Done):
            watch()
            is_stopped = event.reason is FinishReason.STOP
            return Answer(text=event.text, tokens=tuple(tokens), is_stopped=is_stopped)


def _first_difference(one: Answer, two: Answer) -> int | None:
    """By tokens where both engines tell them, else by characters' agreement."""
    if one.text == two.text and one.is_stopped == two.is_stopped:
        return None
    pairs = enumerate(zip(one.tokens, two.tokens, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one.tokens), len(two.tokens)))
