"""Pairs and labelled answers to tokens: two rows for a pair, with the same prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tightfit.core.text import count_of
from tightfit.data.encode_rows import (
    EncoderOptions,
    RowEncoder,
    describe_refusal,
    digest_messages,
    find_first_trained,
    mask_tokens,
)
from tightfit.data.formats import ASSISTANT, Message, RowFormat
from tightfit.data.preferences import Preference, PreferenceFormat, read_preferences
from tightfit.data.readers import Row
from tightfit.data.report import DataIssues, check_text
from tightfit.data.templates import RenderedRow, TemplateRenderError
from tightfit.data.token_store import NewRow
from tightfit.data.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BATCH_EXAMPLES = 256


class PreferenceExample(NamedTuple):
    """A preference, and where it stands."""

    preference: Preference
    place: str
    file: int
    number: int


class _Waiting(NamedTuple):
    example: PreferenceExample
    rendered: list[RenderedRow]
    digest: int


class _Side(NamedTuple):
    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]
    num_lost: int


class PreferenceEncoder(RowEncoder):
    """Only the answers are trained on, not the assistant's turns in the prompt."""

    def __init__(
        self, tokenizer: ChatTokenizer, options: EncoderOptions, findings: DataIssues
    ) -> None:
        super().__init__(tokenizer, options, findings)
        self._waiting: list[_Waiting] = []

    def read(self, row: Row, row_format: RowFormat) -> Sequence[PreferenceExample]:
        assert isinstance(row_format, PreferenceFormat)
        return [
            PreferenceExample(one, row.place, 0, row.number)
            for one in read_preferences(row, row_format, self._options.example)
        ]

    def add(self, example: PreferenceExample) -> Iterator[NewRow]:
        """Take one example; now and then a batch of rows comes out."""
        preference, place, *_ = example
        checked = [check_text(one, place, self._findings) for one in preference.conversations()]
        if any(self._tokenizer.control.holds_name(m.content) for one in checked for m in one):
            self._findings.add("control-token", place)
        try:
            rendered = [self._render(messages, preference) for messages in checked]
        except TemplateRenderError as error:
            self._findings.add("refused", place, describe_refusal(error))
            return
        prompts = {one.text[: one.spans[0].start] for one in rendered}
        if len(prompts) > 1:
            self._findings.add(
                "refused",
                place,
                "the chat template writes the prompt differently before each answer",
            )
            return
        self.counts["tools"] += bool(preference.tools)
        # Of both answers of a row, so that they are on one side of the split.
        answers = [*preference.prompt, *(m for one in preference.pair for m in one)]
        messages = answers if preference.pair else [m for one in checked for m in one]
        digest = digest_messages(messages, preference.tools)
        self._waiting.append(_Waiting(example, rendered, digest))
        if len(self._waiting) >= _BATCH_EXAMPLES:
            yield from self.flush()

    def _render(self, messages: list[Message], preference: Preference) -> RenderedRow:
        """The row of the last answers, with their spans alone."""
        assert self.renderer is not None
        answer = messages[len(preference.prompt) :]
        answers = [m for m in answer if m.role == ASSISTANT and not m.is_empty]
        rows = self.renderer.rows(messages, preference.tools)
        if not rows or not answers or (len(rows) > 1 and len(answers) > 1):
            raise TemplateRenderError("it does not write all turns of the answer")
        return RenderedRow(rows[-1].text, rows[-1].spans[-len(answers) :])

    def flush(self) -> Iterator[NewRow]:
        """Encode what is waiting."""
        batch, self._waiting = self._waiting, []
        texts = [one.text for item in batch for one in item.rendered]
        encodings = iter(self._tokenizer.encode_sealed(texts) if texts else ())
        for item in batch:
            sides: list[_Side] = []
            firsts: list[int | None] = []
            for rendered in item.rendered:
                encoding = next(encodings)
                masked = mask_tokens(encoding.offsets, rendered.spans)
                sides.append(self._cut(encoding.ids, masked))
                firsts.append(find_first_trained(masked[0]) if masked[0][1:].any() else None)
            known = [first for first in firsts if first is not None]
            if len(known) == len(sides):
                lengths = [len(side.tokens) + side.num_lost for side in sides]
                self.lengths.add(lengths, max(known))
            yield from self._rows(item, sides)

    def _cut(self, ids: list[int], masked: tuple[NDArray[np.bool_], int]) -> _Side:
        import numpy as np

        trained, num_straddling = masked
        self.counts["straddling-token"] += num_straddling
        self.longest_row_tokens = max(self.longest_row_tokens, len(ids))
        limit = self._options.seq_len
        tokens = np.asarray(ids, dtype=np.int32)
        return _Side(tokens[:limit], trained[:limit], max(len(ids) - limit, 0))

    def _rows(self, item: _Waiting, sides: list[_Side]) -> Iterator[NewRow]:
        example, num_lost = item.example, sum(side.num_lost for side in sides)
        if not all(side.trained[1:].any() for side in sides):
            self._findings.add("answer-cut-off" if num_lost else "empty-answer", example.place)
            return
        if len(sides) == 2 and sides[0].tokens.tolist() == sides[1].tokens.tolist():
            self._findings.add("cut-alike", example.place)
            return
        if num_lost:
            longest = max(len(side.tokens) + side.num_lost for side in sides)
            self._findings.add("truncated", example.place, count_of(longest, "token"))
        for side in sides:
            learnt = side.tokens[1:][side.trained[1:]]
            yield NewRow(
                tokens=side.tokens,
                trained=side.trained,
                num_trained=len(learnt),
                has_stop=any(bool((learnt == stop).any()) for stop in self.stop_ids),
                num_lost=side.num_lost,
                file=example.file,
                number=example.number,
                digest=item.digest,
                is_good=example.preference.is_good is not False,
            )
