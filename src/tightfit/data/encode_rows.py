"""Rows to tokens and loss masks, a batch at a time."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tightfit.core.errors import first_line
from tightfit.core.objectives import ExampleKind
from tightfit.core.settings import TrainOn
from tightfit.data.formats import ASSISTANT, Message, RowFormat
from tightfit.data.packing import LengthTally
from tightfit.data.readers import Row
from tightfit.data.report import DataIssues, check_text
from tightfit.data.templates import (
    ChatRenderer,
    ChatTemplate,
    RenderedRow,
    Span,
    TemplateRenderError,
)
from tightfit.data.token_store import NewRow
from tightfit.data.tokenizer import ChatTokenizer
from tightfit.data.tools import Tool

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BATCH_ROWS = 512
_BATCH_CHARS = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOptions:
    """How rows become tokens."""

    template: ChatTemplate | None
    """None: an encoder-decoder's texts go in as they are."""
    train_on: TrainOn
    seq_len: int
    is_encoder_decoder: bool
    example: ExampleKind = ExampleKind.ANSWER


class Example(NamedTuple):
    """A row of a data file as messages, and where it stands."""

    messages: list[Message]
    is_text: bool
    """Plain text, which no template wraps."""
    place: str
    file: int
    number: int
    has_before: bool = False
    """Of a document that is read in parts: this is not the first, so it gets no BOS."""
    has_more: bool = False
    """This is not the last, so it gets no EOS."""
    tools: tuple[Tool, ...] = ()


class _Pending(NamedTuple):
    example: Example
    digest: int
    sealed: RenderedRow
    prompt: str | None
    """The encoder's text, where there is an encoder."""


