"""The rounds of a preflight: what all nodes are asked, in which order, and how long each may take.

Together they end in TOTAL_SECONDS whatever hangs: each takes its own time or what is left.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pydantic import TypeAdapter

from tightfit.clusters.agents import AgentGoneError, AgentLine, RemoteAgent
from tightfit.clusters.preflight.messages import (
    PROTOCOL,
    AllReduceResult,
    ConnectionOutcome,
    ConnectionProbe,
    DatagramCount,
    FolderStep,
    ListenerPorts,
    NameLookup,
    NodeFacts,
    Route,
    StreamResult,
    TorchFacts,
)
from tightfit.clusters.preflight.observations import (
    ClockOffset,
    FolderObservations,
    NodeAddresses,
    NodePair,
    Observations,
    addresses_on,
    choose_addresses,
    host_of,
)
from tightfit.core.errors import UserError

AGENT = "tightfit.clusters.preflight.agent"
END_SECONDS = 1.0
GRACE_SECONDS = 0.5
"""For an answer to travel, on top of what the question itself may take."""


class NoAnswerError(Exception):
    """A node gave no answer, or a fault in place of one; the text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """How the agents are started."""

    prefix: str
    argv: tuple[str, ...] = (sys.executable, "-m", AGENT)
    env: Mapping[str, str]


