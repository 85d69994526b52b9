"""`tightfit stage`: a model in the RAM disks of many nodes, listed and cleaned up as well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tightfit.cli import choices
from tightfit.cli.flags.stage import WAYS, StageFlags
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.json_output import show_json
from tightfit.cli.terminal.output import write_err
from tightfit.cli.terminal.progress_bar import progress_bar
from tightfit.core.errors import EnvironmentFaultError, UsageError, UserError
from tightfit.core.units import parse_bytes, render_bytes, render_seconds

if TYPE_CHECKING:
    from tightfit.launch.site import Site
    from tightfit.launch.stage.cost import Choice, How
    from tightfit.launch.stage.crew import Member
    from tightfit.launch.stage.result import Staging
    from tightfit.runtime.staged import Manifest


def stage(flags: StageFlags) -> None:
    """Stage, list or clean."""
    if flags.list_ and flags.clean:
        raise UsageError("`--list` and `--clean` are two commands.", remedy="keep one of them")
    from tightfit.launch.site import read_site
    from tightfit.launch.stage.where import choose_place

    site = read_site()
    place = choose_place(flags.to, site, os.environ)
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
    from tightfit.launch.stage.stage import Stager, StageRequest, describe_source
    from tightfit.launch.stage.where import locate_source

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
            announce=None if flags.as_json or flags.dry_run else _foretell,
            report=report,
        )
        done = Stager(request, members).run()
    fault = _fault_of(done)
    _show(flags, done, fault)
    if fault is not None and not flags.as_json:
        raise fault
    if fault is not None:  # stdout has its one document already, the fault in it
        write_err(f"error: {harmless(fault.problem)}\n  try: {harmless(fault.remedy)}\n")
        raise typer.Exit(fault.exit_code)


def _fault_of(done: Staging) -> UserError | None:
    if not done.lost:
        return None
    return EnvironmentFaultError(
        f"{len(done.lost)} of {len(done.nodes)} nodes were lost and have no whole copy: "
        f"{', '.join(node.why or node.node for node in done.lost)}.",
        remedy="the same command goes on where it stopped, once they are back",
    )


def _read_how(flags: StageFlags) -> How | None:
    from tightfit.launch.stage.cost import How

    word = choices.read_word(flags.how or "auto", WAYS, option="--how")
    return None if word == "auto" else How(word)


@contextmanager
def _crew(flags: StageFlags, site: Site, num_bytes: int = 0) -> Iterator[list[Member]]:
    """The nodes that are meant, for as long as the block lasts."""
    from tightfit.launch.stage.crew import ThisMachine, close_crew, open_crew
    from tightfit.launch.stage.where import agent_command, find_nodes

    way = find_nodes(
        nodes=flags.nodes, on=flags.on, site=site, environ=os.environ, num_bytes=num_bytes
    )
    prefix = flags.run_with or way.prefix
    members: list[Member] = [ThisMachine()]
    if way.nodes:
        members = open_crew(way.nodes, prefix=prefix, command=agent_command(site))
    try:
        yield members
    finally:
        close_crew(members)


def _foretell(choice: Choice, wanted: Manifest) -> None:
    seconds = choice.seconds.get(choice.how)
    predicted = "" if seconds is None else f", predicted {render_seconds(seconds)}"
    write_err(
        f"{harmless(wanted.source)}: {render_bytes(wanted.num_bytes)} by {choice.how.value}"
        f"{predicted}: {harmless(choice.why)}\n"
    )


def _show(flags: StageFlags, done: Staging, fault: UserError | None) -> None:
    if flags.as_json:
        told = {**done.model_dump(mode="json"), "measured_seconds": done.measured_seconds}
        if fault is not None:
            told |= {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
        show_json(told)
        return
    from tightfit.cli.render.stage import show_staging

    show_staging(done)


def _list(flags: StageFlags, site: Site, place: Path) -> None:
    rows = _find_copies(flags, site, place, _find_key(flags))
    _show_copies(flags, {"place": str(place), "copies": rows})


def _foretell_cleaning(flags: StageFlags, site: Site, place: Path, key: str | None) -> None:
    """What `--clean` would remove; nothing is."""
    rows = _find_copies(flags, site, place, key)
    busy = [f"{row['key']} on {row['node']}" for row in rows if row["is_busy"]]
    free = [row for row in rows if not row["is_busy"]]
    _show_copies(flags, {"place": str(place), "would_remove": free, "busy": busy})


def _find_copies(
    flags: StageFlags, site: Site, place: Path, key: str | None
) -> list[dict[str, Any]]:
    """Those of one key or all, node by node."""
    from tightfit.launch.stage.crew import ask_all

    with _crew(flags, site) as members:
        told = ask_all(members, "list", lambda _: {"to": str(place)})
    return [
        {"node": node, "host": answer["host"], **copy}
        for node, answer in told.items()
        for copy in answer["copies"]
        if key in (None, copy["key"])
    ]


def _clean(flags: StageFlags, site: Site, place: Path) -> None:
    from tightfit.launch.stage.crew import ask_all

    key = _find_key(flags)
    if flags.dry_run:
        _foretell_cleaning(flags, site, place, key)
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
    from tightfit.core.errors import NotFoundError
    from tightfit.launch.stage.where import locate_source
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
    from tightfit.cli.render.stage import show_copies

    show_copies(told)
