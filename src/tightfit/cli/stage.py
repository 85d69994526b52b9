"""`tightfit stage`: copy a model to the RAM disks of many nodes; list and remove copies."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType

from tightfit.api.options import choices
from tightfit.api.options.clusters import STAGE_METHODS
from tightfit.cli.flags.clusters import StageFlags
from tightfit.cli.terminal.output import progress_bar, show_json, write_err
from tightfit.cli.terminal.screen import Column, heading, make_table, plain, render_notes, show
from tightfit.clusters.staging.stage import StageResult
from tightfit.core.errors import SetupError, UsageError, UserError
from tightfit.core.text import sanitize
from tightfit.core.units import parse_bytes, render_bytes, render_seconds

if TYPE_CHECKING:
    from tightfit.clusters.site import Site
    from tightfit.clusters.staging.cost import CopyMethod, MethodChoice
    from tightfit.clusters.staging.nodes import StagingNode
    from tightfit.runtime.staged import Manifest


# A staging as text: what was decided and why, what it took beside what was predicted, where.

_TITLES = {"copies": "Staged", "removed": "Removed", "would_remove": "Would be removed"}


def show_staging(done: StageResult) -> None:
    show(_render(done))


def show_copies(told: dict[str, Any]) -> None:
    show(_render_copies(told))


def _render(done: StageResult) -> Iterator[RenderableType]:
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


def _render_rates(done: StageResult) -> RenderableType:
    rates = [
        ("one node reads", done.rates.one_reader),
        ("each, while all read", done.rates.all_readers if len(done.nodes) > 1 else None),
        ("from node to node", done.rates.link),
    ]
    columns = [Column(title="", style="bold"), Column(title="measured", right=True)]
    return make_table(
        columns, [[name, f"{render_bytes(rate)}/s"] for name, rate in rates if rate is not None]
    )


def _render_times(done: StageResult) -> RenderableType:
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


def stage(flags: StageFlags) -> None:
    """Stage, list or clean."""
    if flags.list_ and flags.clean:
        raise UsageError("`--list` and `--clean` are two commands.", remedy="keep one of them")
    from tightfit.clusters.site import read_site
    from tightfit.clusters.staging.resolve import choose_target

    site = read_site()
    place = choose_target(flags.to, site, os.environ)
    if flags.list_:
        _list(flags, site, place)
    elif flags.clean:
        _clean(flags, site, place)
    else:
        _stage(flags, site, place)


def _stage(flags: StageFlags, site: Site, place: Path) -> None:
    how = _read_how(flags)
    leave = None if flags.leave is None else parse_bytes(flags.leave)
    if flags.model is None:
        raise UsageError("No model was named.", remedy="tightfit stage ./my-model")
    from tightfit.clusters.staging.resolve import locate_source
    from tightfit.clusters.staging.stage import Stager, StageRequest, describe_source

    source = locate_source(flags.model)
    num_bytes = describe_source(source).num_bytes
    with _crew(flags, site, num_bytes) as members, progress_bar() as report:
        request = StageRequest(
            source=source,
            to=place,
            how=how,
            leave_bytes=leave,
            verify=flags.verify,
            interface=flags.interface or site.interface,
            is_dry=flags.dry_run,
            announce=None if flags.as_json or flags.dry_run else _announce_forecast,
            report=report,
        )
        done = Stager(request, members).run()
    fault = _error_of(done)
    _show(flags, done, fault)
    if fault is not None and not flags.as_json:
        raise fault
    if fault is not None:  # stdout has its one document already, the fault in it
        write_err(f"error: {sanitize(fault.problem)}\n  try: {sanitize(fault.remedy)}\n")
        raise typer.Exit(fault.exit_code)


def _error_of(done: StageResult) -> UserError | None:
    if not done.lost:
        return None
    return SetupError(
        f"{len(done.lost)} of {len(done.nodes)} nodes were lost and have no whole copy: "
        f"{', '.join(node.why or node.node for node in done.lost)}.",
        remedy="the same command goes on where it stopped, once they are back",
    )


def _read_how(flags: StageFlags) -> CopyMethod | None:
    from tightfit.clusters.staging.cost import CopyMethod

    word = choices.read_word(flags.how or "auto", STAGE_METHODS, option="--how")
    return None if word == "auto" else CopyMethod(word)


@contextmanager
def _crew(flags: StageFlags, site: Site, num_bytes: int = 0) -> Iterator[list[StagingNode]]:
    """The nodes that are meant, for as long as the block lasts."""
    from tightfit.clusters.staging.nodes import LocalNode, start_agents, stop_agents
    from tightfit.clusters.staging.resolve import agent_command, find_nodes

    way = find_nodes(
        nodes=flags.nodes, on=flags.on, site=site, environ=os.environ, num_bytes=num_bytes
    )
    prefix = flags.run_with or way.prefix
    members: list[StagingNode] = [LocalNode()]
    if way.nodes:
        members = start_agents(way.nodes, prefix=prefix, command=agent_command(site))
    try:
        yield members
    finally:
        stop_agents(members)


def _announce_forecast(choice: MethodChoice, wanted: Manifest) -> None:
    seconds = choice.seconds.get(choice.how)
    predicted = "" if seconds is None else f", predicted {render_seconds(seconds)}"
    write_err(
        f"{sanitize(wanted.source)}: {render_bytes(wanted.num_bytes)} by {choice.how.value}"
        f"{predicted}: {sanitize(choice.why)}\n"
    )


def _show(flags: StageFlags, done: StageResult, fault: UserError | None) -> None:
    if flags.as_json:
        told = {**done.model_dump(mode="json"), "measured_seconds": done.measured_seconds}
        if fault is not None:
            told |= {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
        show_json(told)
        return

    show_staging(done)


def _list(flags: StageFlags, site: Site, place: Path) -> None:
    rows = _find_copies(flags, site, place, _find_key(flags))
    _show_copies(flags, {"place": str(place), "copies": rows})


def _announce_cleaning(flags: StageFlags, site: Site, place: Path, key: str | None) -> None:
    """What `--clean` would remove; nothing is."""
    rows = _find_copies(flags, site, place, key)
    busy = [f"{row['key']} on {row['node']}" for row in rows if row["is_busy"]]
    free = [row for row in rows if not row["is_busy"]]
    _show_copies(flags, {"place": str(place), "would_remove": free, "busy": busy})


def _find_copies(
    flags: StageFlags, site: Site, place: Path, key: str | None
) -> list[dict[str, Any]]:
    """Those of one key or all, node by node."""
    from tightfit.clusters.staging.nodes import ask_all

    with _crew(flags, site) as members:
        told = ask_all(members, "list", lambda _: {"to": str(place)})
    return [
        {"node": node, "host": answer["host"], **copy}
        for node, answer in told.items()
        for copy in answer["copies"]
        if key in (None, copy["key"])
    ]


def _clean(flags: StageFlags, site: Site, place: Path) -> None:
    from tightfit.clusters.staging.nodes import ask_all

    key = _find_key(flags)
    if flags.dry_run:
        _announce_cleaning(flags, site, place, key)
        return
    with _crew(flags, site) as members:
        told = ask_all(members, "clean", lambda _: {"to": str(place), "key": key})
    rows = [
        {"node": node, "host": answer["host"], **copy}
        for node, answer in told.items()
        for copy in answer["removed"]
    ]
    busy = [f"{name} on {node}" for node, answer in told.items() for name in answer["busy"]]
    _show_copies(flags, {"place": str(place), "removed": rows, "busy": busy})


def _find_key(flags: StageFlags) -> str | None:
    """Of a model that may be gone from its source by now."""
    if flags.model is None:
        return None
    from tightfit.clusters.staging.resolve import locate_source
    from tightfit.core.errors import NotFoundError
    from tightfit.runtime.staged import make_key, real_source

    try:
        return make_key(real_source(locate_source(flags.model)))
    except NotFoundError:
        if not flags.model.startswith((".", "/", "~")):
            raise
        return make_key(real_source(Path(flags.model).expanduser()))


def _show_copies(flags: StageFlags, told: dict[str, Any]) -> None:
    if flags.as_json:
        show_json(told)
        return

    show_copies(told)
