"""A staging as text: what was decided and why, what it took beside what was predicted, where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from tightfit.cli.terminal.notes import heading, plain, render_notes
from tightfit.cli.terminal.screen import Column, make_table, show
from tightfit.core.units import render_bytes, render_seconds
from tightfit.launch.stage.result import Staging

_TITLES = {"copies": "Staged", "removed": "Removed", "would_remove": "Would be removed"}


def show_staging(done: Staging) -> None:
    show(_render(done))


def show_copies(told: dict[str, Any]) -> None:
    show(_render_copies(told))


def _render(done: Staging) -> Iterator[RenderableType]:
    size = f"{render_bytes(done.num_bytes)} in {done.num_files} files"
    yield heading(f"{done.source}: {size}")
    yield plain(f"{done.how or 'nothing to do'}: {done.why}")
    if done.rates.one_reader or done.rates.link:
        yield ""
        yield _render_rates(done)
    if done.predicted_seconds or done.copy_seconds is not None:
        yield ""
        yield _render_times(done)
    yield ""
    yield make_table(
        [
            Column(title="node", style="bold"),
            Column(title="state"),
            Column(title="found there", right=True),
            Column(title="copy"),
        ],
        [
            [
                node.node,
                node.state,
                render_bytes(node.num_kept_bytes) if node.num_kept_bytes else "",
                node.path,
            ]
            for node in done.nodes
        ],
    )
    yield from render_notes("Beware", [_repaired(node) for node in done.nodes if _repaired(node)])


def _repaired(node: Any) -> str:
    if not node.num_repaired_blocks:
        return ""
    return f"{node.node}: {node.num_repaired_blocks} blocks found there had changed since"


def _render_rates(done: Staging) -> RenderableType:
    rates = [
        ("one node reads", done.rates.one_reader),
        ("each, while all read", done.rates.all_readers if len(done.nodes) > 1 else None),
        ("from node to node", done.rates.link),
    ]
    columns = [Column(title="", style="bold"), Column(title="measured", right=True)]
    return make_table(
        columns, [[name, f"{render_bytes(rate)}/s"] for name, rate in rates if rate is not None]
    )


def _render_times(done: Staging) -> RenderableType:
    columns = [
        Column(title="", style="bold"),
        Column(title="predicted", right=True),
        Column(title="measured", right=True),
    ]
    rows = []
    for how in dict.fromkeys([*done.predicted_seconds, *([done.how] if done.how else [])]):
        predicted = done.predicted_seconds.get(how)
        is_taken = how == done.how and done.measured_seconds is not None
        rows.append(
            [
                how,
                "" if predicted is None else render_seconds(predicted),
                render_seconds(done.measured_seconds or 0.0) if is_taken else "",
            ]
        )
    return make_table(columns, rows)


def _render_copies(told: dict[str, Any]) -> Iterator[RenderableType]:
    name, title = next((name, title) for name, title in _TITLES.items() if name in told)
    rows = told[name]
    if rows:
        total = render_bytes(sum(row["num_bytes"] for row in rows))
        yield heading(f"{title} in {told['place']}: {total}")
        yield ""
        yield make_table(
            [
                Column(title="node", style="bold"),
                Column(title="size", right=True),
                Column(title="state"),
                Column(title="model"),
            ],
            [
                [
                    row["node"],
                    render_bytes(row["num_bytes"]),
                    f"{row['state']}, at work" if row["is_busy"] else row["state"],
                    row["source"] or row["key"],
                ]
                for row in rows
            ],
        )
    elif told.get("busy"):
        yield plain(f"Nothing is removed in {told['place']}.")
    else:
        yield plain(f"Nothing of yours is staged in {told['place']}.")
    yield from render_notes(
        "Left alone, because a staging is at work on them", told.get("busy") or []
    )
