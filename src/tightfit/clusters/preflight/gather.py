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
    """A node gave no answer, or an error in place of one; the text says which."""


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
        self.error: str | None = None
        """Why it does not run."""
        self._remote: RemoteAgent | None = None
        self._hello: Future[AgentLine] = Future()

    def start(self, how: AgentCommand, seconds: float) -> None:
        """Until it has said hello; `error` tells what went wrong."""
        try:
            remote = self._remote = RemoteAgent(
                self.node, how.argv, prefix=how.prefix, env=how.env, on_news=self._greet
            )
        except UserError as error:
            self.error = error.problem
            return
        either: list[Future[Any]] = [self._hello, remote.ended]
        wait(either, timeout=seconds, return_when=FIRST_COMPLETED)
        if self._hello.done():
            self.error = _find_mismatch(self._hello.result())
        elif remote.ended.done():
            code = remote.wait_for_exit(END_SECONDS)
            self.error = f"ended with exit code {code}{remote.last_words}"
        else:
            self.error = f"no answer in {seconds:.0f} s{remote.last_words}"

    def _greet(self, line: AgentLine) -> None:
        if "hello" in line and not self._hello.done():
            self._hello.set_result(line)

    def ask(self, question: str, seconds: float, given: Mapping[str, Any]) -> Any:
        """The answer, or SilentAgentError when the time is over."""
        if self.error is not None or self._remote is None:
            raise NoAnswerError(self.error or "it was not started")
        asked = self._remote.ask({"do": question, **given})
        try:
            reply = asked.result(timeout=max(seconds, 0.0) + GRACE_SECONDS)
        except FutureTimeoutError:
            raise NoAnswerError(f"no answer in {seconds:.0f} s") from None
        except AgentGoneError as error:
            raise NoAnswerError(str(error)) from None
        if "error" in reply:
            raise NoAnswerError(str(reply["error"]))
        return reply["answer"]

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
        return [node for node, agent in self.agents.items() if agent.error is None]

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
            except NoAnswerError as error:
                self.silent[(node, question)] = str(error)
        return answers

    def end(self) -> None:
        list(self._pool.map(NodeAgent.end, self.agents.values()))
        self._pool.shutdown(wait=False)


# The rounds with the shared folder: planted by one node, found and raced for by all.

FOLDER_SECONDS = 8.0


