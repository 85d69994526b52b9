"""Encode a dataset for training: tokens, loss masks, train/eval split, report; cached by
content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.core.errors import InvalidInputError, SetupError, UserError
from tightfit.core.files import atomic_folder, cache_folder, describe_write_error, write_atomic
from tightfit.core.objectives import ExampleKind, Objective
from tightfit.core.reading import read_bytes
from tightfit.core.settings import MAX_SEQ_LEN, TrainOn
from tightfit.core.strategy import DataSource
from tightfit.data.encode_preferences import PreferenceEncoder
from tightfit.data.encode_rows import EncoderOptions, RowEncoder
from tightfit.data.formats import RowFormat
from tightfit.data.packing import percentiles
from tightfit.data.readers import ReadMeter, ReadProgress, Row, file_size
from tightfit.data.report import (
    DataIssues,
    DataReport,
    SourceReport,
    SplitReport,
    describe_split,
)
from tightfit.data.sources import OpenedSource, digest_sources, open_source, read_source
from tightfit.data.templates import (
    ChatTemplate,
    choose_template,
)
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


def find_encoding(home: Path) -> EncodedDataset | None:
    """A finished encoding; None where there is none, or none that can be read whole."""
    try:
        report = DataReport.model_validate_json(read_bytes(home / REPORT_FILE))
        held_out = TokenStore(home / "eval") if report.eval is not None else None
        return EncodedDataset(
            train=TokenStore(home / "train"), eval=held_out, report=report, is_cached=True
        )
    except (OSError, ValueError, UserError):
        return None


@contextmanager
def new_encoding(home: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `home` at the end, whole or not at all."""
    try:
        with atomic_folder(
            home, is_shared=True, is_whole=lambda path: find_encoding(path) is not None
        ) as folder:
            yield folder
    except OSError as error:
        raise SetupError(
            f"Cannot write encoded data under {home.parent}: {describe_write_error(error, home)}.",
            remedy="free some space, or export TIGHTFIT_CACHE=/a/folder/with/space",
        ) from error


# One pass over all sources: rows in, token files and a report out.

NOTE_TEXTS = {
    "cut-text": "{:,} texts longer than {seq_len} tokens were cut into several rows.",
    "text-with-control": "{:,} plain texts spell control tokens, which count as such there.",
    "straddling-token": "{:,} tokens lie across the border between prompt and answer; they are not "
    "trained.",
    "folded-system": "The template has no system role: in {:,} rows the system text was put before "
    "the first user message.",
    "short-ids": "The template takes only ids of nine letters and digits: those of tool calls were "
    "replaced in {:,} rows.",
    "tools": "Tools are read and not trained; rows that list some: {:,}.",
    "calls": "Tool calls are trained ({:,}); the results of tools are read and not trained.",
    "split": "The template writes earlier turns differently once more follow: {:,} conversations "
    "became one row per answer, each as the model will see it.",
    "appended-stop": "The template ends answers without a token that this tokenizer knows as one: "
    "`{eos}` was added to {:,} rows.",
    "unprompted": "{:,} conversations begin with an answer, which the template cannot ask for; "
    "that first answer is not trained.",
    "lost-text": "The template leaves out or rewrites text of {:,} rows (system or user messages).",
}
"""What encoding and rendering did to rows beyond writing them down."""


