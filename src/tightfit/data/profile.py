"""Profile a dataset: token counts of all rows or of an even sample, in bounded memory.

Tokens are counted by the model's own tokenizer where its file is present, else guessed.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tightfit.core.errors import InvalidInputError
from tightfit.core.objectives import ExampleKind
from tightfit.core.profiles import DataProfile
from tightfit.core.settings import MAX_SEQ_LEN
from tightfit.core.strategy import DataSource
from tightfit.data.formats import Turns
from tightfit.data.packing import (
    describe_lengths,
    estimate_padding_waste,
    list_candidate_lengths,
    scaled,
)
from tightfit.data.preferences import list_examples
from tightfit.data.readers import ReadMeter, ReadProgress, file_size
from tightfit.data.sources import OpenedSource, data_files, open_source, read_source
from tightfit.data.token_store import TokenStore, epoch_rows
from tightfit.data.tokenizer import build_tokenizer, encode_batch, read_tokenizer_file
from tightfit.models.resolve import locate_hub_cache

# Guessed tokens: text is split into words, numbers and marks, as byte-pair tokenizers do, and each
# is priced. Prices are fitted to six vocabularies (GPT-2, SmolLM2, Mistral v3, Tekken, Qwen,
# DeepSeek): at most 12% off their mean on English text and code, 25% on 22 other languages.

TOKENS_PER_WORD = 1.07
TOKENS_PER_LETTER = 0.013
TOKENS_PER_DIGIT = 0.8
TOKENS_PER_MARK = 1.1
MAX_LETTERS_PER_TOKEN = 8.0
"""Runs of letters that are no words (encodings, keys) cost by length."""

_TOKENS_PER_CHAR = (
    # (first code point, tokens per character, what lives from there on)
    (0x0080, 1.0, "Latin-1 signs"),
    (0x00C0, 2.0, "Latin letters with accents: such languages also split their words more"),
    (0x0250, 1.5, "phonetic letters and combining marks"),
    (0x0370, 1.0, "Greek"),
    (0x0400, 0.5, "Cyrillic"),
    (0x0530, 1.2, "Armenian"),
    (0x0590, 0.9, "Hebrew and Arabic"),
    (0x0900, 1.25, "scripts of India, Georgia and Southeast Asia"),
    (0x0E00, 0.9, "Thai and Lao"),
    (0x0F00, 1.25, "Tibetan, Burmese, Georgian, Ethiopic, Khmer"),
    (0x1E00, 1.2, "more Latin letters with accents (Vietnamese) and Greek"),
    (0x2000, 1.0, "typographic marks and symbols"),
    (0x2E80, 0.95, "Chinese"),
    (0x3000, 0.85, "Japanese kana and full-width marks"),
    (0x3100, 0.95, "Chinese"),
    (0xA000, 1.25, "rare scripts"),
    (0xAC00, 1.05, "Korean"),
    (0xD800, 1.0, "presentation forms"),
    (0x10000, 2.0, "emoji and rare characters"),
)
_STARTS = [start for start, _, _ in _TOKENS_PER_CHAR]

_LETTER, _DIGIT, _MARK, _SPACE = "a", "0", ".", " "


def _shape_of(code: int) -> str:
    char = chr(code)
    if char.isascii():
        if char.isalpha():
            return _LETTER
        if char.isdigit():
            return _DIGIT
        return _SPACE if char.isspace() or not char.isprintable() else _MARK
    is_latin = 0x00C0 <= code < 0x0250 or 0x1E00 <= code < 0x1F00
    return _LETTER if is_latin else _SPACE


class _Shapes(dict[int, str]):
    def __missing__(self, code: int) -> str:
        shape = self[code] = _shape_of(code)
        return shape


@cache
def _price(char: str) -> float:
    code = ord(char)
    return 0.0 if code < 0x80 else _TOKENS_PER_CHAR[bisect_right(_STARTS, code) - 1][1]


_ASCII_SHAPES = bytes(ord(_shape_of(code)) if code < 128 else ord(" ") for code in range(256))
_ONLY_LETTERS = bytes(ord("a") if code == ord("a") else ord(" ") for code in range(256))
_SHAPES = _Shapes()


def guess_tokens(text: str) -> int:
    """About how many tokens a byte-pair tokenizer makes of `text`; one per byte at most."""
    if text.isascii():
        shape = text.encode("ascii").translate(_ASCII_SHAPES)
        foreign, num_bytes = 0.0, len(shape)
    else:
        shape = text.translate(_SHAPES).encode("ascii")
        foreign = sum(_price(char) * times for char, times in Counter(text).items())
        num_bytes = len(text.encode("utf-8", "surrogatepass"))
    num_letters = shape.count(b"a")
    num_words = (b" " + shape.translate(_ONLY_LETTERS)).count(b" a")
    words = TOKENS_PER_WORD * num_words + TOKENS_PER_LETTER * num_letters
    ascii_tokens = (
        max(words, num_letters / MAX_LETTERS_PER_TOKEN)
        + TOKENS_PER_DIGIT * shape.count(b"0")
        + TOKENS_PER_MARK * shape.count(b".")
    )
    return min(math.ceil(ascii_tokens + foreign), num_bytes)


# Token counters: the model's own tokenizer where its file is at hand, else a guess.

TOKENS_PER_MESSAGE = 5
"""What a chat template adds around a message. ChatML: opening mark, role, line end, closing mark,
line end (five, measured with SmolLM2-135M-Instruct's template and vocabulary). Llama 3: two header
marks, role, blank line, end of turn (five by its published form, huggingface.co/blog/llama3).
A default system prompt, which some templates add, is not counted."""
TOKENS_PER_ROW = 1
"""The begin-of-text or end-of-text mark."""
TRAINED_END_TOKENS = 1
"""The mark that ends an answer is learnt with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounter:
    """Counts tokens of many texts at once."""

    count: Callable[[Sequence[str]], list[int]]
    is_exact: bool
    description: str


def token_counter(model: str | None) -> TokenCounter:
    """The best counter for a model name or folder, without network or torch."""
    if model is None:
        return _guessing("no model named")
    path = find_tokenizer(model)
    if path is None:
        return _guessing(f"no tokenizer.json of {model} on this machine")
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        return _guessing("for exact counts: pip install 'tightfit[data]'")
    return _exact(path)


def find_tokenizer(model: str) -> Path | None:
    """`tokenizer.json` of a model folder, or of a hub id in the local cache."""
    try:
        path = Path(model).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        if path.name == "tokenizer.json":
            return path if path.is_file() else None
        cache = locate_hub_cache()
        if cache is None or model.count("/") != 1 or model.startswith((".", "/", "~")):
            return None
        repository = cache / ("models--" + model.replace("/", "--"))
        found = sorted(
            repository.glob("snapshots/*/tokenizer.json"), key=lambda p: p.stat().st_mtime
        )
        main = repository / "refs" / "main"
        if main.is_file():
            name = main.read_text(errors="replace").strip()
            found += [path for path in found if path.parent.name == name]
    except (OSError, RuntimeError, ValueError):
        return None  # a name no file system takes, or `~nobody`: then there is no such file
    return found[-1] if found else None


def _guessing(why: str) -> TokenCounter:
    return TokenCounter(
        count=lambda texts: [guess_tokens(text) for text in texts],
        is_exact=False,
        description=f"guessed from words, digits and marks, about 4 characters per token in English"
        f" ({why})",
    )


def _exact(path: Path) -> TokenCounter:
    tokenizer = build_tokenizer(read_tokenizer_file(path), path)

    def count(texts: Sequence[str]) -> list[int]:
        try:
            encoded = encode_batch(tokenizer, texts, path)
        except TypeError:  # half a surrogate pair, which JSON can write and UTF-8 cannot
            whole = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
            encoded = encode_batch(tokenizer, whole, path)
        return [len(item) for item in encoded]

    return TokenCounter(count=count, is_exact=True, description=f"counted with {path}")


# Counting rows in batches, all of them or an even sample, in bounded memory.

_BATCH_ROWS = 512
_BATCH_CHARS = 4_000_000
_SAMPLE_SEED = 20_240_917  # fixed: the same file gives the same profile


_Sides = tuple[tuple[int, int], ...]


class _Sampled(NamedTuple):
    mark: float
    """Drawn at random; a row stays while its mark is under the threshold."""
    sides: _Sides
    """Tokens, and trained ones, of each of its conversations."""
    copies: int
    is_text: bool


Example = tuple[Turns, ...]
"""One conversation, or both of a pair."""


class _Cut:
    """Sums over examples, each cut to one length."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self.rows_by_length: Counter[int] = Counter()
        self.num_made = 0
        """Rows that they became: more, where texts are cut into pieces."""
        self.num_tokens = 0
        self.num_trained_tokens = 0
        self.num_truncated = 0
        self.num_lost_tokens = 0

    def add(self, sides: _Sides, copies: int, *, is_text: bool) -> None:
        """One example. Truncation keeps the head, so the answer at the end is lost first; plain
        text is cut into as many rows as it takes instead."""
        longest = max(length for length, _ in sides)
        if is_text and longest > self.seq_len:
            num_whole, rest = divmod(longest, self.seq_len)
            self._add_row(((self.seq_len, self.seq_len),), copies * num_whole)
            if rest:
                self._add_row(((rest, rest),), copies)
            return
        self.num_truncated += copies if longest > self.seq_len else 0
        lost = [max(length - self.seq_len, 0) for length, _ in sides]
        self.num_lost_tokens += sum(lost) * copies
        kept = zip(sides, lost, strict=True)
        self._add_row(
            tuple(
                (length - less, max(num_trained - less, 0)) for (length, num_trained), less in kept
            ),
            copies,
        )

    def merge(self, other: _Cut) -> None:
        """With rows that neither length cuts."""
        self.rows_by_length.update(other.rows_by_length)
        self.num_made += other.num_made
        self.num_tokens += other.num_tokens
        self.num_trained_tokens += other.num_trained_tokens

    def _add_row(self, sides: _Sides, copies: int) -> None:
        self.rows_by_length[max(length for length, _ in sides)] += copies
        self.num_made += copies
        self.num_tokens += sum(length for length, _ in sides) * copies
        self.num_trained_tokens += sum(num_trained for _, num_trained in sides) * copies


class TokenTally:
    """Counts the tokens of examples; beyond `limit` it thins out what it keeps by halves. A pair
    is as long as its longer answer.

    Every row is equally likely to be kept, wherever it stands in the file, and
    the longest row by characters is counted for `longest` even if not kept.
    Memory grows with distinct lengths and with `limit` only.
    """

    def __init__(
        self, *, counter: TokenCounter, seq_lens: Sequence[int], limit: int | None
    ) -> None:
        self.counter = counter
        self.num_rows = 0
        self.longest = 0
        # Of the rows that were counted.
        self.num_counted = 0
        self._seq_lens = sorted(seq_lens)
        self.cuts = tuple(map(_Cut, self._seq_lens))
        """Each row cut to each length, shortest first."""
        self._whole = tuple(map(_Cut, self._seq_lens))
        """Rows that nothing cuts from this length on: added up once, at the end for all."""
        self._limit = limit
        self._threshold = 1.0
        self._sample: list[_Sampled] = []
        self._pending: list[tuple[float, int, Example]] = []
        self._pending_chars = 0
        self._longest_chars = 0
        self._longest_example: Example | None = None
        self._random = random.Random(_SAMPLE_SEED)

    def add(self, example: Example, copies: int = 1) -> None:
        """One example, seen `copies` times in an epoch."""
        self.num_rows += copies
        num_chars = max(len(turns.prompt) + len(turns.answer) for turns in example)
        mark = 0.0 if self._limit is None else self._random.random()
        if mark >= self._threshold:
            if num_chars > self._longest_chars:
                self._longest_chars, self._longest_example = num_chars, example
            return
        self._pending.append((mark, copies, example))
        self._pending_chars += num_chars
        if len(self._pending) >= _BATCH_ROWS or self._pending_chars > _BATCH_CHARS:
            self._count_pending()

    def finish(self) -> None:
        """Count what is left and close the sums."""
        self._count_pending()
        if self._longest_example is not None:
            [sides] = self._count([self._longest_example])
            self.longest = max(self.longest, *(length for length, _ in sides))
        for item in self._sample:
            self._add_up(item.sides, item.copies, is_text=item.is_text)
        self._sample.clear()
        for at, whole in enumerate(self._whole):
            for cut in self.cuts[at:]:
                cut.merge(whole)

    def _count_pending(self) -> None:
        counts = self._count([example for _, _, example in self._pending])
        for (mark, copies, example), sides in zip(self._pending, counts, strict=True):
            self.longest = max(self.longest, *(length for length, _ in sides))
            is_text = example[0].num_messages == 0
            if self._limit is None:
                self._add_up(sides, copies, is_text=is_text)
            else:
                self._sample.append(_Sampled(mark, sides, copies, is_text))
        self._pending.clear()
        self._pending_chars = 0
        while self._limit is not None and len(self._sample) > self._limit:
            self._threshold /= 2
            self._sample = [item for item in self._sample if item.mark < self._threshold]

    def _add_up(self, sides: _Sides, copies: int, *, is_text: bool) -> None:
        self.num_counted += copies
        first = bisect_left(self._seq_lens, max(length for length, _ in sides))
        for cut in self.cuts[:first]:
            cut.add(sides, copies, is_text=is_text)
        if first < len(self.cuts):
            self._whole[first].add(sides, copies, is_text=is_text)

    def _count(self, batch: list[Example]) -> list[tuple[tuple[int, int], ...]]:
        every = [turns for example in batch for turns in example]
        prompts = self.counter.count([turns.prompt for turns in every])
        answers = self.counter.count([turns.answer for turns in every])
        counted = iter(
            (
                prompt + answer + TOKENS_PER_ROW + TOKENS_PER_MESSAGE * turns.num_messages,
                answer + TRAINED_END_TOKENS if answer else 0,
            )
            for turns, prompt, answer in zip(every, prompts, answers, strict=True)
        )
        return [tuple(next(counted) for _ in example) for example in batch]


Sources = Path | str | Sequence[Path | str | DataSource]
"""Paths, or sources with weight and part; what a source holds back for evaluation is left out."""

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
EXACT_SAMPLE_ROWS = 50_000
"""A tokenizer counts about 10,000 rows a second and core; more rows change no percentile."""
_SEED = 20_241_105  # fixed: the same file gives the same profile


def profile_dataset(
    source: Sources,
    *,
    seq_len: int,
    model: str | None = None,
    sample_limit: int | None = None,
    example: ExampleKind = ExampleKind.ANSWER,
    progress: Callable[[ReadProgress], None] | None = None,
) -> DataProfile:
    """`profile_lengths` at one length."""
    return profile_lengths(
        source,
        seq_len=seq_len,
        others=(),
        model=model,
        sample_limit=sample_limit,
        example=example,
        progress=progress,
    )[0]


OTHER_LENGTHS = tuple(1 << power for power in range(9, 25))
"""What a job could have been planned with, too."""


def profile_lengths(  # noqa: PLR0913
    source: Sources,
    *,
    seq_len: int,
    others: Sequence[int] = OTHER_LENGTHS,
    model: str | None = None,
    sample_limit: int | None = None,
    example: ExampleKind = ExampleKind.ANSWER,
    progress: Callable[[ReadProgress], None] | None = None,
) -> tuple[DataProfile, ...]:
    """Lengths, truncation, padding and packing of a dataset at `seq_len`, and at those of the
    other lengths that `list_candidate_lengths` finds worth a look and that train something.

    Every row is read and checked. With a tokenizer at hand, tokens of at most
    `sample_limit` rows are counted (50,000 by default), drawn evenly over the
    whole file, and the longest row by characters always; guesses cost so little
    that all rows are counted by default. `progress` is called about five times a
    second and at the end with the rows and bytes read.
    """
    if not 0 < seq_len <= MAX_SEQ_LEN:
        raise InvalidInputError(
            f"A sequence length of {seq_len} makes no sense.",
            remedy=f"choose one from 1 to {MAX_SEQ_LEN:,}; 2048 is a common start",
        )
    counter = token_counter(model)
    limit = sample_limit or (EXACT_SAMPLE_ROWS if counter.is_exact else None)
    tally = TokenTally(counter=counter, seq_lens=tuple({seq_len, *others}), limit=limit)
    formats: dict[str, None] = {}
    opened = _open(source)
    total = sum(file_size(path) for item in opened for path in item.files)
    meter = ReadMeter(progress, total_bytes=total)
    draw = random.Random(_SEED)
    for item in opened:
        for row, row_format in read_source(item, meter, example=example):
            formats.setdefault(row_format.name)
            # A weight of 2.5 shows a row twice, and every other row once more.
            copies = int(item.source.weight + draw.random())
            # Every row is checked.
            for one in list_examples(row, row_format, example):
                if copies or not tally.num_rows:
                    tally.add(one, copies=max(copies, 1))
            meter.add_row()
    tally.finish()
    meter.finish()
    names = ", ".join(item.name for item in opened), "+".join(formats)
    candidates = list_candidate_lengths(tally.longest)
    asked = [cut for cut in tally.cuts if cut.seq_len == seq_len]
    rest = [cut for cut in tally.cuts if cut not in asked and cut.seq_len in candidates]
    trained = [cut for cut in rest if cut.num_trained_tokens]
    return tuple(_summary(tally, cut, *names) for cut in (*asked, *trained))


def profile_from_store(store: TokenStore) -> DataProfile:
    """The same of rows already encoded: every number exact, weights of sources included.

    An encoder-decoder's rows count by their longer side, for each is cut to
    `seq_len` on its own. A pair is as long as its longer answer.
    """
    import numpy as np

    about = store.description
    rows = epoch_rows(store, seed=0, epoch=0, shuffle=False)
    every = rows[:, None] + np.arange(about.rows_per_example)
    whole, num_trained = store.example_lengths[rows], store.num_trained[every].sum(axis=1)
    sides = np.maximum(num_trained, whole - num_trained) if about.is_encoder_decoder else whole
    values, counts = np.unique(sides, return_counts=True)
    lengths = dict(zip(values.tolist(), counts.tolist(), strict=True))
    is_pair = about.rows_per_example > 1
    num_tokens = int(store.lengths[every].sum() if is_pair else sides.sum())
    share = len(rows) / (len(store) // about.rows_per_example)
    return DataProfile(
        source=", ".join(about.sources),
        format=about.format,
        num_rows=len(rows),
        num_tokens=num_tokens,
        num_trained_tokens=max(int(num_trained.sum()), 1),
        mean_tokens=float(sides.mean()),
        max_tokens=int(values[-1]),
        num_truncated=round(about.num_truncated * share),
        seq_len=about.seq_len,
        tokenizer=f"the model's tokenizer, template {about.template}",
        is_exact=True,
        num_counted_rows=len(rows),
        longest_row_tokens=about.longest_row_tokens,
        num_lost_tokens=round(about.num_lost_tokens * share),
        **_describe_lengths(lengths, about.seq_len),
    )


def _describe_lengths(lengths: Mapping[int, int], seq_len: int) -> dict[str, Any]:
    """The fields of a profile that follow from the row lengths alone."""
    described = describe_lengths(lengths, seq_len)
    num_tokens = sum(length * rows for length, rows in lengths.items())
    waste = {str(size): estimate_padding_waste(lengths.items(), size) for size in MICRO_BATCHES}
    return described | {
        "padding_waste_fraction": waste,
        "packing_waste_fraction": 1.0 - num_tokens / (described["num_packed_rows"] * seq_len),
    }


def _open(source: Sources) -> list[OpenedSource]:
    items = [source] if isinstance(source, str | Path) else list(source)
    if not items:
        data_files([])  # says what is missing
    opened: list[OpenedSource] = []
    for item in items:
        if isinstance(item, DataSource):
            opened += [open_source(item)] if item.split == "train" else []
        elif not str(item).strip():
            data_files(item)
        else:
            bare = DataSource.model_construct(
                path=str(item), weight=1.0, split="train", take=None, text_rows="file"
            )
            opened.append(open_source(bare))
    if not opened:
        raise InvalidInputError(
            "All data is held back for evaluation.", remedy="name data with `split: train`"
        )
    return opened


def _summary(tally: TokenTally, cut: _Cut, source: str, row_format: str) -> DataProfile:
    factor = tally.num_rows / tally.num_counted
    if not cut.num_trained_tokens and cut.num_truncated:
        raise InvalidInputError(
            f"{source}: every answer is cut off at {cut.seq_len} tokens, so nothing is trained.",
            remedy="raise --seq-len, or shorten the prompts",
        )
    if not cut.num_trained_tokens:
        raise InvalidInputError(
            f"{source}: no row has an answer, so nothing is trained.",
            remedy="give rows an answer: an assistant message, or text under `output` or "
            "`completion`",
        )
    num_rows = round(cut.num_made * factor)
    lengths = scaled(cut.rows_by_length, num_rows)
    total = round(cut.num_tokens * factor)
    counted = [
        tally.counter.description,
        f"{TOKENS_PER_MESSAGE} tokens per message for the template",
    ]
    if tally.num_counted < tally.num_rows:
        counted.append(f"{tally.num_counted:,} of {tally.num_rows:,} rows counted")
    return DataProfile(
        source=source,
        format=row_format,
        num_rows=num_rows,
        num_tokens=total,
        num_trained_tokens=max(round(cut.num_trained_tokens * factor), 1),
        mean_tokens=sum(length * rows for length, rows in lengths.items()) / num_rows,
        max_tokens=min(tally.longest, cut.seq_len),
        num_truncated=round(cut.num_truncated * factor),
        seq_len=cut.seq_len,
        tokenizer="; ".join(counted),
        is_exact=tally.counter.is_exact,
        num_counted_rows=cut.num_made,
        longest_row_tokens=tally.longest,
        num_lost_tokens=round(cut.num_lost_tokens * factor),
        **_describe_lengths(lengths, cut.seq_len),
    )
