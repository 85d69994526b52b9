"""Rows of preferences: pairs of answers, and answers that are labelled good or bad.

A row is taken apart into conversations, which the formats of `formats.py` read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tightfit.core.errors import InvalidInputError
from tightfit.core.objectives import ExampleKind
from tightfit.data.formats import (
    ASSISTANT,
    FORMATS,
    TOOL_KEYS,
    Conversation,
    Message,
    RowFormat,
    Turns,
    read_conversation,
    recognise_format,
)
from tightfit.data.readers import Row, excerpt, json_type_name
from tightfit.data.tools import Tool


class Preference(NamedTuple):
    """A prompt with its answers."""

    prompt: list[Message]
    answers: tuple[list[Message], ...]
    """The chosen and the rejected one; or the labelled one."""
    is_good: bool | None = None
    """None: a pair."""
    tools: tuple[Tool, ...] = ()
    """What the assistant may call."""
    pair: tuple[list[Message], ...] = ()
    """Both answers of the row, where this is one of them."""

    def conversations(self) -> list[list[Message]]:
        return [self.prompt + answer for answer in self.answers]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceFormat(RowFormat):
    """A way to write preferences."""

    kind: ExampleKind
    read: Callable[[Row], Preference]


_CHATS = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "instruction", "question", "query", "input")
_PAIR_PROMPTS = (*_PROMPTS, *_CHATS)
_ANSWERS = ("completion", "response", "answer", "output", *_CHATS[:2])


def _read_pair(row: Row) -> Preference:
    chosen, rejected = (_PAIRS.find_key(row, group) for group in _PAIRS.keys)
    values = [row.values[name] for name in (chosen, rejected)]
    tools: tuple[Tool, ...] = ()
    if not _find_any(row, _PAIR_PROMPTS) and all(isinstance(value, str) for value in values):
        sides = _split_texts(row, *values)
        tools = row.tools
    else:
        found = [
            _conversation(row, name, value, _PAIR_PROMPTS)
            for name, value in zip((chosen, rejected), values, strict=True)
        ]
        sides, tools = [one.messages for one in found], found[0].tools
        if found[1].tools != tools:
            raise _bad(row, "chosen and rejected do not list the same tools")
    if sides[0] == sides[1]:
        raise _bad(row, "the chosen and the rejected answer are the same")
    prompt = sides[0][: _count_shared(*sides)]
    answers = tuple(side[len(prompt) :] for side in sides)
    for side, answer in zip(("chosen", "rejected"), answers, strict=True):
        if not any(_says_something(message) for message in answer):
            raise _bad(row, f"the {side} answer is empty")
        if answer[0].role != ASSISTANT:
            raise _bad(row, "chosen and rejected do not share the prompt")
        if answer[-1].role != ASSISTANT or not _says_something(answer[-1]):
            raise _bad(row, f"the {side} answer does not end with text or a call of the assistant")
    if not prompt:
        raise _bad(row, "chosen and rejected share no prompt")
    _check_prompt(row, prompt)
    return Preference(prompt, answers, tools=tools)


def _check_prompt(row: Row, prompt: list[Message]) -> None:
    if not any(_says_something(message) for message in prompt):
        raise _bad(row, "the prompt is empty")


def _says_something(message: Message) -> bool:
    return bool(message.content.strip() or message.tool_calls)


def _read_labelled(row: Row) -> Preference:
    answer_name, label_name = (_LABELLED.find_key(row, group) for group in _LABELLED.keys)
    label = row.values[label_name]
    if isinstance(label, str) and label.strip().lower() in ("true", "false"):  # of a CSV file
        label = label.strip().lower() == "true"
    if not isinstance(label, bool):
        raise _bad(
            row, f"`{label_name}` is {json_type_name(label)}: {excerpt(label)}, not a boolean"
        )
    messages, tools = _conversation(row, answer_name, row.values[answer_name], _PROMPTS)
    if messages[-1].role != ASSISTANT or not _says_something(messages[-1]):
        raise _bad(row, "the answer is empty")
    if len(messages) == 1:
        raise _bad(row, "there is no prompt")
    _check_prompt(row, messages[:-1])
    return Preference(messages[:-1], (messages[-1:],), label, tools)


def _conversation(row: Row, name: str, value: Any, prompts: Sequence[str]) -> Conversation:
    """Prompt and answer. An answer that is a whole conversation brings its prompt along."""
    prompt_name = _find_any(row, prompts)
    prompt = row.values[prompt_name] if prompt_name else None
    if isinstance(value, Mapping) and ("role" in value or "from" in value):  # ShareGPT's pairs
        value = [value]
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise _bad(row, f"`{name}` is empty")
    read_messages = FORMATS["chat"].make
    if isinstance(value, list) and isinstance(value[0], Mapping):
        chat = read_messages(row, [value])
        if chat[0].role != ASSISTANT or prompt is None:
            is_begun = isinstance(prompt, list) and prompt_name not in _CHATS
            begun = read_messages(row, [prompt]) if is_begun else []
            return read_conversation(row, chat if chat[: len(begun)] == begun else begun + chat)
    if prompt is None:
        if prompt_name:
            raise _bad(row, f"`{prompt_name}` is empty")
        if isinstance(value, str):
            return read_conversation(row, [Message(ASSISTANT, value)])
        raise _bad(row, f"`{name}` is {json_type_name(value)}, and there is no `prompt`")
    if prompt_name in _CHATS and read_messages(row, [prompt])[-1].role == ASSISTANT:
        raise _bad(row, f"`{prompt_name}` is no prompt: it ends with an answer")
    kept = {key: row.values[key] for key in ("system", *TOOL_KEYS) if row.values.get(key)}
    values = kept | {"prompt": prompt, "completion": value}
    return FORMATS["prompt-completion"].to_conversation(row._replace(values=values))


_TURN = re.compile(r"\n\n(Human|Assistant):\s?")


def _split_texts(row: Row, chosen: str, rejected: str) -> list[list[Message]]:
    """Two texts that hold the prompt as well: turns of Anthropic's hh-rlhf, else what they share up
    to its last blank."""
    if all(text.startswith("\n\nHuman:") for text in (chosen, rejected)):
        return [_split_turns(text) for text in (chosen, rejected)]
    shared = chosen[: _count_shared(chosen, rejected)]
    shared = shared[: max(shared.rfind(" "), shared.rfind("\n")) + 1]
    if not shared.strip():
        raise _bad(row, "chosen and rejected share no prompt, and there is no `prompt`")
    return [
        [Message("user", shared.strip()), Message(ASSISTANT, text[len(shared) :])]
        for text in (chosen, rejected)
    ]


def _count_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _split_turns(text: str) -> list[Message]:
    _, *pieces = _TURN.split(text)
    roles = {"Human": "user", "Assistant": ASSISTANT}
    pairs = zip(pieces[::2], pieces[1::2], strict=True)
    return [Message(roles[name], content.strip()) for name, content in pairs]


def _find_any(row: Row, group: Sequence[str]) -> str | None:
    return next((key for key in group if key in row.values), None)


def _bad(row: Row, problem: str) -> InvalidInputError:
    return InvalidInputError(
        f"{row.place}: {problem}.", remedy="correct that row, or leave it out of the file"
    )


def _longest(found: Preference) -> list[Message]:
    """The conversation by which a row's length is counted."""
    return max(found.conversations(), key=lambda one: sum(len(message.text) for message in one))


