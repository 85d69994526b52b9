"""Rows to tokens and loss masks, a batch at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tightfit.core.training import TrainOn
from tightfit.data.formats import ASSISTANT, Message
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


class Example(NamedTuple):
    """A row of a data file as messages, and where it stands."""

    messages: list[Message]
    is_text: bool
    """Plain text, which no template wraps."""
    place: str
    file: int
    number: int


class _Pending(NamedTuple):
    example: Example
    digest: int
    sealed: RenderedRow
    prompt: str | None
    """The encoder's text, where there is an encoder."""


@dataclass(slots=True, kw_only=True)
class EncodeCounts:
    """What encoding did beyond writing tokens down."""

    num_straddling_tokens: int = 0
    """Tokens across the border of an answer; not trained."""
    num_cut_texts: int = 0
    num_text_pieces: int = 0
    num_texts_with_control: int = 0
    longest_row_tokens: int = 0


class RowEncoder:
    """Gathers examples and encodes them together; `findings` hears of what is odd."""

    def __init__(
        self, tokenizer: ChatTokenizer, options: EncoderOptions, findings: DataIssues
    ) -> None:
        self.counts = EncodeCounts()
        self.renderer = (
            ChatRenderer(tokenizer, options.template, train_on=options.train_on)
            if options.template is not None
            else None
        )
        self._tokenizer = tokenizer
        self._options = options
        self._findings = findings
        self._pending: list[_Pending] = []
        self._num_chars = 0
        self._text_stops: set[int] = set()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that ended an answer or a text so far."""
        rendered = self.renderer.counts.stop_ids if self.renderer else set()
        return tuple(sorted(rendered | self._text_stops))

    def add(self, example: Example) -> Iterator[NewRow]:
        """Take one example; now and then a batch of rows comes out."""
        messages = check_text(example.messages, example.place, self._findings)
        digest = digest_messages(messages)
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
        said = (
            [m for m in messages if m.content.strip()]
            if self._options.train_on is TrainOn.ALL
            else [m for m in messages if m.role == ASSISTANT and m.content.strip()]
        )
        if not said:
            self._findings.add("empty-answer", example.place)
            return []
        spells_control = any(control.holds_name(message.content) for message in messages)
        if self._options.is_encoder_decoder:
            rows = self._question_answers(messages)
        elif example.is_text or self.renderer is None:
            # Plain text is often written for one model, marks included: they count as marks.
            self.counts.num_texts_with_control += spells_control
            text = "\n".join(message.content for message in messages)
            return [(RenderedRow(control.seal(control.strip_private(text)), ()), None)]
        else:
            rows = self._rendered(example)
        if spells_control:
            self._findings.add("control-token", example.place)
        return rows

    def _rendered(self, example: Example) -> list[tuple[RenderedRow, str | None]]:
        assert self.renderer is not None
        try:
            rows = self.renderer.rows(example.messages)
        except TemplateRenderError as error:
            self._findings.add("refused", example.place, str(error).splitlines()[0][:200])
            return []
        if not rows:
            self._findings.add("empty-answer", example.place, "nothing asks for the answer")
        return [(sealed, None) for sealed in rows]

    def _question_answers(self, messages: list[Message]) -> list[tuple[RenderedRow, str | None]]:
        """One row per answer: all before it is the encoder's, itself the decoder's."""
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
        import numpy as np

        tokens = np.asarray(encoding.ids, dtype=np.int32)
        trained, num_straddling = mask_tokens(encoding.offsets, item.sealed.spans)
        self.counts.num_straddling_tokens += num_straddling
        yield from self._fitted(item, tokens, trained)

    def _fitted(
        self, item: _Pending, tokens: NDArray[np.int32], trained: NDArray[np.bool_]
    ) -> Iterator[NewRow]:
        """Cut to length; a row that then trains nothing is dropped."""
        limit = self._options.seq_len
        num_lost = max(len(tokens) - limit, 0)
        self.counts.longest_row_tokens = max(self.counts.longest_row_tokens, len(tokens))
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

        ids = self._framed(list(encoding.ids))
        tokens = np.asarray(ids, dtype=np.int32)
        limit = self._options.seq_len
        self.counts.longest_row_tokens = max(self.counts.longest_row_tokens, len(tokens))
        if len(tokens) > limit:
            self.counts.num_cut_texts += 1
        for start in range(0, len(tokens), limit):
            piece = tokens[start : start + limit]
            if len(piece) > 1 or limit == 1:
                self.counts.num_text_pieces += 1
                yield self._row(item, piece, np.ones(len(piece), dtype=np.bool_), 0)

    def _framed(self, ids: list[int]) -> list[int]:
        """BOS where the tokenizer adds one, EOS; neither twice."""
        begin = self._tokenizer.begins_with
        first = None if begin is None else self._tokenizer.token_id(begin)
        if first is not None and ids[:1] != [first]:
            ids = [first, *ids]
        return self._ended(ids)

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
        read, said = self._ended(list(prompt.ids)), self._ended(list(encoding.ids))
        num_lost = max(len(read) - limit, 0) + max(len(said) - limit, 0)
        longest = max(len(read), len(said))
        self.counts.longest_row_tokens = max(self.counts.longest_row_tokens, longest)
        if num_lost:
            self._findings.add("truncated", item.example.place, f"{longest:,} tokens")
        if len(read) > limit:
            read = [*read[: limit - 1], read[-1]]
        said = said[:limit]
        tokens = np.asarray([*read, *said], dtype=np.int32)
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
        said = tokens[first:][trained[first:]]
        return NewRow(
            tokens=tokens,
            trained=trained,
            num_trained=len(said),
            has_stop=any(bool((said == stop).any()) for stop in self.stop_ids),
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


def digest_messages(messages: Sequence[Message]) -> int:
    """A number for the text of an example; the same text, the same number."""
    digest = hashlib.blake2b(digest_size=8)
    for message in messages:
        digest.update(f"{message.role}\x1f{message.content}\x1e".encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "little")
