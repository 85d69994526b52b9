"""stage, list_staged and clean_staged: copies of a model on the disks of many nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.api.call import accepts_keywords
from tightfit.api.options.clusters import StageOptions
from tightfit.clusters.site import Site, read_site
from tightfit.clusters.staging import CopyMethod
from tightfit.clusters.staging.home import StagedCopy
from tightfit.clusters.staging.nodes import (
    LocalNode,
    StagingNode,
    agent_command,
    ask_all,
    find_nodes,
    start_agents,
    stop_agents,
)
from tightfit.clusters.staging.stage import (
    Stager,
    StageRequest,
    StageResult,
    choose_target,
    describe_source,
    locate_source,
)
from tightfit.core.errors import NotFoundError, UsageError
from tightfit.core.units import parse_bytes
from tightfit.runtime.staged import make_key, real_source


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCopy:
    """A staged model, or a part of one, on one node."""

    node: str
    host: str
    copy: StagedCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCopies:
    """Copies that were found, removed, or would be removed."""

    place: str
    copies: tuple[NodeCopy, ...]
    busy: tuple[str, ...] = ()
    """`KEY on NODE`: not removed, because a staging is at work on them."""


@accepts_keywords(StageOptions)
def stage(options: StageOptions) -> StageResult:
    """Copy the model to every node; `lost` of the result names nodes that have no whole copy."""
    site = read_site()
    target = choose_target(options.to, site, os.environ)
    leave = None if options.leave is None else parse_bytes(options.leave)
    if options.model is None:
        raise UsageError("No model was named.", remedy="tightfit stage ./my-model")
    source = locate_source(options.model)
    num_bytes = describe_source(source).num_bytes
    with _open_nodes(options, site, num_bytes) as nodes:
        request = StageRequest(
            source=source,
            to=target,
            how=None if options.how in (None, "auto") else CopyMethod(options.how),
            leave_bytes=leave,
            verify=options.verify,
            interface=options.interface or site.interface,
            is_dry=options.dry_run,
            announce=options.announce,
            report=options.progress,
        )
        return Stager(request, nodes).run()


@accepts_keywords(StageOptions)
def list_staged(options: StageOptions) -> StagedCopies:
    """The copies of one model, or all copies, on every node."""
    site = read_site()
    target = choose_target(options.to, site, os.environ)
    key = _find_key(options.model)
    with _open_nodes(options, site) as nodes:
        answers = ask_all(nodes, "list", lambda _: {"to": str(target)})
    found = [one for one in _read_copies(answers, "copies") if key is None or one.copy.key == key]
    return StagedCopies(place=str(target), copies=tuple(found))


@accepts_keywords(StageOptions)
def clean_staged(options: StageOptions) -> StagedCopies:
    """Remove the copies of one model, or all; with `dry_run` only tell which."""
    if options.dry_run:
        found = list_staged(options)
        busy = [f"{one.copy.key} on {one.node}" for one in found.copies if one.copy.is_busy]
        idle = [one for one in found.copies if not one.copy.is_busy]
        return StagedCopies(place=found.place, copies=tuple(idle), busy=tuple(busy))
    site = read_site()
    target = choose_target(options.to, site, os.environ)
    key = _find_key(options.model)
    with _open_nodes(options, site) as nodes:
        answers = ask_all(nodes, "clean", lambda _: {"to": str(target), "key": key})
    return StagedCopies(
        place=str(target),
        copies=tuple(_read_copies(answers, "removed")),
        busy=tuple(f"{key} on {node}" for node, one in answers.items() for key in one["busy"]),
    )


def _read_copies(answers: dict[str, dict[str, Any]], name: str) -> Iterator[NodeCopy]:
    for node, answer in answers.items():
        for copy in answer[name]:
            yield NodeCopy(node=node, host=answer["host"], copy=StagedCopy.model_validate(copy))


@contextmanager
def _open_nodes(
    options: StageOptions, site: Site, num_bytes: int = 0
) -> Iterator[list[StagingNode]]:
    """The nodes that are meant, with an agent on each, for as long as the block lasts."""
    names, prefix = find_nodes(
        nodes=options.nodes, on=options.on, site=site, environ=os.environ, num_bytes=num_bytes
    )
    nodes: list[StagingNode] = [LocalNode()]
    if names:
        prefix = options.run_with or prefix
        nodes = start_agents(names, prefix=prefix, command=agent_command(site))
    try:
        yield nodes
    finally:
        stop_agents(nodes)


def _find_key(model: str | None) -> str | None:
    """The key of a model's copies; the model itself may be gone from its source by now."""
    if model is None:
        return None
    try:
        return make_key(real_source(locate_source(model)))
    except NotFoundError:
        if not model.startswith((".", "/", "~")):
            raise
        return make_key(real_source(Path(model).expanduser()))