_PAIRS = PreferenceFormat(
    name="pairs",
    keys=(("chosen", "chosen_response"), ("rejected", "rejected_response")),
    example='{"prompt": "...", "chosen": "...", "rejected": "..."}',
    make=lambda row, _values: _longest(_read_pair(row)),
    title="pairs (prompt, chosen, rejected)",
    kind=ExampleKind.PAIR,
    read=_read_pair,
)
_LABELLED = PreferenceFormat(
    name="labelled",
    keys=(_ANSWERS, ("label",)),
    example='{"prompt": "...", "completion": "...", "label": true}',
    make=lambda row, _values: _longest(_read_labelled(row)),
    title="labelled answers (prompt, completion, label)",
    kind=ExampleKind.LABELLED,
    read=_read_labelled,
)
PREFERENCE_FORMATS = {one.name: one for one in (_PAIRS, _LABELLED)}
"""By name; of an example's own kind, or pairs taken apart into labelled answers."""
PREFERENCE_EXAMPLES = tuple(one.example for one in PREFERENCE_FORMATS.values())

_SUITS = {
    ExampleKind.PAIR: (ExampleKind.PAIR,),
    ExampleKind.LABELLED: (ExampleKind.LABELLED, ExampleKind.PAIR),
}
_OBJECTIVES = {
    ExampleKind.ANSWER: "sft",
    ExampleKind.PAIR: "dpo",
    ExampleKind.LABELLED: "kto",
}


