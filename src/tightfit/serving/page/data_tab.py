"""The data tab: what of a data file is learnt, its rows' lengths, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tightfit.core.errors import UserError
from tightfit.core.settings import TrainOn, words_of
from tightfit.core.text import count_of
from tightfit.data.report import NUM_SHOWN, DataReport
from tightfit.data.view import Bin, ViewedRow
from tightfit.serving.page.components import (
    ANSWER_EVENT,
    build_hidden_button,
    build_line,
    escape_html,
    render_commands,
    render_error,
    render_folded,
    render_list,
    render_note,
    render_tiles,
)

FIRST_ROWS = "1000"
"""Of a file, until the field is emptied: so many are encoded while one types."""
NUM_ROWS = 4
"""Shown, spread evenly."""
NUM_BARS = 24
MAX_CHARACTERS = 1500
"""Of one stretch of a row that is shown among others."""
_WRONG = {"unreadable", "refused", "empty-answer", "answer-cut-off", "truncated", "in-both"}
"""Kinds that lose rows or tokens; the others are odd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataForm:
    """What stands in the fields, as it was typed."""

    data: str
    model: str
    take: str = FIRST_ROWS
    seq_len: str = ""
    template: str = ""
    train_on: str = words_of(TrainOn)[0]
    row: str = ""
    """A line or row number of the file; empty: a few rows, spread evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPreview:
    """The encoded rows in numbers, and some of them."""

    report: DataReport
    lengths: tuple[Bin, ...]
    packed_fraction: float | None
    """Of slots that hold tokens when packed. None: an encoder-decoder's rows are not packed."""
    rows: tuple[ViewedRow, ...]
    commands: tuple[str, ...]


Preview = Callable[[DataForm], DataPreview]
"""Raises UserError."""


def build_data_tab(preview: Preview, model: str) -> None:
    """Draw the tab, with a model filled in, and connect it."""
    import gradio as gr

    with gr.Row(elem_classes="tf-split"):
        with gr.Column(scale=1, min_width=270, elem_id="tf-ask-data", elem_classes="tf-form"):
            data = build_line(
                "Data", "", "JSON, JSON Lines, CSV, Parquet or text", hint="train.jsonl",
                elem_id="tf-data-path",
            )  # fmt: skip
            name = build_line(
                "Model", model, "A folder with a tokenizer, or a cached hub id",
                hint="./my-model", elem_id="tf-data-model",
            )  # fmt: skip
            train_on = gr.Radio(
                list(words_of(TrainOn)), value=words_of(TrainOn)[0], label="Learn from",
                elem_id="tf-data-train-on", elem_classes="tf-choice",
            )  # fmt: skip
            with gr.Row(elem_classes="tf-twins"):
                take = build_line("Rows", FIRST_ROWS, "", hint="all")
                row = build_line("Show line", "", "", hint="some", elem_id="tf-data-row")
            with gr.Row(elem_classes="tf-twins"):
                length = build_line("Sequence length", "", "", hint="2048")
                template = build_line("Chat template", "", "", hint="the model's")
            go = build_hidden_button("tf-go-data", "Show")
        with gr.Column(scale=3, min_width=320):
            shown = gr.HTML(
                render_note("Name a data file and a model: this shows which words are learnt."),
                apply_default_css=False,
                elem_id="tf-data",
                elem_classes="tf-out",
            )

    inputs = {
        "data": data, "model": name, "take": take, "seq_len": length, "template": template,
        "train_on": train_on, "row": row,
    }  # fmt: skip

    def run(*typed: str | None) -> str:
        fields: Mapping[str, Any] = {
            field: (value or "").strip() for field, value in zip(inputs, typed, strict=True)
        }
        if not fields["data"] or not fields["model"]:
            missing = "a model with a tokenizer" if fields["data"] else "a data file"
            return render_note(f"Name {missing}: this shows which words are learnt.")
        try:
            return render_preview(preview(DataForm(**fields)))
        except UserError as error:
            return render_error(error)

    lines = [line for line in inputs.values() if line is not train_on]
    gr.on([go.click, *(line.submit for line in lines)], run, [*inputs.values()], shown,
          **ANSWER_EVENT)  # fmt: skip