class EncodingJob:
    """Reads, encodes, writes; then judges the whole."""

    def __init__(
        self,
        *,
        tokenizer: ChatTokenizer,
        options: EncoderOptions,
        sources: Sequence[OpenedSource],
        folder: Path,
        meter: ReadMeter,
    ) -> None:
        self.findings = DataIssues()
        self._tokenizer = tokenizer
        self._options = options
        self._sources = sources
        self._meter = meter
        self._encoder = _make_encoder(tokenizer, options, self.findings)
        self.writer = StoreWriter(folder)  # last: its files are open from here on
        self._files: list[StoreFile] = []
        self._formats: list[dict[str, None]] = [{} for _ in sources]
        """By source, in order of appearance."""
        self._num_read = [0] * len(sources)
        self._num_unreadable = [0] * len(sources)
        """Lines that are no row; a row that is refused later was read."""
        self._num_text_rows = 0

    @property
    def _is_text(self) -> bool:
        """All rows are plain text, which no template wraps."""
        return self._num_text_rows == sum(self._num_read)

    @property
    def _template(self) -> ChatTemplate | None:
        return None if self._is_text else self._options.template

    def read(self) -> None:
        """Encode every row of every source to disk; invalid ones are noted and passed over."""
        for number, source in enumerate(self._sources):
            files: dict[tuple[str, str], int] = {}

            def note_unreadable(error: UserError, number: int = number) -> None:
                self._num_unreadable[number] += 1
                self.findings.add_error(error)

            rows = read_source(source, self._meter, note_unreadable, example=self._options.example)
            for row, row_format in rows:
                self._take(number, row, row_format, files)
                self._meter.add_row()
        for new in self._encoder.flush():
            self.writer.add(new)
        self._meter.finish()

    def _take(
        self, source: int, row: Row, row_format: RowFormat, files: dict[tuple[str, str], int]
    ) -> None:
        self._num_read[source] += 1
        self._formats[source].setdefault(row_format.name)
        try:
            examples = self._encoder.read(row, row_format)
        except InvalidInputError as error:
            self.findings.add_error(error)
            return
        at = (str(row.path), row.unit)
        if at not in files:
            files[at] = len(self._files)
            self._files.append(StoreFile(path=at[0], unit=at[1], source=source))
        self._num_text_rows += row_format.name == "text"
        for example in examples:
            for new in self._encoder.add(example._replace(file=files[at])):
                self.writer.add(new)

    def finish(self, key: str, *, eval_fraction: float, seed: int) -> DataReport:
        """Divide the rows, write both stores, refuse what is pointless to train on."""
        import numpy as np

        self.writer.close()
        writer, tokenizer = self.writer, self._tokenizer
        num_trained = writer.column("num_trained")
        if not num_trained.any():
            raise _nothing(self.findings, self._options)
        file_sources = np.array([file.source for file in self._files], dtype=np.int64)
        source_ids = file_sources[writer.column("files")]
        is_eval = np.array([item.source.split == "eval" for item in self._sources])
        sides = split_train_eval(
            writer.column("digests"), is_eval[source_ids], fraction=eval_fraction, seed=seed
        )
        if not num_trained[sides.train].any():
            raise _nothing(self.findings, self._options)
        if self._options.example is ExampleKind.LABELLED and len(sides.train) < 2:
            raise InvalidInputError(
                "KTO compares answers of different rows, and there is only one.",
                remedy="add rows to the data",
            )
        if self._options.train_on is not TrainOn.ALL and not self._is_text:
            if not writer.column("has_stop")[sides.train].any():
                raise _no_stop(self.findings, tokenizer, self._options)
            # An answer that is not empty has a token of its own beside the one that ends it.
            if (num_trained[sides.train] <= 1).all():
                raise InvalidInputError(
                    "The template writes none of the answers: only stop tokens would be trained.",
                    remedy="correct the template so that it writes assistant messages, or name "
                    "another: --template chatml",
                )
        self._note_repeats(sides)
        pad, pad_note = tokenizer.choose_pad((*self._encoder.stop_ids, *tokenizer.stop_ids))
        train = self._write_side("train", sides.train, key, pad)
        held_out = self._write_side("eval", sides.eval, key, pad) if len(sides.eval) else None
        lengths = self._encoder.lengths
        template, count, num_lost = self._template, self.findings.count, writer.column("num_lost")
        notes = (*tokenizer.notes, pad_note, sides.note, *self._notes())
        dropped = ("unreadable", "refused", "empty-answer", "answer-cut-off", "cut-alike")
        return DataReport(
            key=key,
            seq_len=self._options.seq_len,
            train_on=self._options.train_on.value,
            template=template.name if template else "none",
            template_text=template.text if template else "",
            tokenizer=str(tokenizer.folder),
            pad_token=tokenizer.token_name(pad),
            pad_token_id=pad,
            stop_tokens=tuple(tokenizer.token_name(i) for i in self._encoder.stop_ids),
            sources=self._source_reports(source_ids),
            train=train,
            eval=held_out,
            num_read=sum(self._num_read) + sum(self._num_unreadable),
            longest_row_tokens=self._encoder.longest_row_tokens,
            num_truncated=int((num_lost > 0).sum()),
            num_lost_tokens=int(num_lost.sum()),
            num_dropped=sum(map(count, dropped)),
            num_duplicates=count("duplicate"),
            num_empty_answers=count("empty-answer"),
            whole_percentiles=percentiles(lengths.rows) if lengths.rows else {},
            cuts=lengths.list_cuts(),
            findings=self.findings.listed(),
            notes=tuple(note for note in notes if note),
        )

    def _note_repeats(self, sides: TrainEvalSplit) -> None:
        """Duplicates are examples, not the pieces or turns that one example was cut into."""
        writer = self.writer

        def place(row: int) -> str:
            file = self._files[writer.columns["files"][row]]
            return f"{file.path} {file.unit} {writer.columns['numbers'][row]}"

        columns = (writer.column(name) for name in ("digests", "files", "numbers"))
        for row, first in find_duplicates(*columns):
            self.findings.add("duplicate", place(row), f"same as {place(first)}")
        for row in sides.in_both:
            self.findings.add("in-both", place(int(row)))

    def _write_side(self, name: str, rows: NDArray[np.int64], key: str, pad: int) -> SplitReport:
        writer = self.writer
        lengths = writer.column("lengths")[rows]
        num_trained = writer.column("num_trained")[rows]
        num_lost = writer.column("num_lost")[rows]
        with_stop = int(writer.column("has_stop")[rows].sum())
        description = StoreDescription(
            key=key,
            num_rows=len(rows),
            num_tokens=int(lengths.sum()),
            num_trained_tokens=int(num_trained.sum()),
            seq_len=self._options.seq_len,
            template=self._template.name if self._template else "none",
            pad_token_id=pad,
            stop_token_ids=self._encoder.stop_ids,
            num_rows_with_stop=with_stop,
            is_encoder_decoder=self._options.is_encoder_decoder,
            format="+".join(dict.fromkeys(chain(*self._formats))),
            tokenizer=str(self._tokenizer.folder),
            sources=tuple(item.name for item in self._sources),
            source_of_row_weights=tuple(
                item.source.weight if name == "train" else 1.0 for item in self._sources
            ),
            files=tuple(self._files),
            num_truncated=int((num_lost > 0).sum()),
            num_lost_tokens=int(num_lost.sum()),
            longest_row_tokens=self._encoder.longest_row_tokens,
            num_blob_tokens=self.writer.num_tokens,
            example=self._options.example,
        )
        self.writer.write_store(name, rows, description)
        size = description.rows_per_example
        return describe_split(lengths, num_trained, with_stop, self._options.seq_len, size=size)

    def _source_reports(self, source_ids: NDArray[np.int64]) -> tuple[SourceReport, ...]:
        import numpy as np

        writer, size = self.writer, len(self._sources)
        rows = np.bincount(source_ids, minlength=size)
        tokens = np.bincount(source_ids, weights=writer.column("lengths"), minlength=size)
        trained = np.bincount(source_ids, weights=writer.column("num_trained"), minlength=size)
        return tuple(
            SourceReport(
                name=item.name,
                split=item.source.split,
                weight=item.source.weight,
                files=tuple(str(path) for path in item.files),
                format="+".join(self._formats[at]),
                num_rows=self._num_read[at] + self._num_unreadable[at],
                num_encoded_rows=int(rows[at]),
                num_tokens=int(tokens[at]),
                num_trained_tokens=int(trained[at]),
            )
            for at, item in enumerate(self._sources)
        )

    def _notes(self) -> Iterator[str]:
        encoder, template = self._encoder, self._options.template
        if self._template is not None and self._template.note:
            yield self._template.note
        eos = self._tokenizer.names.get("eos_token", "")
        for kind, text in NOTE_TEXTS.items():
            if number := encoder.counts[kind]:
                yield text.format(number, seq_len=self._options.seq_len, eos=eos)
        if encoder.renderer is None or template is None:
            return
        if "strftime_now" in template.text:
            yield "The template writes the date of the encoding into every row."
        if unknown := sorted(encoder.renderer.stop_ids - set(self._tokenizer.stop_ids)):
            named = ", ".join(f"`{self._tokenizer.token_name(i)}`" for i in unknown)
            yield (
                f"Answers end with {named}, which the model's generation config does not name "
                "as a stop; generate with it as a stop token."
            )