def holds_preferences(row: Row) -> bool:
    """A row of preferences and of nothing else."""
    is_answer = any(one.matches(row.values) for one in FORMATS.values())
    return not is_answer and any(one.matches(row.values) for one in PREFERENCE_FORMATS.values())


def find_preference_format(row: Row) -> PreferenceFormat | None:
    """Of a pair or a labelled answer, whatever else the row holds."""
    return next((one for one in PREFERENCE_FORMATS.values() if one.matches(row.values)), None)


def recognise(row: Row, example: ExampleKind) -> RowFormat:
    """The format of a row that is to give examples of this kind."""
    held = [one for one in PREFERENCE_FORMATS.values() if one.matches(row.values)]
    if example is ExampleKind.ANSWER:
        is_answer = any(one.matches(row.values) for one in FORMATS.values())
        if is_answer or not held:
            return recognise_format(row)
        raise _misfit(row, held[0].kind, example)
    for kind in _SUITS[example]:
        for one in held:
            if one.kind is kind:
                return one
    if held:
        raise _misfit(row, held[0].kind, example)
    if any(one.matches(row.values) for one in FORMATS.values()):
        raise _misfit(row, ExampleKind.ANSWER, example)
    wanted = _SUITS[example]
    suitable = [one for one in PREFERENCE_FORMATS.values() if one.kind in wanted]
    return recognise_format(row, suitable)  # says what is wrong with a row of no format


def _misfit(row: Row, found: ExampleKind, wanted: ExampleKind) -> InvalidInputError:
    holds = {
        ExampleKind.ANSWER: "one answer",
        ExampleKind.PAIR: "a pair of answers (chosen, rejected)",
        ExampleKind.LABELLED: "a labelled answer",
    }
    learnt = {
        ExampleKind.ANSWER: "answers (objective sft)",
        ExampleKind.PAIR: "pairs (objectives dpo, ipo, orpo, simpo)",
        ExampleKind.LABELLED: "labelled answers or pairs (objective kto)",
    }
    example = next((one.example for one in PREFERENCE_FORMATS.values() if one.kind is wanted), None)
    shape = f", or rows like {example}" if example else ""
    return InvalidInputError(
        f"{row.place} holds {holds[found]}; this job learns from {learnt[wanted]}.",
        remedy=f"--objective {_OBJECTIVES[found]}{shape}",
    )


def list_examples(row: Row, row_format: RowFormat, wanted: ExampleKind) -> list[tuple[Turns, ...]]:
    """What a row gives, reduced to what length counting needs: both conversations of a pair."""
    if not isinstance(row_format, PreferenceFormat):
        return [(row_format.to_turns(row),)]
    return [
        tuple(_reduce(found, answer) for answer in found.answers)
        for found in read_preferences(row, row_format, wanted)
    ]


def _reduce(found: Preference, answer: list[Message]) -> Turns:
    """Of an answer of several turns the assistant's are learnt."""
    learnt = [message.text for message in answer if message.role == ASSISTANT]
    read = [json.dumps(tool, default=str) for tool in found.tools]
    read += [message.text for message in found.prompt]
    read += [message.text for message in answer if message.role != ASSISTANT]
    return Turns("\n".join(read), "\n".join(learnt), len(found.prompt) + len(answer))


def read_preferences(
    row: Row, row_format: PreferenceFormat, wanted: ExampleKind
) -> list[Preference]:
    """What a row gives; a pair is two labelled answers where those are wanted, as in trl."""
    found = row_format.read(row)
    if wanted is ExampleKind.PAIR or row_format.kind is ExampleKind.LABELLED:
        return [found]
    return [
        Preference(found.prompt, (answer,), is_good, found.tools, pair=found.answers)
        for answer, is_good in zip(found.answers, (True, False), strict=True)
    ]
