"""Questions of a data file: the prompt as training would show it, and the gold answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.core.training import DataSource
from tightfit.data.formats import ASSISTANT, Message, to_messages
from tightfit.data.meter import Meter
from tightfit.data.prompter import Prompter
from tightfit.data.sources import open_source, read_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row to be answered: all before its last answer, and that answer."""

    place: str
    values: Mapping[str, Any]
    """The row itself, for what it says besides: a database's name."""
    messages: tuple[Message, ...]
    """All that is said before the answer."""
    prompt_ids: tuple[int, ...]
    gold: str
    num_gold_tokens: int

    @property
    def prompt(self) -> str:
        """The messages as people read them."""
        return "\n\n".join(message.content for message in self.messages)


def read_questions(source: DataSource, prompter: Prompter) -> tuple[str, list[Question]]:
    """The format of the rows, and a question for each that asks for something."""
    questions: list[Question] = []
    formats: dict[str, None] = {}
    for row, row_format in read_source(open_source(source), Meter()):
        formats[row_format.name] = None
        messages = to_messages(row, row_format)
        asked = [at for at, message in enumerate(messages) if message.role == ASSISTANT]
        if row_format.name == "text" or not asked or not asked[-1]:
            continue
        before, gold = messages[: asked[-1]], messages[asked[-1]].content
        questions.append(
            Question(
                place=row.place,
                values=row.values,
                messages=tuple(before),
                prompt_ids=prompter.ask(before, place=row.place),
                gold=gold,
                num_gold_tokens=prompter.count_tokens(gold),
            )
        )
    return "+".join(formats), questions
