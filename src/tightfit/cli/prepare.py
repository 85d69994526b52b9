"""`tightfit prepare`: encode data as `train` does, and show lengths, batches, errors and loss
masks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tightfit.cli.charts.lengths import Bin, choose_step, make_bins
from tightfit.cli.charts.memory import check_chart_path
from tightfit.cli.error_report import report_error
from tightfit.cli.flags.training import PrepareFlags
from tightfit.cli.render.data import ViewedRow, render_findings, render_legend, render_row
from tightfit.cli.terminal.output import show_json, supports_unicode
from tightfit.cli.terminal.screen import (
    Column,
    heading,
    make_console,
    make_table,
    plain,
    render_bar,
    render_gauge,
    render_notes,
    render_pairs,
    show,
)
from tightfit.cli.training.prepare import (
    NextStep,
    PrepareJob,
    encode_for,
    find_next,
    list_row_errors,
    lists_rows,
    make_rows_error,
    read_prepare_job,
)
from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError
from tightfit.core.text import count_of, sanitize
from tightfit.core.units import render_count
from tightfit.data.encode import EncodedDataset
from tightfit.data.packing import count_packed_rows, estimate_padding_waste
from tightfit.data.report import DataReport, SourceReport
from tightfit.data.token_store import TokenStore, epoch_rows

MICRO_BATCHES = (2, 4, 8, 16, 32)
"""What padding is told for; alone, a row is not padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """One epoch of training rows in sequences, packed and padded."""

    num_rows: int
    num_tokens: int
    num_packed_rows: int | None
    """None: an encoder-decoder's rows are not packed."""
    packed_fraction: float | None
    """Share of slots that hold tokens."""
    padding_waste_fraction: dict[int, float]
    """By micro-batch: share of slots that padding fills."""


def prepare(flags: PrepareFlags) -> None:
    """Encode, show, draw."""
    if flags.show is not None and flags.row is not None:
        raise UsageError(
            "--show picks rows and --row names one.", remedy=f"keep one: --row {flags.row}"
        )
    if flags.chart is not None:
        check_chart_path(flags.chart)
    job = read_prepare_job(flags)
    try:
        encoded = _encode(job, skip_faulty=flags.skip_faulty)
    except InvalidInputError as fault:
        if not lists_rows(fault):
            raise
        _refuse(flags, job, fault)
        return
    rows = _find_rows(flags, encoded)
    batching = measure_batches(encoded, seed=job.training.seed)
    if flags.as_json:
        _draw(flags, job, encoded)
        show_json(_describe(flags, job, encoded, batching, rows))
        return

    show_prepared(
        job,
        encoded,
        batching,
        rows=rows,
        is_whole=flags.row is not None,
        next_step=None if flags.skip_faulty else find_next(flags, job),
    )
    _draw(flags, job, encoded)


def _encode(job: PrepareJob, *, skip_faulty: bool) -> EncodedDataset:
    """The very encoding that `train` asks for; less its faulty rows where that is wished."""
    return encode_for(
        job.training, model_folder=job.folder, seq_len=job.seq_len, skip_faulty=skip_faulty
    )