class NodeAgent:
    """One node's agent."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.fault: str | None = None
        """Why it does not run."""
        self._remote: RemoteAgent | None = None
        self._hello: Future[AgentLine] = Future()

    def start(self, how: AgentCommand, seconds: float) -> None:
        """Until it has said hello; `fault` tells what went wrong."""
        try:
            remote = self._remote = RemoteAgent(
                self.node, how.argv, prefix=how.prefix, env=how.env, on_news=self._greet
            )
        except UserError as fault:
            self.fault = fault.problem
            return
        either: list[Future[Any]] = [self._hello, remote.ended]
        wait(either, timeout=seconds, return_when=FIRST_COMPLETED)
        if self._hello.done():
            self.fault = _find_mismatch(self._hello.result())
        elif remote.ended.done():
            code = remote.wait_for_exit(END_SECONDS)
            self.fault = f"ended with exit code {code}{remote.last_words}"
        else:
            self.fault = f"no answer in {seconds:.0f} s{remote.last_words}"

    def _greet(self, line: AgentLine) -> None:
        if "hello" in line and not self._hello.done():
            self._hello.set_result(line)

    def ask(self, question: str, seconds: float, given: Mapping[str, Any]) -> Any:
        """The answer, or SilentAgentError when the time is over."""
        if self.fault is not None or self._remote is None:
            raise NoAnswerError(self.fault or "it was not started")
        asked = self._remote.ask({"do": question, **given})
        try:
            told = asked.result(timeout=max(seconds, 0.0) + GRACE_SECONDS)
        except FutureTimeoutError:
            raise NoAnswerError(f"no answer in {seconds:.0f} s") from None
        except AgentGoneError as fault:
            raise NoAnswerError(str(fault)) from None
        if "fault" in told:
            raise NoAnswerError(str(told["fault"]))
        return told["answer"]

    def end(self) -> None:
        if self._remote is not None:
            self._remote.close(seconds=END_SECONDS)


def _find_mismatch(hello: AgentLine) -> str | None:
    if hello.get("protocol") == PROTOCOL:
        return None
    return f"tightfit {hello.get('version')} there does not speak with the one of this machine"


class AgentPool:
    """All agents. Questions go to all at once; who is silent is left out of the answers."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.agents = {node: NodeAgent(node) for node in nodes}
        self.silent: dict[tuple[str, str], str] = {}
        """Questions that a node did not answer, and why."""
        self._pool = ThreadPoolExecutor(max_workers=2 * len(nodes) + 2)

    def start(self, how: AgentCommand, seconds: float) -> None:
        list(self._pool.map(lambda agent: agent.start(how, seconds), self.agents.values()))

    @property
    def present(self) -> list[str]:
        return [node for node, agent in self.agents.items() if agent.fault is None]

    def ask(
        self, question: str, seconds: float, given: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """What each present node answers; `given` by node, and only to the nodes in it."""
        nodes = self.present if given is None else [n for n in given if n in self.present]
        asked = {
            node: self._pool.submit(
                self.agents[node].ask, question, seconds, (given or {}).get(node, {})
            )
            for node in nodes
        }
        answers = {}
        for node, future in asked.items():
            try:
                answers[node] = future.result()
            except NoAnswerError as fault:
                self.silent[(node, question)] = str(fault)
        return answers

    def end(self) -> None:
        list(self._pool.map(NodeAgent.end, self.agents.values()))
        self._pool.shutdown(wait=False)


# The rounds with the shared folder: planted by one node, found and raced for by all.

FOLDER_SECONDS = 8.0


def check_shared_folder(
    seen: FolderObservations, crew: AgentPool, left: Callable[[float], float]
) -> None:
    """Fill `seen`; what was planted is removed again."""
    nodes = crew.present
    if not nodes:
        return
    nonce = uuid.uuid4().hex
    place = str(PurePosixPath(seen.path) / f".tightfit-preflight-{nonce[:12]}")

    def step(name: str, who: Sequence[str], **given: Any) -> dict[str, FolderStep]:
        wanted = {node: {"step": name, "place": place, "given": given} for node in who}
        told = crew.ask("folder", left(FOLDER_SECONDS), wanted)
        return {node: FolderStep.model_validate(answer) for node, answer in told.items()}

    first, others = nodes[0], nodes[1:]
    seen.planted = step("plant", [first], nonce=nonce).get(first)
    if seen.planted is None or not seen.planted.is_done:
        return
    seen.found = step("find", others, nonce=nonce, seconds=left(FOLDER_SECONDS))
    finders = [node for node in others if node in seen.found and seen.found[node].is_done]
    everyone = [first, *finders]
    seen.raced = step("race", everyone, nonce=nonce)
    wrote = [told.wrote for told in seen.raced.values() if told.is_done]
    seen.renamed = step(
        "see_renamed", everyone, names=wrote, nonce=nonce, seconds=left(FOLDER_SECONDS)
    )
    if finders and first in step("grow", [first], nonce=nonce):
        seen.grown = step("see_grown", finders, nonce=nonce, seconds=left(FOLDER_SECONDS))
    step("remove", [first])


# The rounds: what is asked of all nodes, in which order, and how long each may take.

TOTAL_SECONDS = 54.0
START_SECONDS = 20.0
FACTS_SECONDS = 8.0
LOOKUP_SECONDS = 10.0
OPEN_SECONDS = 3.0
KNOCK_SECONDS = 5.0
SPRAY_SECONDS = 4.0
STREAM_SECONDS = 1.5
TORCH_SECONDS = 20.0
REDUCE_SECONDS = 15.0
REDUCE_RESERVE_SECONDS = 6.0
"""An all-reduce with less time than this would tell nothing."""
NUM_CLOCK_ASKS = 8
NUM_SMALL, NUM_LARGE = 200, 4
FEW_NODES = 16
"""Up to here every node tries every other; beyond, its neighbours in the ring and the first."""
IP_UDP_HEADER_BYTES = 28
ReportProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRequest:
    """What `tightfit preflight` was asked."""

    nodes: tuple[str, ...]
    start: AgentCommand
    port: int
    interface: str | None = None
    shared: str | None = None


class Collector:
    """One preflight under way."""

    def __init__(self, request: PreflightRequest, tell: ReportProgress) -> None:
        self.request = request
        self.tell = tell
        self.crew = AgentPool(request.nodes)
        self.seen = Observations(
            nodes=request.nodes, port=request.port, interface=request.interface
        )
        self._begin = time.monotonic()

    def left(self, most: float) -> float:
        """Seconds that a round may take."""
        passed = time.monotonic() - self._begin
        return max(0.0, min(most, TOTAL_SECONDS - passed))

    def run(self) -> Observations:
        aside = ThreadPoolExecutor(max_workers=1)
        try:
            self._start()
            folder = aside.submit(self._look_at_folder) if self.request.shared else None
            self._look_at_nodes()
            if len(self.seen.present) > 1:
                self._look_at_network()
            self._look_at_torch()
            _wait(folder)
        finally:
            self.crew.end()
            aside.shutdown(wait=False)
        self.seen.silent = dict(self.crew.silent)
        self.seen.seconds = time.monotonic() - self._begin
        return self.seen

    def _start(self) -> None:
        self.tell(f"starting an agent on each of {len(self.request.nodes)} nodes")
        self.crew.start(self.request.start, self.left(START_SECONDS))
        self.seen.absent = {
            node: agent.fault for node, agent in self.crew.agents.items() if agent.fault is not None
        }
        self.crew.ask("torch_start", self.left(OPEN_SECONDS))

    def _look_at_nodes(self) -> None:
        self.tell("versions, devices, clocks and names")
        seen = self.seen
        seen.facts = {
            node: NodeFacts.model_validate(told)
            for node, told in self.crew.ask("facts", self.left(FACTS_SECONDS)).items()
        }
        seen.clocks = self._read_clocks()
        hosts = [host_of(node) for node in self.request.nodes]
        wanted = {
            node: {"names": list(dict.fromkeys([*hosts, facts.hostname]))}
            for node, facts in seen.facts.items()
        }
        told = self.crew.ask("lookup", self.left(LOOKUP_SECONDS), wanted)
        seen.lookups = {node: _read(list[NameLookup], answer) for node, answer in told.items()}

    def _read_clocks(self) -> dict[str, ClockOffset]:
        """One node after the other, so that no question waits for another."""
        found: dict[str, ClockOffset] = {}
        for node in self.seen.facts:
            for _ in range(NUM_CLOCK_ASKS):
                before = time.time()
                told = self.crew.ask("clock", self.left(1.0), {node: {}}).get(node)
                after = time.time()
                if told is None:
                    break
                clock = ClockOffset(
                    offset_seconds=float(told) - (before + after) / 2,
                    error_seconds=(after - before) / 2,
                )
                if node not in found or clock.error_seconds < found[node].error_seconds:
                    found[node] = clock
        return found

    def _look_at_network(self) -> None:
        seen = self.seen
        seen.plain_seats = choose_addresses(seen.facts, seen.lookups)
        if seen.interface is not None:
            seen.asked_seats = addresses_on(seen.facts, seen.interface)
        self.tell("the port, and every node from every other")
        self._open_doors()
        self._find_routes()
        if self._is_asked_whole():
            seen.asked_knocks = self._knock(seen.asked_seats)
        works = any(knock.outcome is ConnectionOutcome.OK for knock in seen.asked_knocks.values())
        seen.seats = seen.asked_seats if works else seen.plain_seats
        seen.knocks = seen.asked_knocks if works else self._knock(seen.plain_seats)
        self._knock_at_port()
        self.tell("loss in each direction")
        self._spray()
        self.tell("bandwidth of each link")
        self._stream()

    def _is_asked_whole(self) -> bool:
        """Whether the device that was asked for is on all nodes and carries the ways between."""
        seen = self.seen
        if len(seen.asked_seats) != len(seen.present):
            return False
        return all(
            self._device_to(source, seen.asked_seats[target].address) == seen.interface
            for source, target in self._pairs(seen.asked_seats)
        )

    def _device_to(self, node: str, address: str) -> str | None:
        route = self.seen.routes.get(node, {}).get(address)
        return route.device if route else None

    def _open_doors(self) -> None:
        wanted = {
            node: {"port": self.seen.port if node == self.seen.head else None}
            for node in self.seen.present
        }
        told = self.crew.ask("open", self.left(OPEN_SECONDS), wanted)
        self.seen.doors = {
            node: ListenerPorts.model_validate(answer) for node, answer in told.items()
        }

    def _find_routes(self) -> None:
        seen = self.seen
        seats = [*seen.plain_seats.values(), *seen.asked_seats.values()]
        wanted = {
            node: {"addresses": list(dict.fromkeys(s.address for s in seats if s.node != node))}
            for node in seen.present
        }
        for node, answer in self.crew.ask("routes", self.left(KNOCK_SECONDS), wanted).items():
            seen.routes[node] = {route.address: route for route in _read(list[Route], answer)}

    def _pairs(self, seats: NodeAddresses) -> list[NodePair]:
        """Who tries whom."""
        nodes = [node for node in self.seen.present if node in seats]
        if len(nodes) <= FEW_NODES:
            return [(a, b) for a in nodes for b in nodes if a != b]
        ring = dict.fromkeys(
            pair
            for at, node in enumerate(nodes)
            for other in (nodes[at - 1], nodes[(at + 1) % len(nodes)], nodes[0])
            for pair in ((node, other), (other, node))
            if node != other
        )
        return list(ring)

    def _knock(self, seats: NodeAddresses) -> dict[NodePair, ConnectionProbe]:
        seconds = self.left(KNOCK_SECONDS)
        wanted: dict[str, dict[str, Any]] = {}
        for source, target in self._pairs(seats):
            if target in self.seen.doors:
                ask = wanted.setdefault(source, {"targets": [], "seconds": seconds})
                ask["targets"].append(
                    {
                        "node": target,
                        "address": seats[target].address,
                        "port": self.seen.doors[target].tcp_port,
                        "is_ours": True,
                    }
                )
        told = self.crew.ask("knock", seconds, wanted)
        return {
            (node, knock.node): knock
            for node, answer in told.items()
            for knock in _read(list[ConnectionProbe], answer)
        }

    def _knock_at_port(self) -> None:
        """The first node's rendezvous port, as the others will do, and it itself."""
        seen = self.seen
        head = seen.seats.get(seen.head)
        if head is None or seen.head not in seen.doors:
            return
        target = {
            "node": seen.head,
            "address": head.address,
            "port": seen.port,
            "is_ours": seen.doors[seen.head].rendezvous_fault is None,
        }
        seconds = self.left(KNOCK_SECONDS)
        wanted = {node: {"targets": [target], "seconds": seconds} for node in seen.present}
        for node, answer in self.crew.ask("knock", seconds, wanted).items():
            seen.port_knocks[node] = _read(list[ConnectionProbe], answer)[0]

    def _spray(self) -> None:
        """What arrives is held against what its source says it has sent, in time."""
        seen = self.seen
        pairs = [
            (source, target)
            for source, target in self._pairs(seen.seats)
            if target in seen.doors and ":" not in seen.seats[target].address
        ]
        seen.sent = self.crew.ask("spray", self.left(SPRAY_SECONDS), self._plan_spray(pairs))
        time.sleep(self.left(0.3))  # for the last of them to arrive
        wanted: dict[str, dict[str, list[int]]] = {}
        for source, target in pairs:
            if source in seen.sent:
                ask = wanted.setdefault(target, {"senders": []})
                ask["senders"].append(seen.nodes.index(source))
        for node, answer in self.crew.ask("heard", self.left(OPEN_SECONDS), wanted).items():
            for heard in _read(list[DatagramCount], answer):
                seen.heard[(seen.nodes[heard.sender], node)] = heard

    def _plan_spray(self, pairs: list[NodePair]) -> dict[str, dict[str, Any]]:
        seen = self.seen
        wanted: dict[str, dict[str, Any]] = {}
        for source, target in pairs:
            mtu = min(seen.seats[source].mtu, seen.seats[target].mtu)
            amounts = {"num_small": NUM_SMALL, "num_large": NUM_LARGE}
            sender = seen.nodes.index(source)
            ask = wanted.setdefault(source, {"targets": [], "sender": sender, **amounts})
            ask["targets"].append(
                {
                    "address": seen.seats[target].address,
                    "port": seen.doors[target].udp_port,
                    "large_bytes": min(max(mtu, 576), 65_535) - IP_UDP_HEADER_BYTES,
                }
            )
        return wanted

    def _stream(self) -> None:
        """Round the ring, all at once: each node sends to one and receives from one."""
        seen = self.seen
        nodes = [node for node in seen.present if node in seen.seats and node in seen.doors]
        ring = zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)
        seconds = min(STREAM_SECONDS, self.left(STREAM_SECONDS))
        wanted = {
            source: {
                "node": target,
                "address": seen.seats[target].address,
                "port": seen.doors[target].tcp_port,
                "seconds": seconds,
            }
            for source, target in ring
            if source != target and seen.is_open((source, target))
        }
        told = self.crew.ask("stream", seconds + 2.0, wanted)
        for node, answer in told.items():
            stream = StreamResult.model_validate(answer)
            seen.streams[(node, stream.node)] = stream

    def _look_at_torch(self) -> None:
        seen = self.seen
        self.tell("torch on each node")
        told = self.crew.ask("torch", self.left(TORCH_SECONDS))
        seen.torch = {node: TorchFacts.model_validate(answer) for node, answer in told.items()}
        seen.no_reduce = self._why_no_reduce()
        if seen.no_reduce is None:
            self.tell("all-reduce over all nodes")
            self._reduce()

    def _why_no_reduce(self) -> str | None:
        seen = self.seen
        loaded = [n for n in seen.nodes if n in seen.torch and seen.torch[n].fault is None]
        closed = [pair for pair in self._pairs(seen.seats) if not seen.is_open(pair)]
        doubts = {
            "there is only one node": len(seen.nodes) == 1,
            "not every node answers": len(seen.present) < len(seen.nodes),
            "torch does not load on every node": len(loaded) < len(seen.nodes),
            "not every node reaches every other": closed or len(seen.seats) < len(seen.nodes),
            f"port {seen.port} of {seen.head} is not to be had": any(
                knock.outcome is not ConnectionOutcome.OK for knock in seen.port_knocks.values()
            )
            or any(doors.rendezvous_fault for doors in seen.doors.values()),
            "the other checks took the time": self.left(REDUCE_SECONDS) < REDUCE_RESERVE_SECONDS,
        }
        return next((why for why, is_so in doubts.items() if is_so), None)

    def _reduce(self) -> None:
        seen = self.seen
        self.crew.ask("close_port", self.left(OPEN_SECONDS), {seen.head: {}})
        has_gpus = all(facts.num_gpus > 0 for facts in seen.torch.values())
        seconds = self.left(REDUCE_SECONDS)
        wanted = {
            node: {
                "given": {
                    "backend": "nccl" if has_gpus else "gloo",
                    "address": seen.seats[seen.head].address,
                    "port": seen.port,
                    "rank": rank,
                    "world_size": len(seen.nodes),
                    "device": seen.seats[node].device,
                    "seconds": seconds,
                }
            }
            for rank, node in enumerate(seen.nodes)
        }
        told = self.crew.ask("reduce", seconds, wanted)
        found = [AllReduceResult.model_validate(answer) for answer in told.values()]
        faults = [reduce for reduce in found if reduce.fault]
        if len(found) < len(seen.nodes) and not faults:
            faults = [AllReduceResult(fault=f"it did not end in {seconds:.0f} s")]
        seen.reduce = faults[0] if faults else max(found, key=lambda r: r.seconds)

    def _look_at_folder(self) -> None:
        """Beside the other rounds: a file system that hangs takes no time of theirs."""
        assert self.request.shared is not None
        self.seen.folder = FolderObservations(path=self.request.shared)
        check_shared_folder(self.seen.folder, self.crew, self.left)


def _wait(task: Future[None] | None) -> None:
    if task is not None:
        task.result()


def _read(kind: Any, answer: Any) -> Any:
    return TypeAdapter(kind).validate_python(answer)