def _make_encoder(
    tokenizer: ChatTokenizer, options: EncoderOptions, findings: DataIssues
) -> RowEncoder:
    kind = RowEncoder if options.example is ExampleKind.ANSWER else PreferenceEncoder
    return kind(tokenizer, options, findings)


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


ENCODER_VERSION = 6
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
    objective: Objective = Objective.SFT
    skip_invalid: bool = False
    """Leave out rows that cannot be read instead of refusing; the report lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDataset:
    """Rows to train on, rows to evaluate on, and the report on them."""

    train: TokenStore
    eval: TokenStore | None
    report: DataReport
    is_cached: bool = False
    """Found, not made."""


def encode_dataset(
    request: EncodeRequest, *, progress: Callable[[ReadProgress], None] | None = None
) -> EncodedDataset:
    """Tokens and masks of all sources; found in the cache or made now.

    Raises one error that lists every row that cannot be trained on, and refuses
    data that would train nothing, or that never trains a stop token.
    """
    if not 0 < request.seq_len <= MAX_SEQ_LEN:
        raise InvalidInputError(
            f"A sequence length of {request.seq_len} makes no sense.",
            remedy=f"choose one from 1 to {MAX_SEQ_LEN:,}; 2048 is a common start",
        )
    if not any(source.split == "train" for source in request.sources):
        raise InvalidInputError(
            "No data to train on was named.", remedy="name a data file: --data train.jsonl"
        )
    tokenizer = load_tokenizer(request.model_folder)
    opened = [open_source(source) for source in request.sources]
    is_pair = request.is_encoder_decoder
    is_pair = tokenizer.is_encoder_decoder if is_pair is None else is_pair
    # An encoder-decoder learns question to answer; a chat template only where one is named.
    is_bare = is_pair and request.template is None
    options = EncoderOptions(
        template=None if is_bare else choose_template(request.template, tokenizer),
        train_on=request.train_on,
        seq_len=request.seq_len,
        is_encoder_decoder=is_pair,
        example=request.objective.record.example,
    )
    _check_objective(request, options)
    key = _key(request, opened, tokenizer, options)
    home = (request.cache or cache_folder()) / "tokens" / key
    if found := find_encoding(home):
        return found
    with new_encoding(home) as folder:
        total = sum(file_size(path) for item in opened for path in item.files)
        job = EncodingJob(
            tokenizer=tokenizer,
            options=options,
            sources=opened,
            folder=folder,
            meter=ReadMeter(progress, total_bytes=total),
        )
        try:
            job.read()
            if not request.skip_invalid:
                job.findings.refuse()
            report = job.finish(key, eval_fraction=request.eval_fraction, seed=request.seed)
        finally:
            job.writer.close()
        write_atomic(folder / REPORT_FILE, report.model_dump_json(indent=2) + "\n")
    made = find_encoding(home)
    if made is None:
        raise UserError(
            f"The encoded data in {home} vanished while it was written.",
            remedy="run the same command again, or export TIGHTFIT_CACHE=/another/folder",
        )
    return replace(made, is_cached=False)


def _check_objective(request: EncodeRequest, options: EncoderOptions) -> None:
    if options.example is ExampleKind.ANSWER:
        return
    name = request.objective.value
    if options.is_encoder_decoder:
        raise InvalidInputError(
            f"{request.model_folder} is an encoder-decoder model; {name} is for decoders.",
            remedy="--objective sft, or another model",
        )
    if request.train_on is TrainOn.ALL:
        raise InvalidInputError(
            f"`train_on: all` and {name}: preferences are between answers.",
            remedy="leave `train_on` out",
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
        str(request.skip_invalid),
        *(() if options.example is ExampleKind.ANSWER else (options.example.value,)),
    )
    return hashlib.blake2b("\x1e".join(parts).encode(), digest_size=12).hexdigest()
