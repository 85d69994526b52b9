"""All that the nodes told, before anything is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tightfit.launch.preflight.addresses import Seats
from tightfit.launch.preflight.messages import (
    Doors,
    Facts,
    FolderStep,
    Heard,
    Knock,
    Lookup,
    Outcome,
    Reduce,
    Route,
    Stream,
    TorchFacts,
)

Pair = tuple[str, str]
"""From which node to which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """How far a node's clock is ahead of this machine's."""

    offset_seconds: float
    error_seconds: float
    """Half of the shortest question and answer: the offset is known no better."""


@dataclass(slots=True, kw_only=True)
class FolderSeen:
    """What became of the shared folder, by node."""

    path: str
    planted: FolderStep | None = None
    found: dict[str, FolderStep] = field(default_factory=dict)
    raced: dict[str, FolderStep] = field(default_factory=dict)
    renamed: dict[str, FolderStep] = field(default_factory=dict)
    grown: dict[str, FolderStep] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Seen:
    """Filled round by round; what is missing was not answered, or not asked for want of time."""

    nodes: tuple[str, ...]
    port: int
    interface: str | None = None
    """As asked for."""
    absent: dict[str, str] = field(default_factory=dict)
    """Nodes whose agent does not run, and why."""
    silent: dict[tuple[str, str], str] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)
    lookups: dict[str, list[Lookup]] = field(default_factory=dict)
    clocks: dict[str, Clock] = field(default_factory=dict)
    asked_seats: Seats = field(default_factory=dict)
    """On the device that was asked for."""
    plain_seats: Seats = field(default_factory=dict)
    """Without regard to it."""
    seats: Seats = field(default_factory=dict)
    """Those of the two that are to be used."""
    doors: dict[str, Doors] = field(default_factory=dict)
    routes: dict[str, dict[str, Route]] = field(default_factory=dict)
    """By node, then by address."""
    knocks: dict[Pair, Knock] = field(default_factory=dict)
    asked_knocks: dict[Pair, Knock] = field(default_factory=dict)
    """At the seats of the device that was asked for, where those are others."""
    port_knocks: dict[str, Knock] = field(default_factory=dict)
    """At the rendezvous port of the first node, by who knocked."""
    sent: dict[str, int] = field(default_factory=dict)
    """Small datagrams to each target, by the node that says so."""
    heard: dict[Pair, Heard] = field(default_factory=dict)
    """Only where both nodes told; then also where nothing came."""
    streams: dict[Pair, Stream] = field(default_factory=dict)
    torch: dict[str, TorchFacts] = field(default_factory=dict)
    reduce: Reduce | None = None
    no_reduce: str | None = None
    """Why no all-reduce was tried."""
    folder: FolderSeen | None = None
    seconds: float = 0.0

    @property
    def head(self) -> str:
        return self.nodes[0]

    @property
    def present(self) -> list[str]:
        return [node for node in self.nodes if node in self.facts]

    def is_open(self, pair: Pair) -> bool:
        knock = self.knocks.get(pair)
        return knock is not None and knock.outcome is Outcome.OK

    def lost_fraction(self, pair: Pair) -> float | None:
        """At least so much is lost on the way; 1.0: nothing arrives. None: not known."""
        heard, sent = self.heard.get(pair), self.sent.get(pair[0])
        if heard is None or not sent:
            return None
        return max(0, sent - heard.num_small - heard.num_dropped) / sent
