"""Encode a dataset for training: tokens, loss masks, train/eval split, report; cached by
content.
"""

from __future__ import annotations

import errno
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.core.errors import InvalidInputError, SetupError, UserError
from tightfit.core.files import atomic_folder, cache_folder, remove_stale_partials, write_atomic
from tightfit.core.strategy import MAX_SEQ_LEN
from tightfit.core.training import DataSource, TrainOn
from tightfit.data.formats import RowFormat, to_messages
from tightfit.data.report import DataIssues, DataReport, SourceReport, SplitReport, describe_split
from tightfit.data.row_encoder import EncoderOptions, Example, RowEncoder
from tightfit.data.sources import OpenedSource, digest_sources, open_source, read_source
from tightfit.data.streams import ReadMeter, ReadProgress, Row, file_size
from tightfit.data.templates import choose_template
from tightfit.data.token_store import (
    SCHEMA_VERSION,
    StoreDescription,
    StoreFile,
    StoreWriter,
    TokenStore,
)
from tightfit.data.tokenizer import ChatTokenizer, load_tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# Which rows are trained on and which evaluated: by content, so that twins stay together.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEvalSplit:
    """Row indices, ascending."""

    train: NDArray[np.int64]
    eval: NDArray[np.int64]
    in_both: NDArray[np.int64]
    """Training rows whose text is also on the other side."""
    note: str | None = None


def split_train_eval(
    digests: NDArray[np.int64], is_held_out: NDArray[np.bool_], *, fraction: float, seed: int
) -> TrainEvalSplit:
    """Rows of evaluation sources, and a seeded share of the distinct training examples.

    The draw orders examples by a hash of their text and the seed: the same text
    falls on one side, and adding rows moves few others.
    """
    import numpy as np

    numbers = np.asarray(digests, dtype=np.uint64)
    held = is_held_out
    note = None
    if fraction > 0:
        distinct = np.unique(numbers[~held])
        num_drawn = min(max(round(fraction * len(distinct)), 1), len(distinct) - 1)
        if num_drawn > 0:
            drawn = distinct[np.argsort(_mix(distinct, seed), kind="stable")[:num_drawn]]
            held = held | np.isin(numbers, drawn)
        else:
            note = "There are too few distinct rows to hold any back for evaluation."
    train, evaluated = np.flatnonzero(~held), np.flatnonzero(held)
    in_both = train[np.isin(numbers[train], numbers[evaluated])] if len(evaluated) else train[:0]
    return TrainEvalSplit(train=train, eval=evaluated, in_both=in_both, note=note)


def find_duplicates(
    digests: NDArray[np.int64], files: NDArray[np.int64], numbers: NDArray[np.int64]
) -> list[tuple[int, int]]:
    """(row, first row with that text) for every example that repeats an earlier one."""
    import numpy as np

    if not len(digests):
        return []
    # Pieces of one example follow each other and share its place; only the first one counts.
    is_start = np.ones(len(digests), dtype=np.bool_)
    is_start[1:] = (np.diff(files) != 0) | (np.diff(numbers) != 0)
    starts = np.flatnonzero(is_start)
    _, first, inverse = np.unique(digests[starts], return_index=True, return_inverse=True)
    earliest = first[inverse]
    repeats = np.flatnonzero(earliest != np.arange(len(starts)))
    return [(int(starts[i]), int(starts[earliest[i]])) for i in repeats]


