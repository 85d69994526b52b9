"""The verdict of a preflight, with the figures and the options that the job is to be given."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from tightfit.core.errors import EnvironmentFaultError
from tightfit.hardware.checkup import Checkup
from tightfit.hardware.findings import Status
from tightfit.launch.preflight.judge_devices import judge_devices
from tightfit.launch.preflight.judge_folder import judge_folder
from tightfit.launch.preflight.judge_links import judge_links
from tightfit.launch.preflight.judge_names import judge_names
from tightfit.launch.preflight.judge_nodes import judge_nodes
from tightfit.launch.preflight.messages import Facts, Reduce
from tightfit.launch.preflight.seen import Seen


class NodeReport(BaseModel):
    """One node, and how `tightfit train` is to be started there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    address: str | None
    interface: str | None
    clock_offset_seconds: float | None
    """Ahead of the machine that asked."""
    facts: Facts | None
    options: tuple[str, ...]
    """Empty where the nodes cannot meet."""


class LinkReport(BaseModel):
    """One direction between two nodes. None: not measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    target: str
    outcome: str
    rtt_seconds: float | None
    lost_fraction: float | None
    bytes_per_second: float | None
    resent_fraction: float | None


class PreflightReport(Checkup):
    """What was found, and what to do with it."""

    seconds: float
    nodes: tuple[NodeReport, ...]
    links: tuple[LinkReport, ...]
    all_reduce: Reduce | None


def conclude(seen: Seen) -> PreflightReport:
    findings = (
        *judge_nodes(seen),
        *judge_names(seen),
        *judge_devices(seen),
        *judge_links(seen),
        *judge_folder(seen),
    )
    worst = max((f.status for f in findings), key=list(Status).index, default=Status.OK)
    return PreflightReport(
        findings=findings,
        worst=worst,
        exit_code=EnvironmentFaultError.exit_code if worst is Status.FAULT else 0,
        seconds=seen.seconds,
        nodes=tuple(_report_node(seen, rank, node) for rank, node in enumerate(seen.nodes)),
        links=_report_links(seen),
        all_reduce=seen.reduce,
    )


def _report_node(seen: Seen, rank: int, node: str) -> NodeReport:
    seat = seen.seats.get(node)
    clock = seen.clocks.get(node)
    return NodeReport(
        name=node,
        address=seat.address if seat else None,
        interface=seat.device if seat else None,
        clock_offset_seconds=clock.offset_seconds if clock else None,
        facts=seen.facts.get(node),
        options=_options(seen, rank, node),
    )


def _options(seen: Seen, rank: int, node: str) -> tuple[str, ...]:
    """Everything torchrun would guess, said: names, addresses and devices do not matter then."""
    if len(seen.seats) < len(seen.nodes) or len(seen.nodes) == 1:
        return ()
    return (
        "--nodes", str(len(seen.nodes)),
        "--rendezvous", f"{seen.seats[seen.head].address}:{seen.port}",
        "--node-rank", str(rank),
        "--local-addr", seen.seats[node].address,
        "--interface", seen.seats[node].device,
    )  # fmt: skip


def _report_links(seen: Seen) -> tuple[LinkReport, ...]:
    found = []
    for (source, target), knock in seen.knocks.items():
        stream = seen.streams.get((source, target))
        found.append(
            LinkReport(
                source=source,
                target=target,
                outcome=knock.outcome.value,
                rtt_seconds=knock.rtt_seconds,
                lost_fraction=seen.lost_fraction((source, target)),
                bytes_per_second=stream.bytes_per_second if stream else None,
                resent_fraction=stream.resent_fraction if stream else None,
            )
        )
    return tuple(found)