def render_preview(found: DataPreview) -> str:
    """Figures, rows with what is learnt in colour, lengths and findings."""
    report, train = found.report, found.report.train
    names = ", ".join(source.name.rsplit("/", 1)[-1] for source in report.sources)
    share = train.num_trained_tokens / train.num_tokens
    stop = " or ".join(report.stop_tokens) or "none"
    tiles = [
        ("Rows", f"{train.num_rows:,}", f"of {report.num_read:,} read"),
        ("Tokens", f"{train.num_tokens:,}", f"{share:.0%} are learnt"),
        ("Longest row", f"{train.max_tokens:,}", f"mean {train.mean_tokens:,.0f}"),
        ("Stop token", stop, f"learnt in {train.num_rows_with_stop:,} rows"),
    ]
    if found.packed_fraction is not None:
        packs = count_of(train.num_packed_rows, "sequence")
        tiles.insert(3, ("Packed", f"{found.packed_fraction:.0%} full", packs))
    template = {"tokenizer": "the model's own template", "none": "no template"}.get(
        report.template, f"template {report.template}"
    )
    subject = (
        f"{report.formats or 'nothing known'} · {template} · {report.seq_len:,} tokens at most"
    )
    return "".join(
        (
            f"<h2>{escape_html(names)}</h2>{render_note(subject)}{render_tiles(tiles)}",
            render_commands(found.commands),
            _render_findings(report),
            '<h3>What is learnt</h3><p class="tf-note tf-key"><span class="tf-learnt">learnt</span>'
            '<span class="tf-context">only read</span>'
            '<span class="tf-token">special token</span></p>',
            *(_render_row(row, is_whole=len(found.rows) == 1) for row in found.rows),
            _render_lengths(found),
            render_folded("Notes", render_list(report.notes)) if report.notes else "",
        )
    )


def _render_row(row: ViewedRow, *, is_whole: bool) -> str:
    share = row.num_trained_tokens / row.num_tokens
    file, _, number = row.place.rpartition("/")[2].rpartition(" ")
    counted = f"{row.num_tokens:,} tokens, {row.num_trained_tokens:,} learnt ({share:.0%})"
    pieces = "".join(
        f'<span class="{"tf-learnt" if piece.is_trained else "tf-context"}'
        f'{" tf-token" if piece.is_special else ""}">{text}</span>'
        for piece in row.pieces
        for text in [_shorten(piece.text, is_whole=is_whole)]
    )
    return (
        f'<article class="tf-row"><h4>{escape_html(f"{file} {number}")}'
        f'<span class="tf-pace">{escape_html(counted)}</span></h4>'
        f'<div class="tf-text">{pieces}</div></article>'
    )


def _shorten(text: str, *, is_whole: bool) -> str:
    if is_whole or len(text) <= MAX_CHARACTERS:
        return escape_html(text)
    half = MAX_CHARACTERS // 2
    gap = f"{len(text) - 2 * half:,} characters"
    return f'{escape_html(text[:half])}<em class="tf-gap">{gap}</em>{escape_html(text[-half:])}'


def _render_lengths(found: DataPreview) -> str:
    """Columns, and under them where half, 9 of 10 and 99 of 100 rows end."""
    report, train = found.report, found.report.train
    tallest = max(item.num_rows for item in found.lengths)
    columns = "".join(
        f'<i style="height:{100 * item.num_rows / tallest:.1f}%" '
        f'title="{_name_bin(item)} tokens: {count_of(item.num_rows, "row")}"></i>'
        for item in found.lengths
    )
    marks = " · ".join(f"{name} {at:,}" for name, at in train.percentiles.items())
    cut = (
        f"{count_of(report.num_truncated, 'row')} cut at {report.seq_len:,} tokens; the longest "
        f"had {report.longest_row_tokens:,}"
        if report.num_truncated
        else f"nothing is cut at {report.seq_len:,} tokens"
    )
    first, last = found.lengths[0].first, found.lengths[-1].last
    return (
        f'<h3>Tokens per row</h3><div class="tf-columns" role="img" aria-label="{marks}">{columns}'
        f'</div><div class="tf-axis"><span>{first:,}</span><span>{last:,} tokens</span></div>'
        f"{render_note(f'{marks} · {cut}')}"
    )


def _name_bin(item: Bin) -> str:
    return f"{item.first:,}" if item.first == item.last else f"{item.first:,} to {item.last:,}"


def _render_findings(report: DataReport) -> str:
    if not report.findings:
        return (
            '<p class="tf-note"><span class="tf-badge tf-fits">no findings</span> '
            "no row is unreadable, empty, cut, repeated or wrongly decoded</p>"
        )
    return "<h3>Findings by row</h3>" + "".join(_list_findings(report))


def _list_findings(report: DataReport) -> Iterator[str]:
    files = {path for source in report.sources for path in source.files}
    for finding in report.findings:
        places = list(finding.shown[:NUM_SHOWN])
        for path in files:  # a file by its name; with one file, its rows alone
            name = f"{path.rsplit('/', 1)[-1]} " if len(files) > 1 else ""
            places = [place.replace(f"{path} ", name) for place in places]
        more = finding.num_rows - len(places)
        places += [f"and {more:,} more"] if more else []
        kind = "tf-tight" if finding.kind in _WRONG else "tf-odd"
        title = f"{finding.kind.replace('-', ' ')}, {count_of(finding.num_rows, 'row')}"
        yield (
            f'<div class="tf-finding {kind}"><b>{escape_html(title)}</b> '
            f"{escape_html(finding.says)}{render_list(places)}</div>"
        )