def _refuse(flags: PrepareFlags, job: PrepareJob, refusal: InvalidInputError) -> None:
    """Every faulty row: the first ones for a person, all of them in JSON."""
    faults = list_row_errors(refusal, job.training.data)
    counted = re.match(r"([\d,]+) rows?\b", refusal.problem)
    num_faults = max(len(faults), int(counted[1].replace(",", "")) if counted else 0)
    words = ["tightfit", "prepare", flags.job]
    words += [word for name in flags.data or () for word in ("--data", name)]
    remedy = f"correct these rows; the others: {shlex.join(words)} --skip-faulty"
    fault = make_rows_error(faults, num_faults=num_faults, sources=job.training.data, remedy=remedy)
    if flags.as_json:
        told = {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
        show_json({**told, "num_faults": num_faults, "faults": faults})
    raise typer.Exit(report_error(fault, as_json=False))


def measure_batches(encoded: EncodedDataset, *, seed: int) -> Batching:
    """What an epoch's rows come to, each source as often as its weight says."""
    import numpy as np

    store = encoded.train
    lengths = store.lengths[epoch_rows(store, seed=seed, epoch=0, shuffle=False)]
    by_length = count_lengths(lengths)
    num_tokens, seq_len = int(np.sum(lengths)), encoded.report.seq_len
    is_pair = store.description.is_encoder_decoder
    num_packed = None if is_pair else count_packed_rows(by_length, seq_len)
    return Batching(
        num_rows=len(lengths),
        num_tokens=num_tokens,
        num_packed_rows=num_packed,
        packed_fraction=None if num_packed is None else num_tokens / (num_packed * seq_len),
        padding_waste_fraction={
            size: estimate_padding_waste(by_length.items(), size) for size in MICRO_BATCHES
        },
    )


def count_lengths(lengths: Any) -> dict[int, int]:
    """Rows by length."""
    import numpy as np

    values, counts = np.unique(lengths, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _find_rows(flags: PrepareFlags, encoded: EncodedDataset) -> list[ViewedRow]:
    """Rows to show: those asked for; one for a person who asked for none."""
    if flags.as_json and flags.show is None and flags.row is None:
        return []
    from tightfit.cli.render.data import pick_rows, view_row
    from tightfit.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(encoded.report.tokenizer))
    if flags.row is not None:
        return [view_row(store, at, tokenizer) for store, at in _find_row(encoded, flags.row)]
    picked = pick_rows(len(encoded.train), flags.show or 1)
    return [view_row(encoded.train, at, tokenizer) for at in picked]


def _find_row(encoded: EncodedDataset, wanted: int) -> Iterator[tuple[TokenStore, int]]:
    """Every encoded row that comes from this line or row of a data file."""
    import numpy as np

    stores = [store for store in (encoded.train, encoded.eval) if store is not None]
    numbers = [np.load(store.folder / "numbers.npy") for store in stores]
    found = [
        (store, int(at))
        for store, held in zip(stores, numbers, strict=True)
        for at in np.flatnonzero(held == wanted)
    ]
    if not found:
        known = np.concatenate(numbers)
        nearest = int(known[np.argmin(np.abs(known - wanted))])
        raise NotFoundError(
            f"No encoded row begins at line {wanted:,}; the nearest is {nearest:,}.",
            remedy=f"--row {nearest}",
        )
    yield from found


def _draw(flags: PrepareFlags, job: PrepareJob, encoded: EncodedDataset) -> None:
    if flags.chart is None:
        return
    from tightfit.cli.charts.lengths import LengthChart, write_length_chart

    report = encoded.report
    sides = {"to train on": count_lengths(encoded.train.lengths)}
    if encoded.eval is not None:
        sides["to evaluate on"] = count_lengths(encoded.eval.lengths)
    names = [sanitize(source.name.rsplit("/", 1)[-1]) for source in report.sources]
    cut = count_of(report.num_truncated, "row")
    chart = LengthChart(
        title=f"{', '.join(names)}: row lengths",
        subtitle=f"{count_of(report.train.num_rows, 'row')} to train on, mean "
        f"{report.train.mean_tokens:,.0f} tokens, longest {report.train.max_tokens:,}; "
        f"{cut} cut at seq_len {report.seq_len:,}",
        sides=sides,
        percentiles=report.train.percentiles,
        seq_len=job.seq_len,
    )
    write_length_chart(chart, flags.chart)


def _describe(
    flags: PrepareFlags,
    job: PrepareJob,
    encoded: EncodedDataset,
    batching: Batching,
    rows: list[ViewedRow],
) -> dict[str, Any]:
    return {
        "model": job.recipe.model,
        "folder": str(encoded.train.folder.parent),
        "is_cached": encoded.is_cached,
        "report": encoded.report.model_dump(mode="json"),
        "batching": {
            "num_rows": batching.num_rows,
            "num_tokens": batching.num_tokens,
            "num_packed_rows": batching.num_packed_rows,
            "packed_fraction": batching.packed_fraction,
            "padding_waste_fraction": {
                str(size): waste for size, waste in batching.padding_waste_fraction.items()
            },
        },
        "rows": [row.describe() for row in rows],
        "next": None if flags.skip_faulty else asdict(find_next(flags, job)),
    }


# What `tightfit prepare` prints: the data, its lengths, its batches, its faults, its mask.

FORMAT_WORDS = {
    "chat": "conversations (messages)",
    "alpaca": "Alpaca (instruction, input, output)",
    "question-context-answer": "question, context, answer",
    "dialogue-summary": "dialogue, summary",
    "prompt-completion": "prompt, completion",
    "text": "plain text",
}
NUM_BARS = 14
MOST_CHARS = 600
"""Of one stretch of a shown row; `--row` shows all."""


def show_prepared(
    job: PrepareJob,
    encoded: EncodedDataset,
    batching: Batching,
    *,
    rows: Sequence[ViewedRow],
    is_whole: bool,
    next_step: NextStep | None,
) -> None:
    """The whole report. `is_whole`: rows are shown uncut. No next step: rows are faulty."""
    show(
        [
            *_render_data(job, encoded),
            *_render_lengths(encoded),
            *_render_batches(encoded.report, batching),
            *render_findings(encoded.report),
            *render_notes("Notes", encoded.report.notes),
            *_render_rows(rows, encoded, is_whole=is_whole),
            *_render_next(next_step),
        ]
    )


def _render_data(job: PrepareJob, encoded: EncodedDataset) -> Iterator[RenderableType]:
    report = encoded.report
    model = Path(job.recipe.model.rstrip("/")).name
    total = sum(source.num_tokens for source in report.sources)
    yield heading(f"Data for {model}: {count_of(report.num_read, 'row')}, {total:,} tokens")
    yield ""
    columns = [
        Column(title="source", style="bold", keep=False),
        Column(title="rows", right=True),
        Column(title="recognised as", keep=False),
        Column(title="tokens", right=True),
        Column(title="trained", right=True),
    ]
    is_mixed = any(source.weight != 1 or source.split == "eval" for source in report.sources)
    if is_mixed:
        columns.insert(1, Column(title="used"))
    yield make_table(columns, [_source_row(source, is_mixed) for source in report.sources])
    yield ""
    yield render_pairs(_settings(job, encoded))


def _source_row(source: SourceReport, is_mixed: bool) -> list[str]:
    share = source.num_trained_tokens / source.num_tokens if source.num_tokens else 0.0
    is_held_out = source.split == "eval"
    row = [
        source.name.rsplit("/", 1)[-1],
        f"{source.num_rows:,}",
        _format_words(source.format),
        f"{source.num_tokens:,}",
        f"{source.num_trained_tokens:,} ({share:.0%})",
    ]
    if is_mixed:
        row.insert(1, "to evaluate" if is_held_out else f"{source.weight:g} x")
    return row


def _format_words(name: str) -> str:
    if not name:
        return "nothing known"
    return " and ".join(FORMAT_WORDS.get(part, part) for part in name.split("+"))


def _settings(job: PrepareJob, encoded: EncodedDataset) -> Iterator[tuple[str, str]]:
    report = encoded.report
    train = report.train
    yield "template", _explain_template(job, encoded)
    what = "answers only" if report.train_on == "answers" else "everything"
    if report.formats == "text":
        what = "everything: plain text has no prompt"
    share = train.num_trained_tokens / train.num_tokens
    yield "trained", f"{what}, {render_count(train.num_trained_tokens)} tokens, {share:.1%} of all"
    yield "stop token", _explain_stop(report)
    yield "pad token", f"{report.pad_token} (token {report.pad_token_id}), never trained"
    if report.eval is not None:
        held = count_of(report.eval.num_rows, "row")
        yield "split", f"{count_of(train.num_rows, 'row')} to train on, {held} to evaluate on"
    if report.num_dropped:
        yield (
            "left out",
            f"{count_of(report.num_dropped, 'row')} of {report.num_read:,}: see Faults",
        )
    how = "found encoded in" if encoded.is_cached else "encoded into"
    yield "kept", f"{how} {encoded.train.folder.parent}"


def _explain_template(job: PrepareJob, encoded: EncodedDataset) -> str:
    name, wanted = encoded.report.template, job.training.template
    if name == "none":
        if encoded.train.description.is_encoder_decoder:
            return "none: the encoder reads the question, the decoder learns the answer"
        return "none: plain text is taken as it is"
    if name == "tokenizer":
        return "the tokenizer's own chat template"
    if wanted is None:
        return f"{name}, because the tokenizer has no chat template"
    return f"{name}, as asked"


def _explain_stop(report: DataReport) -> str:
    if not report.stop_tokens:
        return "none is trained"
    names, train = " or ".join(report.stop_tokens), report.train
    if train.num_rows_with_stop == train.num_rows:
        return f"{names}, trained in every row"
    return f"{names}, trained in {train.num_rows_with_stop:,} of {train.num_rows:,} rows"


def _render_lengths(encoded: EncodedDataset) -> Iterator[RenderableType]:
    """Bars by length up to where nearly all rows are, the rest as one, and the limit."""
    train, by_length = encoded.report.train, count_lengths(encoded.train.lengths)
    top = train.percentiles["p99"]
    step = choose_step(top, most=NUM_BARS)
    bins = make_bins(by_length, step=step, top=top)
    end = bins[-1].last
    while not bins[0].num_rows and len(bins) > 1:
        del bins[0]
    rest = sum(rows for length, rows in by_length.items() if length > end)
    if rest:
        bins.append(Bin(end + 1, train.max_tokens, rest))
    else:
        bins[-1] = bins[-1]._replace(last=min(end, max(train.max_tokens, bins[-1].first)))
    yield ""
    is_pair = encoded.train.description.is_encoder_decoder
    yield heading("Tokens per row" + (", read and answered together" if is_pair else ""))
    yield _render_bars(bins, train.percentiles)
    yield _render_limit(encoded.report)
    marks = [f"{name} {at:,}" for name, at in train.percentiles.items()]
    yield plain(
        f"  mean {train.mean_tokens:,.0f}, {', '.join(marks)}, longest {train.max_tokens:,}"
    )


def _render_bars(bins: Sequence[Bin], percentiles: dict[str, int]) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    tallest = max(item.num_rows for item in bins)
    width = max(min(make_console().width - 40, 48), 8)
    dash = "–" if supports_unicode() else "-"
    for item in bins:
        marks = [name for name, at in percentiles.items() if item.first <= at <= item.last]
        one = item.first == item.last
        grid.add_row(
            f"  {item.first:,}" if one else f"  {item.first:,}{dash}{item.last:,}",
            Text(render_bar(item.num_rows / tallest, width=width).ljust(width), style="blue"),
            f"{item.num_rows:,}",
            Text(" ".join(marks), style="dim"),
        )
    return grid


def _render_limit(report: DataReport) -> RenderableType:
    """The line that rows cannot cross, and how many tried."""
    line = ("─" if supports_unicode() else "-") * 3
    counts = {finding.kind: finding.num_rows for finding in report.findings}
    num_without = counts.get("answer-cut-off", 0)
    if report.num_truncated or num_without:
        left_out = f", {num_without:,} left out, their answer cut off" if num_without else ""
        told = (
            f"{count_of(report.num_truncated, 'row')} cut here "
            f"({count_of(report.num_lost_tokens, 'token')} lost){left_out}; "
            f"the longest had {report.longest_row_tokens:,} tokens"
        )
    elif report.longest_row_tokens > report.seq_len:
        told = f"longer texts, up to {report.longest_row_tokens:,} tokens, became several rows"
    else:
        told = "nothing is cut"
    style = "red" if report.num_truncated or num_without else "dim"
    text = Text(f"{line} seq_len {report.seq_len:,} {line} {told}", style=style)
    return Padding(text, (0, 0, 0, 2))


def _render_batches(report: DataReport, batching: Batching) -> Iterator[RenderableType]:
    yield ""
    yield heading("Slots that hold tokens")
    rows: list[tuple[str, Text, str]] = []
    if batching.num_packed_rows is not None and batching.packed_fraction is not None:
        packs = count_of(batching.num_packed_rows, "sequence")
        told = f"{count_of(batching.num_rows, 'row')} in {packs} of {report.seq_len:,}"
        rows.append(("packed", _gauge(batching.packed_fraction), told))
    for size, waste in batching.padding_waste_fraction.items():
        if size <= max(batching.num_rows, 2):
            rows.append((f"padded, {size} at a time", _gauge(1 - waste), f"{waste:.0%} padding"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, gauge, told in rows:
        grid.add_row(f"  {label}", gauge, Text(told, style="dim"))
    yield grid


def _gauge(fraction: float) -> Text:
    width = max(min(make_console().width - 56, 20), 0)
    return Text.assemble((render_gauge(fraction, width=width), "blue"), f" {fraction:6.1%}")


def _render_rows(
    rows: Sequence[ViewedRow], encoded: EncodedDataset, *, is_whole: bool
) -> Iterator[RenderableType]:
    if not rows:
        return
    yield ""
    yield Text.assemble(heading("What is trained"), "   ", render_legend())
    for row in rows:
        share = row.num_trained_tokens / row.num_tokens
        file, _, number = row.place.rpartition("/")[2].rpartition(" ")
        yield ""
        yield Text.assemble(
            plain(f"{file} {number}"),
            (f", {row.num_tokens:,} tokens, {row.num_trained_tokens:,} trained ({share:.0%})", ""),
            style="bold",
        )
        yield render_row(row, most_chars=None if is_whole else MOST_CHARS)
    more = len(encoded.train) - len(rows)
    if not is_whole and more > 0:
        yield ""
        yield plain(f"{count_of(more, 'more row')}: --show N, or --row LINE")


def _render_next(step: NextStep | None) -> Iterator[RenderableType]:
    if step is None:
        told = "correct the faulty rows or take them out of the file: training refuses them"
        yield from render_notes("Next", [told])
        return
    if step.recipe_file is not None:
        yield ""
        yield heading(f"Into {step.recipe_file}")
        for line in step.recipe_lines:
            yield Padding(plain(line), (0, 0, 0, 2))
    yield from render_notes("Next", [step.command])