def check_shared_folder(
    observed: FolderObservations, pool: AgentPool, left: Callable[[float], float]
) -> None:
    """Fill `observed`; what was planted is removed again."""
    nodes = pool.present
    if not nodes:
        return
    nonce = uuid.uuid4().hex
    place = str(PurePosixPath(observed.path) / f".tightfit-preflight-{nonce[:12]}")

    def step(name: str, who: Sequence[str], **given: Any) -> dict[str, FolderStep]:
        wanted = {node: {"step": name, "place": place, "given": given} for node in who}
        reply = pool.ask("folder", left(FOLDER_SECONDS), wanted)
        return {node: FolderStep.model_validate(answer) for node, answer in reply.items()}

    first, others = nodes[0], nodes[1:]
    observed.planted = step("plant", [first], nonce=nonce).get(first)
    if observed.planted is None or not observed.planted.is_done:
        return
    observed.found = step("find", others, nonce=nonce, seconds=left(FOLDER_SECONDS))
    finders = [node for node in others if node in observed.found and observed.found[node].is_done]
    everyone = [first, *finders]
    observed.raced = step("race", everyone, nonce=nonce)
    wrote = [reply.wrote for reply in observed.raced.values() if reply.is_done]
    observed.renamed = step(
        "see_renamed", everyone, names=wrote, nonce=nonce, seconds=left(FOLDER_SECONDS)
    )
    if finders and first in step("grow", [first], nonce=nonce):
        observed.grown = step("see_grown", finders, nonce=nonce, seconds=left(FOLDER_SECONDS))
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
        self.report = tell
        self.pool = AgentPool(request.nodes)
        self.observed = Observations(
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
            if len(self.observed.present) > 1:
                self._look_at_network()
            self._look_at_torch()
            _wait(folder)
        finally:
            self.pool.end()
            aside.shutdown(wait=False)
        self.observed.silent = dict(self.pool.silent)
        self.observed.seconds = time.monotonic() - self._begin
        return self.observed

    def _start(self) -> None:
        self.report(f"starting an agent on each of {len(self.request.nodes)} nodes")
        self.pool.start(self.request.start, self.left(START_SECONDS))
        self.observed.absent = {
            node: agent.error for node, agent in self.pool.agents.items() if agent.error is not None
        }
        self.pool.ask("torch_start", self.left(OPEN_SECONDS))

    def _look_at_nodes(self) -> None:
        self.report("versions, devices, clocks and names")
        observed = self.observed
        observed.facts = {
            node: NodeFacts.model_validate(reply)
            for node, reply in self.pool.ask("facts", self.left(FACTS_SECONDS)).items()
        }
        observed.clocks = self._read_clocks()
        hosts = [host_of(node) for node in self.request.nodes]
        wanted = {
            node: {"names": list(dict.fromkeys([*hosts, facts.hostname]))}
            for node, facts in observed.facts.items()
        }
        reply = self.pool.ask("lookup", self.left(LOOKUP_SECONDS), wanted)
        observed.lookups = {node: _read(list[NameLookup], answer) for node, answer in reply.items()}

    def _read_clocks(self) -> dict[str, ClockOffset]:
        """One node after the other, so that no question waits for another."""
        found: dict[str, ClockOffset] = {}
        for node in self.observed.facts:
            for _ in range(NUM_CLOCK_ASKS):
                before = time.time()
                reply = self.pool.ask("clock", self.left(1.0), {node: {}}).get(node)
                after = time.time()
                if reply is None:
                    break
                clock = ClockOffset(
                    offset_seconds=float(reply) - (before + after) / 2,
                    error_seconds=(after - before) / 2,
                )
                if node not in found or clock.error_seconds < found[node].error_seconds:
                    found[node] = clock
        return found

    def _look_at_network(self) -> None:
        observed = self.observed
        observed.defaults = choose_addresses(observed.facts, observed.lookups)
        if observed.interface is not None:
            observed.requested = addresses_on(observed.facts, observed.interface)
        self.report("the port, and every node from every other")
        self._open_ports()
        self._find_routes()
        if self._is_asked_whole():
            observed.requested_probes = self._probe(observed.requested)
        works = any(
            probe.outcome is ConnectionOutcome.OK for probe in observed.requested_probes.values()
        )
        observed.addresses = observed.requested if works else observed.defaults
        observed.probes = observed.requested_probes if works else self._probe(observed.defaults)
        self._probe_port()
        self.report("loss in each direction")
        self._send_datagrams()
        self.report("bandwidth of each link")
        self._stream()

    def _is_asked_whole(self) -> bool:
        """Whether the device that was asked for is on all nodes and carries the ways between."""
        observed = self.observed
        if len(observed.requested) != len(observed.present):
            return False
        return all(
            self._device_to(source, observed.requested[target].address) == observed.interface
            for source, target in self._pairs(observed.requested)
        )

    def _device_to(self, node: str, address: str) -> str | None:
        route = self.observed.routes.get(node, {}).get(address)
        return route.device if route else None

    def _open_ports(self) -> None:
        wanted = {
            node: {"port": self.observed.port if node == self.observed.head else None}
            for node in self.observed.present
        }
        reply = self.pool.ask("open", self.left(OPEN_SECONDS), wanted)
        self.observed.ports = {
            node: ListenerPorts.model_validate(answer) for node, answer in reply.items()
        }

    def _find_routes(self) -> None:
        observed = self.observed
        node_addresses = [*observed.defaults.values(), *observed.requested.values()]
        wanted = {
            node: {
                "addresses": list(
                    dict.fromkeys(s.address for s in node_addresses if s.node != node)
                )
            }
            for node in observed.present
        }
        for node, answer in self.pool.ask("routes", self.left(KNOCK_SECONDS), wanted).items():
            observed.routes[node] = {route.address: route for route in _read(list[Route], answer)}

    def _pairs(self, node_addresses: NodeAddresses) -> list[NodePair]:
        """Who tries whom."""
        nodes = [node for node in self.observed.present if node in node_addresses]
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

    def _probe(self, node_addresses: NodeAddresses) -> dict[NodePair, ConnectionProbe]:
        seconds = self.left(KNOCK_SECONDS)
        wanted: dict[str, dict[str, Any]] = {}
        for source, target in self._pairs(node_addresses):
            if target in self.observed.ports:
                ask = wanted.setdefault(source, {"targets": [], "seconds": seconds})
                ask["targets"].append(
                    {
                        "node": target,
                        "address": node_addresses[target].address,
                        "port": self.observed.ports[target].tcp_port,
                        "is_ours": True,
                    }
                )
        reply = self.pool.ask("connect", seconds, wanted)
        return {
            (node, probe.node): probe
            for node, answer in reply.items()
            for probe in _read(list[ConnectionProbe], answer)
        }

    def _probe_port(self) -> None:
        """The first node's rendezvous port, as the others will do, and it itself."""
        observed = self.observed
        head = observed.addresses.get(observed.head)
        if head is None or observed.head not in observed.ports:
            return
        target = {
            "node": observed.head,
            "address": head.address,
            "port": observed.port,
            "is_ours": observed.ports[observed.head].rendezvous_error is None,
        }
        seconds = self.left(KNOCK_SECONDS)
        wanted = {node: {"targets": [target], "seconds": seconds} for node in observed.present}
        for node, answer in self.pool.ask("connect", seconds, wanted).items():
            observed.port_probes[node] = _read(list[ConnectionProbe], answer)[0]

    def _send_datagrams(self) -> None:
        """What arrives is held against what its source says it has sent, in time."""
        observed = self.observed
        pairs = [
            (source, target)
            for source, target in self._pairs(observed.addresses)
            if target in observed.ports and ":" not in observed.addresses[target].address
        ]
        observed.sent = self.pool.ask(
            "datagrams", self.left(SPRAY_SECONDS), self._plan_datagrams(pairs)
        )
        time.sleep(self.left(0.3))  # for the last of them to arrive
        wanted: dict[str, dict[str, list[int]]] = {}
        for source, target in pairs:
            if source in observed.sent:
                ask = wanted.setdefault(target, {"senders": []})
                ask["senders"].append(observed.nodes.index(source))
        for node, answer in self.pool.ask("received", self.left(OPEN_SECONDS), wanted).items():
            for received in _read(list[DatagramCount], answer):
                observed.received[(observed.nodes[received.sender], node)] = received

    def _plan_datagrams(self, pairs: list[NodePair]) -> dict[str, dict[str, Any]]:
        observed = self.observed
        wanted: dict[str, dict[str, Any]] = {}
        for source, target in pairs:
            mtu = min(observed.addresses[source].mtu, observed.addresses[target].mtu)
            amounts = {"num_small": NUM_SMALL, "num_large": NUM_LARGE}
            sender = observed.nodes.index(source)
            ask = wanted.setdefault(source, {"targets": [], "sender": sender, **amounts})
            ask["targets"].append(
                {
                    "address": observed.addresses[target].address,
                    "port": observed.ports[target].udp_port,
                    "large_bytes": min(max(mtu, 576), 65_535) - IP_UDP_HEADER_BYTES,
                }
            )
        return wanted

    def _stream(self) -> None:
        """Round the ring, all at once: each node sends to one and receives from one."""
        observed = self.observed
        nodes = [
            node
            for node in observed.present
            if node in observed.addresses and node in observed.ports
        ]
        ring = zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)
        seconds = min(STREAM_SECONDS, self.left(STREAM_SECONDS))
        wanted = {
            source: {
                "node": target,
                "address": observed.addresses[target].address,
                "port": observed.ports[target].tcp_port,
                "seconds": seconds,
            }
            for source, target in ring
            if source != target and observed.is_open((source, target))
        }
        reply = self.pool.ask("stream", seconds + 2.0, wanted)
        for node, answer in reply.items():
            stream = StreamResult.model_validate(answer)
            observed.streams[(node, stream.node)] = stream

    def _look_at_torch(self) -> None:
        observed = self.observed
        self.report("torch on each node")
        reply = self.pool.ask("torch", self.left(TORCH_SECONDS))
        observed.torch = {node: TorchFacts.model_validate(answer) for node, answer in reply.items()}
        observed.no_all_reduce = self._why_no_all_reduce()
        if observed.no_all_reduce is None:
            self.report("all-reduce over all nodes")
            self._reduce()

    def _why_no_all_reduce(self) -> str | None:
        observed = self.observed
        loaded = [
            n for n in observed.nodes if n in observed.torch and observed.torch[n].error is None
        ]
        closed = [pair for pair in self._pairs(observed.addresses) if not observed.is_open(pair)]
        doubts = {
            "there is only one node": len(observed.nodes) == 1,
            "not every node answers": len(observed.present) < len(observed.nodes),
            "torch does not load on every node": len(loaded) < len(observed.nodes),
            "not every node reaches every other": closed
            or len(observed.addresses) < len(observed.nodes),
            f"port {observed.port} of {observed.head} is not to be had": any(
                probe.outcome is not ConnectionOutcome.OK for probe in observed.port_probes.values()
            )
            or any(ports.rendezvous_error for ports in observed.ports.values()),
            "the other checks took the time": self.left(REDUCE_SECONDS) < REDUCE_RESERVE_SECONDS,
        }
        return next((why for why, is_so in doubts.items() if is_so), None)

    def _reduce(self) -> None:
        observed = self.observed
        self.pool.ask("close_port", self.left(OPEN_SECONDS), {observed.head: {}})
        has_gpus = all(facts.num_gpus > 0 for facts in observed.torch.values())
        seconds = self.left(REDUCE_SECONDS)
        wanted = {
            node: {
                "given": {
                    "backend": "nccl" if has_gpus else "gloo",
                    "address": observed.addresses[observed.head].address,
                    "port": observed.port,
                    "rank": rank,
                    "world_size": len(observed.nodes),
                    "device": observed.addresses[node].device,
                    "seconds": seconds,
                }
            }
            for rank, node in enumerate(observed.nodes)
        }
        reply = self.pool.ask("reduce", seconds, wanted)
        found = [AllReduceResult.model_validate(answer) for answer in reply.values()]
        errors = [reduce for reduce in found if reduce.error]
        if len(found) < len(observed.nodes) and not errors:
            errors = [AllReduceResult(error=f"it did not end in {seconds:.0f} s")]
        observed.reduce = errors[0] if errors else max(found, key=lambda r: r.seconds)

    def _look_at_folder(self) -> None:
        """Beside the other rounds: a file system that hangs takes no time of theirs."""
        assert self.request.shared is not None
        self.observed.folder = FolderObservations(path=self.request.shared)
        check_shared_folder(self.observed.folder, self.pool, self.left)


def _wait(task: Future[None] | None) -> None:
    if task is not None:
        task.result()


def _read(kind: Any, answer: Any) -> Any:
    return TypeAdapter(kind).validate_python(answer)
