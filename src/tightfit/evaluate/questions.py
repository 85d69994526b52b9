"""Questions of a data file: the prompt as training would show it, and the gold answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.core.errors import InvalidInputError
from tightfit.core.training import DataSource, TrainOn
from tightfit.data.formats import ASSISTANT, Message, to_messages
from tightfit.data.jinja import TemplateFault
from tightfit.data.masks import Renderer
from tightfit.data.meter import Meter
from tightfit.data.sources import open_source, read_source
from tightfit.data.templates import choose_template
from tightfit.data.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row to be answered: all before its last answer, and that answer."""

    place: str
    values: Mapping[str, Any]
    """The row itself, for what it says besides: a database's name."""
    prompt: str
    """The messages as people read them."""
    prompt_ids: tuple[int, ...]
    gold: str
    num_gold_tokens: int


class Asker:
    """Makes prompts with the template and tokenizer that training uses."""

    def __init__(self, tokenizer: ChatTokenizer, template: str | None) -> None:
        self._tokenizer = tokenizer
        # An encoder-decoder reads plain text unless a template is named: see `data/encode.py`.
        is_bare = tokenizer.is_encoder_decoder and template is None
        self._renderer = (
            None
            if is_bare
            else Renderer(tokenizer, choose_template(template, tokenizer), train_on=TrainOn.ANSWERS)
        )

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens behind which the answer is to follow."""
        control = self._tokenizer.control
        if self._renderer is not None:
            text = self._renderer.prompt(messages)
        else:
            text = control.seal(control.escape("\n".join(m.content for m in messages)))
        ids = list(self._tokenizer.encode_sealed([text])[0].ids)
        end = self._tokenizer.eos_id
        if self._tokenizer.is_encoder_decoder and end is not None and ids[-1:] != [end]:
            ids.append(end)
        return tuple(ids)

    def count_tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """An answer as text, control tokens left out."""
        control = set(self._tokenizer.control.ids.values())
        return self._tokenizer.decode([i for i in token_ids if i not in control]).strip()


def read_questions(source: DataSource, asker: Asker) -> tuple[str, list[Question]]:
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
                prompt="\n\n".join(message.content for message in before),
                prompt_ids=_encode(asker, before, row.place),
                gold=gold,
                num_gold_tokens=asker.count_tokens(gold),
            )
        )
    return "+".join(formats), questions


def _encode(asker: Asker, messages: Sequence[Message], place: str) -> tuple[int, ...]:
    try:
        return asker.encode(messages)
    except TemplateFault as fault:
        raise InvalidInputError(
            f"{place}: the chat template refuses these messages: {str(fault).splitlines()[0]}.",
            remedy="correct that row, or name another template: --set template=NAME",
        ) from fault