class RowEncoder:
    """Gathers examples and encodes them together; `findings` receives what is odd."""

    def __init__(
        self, tokenizer: ChatTokenizer, options: EncoderOptions, findings: DataIssues
    ) -> None:
        self.longest_row_tokens = 0
        """Before truncation."""
        self.lengths = LengthTally(options.seq_len)
        """Of rows that are cut; plain text becomes several instead."""
        self.counts: Counter[str] = Counter()
        """What encoding did beyond writing tokens down, by the keys of `NOTE_TEXTS`."""
        self.renderer: ChatRenderer | None = None
        if options.template is not None:
            self.renderer = ChatRenderer(tokenizer, options.template, train_on=options.train_on)
            self.counts = self.renderer.counts
        self._tokenizer = tokenizer
        self._options = options
        self._findings = findings
        self._pending: list[_Pending] = []
        self._num_chars = 0
        self._text_stops: set[int] = set()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that ended an answer or a text so far."""
        rendered = self.renderer.stop_ids if self.renderer else set()
        return tuple(sorted(rendered | self._text_stops))

    def read(self, row: Row, row_format: RowFormat) -> Sequence[Any]:
        """The examples of a row, for `add`. Raises `InvalidInputError`."""
        is_text = row_format.name == "text"
        messages, tools = row_format.to_conversation(row)
        parts = (row.has_before, row.has_more)
        return [Example(messages, is_text, row.place, 0, row.number, *parts, tools)]

    def add(self, example: Any) -> Iterator[NewRow]:
        """Take one example; now and then a batch of rows comes out."""
        messages = check_text(example.messages, example.place, self._findings)
        digest = digest_messages(messages, example.tools)
        for sealed, prompt in self._sealed(example._replace(messages=messages)):
            self._pending.append(_Pending(example, digest, sealed, prompt))
            self._num_chars += len(sealed.text) + len(prompt or "")
        if len(self._pending) >= _BATCH_ROWS or self._num_chars >= _BATCH_CHARS:
            yield from self.flush()

    def flush(self) -> Iterator[NewRow]:
        """Encode what is waiting."""
        batch, self._pending, self._num_chars = self._pending, [], 0
        if not batch:
            return
        encodings = self._tokenizer.encode_sealed([item.sealed.text for item in batch])
        prompts: Sequence[Any] = [None] * len(batch)
        if self._options.is_encoder_decoder:
            prompts = self._tokenizer.encode_sealed([item.prompt or "" for item in batch])
        for item, encoding, prompt in zip(batch, encodings, prompts, strict=True):
            if prompt is not None:
                yield from self._pair(item, encoding, prompt)
            elif item.example.is_text:
                yield from self._pieces(item, encoding)
            else:
                yield from self._conversation(item, encoding)

    def _sealed(self, example: Example) -> list[tuple[RenderedRow, str | None]]:
        messages, control = example.messages, self._tokenizer.control
        is_all = self._options.train_on is TrainOn.ALL
        if all(m.is_empty for m in messages if is_all or m.role == ASSISTANT):
            self._findings.add("empty-answer", example.place)
            return []
        texts = (text for m in messages for text in (m.content, m.reasoning))
        spells_control = any(control.holds_name(text) for text in texts)
        if self._options.is_encoder_decoder:
            try:
                rows = self._question_answers(messages, example.tools)
            except TemplateRenderError as error:
                self._findings.add("refused", example.place, describe_refusal(error))
                return []
        elif example.is_text or self.renderer is None:
            # Plain text is often written for one model, marks included: they count as marks.
            self.counts["text-with-control"] += spells_control
            text = "\n".join(message.content for message in messages)
            return [(RenderedRow(control.seal(control.strip_private(text)), ()), None)]
        else:
            try:
                rendered = self.renderer.rows(messages, example.tools)
            except TemplateRenderError as error:
                self._findings.add("refused", example.place, describe_refusal(error))
                return []
            if not rendered:
                self._findings.add("empty-answer", example.place, "nothing asks for the answer")
            if not is_all:
                self.counts["tools"] += bool(example.tools)
                self.counts["calls"] += sum(len(message.tool_calls) for message in messages)
            rows = [(sealed, None) for sealed in rendered]
        if spells_control:
            self._findings.add("control-token", example.place)
        return rows

    def _question_answers(
        self, messages: list[Message], tools: tuple[Tool, ...]
    ) -> list[tuple[RenderedRow, str | None]]:
        """One row per answer: all before it is the encoder's, itself the decoder's."""
        if tools or any(message.tool_calls for message in messages):
            raise TemplateRenderError("an encoder-decoder learns texts, not tool calls")
        control = self._tokenizer.control
        rows: list[tuple[RenderedRow, str | None]] = []
        for at, message in enumerate(messages):
            if message.role != ASSISTANT or not message.content.strip():
                continue
            if self.renderer is not None:
                prompt = self.renderer.prompt(messages[:at])
            else:
                asked = "\n".join(before.content for before in messages[:at])
                prompt = control.seal(control.escape(asked))
            answer = control.seal(control.escape(message.content))
            rows.append((RenderedRow(answer, (Span(0, len(answer)),)), prompt))
        return rows

    def _conversation(self, item: _Pending, encoding: Any) -> Iterator[NewRow]:
        """Cut to length; a row that then trains nothing is dropped."""
        import numpy as np

        tokens = np.asarray(encoding.ids, dtype=np.int32)
        trained, num_straddling = mask_tokens(encoding.offsets, item.sealed.spans)
        self.counts["straddling-token"] += num_straddling
        limit = self._options.seq_len
        num_lost = max(len(tokens) - limit, 0)
        self.longest_row_tokens = max(self.longest_row_tokens, len(tokens))
        if trained[1:].any():
            self.lengths.add([len(tokens)], find_first_trained(trained))
        row = self._row(item, tokens[:limit], trained[:limit], num_lost)
        if row.num_trained:
            if num_lost:
                self._findings.add("truncated", item.example.place, f"{len(tokens):,} tokens")
            yield row
        else:
            kind = "answer-cut-off" if num_lost else "empty-answer"
            self._findings.add(kind, item.example.place)

    def _pieces(self, item: _Pending, encoding: Any) -> Iterator[NewRow]:
        """Plain text: all of it trained, cut into as many rows as it takes."""
        import numpy as np

        # BOS where the tokenizer adds one, EOS; neither twice.
        ids = list(encoding.ids)
        begin = self._tokenizer.begins_with
        first = None if begin is None else self._tokenizer.token_id(begin)
        if first is not None and ids[:1] != [first] and not item.example.has_before:
            ids = [first, *ids]
        ids = ids if item.example.has_more else self._ended(ids)
        tokens = np.asarray(ids, dtype=np.int32)
        limit = self._options.seq_len
        self.longest_row_tokens = max(self.longest_row_tokens, len(tokens))
        if len(tokens) > limit:
            self.counts["cut-text"] += 1
        for start in range(0, len(tokens), limit):
            piece = tokens[start : start + limit]
            if len(piece) == 1 < min(limit, len(tokens)):
                piece = tokens[-2:]  # the last token is learnt from one before it
            if len(piece) > 1 or limit == 1:
                yield self._row(item, piece, np.ones(len(piece), dtype=np.bool_), 0)

    def _ended(self, ids: list[int]) -> list[int]:
        end = self._tokenizer.eos_id
        if end is None:
            return ids
        self._text_stops.add(end)
        return ids if ids[-1:] == [end] else [*ids, end]

    def _pair(self, item: _Pending, encoding: Any, prompt: Any) -> Iterator[NewRow]:
        """Encoder tokens, then the decoder's; each cut to length, the encoder's end mark kept."""
        import numpy as np

        limit = self._options.seq_len
        read, answer = self._ended(list(prompt.ids)), self._ended(list(encoding.ids))
        num_lost = max(len(read) - limit, 0) + max(len(answer) - limit, 0)
        longest = max(len(read), len(answer))
        self.longest_row_tokens = max(self.longest_row_tokens, longest)
        self.lengths.add([len(read), len(answer)], 0)
        if num_lost:
            self._findings.add("truncated", item.example.place, f"{longest:,} tokens")
        if len(read) > limit:
            read = [*read[: limit - 1], read[-1]]
        answer = answer[:limit]
        tokens = np.asarray([*read, *answer], dtype=np.int32)
        trained = np.arange(len(tokens)) >= len(read)
        yield self._row(item, tokens, trained, num_lost)

    def _row(
        self,
        item: _Pending,
        tokens: NDArray[np.int32],
        trained: NDArray[np.bool_],
        num_lost: int,
    ) -> NewRow:
        first = 0 if self._options.is_encoder_decoder else 1
        learnt = tokens[first:][trained[first:]]
        return NewRow(
            tokens=tokens,
            trained=trained,
            num_trained=len(learnt),
            has_stop=any(bool((learnt == stop).any()) for stop in self.stop_ids),
            num_lost=num_lost,
            file=item.example.file,
            number=item.example.number,
            digest=item.digest,
        )


def mask_tokens(
    offsets: Sequence[tuple[int, int]], spans: Sequence[Span]
) -> tuple[NDArray[np.bool_], int]:
    """True for tokens that lie in a span; and how many lie across a span's border."""
    import numpy as np

    places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = places[:, 0], places[:, 1]
    trained = np.zeros(len(places), dtype=np.bool_)
    across = np.zeros(len(places), dtype=np.bool_)
    for span in spans:
        is_inside = (starts >= span.start) & (starts < span.end) & (ends <= span.end)
        overlaps = (starts < span.end) & (ends > span.start)
        trained |= is_inside
        across |= overlaps & ~is_inside
    return trained & ~across, int(across.sum())


def find_first_trained(trained: NDArray[np.bool_]) -> int:
    """Where the first token is that carries loss: never at 0, which nothing predicts."""
    return int(trained[1:].argmax()) + 1


def describe_refusal(error: TemplateRenderError) -> str:
    """Why a chat template refuses a row, in one line."""
    return f"the chat template refuses it: {first_line(error)[:200]}"


def digest_messages(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
    """A number for the text of an example; the same text, the same number."""
    digest = hashlib.blake2b(digest_size=8)
    if tools:
        digest.update(json.dumps(tools, default=str).encode())
    for message in messages:
        digest.update(f"{message.role}\x1f{message.text}\x1e".encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "little")
