"""`tightfit prepare`: encode data as `train` does, and show lengths, batches, errors and loss
masks.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tightfit.api import prepare as api
from tightfit.api.prepare import (
    Batching,
    InvalidRowsError,
    PrepareJob,
    count_lengths,
    find_row,
)
from tightfit.api.training.recipe import RECIPE_ENDINGS
from tightfit.cli.charts.lengths import Bin, choose_step, make_bins
from tightfit.cli.charts.memory import check_chart_path
from tightfit.cli.error_report import report_error
from tightfit.cli.flags.training import PrepareFlags
from tightfit.cli.render.data import ViewedRow, render_findings, render_legend, render_row
from tightfit.cli.terminal.output import progress_bar, show_json, supports_unicode
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
from tightfit.core.errors import UsageError
from tightfit.core.recipe import Recipe
from tightfit.core.text import count_of, sanitize
from tightfit.core.units import render_count
from tightfit.data.encode import EncodedDataset
from tightfit.data.report import DataReport, SourceReport

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


def prepare(flags: PrepareFlags) -> None:
    """Encode, show, draw."""
    if flags.show is not None and flags.row is not None:
        raise UsageError(
            "--show picks rows and --row names one.", remedy=f"keep one: --row {flags.row}"
        )
    if flags.chart is not None:
        check_chart_path(flags.chart)
    try:
        with progress_bar() as progress:
            found = api.prepare(replace(flags, progress=progress))
    except InvalidRowsError as error:
        if flags.as_json:
            show_json(
                {
                    "error": error.problem,
                    "remedy": error.remedy,
                    "exit_code": error.exit_code,
                    "num_faults": error.num_rows,
                    "faults": error.rows,
                }
            )
        raise typer.Exit(report_error(error, as_json=False)) from None
    job, encoded, batching = found.job, found.encoded, found.batching
    rows = _find_rows(flags, encoded)
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


def _find_rows(flags: PrepareFlags, encoded: EncodedDataset) -> list[ViewedRow]:
    """Rows to show: those asked for; one for a person who asked for none."""
    if flags.as_json and flags.show is None and flags.row is None:
        return []
    from tightfit.cli.render.data import pick_rows, view_row
    from tightfit.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(encoded.report.tokenizer))
    if flags.row is not None:
        return [view_row(store, at, tokenizer) for store, at in find_row(encoded, flags.row)]
    picked = pick_rows(len(encoded.train), flags.show or 1)
    return [view_row(encoded.train, at, tokenizer) for at in picked]


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
        note = (
            f"{count_of(report.num_truncated, 'row')} cut here "
            f"({count_of(report.num_lost_tokens, 'token')} lost){left_out}; "
            f"the longest had {report.longest_row_tokens:,} tokens"
        )
    elif report.longest_row_tokens > report.seq_len:
        note = f"longer texts, up to {report.longest_row_tokens:,} tokens, became several rows"
    else:
        note = "nothing is cut"
    style = "red" if report.num_truncated or num_without else "dim"
    text = Text(f"{line} seq_len {report.seq_len:,} {line} {note}", style=style)
    return Padding(text, (0, 0, 0, 2))


def _render_batches(report: DataReport, batching: Batching) -> Iterator[RenderableType]:
    yield ""
    yield heading("Slots that hold tokens")
    rows: list[tuple[str, Text, str]] = []
    if batching.num_packed_rows is not None and batching.packed_fraction is not None:
        packs = count_of(batching.num_packed_rows, "sequence")
        note = f"{count_of(batching.num_rows, 'row')} in {packs} of {report.seq_len:,}"
        rows.append(("packed", _gauge(batching.packed_fraction), note))
    for size, waste in batching.padding_waste_fraction.items():
        if size <= max(batching.num_rows, 2):
            rows.append((f"padded, {size} at a time", _gauge(1 - waste), f"{waste:.0%} padding"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, gauge, note in rows:
        grid.add_row(f"  {label}", gauge, Text(note, style="dim"))
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
        note = "correct the faulty rows or take them out of the file: training refuses them"
        yield from render_notes("Next", [note])
        return
    if step.recipe_file is not None:
        yield ""
        yield heading(f"Into {step.recipe_file}")
        for line in step.recipe_lines:
            yield Padding(plain(line), (0, 0, 0, 2))
    yield from render_notes("Next", [step.command])


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """How to go on."""

    command: str
    recipe_file: str | None = None
    recipe_lines: tuple[str, ...] = ()
    """To be written there first: what `train` has no options for."""


def find_next(flags: PrepareFlags, job: PrepareJob) -> NextStep:
    """The command that trains on this very encoding."""
    words: list[str] = []
    for option, value in (
        ("--eval", flags.eval),
        ("--seq-len", flags.seq_len),
        ("--template", flags.template),
    ):
        words += [option, str(value)] if value is not None else []
    sources = [source for source in job.recipe.data if source.split == "train"]
    changes_data = flags.data is not None or flags.take is not None
    is_told_by_flags = flags.train_on is None and (
        not changes_data
        or (flags.data is not None and len(sources) == 1 and sources[0].take is None)
    )
    if is_told_by_flags:
        if changes_data:
            words = ["--data", sources[0].path.removeprefix(f"{Path.cwd()}/"), *words]
        return NextStep(command=shlex.join(["tightfit", "train", flags.job, *words]))
    is_recipe = flags.job.lower().endswith(RECIPE_ENDINGS)
    file = flags.job if is_recipe else "recipe.yaml"
    lines = [] if is_recipe else [f"model: {_as_yaml(flags.job)}"]
    return NextStep(
        command=shlex.join(["tightfit", "train", file, *words]),
        recipe_file=file,
        recipe_lines=(*lines, *_write_data(job.recipe, flags)),
    )


def _write_data(recipe: Recipe, flags: PrepareFlags) -> Iterator[str]:
    yield "data:"
    for source in recipe.data:
        if source.split == "eval" and flags.eval is not None:
            continue  # the command line names it
        stated = source.model_dump(exclude_defaults=True)
        listed = ", ".join(f"{key}: {_as_yaml(value)}" for key, value in stated.items())
        yield f"  - {{{listed}}}"
    if flags.train_on is not None and recipe.train_on is not None:
        yield f"train_on: {recipe.train_on.value}"


def _as_yaml(value: object) -> str:
    """JSON is YAML."""
    return json.dumps(value, ensure_ascii=False)