def _mix(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """SplitMix64's finalizer over value and seed (Steele, Lea, Flood, OOPSLA 2014)."""
    import numpy as np

    golden = 0x9E3779B97F4A7C15
    with np.errstate(over="ignore"):
        mixed = values ^ np.uint64((seed * golden + golden) % 2**64)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        final: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return final


# Encodings kept by content: found again, or written whole under a name of their own first.

REPORT_FILE = "report.json"
_STALE_SECONDS = 2 * 24 * 3600


def find_encoding(home: Path) -> tuple[TokenStore, TokenStore | None, DataReport] | None:
    """A finished encoding; None where there is none, or none that can be read whole."""
    try:
        report = DataReport.model_validate_json((home / REPORT_FILE).read_bytes())
        held_out = TokenStore(home / "eval") if report.eval is not None else None
        return TokenStore(home / "train"), held_out, report
    except (OSError, ValueError, UserError):
        return None


@contextmanager
def new_encoding(home: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `home` at the end, whole or not at all."""
    try:
        with atomic_folder(
            home, is_shared=True, is_whole=lambda path: find_encoding(path) is not None
        ) as folder:
            remove_stale_partials(home.parent, age_seconds=_STALE_SECONDS)
            yield folder
    except OSError as error:
        raise _cannot_write(home, error) from error


def _cannot_write(home: Path, fault: OSError) -> SetupError:
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return SetupError(
            f"The disk is full while writing encoded data under {home.parent}.",
            remedy="free some space, or export TIGHTFIT_CACHE=/a/folder/with/space",
        )
    return SetupError(
        f"Cannot write encoded data under {home.parent}: {fault.strerror or fault}.",
        remedy="export TIGHTFIT_CACHE=/a/folder/you/can/write",
    )


# One pass over all sources: rows in, token files and a report out.


class EncodingJob:
    """Reads, encodes, writes; then judges the whole."""

    def __init__(
        self, *, tokenizer: ChatTokenizer, options: EncoderOptions, folder: Path, meter: ReadMeter
    ) -> None:
        self.findings = DataIssues()
        self.writer = StoreWriter(folder)
        self._tokenizer = tokenizer
        self._options = options
        self._meter = meter
        self._encoder = RowEncoder(tokenizer, options, self.findings)
        self._files: list[StoreFile] = []
        self._opened: list[OpenedSource] = []
        self._formats: list[list[str]] = []
        self._num_read: Counter[int] = Counter()
        self._num_text_rows = 0

    def read(self, sources: Sequence[OpenedSource]) -> None:
        """Encode every row of every source to disk; faulty ones are noted and passed over."""
        for opened in sources:
            self._opened.append(opened)
            self._formats.append([])
            numbers: dict[tuple[str, str], int] = {}
            for row, row_format in read_source(opened, self._meter, self.findings.add_error):
                self._take(row, row_format, numbers)
                self._meter.add_row()
        for new in self._encoder.flush():
            self.writer.add(new)
        self._meter.finish()

    def _take(self, row: Row, row_format: RowFormat, numbers: dict[tuple[str, str], int]) -> None:
        source = len(self._opened) - 1
        self._num_read[source] += 1
        if row_format.name not in self._formats[source]:
            self._formats[source].append(row_format.name)
        try:
            messages = to_messages(row, row_format)
        except InvalidInputError as error:
            self.findings.add_error(error)
            return
        at = (str(row.path), row.unit)
        if at not in numbers:
            numbers[at] = len(self._files)
            self._files.append(StoreFile(path=at[0], unit=at[1], source=source))
        is_text = row_format.name == "text"
        self._num_text_rows += is_text
        example = Example(messages, is_text, row.place, numbers[at], row.number)
        for new in self._encoder.add(example):
            self.writer.add(new)

    def finish(self, key: str, *, eval_fraction: float, seed: int) -> DataReport:
        """Divide the rows, write both stores, refuse what is pointless to train on."""
        import numpy as np

        self.writer.close()
        self._refuse_nothing()
        table = self.writer.table
        held_out = [item.source.split == "eval" for item in self._opened]
        source_ids = self._source_ids()
        sides = split_train_eval(
            table.column("digests"),
            np.array(held_out)[source_ids],
            fraction=eval_fraction,
            seed=seed,
        )
        if not len(sides.train):
            raise _nothing(self.findings, self._options)
        self._refuse_untrained(sides)
        self._note_repeats(sides)
        pad, pad_note = self._tokenizer.choose_pad(
            (*self._encoder.stop_ids, *self._tokenizer.stop_ids)
        )
        train = self._write_side("train", sides.train, key, pad)
        evaluated = self._write_side("eval", sides.eval, key, pad) if len(sides.eval) else None
        return self._report(key, pad, train, evaluated, [pad_note, sides.note])

    def _source_ids(self) -> NDArray[np.int64]:
        import numpy as np

        by_file = np.array([file.source for file in self._files], dtype=np.int64)
        ids: NDArray[np.int64] = by_file[self.writer.table.column("files")]
        return ids

    def _refuse_nothing(self) -> None:
        if not self.writer.num_tokens or not any(self.writer.table.num_trained):
            raise _nothing(self.findings, self._options)

    def _refuse_untrained(self, sides: TrainEvalSplit) -> None:
        table = self.writer.table
        if not table.column("num_trained")[sides.train].any():
            raise _nothing(self.findings, self._options)
        is_text = self._num_text_rows == sum(self._num_read.values())
        if self._options.train_on is TrainOn.ALL or is_text:
            return
        if not table.column("has_stop")[sides.train].any():
            raise _no_stop(self.findings, self._tokenizer, self._options)
        if (table.column("num_trained")[sides.train] <= 1).all():
            raise _only_stops()

    def _note_repeats(self, sides: TrainEvalSplit) -> None:
        """Duplicates are examples, not the pieces or turns that one example was cut into."""
        table = self.writer.table
        again = find_duplicates(
            table.column("digests"), table.column("files"), table.column("numbers")
        )
        for row, first in again:
            self.findings.add("duplicate", self._place(row), f"same as {self._place(first)}")
        for row in sides.in_both:
            self.findings.add("in-both", self._place(int(row)))

    def _place(self, row: int) -> str:
        file = self._files[self.writer.table.files[row]]
        return f"{file.path} {file.unit} {self.writer.table.numbers[row]}"

    def _write_side(self, name: str, rows: NDArray[np.int64], key: str, pad: int) -> SplitReport:
        table = self.writer.table
        lengths = table.column("lengths")[rows]
        num_trained = table.column("num_trained")[rows]
        num_lost = table.column("num_lost")[rows]
        with_stop = int(table.column("has_stop")[rows].sum())
        weights = tuple(item.source.weight if name == "train" else 1.0 for item in self._opened)
        formats = dict.fromkeys(found for part in self._formats for found in part)
        description = StoreDescription(
            key=key,
            num_rows=len(rows),
            num_tokens=int(lengths.sum()),
            num_trained_tokens=int(num_trained.sum()),
            seq_len=self._options.seq_len,
            template=self._template_name(),
            pad_token_id=pad,
            stop_token_ids=self._encoder.stop_ids,
            num_rows_with_stop=with_stop,
            is_encoder_decoder=self._options.is_encoder_decoder,
            format="+".join(formats),
            tokenizer=str(self._tokenizer.folder),
            sources=tuple(item.name for item in self._opened),
            source_of_row_weights=weights,
            files=tuple(self._files),
            num_truncated=int((num_lost > 0).sum()),
            num_lost_tokens=int(num_lost.sum()),
            longest_row_tokens=self._encoder.counts.longest_row_tokens,
            num_blob_tokens=self.writer.num_tokens,
        )
        self.writer.write_store(name, rows, description)
        return describe_split(lengths, num_trained, with_stop, self._options.seq_len)

    def _template_name(self) -> str:
        is_text = self._num_text_rows == sum(self._num_read.values())
        return "none" if is_text or not self._options.template else self._options.template.name

    def _report(
        self,
        key: str,
        pad: int,
        train: SplitReport,
        evaluated: SplitReport | None,
        notes: list[str | None],
    ) -> DataReport:
        table, count = self.writer.table, self.findings.count
        name = self._template_name()
        template = self._options.template
        reported = [*self._tokenizer.notes, *notes, *self._notes(name)]
        return DataReport(
            key=key,
            seq_len=self._options.seq_len,
            train_on=self._options.train_on.value,
            template=name,
            template_text=template.text if template and name != "none" else "",
            tokenizer=str(self._tokenizer.folder),
            pad_token=self._tokenizer.token_name(pad),
            pad_token_id=pad,
            stop_tokens=tuple(self._tokenizer.token_name(i) for i in self._encoder.stop_ids),
            sources=self._source_reports(),
            train=train,
            eval=evaluated,
            num_read=sum(self._num_read.values()),
            longest_row_tokens=self._encoder.counts.longest_row_tokens,
            num_truncated=int((table.column("num_lost") > 0).sum()),
            num_lost_tokens=int(table.column("num_lost").sum()),
            num_dropped=sum(
                count(kind) for kind in ("unreadable", "refused", "empty-answer", "answer-cut-off")
            ),
            num_duplicates=count("duplicate"),
            num_empty_answers=count("empty-answer"),
            findings=self.findings.listed(),
            notes=tuple(note for note in reported if note),
        )

    def _source_reports(self) -> tuple[SourceReport, ...]:
        import numpy as np

        table = self.writer.table
        ids = self._source_ids()
        size = len(self._opened)
        rows = np.bincount(ids, minlength=size)
        tokens = np.bincount(ids, weights=table.column("lengths"), minlength=size)
        trained = np.bincount(ids, weights=table.column("num_trained"), minlength=size)
        return tuple(
            SourceReport(
                name=item.name,
                split=item.source.split,
                weight=item.source.weight,
                files=tuple(str(path) for path in item.files),
                format="+".join(self._formats[at]),
                num_rows=self._num_read[at],
                num_encoded_rows=int(rows[at]),
                num_tokens=int(tokens[at]),
                num_trained_tokens=int(trained[at]),
            )
            for at, item in enumerate(self._opened)
        )

    def _notes(self, template_name: str) -> list[str]:
        counts, reported = self._encoder.counts, []
        template = self._options.template
        if template is not None and template.note and template_name != "none":
            reported.append(template.note)
        if counts.num_cut_texts:
            reported.append(
                f"{counts.num_cut_texts:,} texts longer than {self._options.seq_len} tokens were "
                "cut into several rows."
            )
        if counts.num_texts_with_control:
            reported.append(
                f"{counts.num_texts_with_control:,} plain texts spell control tokens, which count "
                "as such there."
            )
        if counts.num_straddling_tokens:
            reported.append(
                f"{counts.num_straddling_tokens:,} tokens lie across the border between prompt and "
                "answer; they are not trained."
            )
        return reported + self._render_notes()

    def _render_notes(self) -> list[str]:
        if self._encoder.renderer is None:
            return []
        counts, reported = self._encoder.renderer.counts, []
        template = self._options.template
        if counts.num_folded_systems:
            reported.append(
                f"The template has no system role: in {counts.num_folded_systems:,} rows the "
                "system text was put before the first user message."
            )
        if counts.num_split:
            reported.append(
                f"The template writes earlier turns differently once more follow: "
                f"{counts.num_split:,} conversations became one row per answer, each as the model "
                "will see it."
            )
        if counts.num_appended_stops:
            reported.append(
                f"The template ends answers without a token that this tokenizer knows as one: "
                f"`{self._tokenizer.names.get('eos_token', '')}` was added to "
                f"{counts.num_appended_stops:,} rows."
            )
        if counts.num_unprompted:
            reported.append(
                f"{counts.num_unprompted:,} conversations begin with an answer, which the template "
                "cannot ask for; that first answer is not trained."
            )
        if counts.num_lost_texts:
            reported.append(
                f"The template leaves out or rewrites text of {counts.num_lost_texts:,} rows "
                "(system or user messages)."
            )
        if template is not None and "strftime_now" in template.text:
            reported.append("The template writes the date of the encoding into every row.")
        unknown = sorted(counts.stop_ids - set(self._tokenizer.stop_ids))
        if unknown:
            named = ", ".join(f"`{self._tokenizer.token_name(i)}`" for i in unknown)
            reported.append(
                f"Answers end with {named}, which the model's generation config does not name "
                "as a stop; generate with it as a stop token."
            )
        return reported


def _nothing(findings: DataIssues, options: EncoderOptions) -> InvalidInputError:
    findings.refuse()
    if findings.count("answer-cut-off"):
        return InvalidInputError(
            f"Every answer is cut off at {options.seq_len} tokens, so nothing is trained.",
            remedy="raise --seq-len, or shorten the prompts",
        )
    return InvalidInputError(
        "No row has an answer, so nothing is trained.",
        remedy="give rows an answer: an assistant message, or text under `output` or `completion`",
    )


def _no_stop(
    findings: DataIssues, tokenizer: ChatTokenizer, options: EncoderOptions
) -> InvalidInputError:
    if findings.count("truncated"):
        return InvalidInputError(
            f"Every answer is cut at {options.seq_len} tokens before its stop token, so the model "
            "would never learn to stop.",
            remedy="raise --seq-len, or shorten the rows",
        )
    return InvalidInputError(
        f"No answer ends with a stop token: {tokenizer.folder} names no `eos_token`.",
        remedy="name it in tokenizer_config.json, or use a template that ends answers with one",
    )


def _only_stops() -> InvalidInputError:
    """An answer that is not empty has a token of its own beside the one that ends it."""
    return InvalidInputError(
        "The template writes none of the answers: only stop tokens would be trained.",
        remedy="correct the template so that it writes assistant messages, or name another: "
        "--template chatml",
    )


ENCODER_VERSION = 1
"""Raised whenever the same data would be encoded otherwise, so that old caches are not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeRequest:
    """What to encode and how. Equal requests over equal files share one encoding."""

    sources: Sequence[DataSource]
    model_folder: Path
    """Holds tokenizer.json, and the chat template if the model has one."""
    template: str | None = None
    train_on: TrainOn = TrainOn.ANSWERS
    seq_len: int
    eval_fraction: float = 0.0
    seed: int = 0
    is_encoder_decoder: bool | None = None
    """None: as the model's config says."""
    cache: Path | None = None
    """None: `core.cache.cache_folder()`."""
    skip_faulty: bool = False
    """Leave out rows that cannot be read instead of refusing; the report lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDataset:
    """Rows to train on, rows to evaluate on, and what is to be said about them."""

    train: TokenStore
    eval: TokenStore | None
    report: DataReport
    is_cached: bool = False
    """Found, not made."""


def encode_dataset(
    request: EncodeRequest, *, watch: Callable[[ReadProgress], None] | None = None
) -> EncodedDataset:
    """Tokens and masks of all sources; found in the cache or made now.

    Raises one error that lists every row that cannot be trained on, and refuses
    data that would train nothing, or that never trains a stop token.
    """
    _check(request)
    tokenizer = load_tokenizer(request.model_folder)
    opened = [open_source(source) for source in request.sources]
    options = _options(request, tokenizer)
    key = _key(request, opened, tokenizer, options)
    home = (request.cache or cache_folder()) / "tokens" / key
    if found := find_encoding(home):
        return EncodedDataset(train=found[0], eval=found[1], report=found[2], is_cached=True)
    with new_encoding(home) as folder:
        total = sum(file_size(path) for item in opened for path in item.files)
        job = EncodingJob(
            tokenizer=tokenizer,
            options=options,
            folder=folder,
            meter=ReadMeter(watch, total_bytes=total),
        )
        try:
            job.read(opened)
            if not request.skip_faulty:
                job.findings.refuse()
            report = job.finish(key, eval_fraction=request.eval_fraction, seed=request.seed)
        finally:
            job.writer.abandon()
        write_atomic(folder / REPORT_FILE, report.model_dump_json(indent=2) + "\n")
    made = find_encoding(home)
    if made is None:
        raise UserError(
            f"The encoded data in {home} vanished while it was written.",
            remedy="run the same command again, or export TIGHTFIT_CACHE=/another/folder",
        )
    return EncodedDataset(train=made[0], eval=made[1], report=made[2])


def _check(request: EncodeRequest) -> None:
    if not 0 < request.seq_len <= MAX_SEQ_LEN:
        raise InvalidInputError(
            f"A sequence length of {request.seq_len} makes no sense.",
            remedy=f"choose one from 1 to {MAX_SEQ_LEN:,}; 2048 is a common start",
        )
    if not any(source.split == "train" for source in request.sources):
        raise InvalidInputError(
            "No data to train on was named.", remedy="name a data file: --data train.jsonl"
        )


def _options(request: EncodeRequest, tokenizer: ChatTokenizer) -> EncoderOptions:
    is_pair = request.is_encoder_decoder
    is_pair = tokenizer.is_encoder_decoder if is_pair is None else is_pair
    # An encoder-decoder learns question to answer; a chat template only where one is named.
    is_bare = is_pair and request.template is None
    return EncoderOptions(
        template=None if is_bare else choose_template(request.template, tokenizer),
        train_on=request.train_on,
        seq_len=request.seq_len,
        is_encoder_decoder=is_pair,
    )


def _key(
    request: EncodeRequest,
    opened: Sequence[OpenedSource],
    tokenizer: ChatTokenizer,
    options: EncoderOptions,
) -> str:
    parts = (
        f"{ENCODER_VERSION}.{SCHEMA_VERSION}",
        digest_sources(opened),
        tokenizer.digest,
        str(tokenizer.folder.resolve()),
        options.template.name if options.template else "",
        options.template.text if options.template else "",
        options.train_on.value,
        str(options.seq_len),
        str(options.is_encoder_decoder),
        repr(float(request.eval_fraction)),
        str(request.seed if request.eval_fraction else 0),
        str(request.skip_faulty),
    )
    return hashlib.blake2b("\x1e".join(parts).encode(), digest_size=12).hexdigest()
