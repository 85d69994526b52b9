"""One pass over all sources: rows in, token files and a report out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.core.errors import InvalidInputError
from tightfit.core.training import TrainOn
from tightfit.data.findings import Findings
from tightfit.data.formats import RowFormat, to_messages
from tightfit.data.meter import Meter
from tightfit.data.report import DataReport, SourceReport, SplitReport, describe_split
from tightfit.data.row import Row
from tightfit.data.row_encoder import EncoderOptions, Example, RowEncoder
from tightfit.data.sides import Sides, mark_first, split_sides
from tightfit.data.sources import OpenedSource, read_source
from tightfit.data.store_writer import StoreWriter
from tightfit.data.token_store import StoreDescription, StoreFile
from tightfit.data.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class EncodingJob:
    """Reads, encodes, writes; then judges the whole."""

    def __init__(
        self, *, tokenizer: ChatTokenizer, options: EncoderOptions, folder: Path, meter: Meter
    ) -> None:
        self.findings = Findings()
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
        except InvalidInputError as fault:
            self.findings.add_error(fault)
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
        sides = split_sides(
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

    def _refuse_untrained(self, sides: Sides) -> None:
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

    def _note_repeats(self, sides: Sides) -> None:
        """Duplicates are examples, not the pieces or turns that one example was cut into."""
        table = self.writer.table
        again = mark_first(table.column("digests"), table.column("files"), table.column("numbers"))
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
        told = [*self._tokenizer.notes, *notes, *self._notes(name)]
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
            notes=tuple(note for note in told if note),
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
        counts, told = self._encoder.counts, []
        template = self._options.template
        if template is not None and template.note and template_name != "none":
            told.append(template.note)
        if counts.num_cut_texts:
            told.append(
                f"{counts.num_cut_texts:,} texts longer than {self._options.seq_len} tokens were "
                "cut into several rows."
            )
        if counts.num_texts_with_control:
            told.append(
                f"{counts.num_texts_with_control:,} plain texts spell control tokens, which count "
                "as such there."
            )
        if counts.num_straddling_tokens:
            told.append(
                f"{counts.num_straddling_tokens:,} tokens lie across the border between prompt and "
                "answer; they are not trained."
            )
        return told + self._render_notes()

    def _render_notes(self) -> list[str]:
        if self._encoder.renderer is None:
            return []
        counts, told = self._encoder.renderer.counts, []
        template = self._options.template
        if counts.num_folded_systems:
            told.append(
                f"The template has no system role: in {counts.num_folded_systems:,} rows the "
                "system text was put before the first user message."
            )
        if counts.num_split:
            told.append(
                f"The template writes earlier turns differently once more follow: "
                f"{counts.num_split:,} conversations became one row per answer, each as the model "
                "will see it."
            )
        if counts.num_appended_stops:
            told.append(
                f"The template ends answers without a token that this tokenizer knows as one: "
                f"`{self._tokenizer.names.get('eos_token', '')}` was added to "
                f"{counts.num_appended_stops:,} rows."
            )
        if counts.num_unprompted:
            told.append(
                f"{counts.num_unprompted:,} conversations begin with an answer, which the template "
                "cannot ask for; that first answer is not trained."
            )
        if counts.num_lost_texts:
            told.append(
                f"The template leaves out or rewrites text of {counts.num_lost_texts:,} rows "
                "(system or user messages)."
            )
        if template is not None and "strftime_now" in template.text:
            told.append("The template writes the date of the encoding into every row.")
        unknown = sorted(counts.stop_ids - set(self._tokenizer.stop_ids))
        if unknown:
            named = ", ".join(f"`{self._tokenizer.token_name(i)}`" for i in unknown)
            told.append(
                f"Answers end with {named}, which the model's generation config does not name "
                "as a stop; generate with it as a stop token."
            )
        return told


def _nothing(findings: Findings, options: EncoderOptions) -> InvalidInputError:
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
    findings: Findings, tokenizer: ChatTokenizer, options: EncoderOptions
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
