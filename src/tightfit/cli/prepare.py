"""`tightfit prepare`: Encode data as `train` will, and show what becomes of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from tightfit.api import prepare as api
from tightfit.api.options.training import PrepareOptions, PrepareOutput
from tightfit.api.prepare import (
    Batching,
    InvalidRowsError,
)
from tightfit.api.training.recipe import RECIPE_ENDINGS
from tightfit.cli.terminal.charts import check_chart_path, write_length_chart
from tightfit.cli.terminal.error_report import end_with
from tightfit.cli.terminal.output import progress_bar, show_json, supports_unicode
from tightfit.cli.terminal.screen import (
    Cell,
    Column,
    heading,
    make_console,
    make_table,
    plain,
    render_bar,
    render_gauge,
    render_grid,
    render_notes,
    render_pairs,
    show,
    styled,
)
from tightfit.core.errors import UsageError
from tightfit.core.recipe import Recipe
from tightfit.core.text import count_of, sanitize
from tightfit.core.units import render_count
from tightfit.data.encode import EncodedDataset
from tightfit.data.formats import FORMATS
from tightfit.data.preferences import PREFERENCE_FORMATS
from tightfit.data.report import NUM_SHOWN, DataReport, SourceReport
from tightfit.data.tokenizer import load_tokenizer
from tightfit.data.view import (
    Bin,
    ViewedRow,
    count_lengths,
    find_row,
    pick_rows,
    summarize_lengths,
    view_row,
)

# The mask viewer: a row's text with what is trained, what is not, and special tokens.

TRAINED = "green"
TRAINED_SPECIAL = "black on green"
UNTRAINED = "dim"
SPECIAL = "magenta"
INDENT = 2


def is_coloured() -> bool:
    """Whether colour reaches a reader; without it, marks stand around what is trained."""
    console = make_console()
    return console.color_system is not None and not console.no_color


def render_legend() -> Text:
    if not is_coloured():
        opening, closing = _marks()
        return Text(f"{opening}trained{closing}, the rest is not; <...> special tokens")
    return Text.assemble(
        ("trained", TRAINED),
        ("  not trained", UNTRAINED),
        "  special token: ",
        ("trained", TRAINED_SPECIAL),
        "  ",
        ("not trained", SPECIAL),
    )


def render_row(row: ViewedRow, *, most_chars: int | None) -> RenderableType:
    """The text, indented. `most_chars`: longer stretches lose their middle."""
    text = _render_coloured(row, most_chars) if is_coloured() else _render_marked(row, most_chars)
    text.overflow = "fold"
    if text.plain.endswith("\n"):
        text.right_crop(1)  # an empty line more would say nothing
    return Padding(text, (0, 0, 0, INDENT))


def _render_coloured(row: ViewedRow, most_chars: int | None) -> Text:
    text = Text()
    line_end = "↵\n" if supports_unicode() else "\n"
    for piece in row.pieces:
        styles = (TRAINED_SPECIAL, SPECIAL) if piece.is_special else (TRAINED, UNTRAINED)
        style = styles[0] if piece.is_trained else styles[1]
        for stretch, is_ours in _shorten(piece.text, most_chars):
            shown = make_visible(stretch).replace("\n", line_end)
            text.append(shown, style="italic dim" if is_ours else style)
    return text


def _render_marked(row: ViewedRow, most_chars: int | None) -> Text:
    opening, closing = _marks()
    parts: list[str] = []
    for is_trained, group in groupby(row.pieces, key=lambda piece: piece.is_trained):
        piece_text = "".join(
            make_visible(stretch)
            for piece in group
            for stretch, _ in _shorten(piece.text, most_chars)
        )
        parts.append(f"{opening}{piece_text}{closing}" if is_trained else piece_text)
    return Text("".join(parts))


def _marks() -> tuple[str, str]:
    return ("«", "»") if supports_unicode() else ("[[", "]]")


def _shorten(text: str, most_chars: int | None) -> Iterator[tuple[str, bool]]:
    """The text, or its two ends with a word between them that is ours."""
    if most_chars is None or len(text) <= most_chars:
        yield text, False
        return
    half = most_chars // 2
    yield text[:half], False
    yield f" [... {len(text) - 2 * half:,} characters ...] ", True
    yield text[-half:], False


def make_visible(text: str) -> str:
    """Line breaks as they are; whatever else a terminal would obey or hide, spelt out."""
    if text.isprintable():
        return text
    return "".join(map(_spell, text.replace("\r\n", "\n")))


def _spell(char: str) -> str:
    if char == "\n" or char.isprintable():
        return char
    if char == "\t":
        return "    "
    if char.isspace() and ord(char) > 0x9F and char not in "\u2028\u2029":
        return " "
    number = ord(char)
    if number < 0x20 and supports_unicode():
        return chr(0x2400 + number)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


NUM_BARS = 14
MOST_CHARS = 600
"""Of one stretch of a shown row; `--row` shows all."""


ONE_PER_LINE = ("unreadable", "refused", "mojibake")
"""Kinds whose detail is a sentence."""
GRAVE = ("unreadable", "refused", "empty-answer", "answer-cut-off", "truncated", "in-both")


def prepare(options: PrepareOptions, output: PrepareOutput) -> None:
    """Encode, show, draw."""
    if output.show is not None and output.row is not None:
        raise UsageError(
            "--show picks rows and --row names one.", remedy=f"keep one: --row {output.row}"
        )
    if output.chart is not None:
        check_chart_path(output.chart)
    try:
        with progress_bar() as progress:
            found = api.prepare(replace(options, progress=progress))
    except InvalidRowsError as error:
        rows = {"num_errors": error.num_rows, "errors": error.rows}
        raise end_with(error, rows, as_json=output.as_json) from None
    recipe, encoded, batching = found.recipe, found.encoded, found.batching
    viewed = _view_rows(output, encoded)
    next_step = None if options.skip_invalid else find_next(options, recipe)
    if not output.as_json:
        is_whole = output.row is not None
        show(
            [
                *_render_data(recipe, encoded),
                *_render_lengths(encoded),
                *_render_cuts(encoded.report),
                *_render_batches(encoded.report, batching),
                *_render_findings(encoded.report),
                *render_notes("Notes", (*encoded.report.notes, *found.notes)),
                *_render_rows(viewed, encoded, is_whole=is_whole),
                *_render_next(next_step),
            ]
        )
    if output.chart is not None:
        _draw(output.chart, encoded)
    if output.as_json:
        show_json(
            {
                "model": recipe.model,
                "folder": str(encoded.train.folder.parent),
                "is_cached": encoded.is_cached,
                "report": encoded.report.model_dump(mode="json"),
                "batching": asdict(batching),
                "notes": list(found.notes),
                "rows": [row.describe() for row in viewed],
                "next": None if next_step is None else asdict(next_step),
            }
        )


def _view_rows(output: PrepareOutput, encoded: EncodedDataset) -> list[ViewedRow]:
    """Rows to show: those asked for; one for a person who asked for none."""
    if output.as_json and output.show is None and output.row is None:
        return []
    tokenizer = load_tokenizer(Path(encoded.report.tokenizer))
    if output.row is not None:
        return [view_row(store, at, tokenizer) for store, at in find_row(encoded, output.row)]
    picked = pick_rows(encoded.train, output.show or 1)
    return [view_row(encoded.train, at, tokenizer) for at in picked]


def _draw(path: Path, encoded: EncodedDataset) -> None:
    report = encoded.report
    sides = {"to train on": count_lengths(encoded.train.lengths)}
    if encoded.eval is not None:
        sides["to evaluate on"] = count_lengths(encoded.eval.lengths)
    names = [sanitize(source.name.rsplit("/", 1)[-1]) for source in report.sources]
    write_length_chart(
        f"{', '.join(names)}: row lengths",
        f"{count_of(report.train.num_rows, 'row')} to train on, mean "
        f"{report.train.mean_tokens:,.0f} tokens, longest {report.train.max_tokens:,}; "
        f"{count_of(report.num_truncated, 'row')} cut at seq_len {report.seq_len:,}",
        sides,
        path,
        percentiles=report.train.percentiles,
        seq_len=report.seq_len,
    )


def _render_data(recipe: Recipe, encoded: EncodedDataset) -> Iterator[RenderableType]:
    report = encoded.report
    model = Path(recipe.model.rstrip("/")).name
    total = sum(source.num_tokens for source in report.sources)
    yield heading(f"Data for {model}: {count_of(report.num_read, 'row')}, {total:,} tokens")
    yield ""
    columns: list[str | Column] = ["*~source", ">rows", "~recognised as", ">tokens", ">trained"]
    is_mixed = any(source.weight != 1 or source.split == "eval" for source in report.sources)
    if is_mixed:
        columns.insert(1, "used")
    yield make_table(columns, [_source_row(source, is_mixed) for source in report.sources])
    yield ""
    yield render_pairs(_settings(recipe, encoded))


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
    titles = {one.name: one.title for one in (FORMATS | PREFERENCE_FORMATS).values()}
    return " and ".join(titles.get(part) or part for part in name.split("+"))


def _settings(recipe: Recipe, encoded: EncodedDataset) -> Iterator[tuple[str, str]]:
    report = encoded.report
    train = report.train
    yield "template", _explain_template(recipe, encoded)
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
            f"{count_of(report.num_dropped, 'row')} of {report.num_read:,}: see Problems",
        )
    how = "found encoded in" if encoded.is_cached else "encoded into"
    yield "kept", f"{how} {encoded.train.folder.parent}"


def _explain_template(recipe: Recipe, encoded: EncodedDataset) -> str:
    name, wanted = encoded.report.template, recipe.template
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
    bins = summarize_lengths(train, by_length, most=NUM_BARS)
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
    tallest = max(item.num_rows for item in bins)
    width = max(min(make_console().width - 40, 48), 8)
    dash = "–" if supports_unicode() else "-"
    rows: list[tuple[Cell, ...]] = []
    for first, last, num_rows in bins:
        marks = [name for name, at in percentiles.items() if first <= at <= last]
        bar = render_bar(num_rows / tallest, width=width).ljust(width)
        span = f"{first:,}" if first == last else f"{first:,}{dash}{last:,}"
        rows.append(
            (f"  {span}", styled(bar, "blue"), f"{num_rows:,}", styled(" ".join(marks), "dim"))
        )
    return render_grid((">", "", ">", ""), rows, gap=1)


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


def _render_cuts(report: DataReport) -> Iterator[RenderableType]:
    """What each length would cut, where the shortest cuts something."""
    if not report.cuts or not report.cuts[0].num_truncated:
        return
    yield ""
    marks = ", ".join(f"{name} {at:,}" for name, at in report.whole_percentiles.items())
    yield heading("What a length cuts")
    yield plain(f"  whole rows: {marks}, longest {report.longest_row_tokens:,} tokens")
    columns = (">seq_len", ">rows cut", ">tokens lost", ">answers lost")
    rows: list[tuple[Cell, ...]] = []
    for cut in report.cuts:
        cells = (cut.seq_len, cut.num_truncated, cut.num_lost_tokens, cut.num_without_answer)
        style = "bold" if cut.seq_len == report.seq_len else ""
        rows.append(tuple(styled(f"{cell:,}", style) for cell in cells))
    yield make_table(columns, rows)


def _render_batches(report: DataReport, batching: Batching) -> Iterator[RenderableType]:
    yield ""
    yield heading("Slots that hold tokens")
    rows: list[tuple[Cell, ...]] = []
    if batching.num_packed_rows is not None and batching.packed_fraction is not None:
        packs = count_of(batching.num_packed_rows, "sequence")
        note = f"{count_of(batching.num_rows, 'row')} in {packs} of {report.seq_len:,}"
        rows.append(("  packed", _gauge(batching.packed_fraction), styled(note, "dim")))
    for size, waste in batching.padding_waste_fraction.items():
        if size <= max(batching.num_rows, 2):
            lost = styled(f"{waste:.0%} padding", "dim")
            rows.append((f"  padded, {size} at a time", _gauge(1 - waste), lost))
    yield render_grid(("", "", "~"), rows)


def _gauge(fraction: float) -> Text:
    width = max(min(make_console().width - 56, 20), 0)
    return Text.assemble((render_gauge(fraction, width=width), "blue"), f" {fraction:6.1%}")


def _render_findings(report: DataReport) -> Iterator[RenderableType]:
    yield ""
    if not report.findings:
        none = "none: no row is unreadable, empty, cut, repeated or wrongly decoded"
        yield Text.assemble(heading("Problems"), f"  {none}")
        return
    yield heading("Problems")
    # A file by its name: the user knows where it is. With one file, its lines alone.
    files = {path for source in report.sources for path in source.files}
    short = {path: f"{_name(path)} " if len(files) > 1 else "" for path in files}
    for finding in report.findings:
        style = "bold yellow" if finding.kind in GRAVE else "bold"
        summary = Text.assemble(
            (f"{finding.kind.replace('-', ' ')}, {count_of(finding.num_rows, 'row')}", style),
            plain(f": {finding.says}"),
        )
        yield Padding(summary, (0, 0, 0, 2))
        places = list(finding.shown[:NUM_SHOWN])
        for path, name in short.items():
            places = [place.replace(f"{path} ", name) for place in places]
        more = finding.num_rows - len(places)
        places += [f"and {more:,} more"] if more else []
        lines = places if finding.kind in ONE_PER_LINE else ["; ".join(places)]
        for line in lines:
            yield Padding(plain(line), (0, 0, 0, 4))


def _name(file: str) -> str:
    return file.rsplit("/", 1)[-1]


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
            plain(f"{file} {number}" + (f", {row.answer}" if row.answer else "")),
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
        note = "correct the invalid rows or take them out of the file: training refuses them"
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


def find_next(options: PrepareOptions, recipe: Recipe) -> NextStep:
    """The command that trains on this very encoding."""
    words: list[str] = []
    for option, value in (
        ("--tools", options.tools),
        ("--objective", options.objective),
        ("--eval", options.eval),
        ("--seq-len", options.seq_len),
        ("--template", options.template),
    ):
        words += [option, str(value)] if value is not None else []
    sources = [source for source in recipe.data if source.split == "train"]
    changes_data = options.data is not None or options.take is not None
    can_be_options = options.train_on is None and (
        not changes_data
        or (options.data is not None and len(sources) == 1 and sources[0].take is None)
    )
    if can_be_options:
        if changes_data:
            words = ["--data", sources[0].path.removeprefix(f"{Path.cwd()}/"), *words]
        return NextStep(command=shlex.join(["tightfit", "train", options.job, *words]))
    is_recipe = options.job.lower().endswith(RECIPE_ENDINGS)
    file = options.job if is_recipe else "recipe.yaml"
    lines = [] if is_recipe else [f"model: {_as_yaml(options.job)}"]
    return NextStep(
        command=shlex.join(["tightfit", "train", file, *words]),
        recipe_file=file,
        recipe_lines=(*lines, *_write_data(recipe, options)),
    )


def _write_data(recipe: Recipe, options: PrepareOptions) -> Iterator[str]:
    yield "data:"
    for source in recipe.data:
        if source.split == "eval" and options.eval is not None:
            continue  # the command line names it
        stated = source.model_dump(exclude_defaults=True)
        listed = ", ".join(f"{key}: {_as_yaml(value)}" for key, value in stated.items())
        yield f"  - {{{listed}}}"
    if options.train_on is not None and recipe.train_on is not None:
        yield f"train_on: {recipe.train_on.value}"


def _as_yaml(value: object) -> str:
    """JSON is YAML."""
    return json.dumps(value, ensure_ascii=False)
