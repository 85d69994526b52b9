"""`tightfit stage`: Copy a model to the RAM disks of many nodes, the fastest way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import RenderableType

from tightfit.api.options.clusters import StageOptions, StageOutput
from tightfit.api.stage import StagedCopies, clean_staged, list_staged
from tightfit.api.stage import stage as stage_model
from tightfit.cli.terminal.error_report import end_with
from tightfit.cli.terminal.output import progress_bar, show_json, write_err
from tightfit.cli.terminal.screen import heading, make_table, plain, render_notes, show
from tightfit.clusters.staging.cost import MethodChoice
from tightfit.clusters.staging.stage import StageResult
from tightfit.core.errors import UsageError
from tightfit.core.text import sanitize
from tightfit.core.units import render_bytes, render_seconds
from tightfit.runtime.staged import Manifest


def stage(options: StageOptions, output: StageOutput) -> None:
    """Stage, list or clean."""
    if output.list_ and output.clean:
        raise UsageError("`--list` and `--clean` are two commands.", remedy="keep one of them")
    if output.list_:
        _show_copies(list_staged(options), "copies", "Staged", as_json=output.as_json)
    elif output.clean and options.dry_run:
        found = clean_staged(options)
        _show_copies(found, "would_remove", "Would be removed", as_json=output.as_json)
    elif output.clean:
        _show_copies(clean_staged(options), "removed", "Removed", as_json=output.as_json)
    else:
        _stage(options, output)


def _stage(options: StageOptions, output: StageOutput) -> None:
    is_quiet = output.as_json or options.dry_run
    with progress_bar() as report:
        options = replace(options, progress=report, announce=None if is_quiet else _show_choice)
        result = stage_model(options)
    error = result.find_error()
    if not output.as_json:
        show(_render(result))
        if error is not None:
            raise error
        return
    document = {**result.model_dump(mode="json"), "measured_seconds": result.measured_seconds}
    if error is not None:
        raise end_with(error, document, as_json=True)
    show_json(document)


def _show_choice(choice: MethodChoice, wanted: Manifest) -> None:
    seconds = choice.seconds.get(choice.how)
    predicted = "" if seconds is None else f", predicted {render_seconds(seconds)}"
    write_err(
        f"{sanitize(wanted.source)}: {render_bytes(wanted.num_bytes)} by {choice.how.value}"
        f"{predicted}: {sanitize(choice.why)}\n"
    )


def _show_copies(found: StagedCopies, name: str, title: str, *, as_json: bool) -> None:
    if not as_json:
        show(_render_copies(title, found))
        return
    rows = [
        {"node": one.node, "host": one.host, **one.copy.model_dump(mode="json")}
        for one in found.copies
    ]
    document: dict[str, Any] = {"place": found.place, name: rows}
    show_json(document if name == "copies" else {**document, "busy": list(found.busy)})


def _render(result: StageResult) -> Iterator[RenderableType]:
    size = f"{render_bytes(result.num_bytes)} in {result.num_files} files"
    yield heading(f"{result.source}: {size}")
    yield plain(f"{result.how or 'nothing to do'}: {result.why}")
    if result.rates.one_reader or result.rates.link:
        yield ""
        yield _render_rates(result)
    if result.predicted_seconds or result.copy_seconds is not None:
        yield ""
        yield _render_times(result)
    yield ""
    yield make_table(
        ["*node", "state", ">found there", "copy"],
        [
            [
                node.node,
                node.state,
                render_bytes(node.num_kept_bytes) if node.num_kept_bytes else "",
                node.path,
            ]
            for node in result.nodes
        ],
    )
    repaired = [
        f"{node.node}: {node.num_repaired_blocks} blocks found there had changed since"
        for node in result.nodes
        if node.num_repaired_blocks
    ]
    yield from render_notes("Beware", repaired)


def _render_rates(result: StageResult) -> RenderableType:
    rates = [
        ("one node reads", result.rates.one_reader),
        ("each, while all read", result.rates.all_readers if len(result.nodes) > 1 else None),
        ("from node to node", result.rates.link),
    ]
    return make_table(
        ["*", ">measured"],
        [[name, f"{render_bytes(rate)}/s"] for name, rate in rates if rate is not None],
    )


def _render_times(result: StageResult) -> RenderableType:
    rows = []
    for how in dict.fromkeys([*result.predicted_seconds, *([result.how] if result.how else [])]):
        predicted = result.predicted_seconds.get(how)
        is_taken = how == result.how and result.measured_seconds is not None
        rows.append(
            [
                how,
                "" if predicted is None else render_seconds(predicted),
                render_seconds(result.measured_seconds or 0.0) if is_taken else "",
            ]
        )
    return make_table(["*", ">predicted", ">measured"], rows)


def _render_copies(title: str, found: StagedCopies) -> Iterator[RenderableType]:
    copies = [one.copy for one in found.copies]
    if copies:
        total = render_bytes(sum(copy.num_bytes for copy in copies))
        yield heading(f"{title} in {found.place}: {total}")
        yield ""
        yield make_table(
            ["*node", ">size", "state", "model"],
            [
                [
                    one.node,
                    render_bytes(one.copy.num_bytes),
                    f"{one.copy.state}, at work" if one.copy.is_busy else one.copy.state,
                    one.copy.source or one.copy.key,
                ]
                for one in found.copies
            ],
        )
    elif found.busy:
        yield plain(f"Nothing is removed in {found.place}.")
    else:
        yield plain(f"Nothing of yours is staged in {found.place}.")
    yield from render_notes("Left alone, because a staging is at work on them", list(found.busy))
