"""The rounds of a preflight: what all nodes are asked, in which order, and how long each may take.

Together they end in TOTAL_SECONDS whatever hangs: each takes its own time or what is left.
"""

from __future__ import annotations

import shlex
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar

from pydantic import TypeAdapter

from tightfit.clusters.agents import AgentGoneError, RemoteAgent, after_setup
from tightfit.clusters.preflight.findings import list_findings
from tightfit.clusters.preflight.observations import (
    PROTOCOL,
    AllReduceResult,
    ClockOffset,
    ConnectionProbe,
    DatagramCount,
    FolderObservations,
    FolderStep,
    ListenerPorts,
    NameLookup,
    NodeAddresses,
    NodeFacts,
    NodePair,
    Observations,
    Route,
    StreamResult,
    TorchFacts,
    addresses_on,
    choose_addresses,
    host_of,
)
from tightfit.clusters.site import Site
from tightfit.core.child_process import Message
from tightfit.core.errors import SetupError, UserError
from tightfit.core.findings import Status
from tightfit.core.frozen import Frozen
from tightfit.core.import_path import module_words
from tightfit.hardware.checkup import Checkup

END_SECONDS = 1.0
GRACE_SECONDS = 0.5
"""For an answer to travel, on top of the time that the request itself may take."""
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """How the agents are started."""

    prefix: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


class AgentPool:
    """One agent per node. A request goes to all at once; nodes that do not answer are left out."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes = nodes
        self.absent: dict[str, str] = {}
        """Nodes whose agent does not run, and why."""
        self.silent: dict[tuple[str, str], str] = {}
        """Node and request that was not answered, and why."""
        self._agents: dict[str, RemoteAgent] = {}

    @property
    def present(self) -> list[str]:
        return [node for node in self.nodes if node in self._agents and node not in self.absent]

    def start(self, how: AgentCommand, seconds: float) -> None:
        """Until all have sent their greeting; those that did not are in `absent`."""
        greetings: dict[str, Future[Message]] = {}
        for node in self.nodes:
            greeting: Future[Message] = Future()

            def greet(message: Message, greeting: Future[Message] = greeting) -> None:
                if "hello" in message and not greeting.done():
                    greeting.set_result(message)

            try:
                self._agents[node] = RemoteAgent(
                    node, how.argv, prefix=how.prefix, env=how.env, on_news=greet
                )
                greetings[node] = greeting
            except UserError as error:
                self.absent[node] = error.problem
        end = time.monotonic() + seconds
        for node, greeting in greetings.items():
            agent = self._agents[node]
            either: list[Future[Any]] = [greeting, agent.ended]
            left = max(0.0, end - time.monotonic())
            wait(either, timeout=left, return_when=FIRST_COMPLETED)
            if greeting.done():
                hello = greeting.result()
                if hello.get("protocol") != PROTOCOL:
                    self.absent[node] = (
                        f"tightfit {hello.get('version')} there does not match this machine's"
                    )
            elif agent.ended.done():
                code = agent.wait_for_exit(END_SECONDS)
                self.absent[node] = f"ended with exit code {code}{agent.last_words}"
            else:
                self.absent[node] = f"no answer in {seconds:.0f} s{agent.last_words}"

    def ask(
        self, do: str, seconds: float, given: Mapping[str, Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Each present node's answer; with `given`, arguments by node, only of the nodes in it."""
        wanted = {node: {} for node in self.present} if given is None else given
        asked = {
            node: self._agents[node].ask(do, **arguments)
            for node, arguments in wanted.items()
            if node in self.present
        }
        end = time.monotonic() + max(seconds, 0.0) + GRACE_SECONDS
        answers = {}
        for node, future in asked.items():
            try:
                answers[node] = future.result(timeout=max(0.0, end - time.monotonic()))
            except FutureTimeoutError:
                self.silent[(node, do)] = f"no answer in {seconds:.0f} s"
            except (AgentGoneError, UserError, RuntimeError) as error:
                self.silent[(node, do)] = str(error)
        return answers

    def ask_for(
        self,
        kind: type[Kind],
        do: str,
        seconds: float,
        given: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Kind]:
        """The same, as values of a type."""
        adapter: TypeAdapter[Kind] = TypeAdapter(kind)
        answers = self.ask(do, seconds, given)
        return {node: adapter.validate_python(answer) for node, answer in answers.items()}

    def end(self) -> None:
        with ThreadPoolExecutor(max_workers=len(self._agents) or 1) as pool:
            list(pool.map(lambda agent: agent.close(seconds=END_SECONDS), self._agents.values()))


TOTAL_SECONDS = 54.0
START_SECONDS = 20.0
FACTS_SECONDS = 8.0
LOOKUP_SECONDS = 10.0
OPEN_SECONDS = 3.0
CONNECT_SECONDS = 5.0
DATAGRAM_SECONDS = 4.0
STREAM_SECONDS = 1.5
TORCH_SECONDS = 20.0
REDUCE_SECONDS = 15.0
MIN_REDUCE_SECONDS = 6.0
"""An all-reduce with less time than this would show nothing."""
FOLDER_SECONDS = 8.0
NUM_CLOCK_ASKS = 8
NUM_SMALL, NUM_LARGE = 200, 4
FEW_NODES = 16
"""Up to here every node tries every other; beyond, its neighbours in the ring and the first."""
IP_UDP_HEADER_BYTES = 28
ReportProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightRequest:
    """The nodes to check, how their agents start, and what the job will use."""

    nodes: tuple[str, ...]
    start: AgentCommand
    port: int
    interface: str | None = None
    shared: str | None = None


class Collector:
    """Asks the nodes, round by round, and fills `observed`."""

    def __init__(self, request: PreflightRequest, report: ReportProgress) -> None:
        self.request = request
        self.report = report
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
        observed = self.observed
        beside = ThreadPoolExecutor(max_workers=1)
        try:
            self.report(f"starting an agent on each of {len(self.request.nodes)} nodes")
            self.pool.start(self.request.start, self.left(START_SECONDS))
            observed.absent = self.pool.absent
            self.pool.ask("torch_start", self.left(OPEN_SECONDS))
            # Beside the other rounds: a file system that hangs takes none of their time.
            folder = beside.submit(self._check_folder)
            self._check_nodes()
            if len(observed.present) > 1:
                self._check_network()
            self._check_torch()
            folder.result()
        finally:
            self.pool.end()
            beside.shutdown(wait=False)
        observed.silent = self.pool.silent
        observed.seconds = time.monotonic() - self._begin
        return observed

    def _check_nodes(self) -> None:
        self.report("versions, devices, clocks and names")
        observed = self.observed
        observed.facts = self.pool.ask_for(NodeFacts, "facts", self.left(FACTS_SECONDS))
        self._read_clocks()
        hosts = [host_of(node) for node in self.request.nodes]
        names = {
            node: {"names": list(dict.fromkeys([*hosts, facts.hostname]))}
            for node, facts in observed.facts.items()
        }
        seconds = self.left(LOOKUP_SECONDS)
        observed.lookups = self.pool.ask_for(list[NameLookup], "lookup", seconds, names)

    def _read_clocks(self) -> None:
        """One node after the other, so that no request waits for another."""
        clocks = self.observed.clocks
        for node in self.observed.facts:
            for _ in range(NUM_CLOCK_ASKS):
                before = time.time()
                answer = self.pool.ask("clock", self.left(1.0), {node: {}}).get(node)
                after = time.time()
                if answer is None:
                    break
                error = (after - before) / 2
                if node not in clocks or error < clocks[node].error_seconds:
                    offset = float(answer) - (before + after) / 2
                    clocks[node] = ClockOffset(offset_seconds=offset, error_seconds=error)

    def _check_network(self) -> None:
        observed = self.observed
        observed.defaults = choose_addresses(observed.facts, observed.lookups)
        if observed.interface is not None:
            observed.requested = addresses_on(observed.facts, observed.interface)
        self.report("the port, and every node from every other")
        ports = {
            node: {"rendezvous_port": observed.port if node == observed.head else None}
            for node in observed.present
        }
        observed.ports = self.pool.ask_for(ListenerPorts, "open", self.left(OPEN_SECONDS), ports)
        self._find_routes()
        observed.addresses = observed.defaults
        if self._is_requested_device_usable():
            observed.requested_probes = self._probe(observed.requested)
        if any(probe.is_ok for probe in observed.requested_probes.values()):
            observed.addresses = observed.requested
            observed.probes = observed.requested_probes
        else:
            observed.probes = self._probe(observed.defaults)
        self._probe_rendezvous_port()
        self.report("loss in each direction")
        self._send_datagrams()
        self.report("bandwidth of each link")
        self._stream()

    def _find_routes(self) -> None:
        observed = self.observed
        places = [*observed.defaults.values(), *observed.requested.values()]
        wanted = {
            node: {"addresses": list(dict.fromkeys(p.address for p in places if p.node != node))}
            for node in observed.present
        }
        seconds = self.left(CONNECT_SECONDS)
        for node, routes in self.pool.ask_for(list[Route], "routes", seconds, wanted).items():
            observed.routes[node] = {route.address: route for route in routes}

    def _is_requested_device_usable(self) -> bool:
        """Whether all nodes have the requested device, and send to each other over it."""
        observed = self.observed
        if len(observed.requested) != len(observed.present):
            return False
        for source, target in self._pairs(observed.requested):
            route = observed.routes.get(source, {}).get(observed.requested[target].address)
            if route is None or route.device != observed.interface:
                return False
        return True

    def _pairs(self, addresses: NodeAddresses) -> list[NodePair]:
        """Which node tries which."""
        nodes = [node for node in self.observed.present if node in addresses]
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

    def _probe(self, addresses: NodeAddresses) -> dict[NodePair, ConnectionProbe]:
        seconds = self.left(CONNECT_SECONDS)
        targets: dict[str, list[Message]] = defaultdict(list)
        for source, target in self._pairs(addresses):
            if target in self.observed.ports:
                place, port = addresses[target].address, self.observed.ports[target].tcp_port
                targets[source].append(_make_target(target, place, port))
        wanted = {node: {"targets": held, "seconds": seconds} for node, held in targets.items()}
        answers = self.pool.ask_for(list[ConnectionProbe], "connect", seconds, wanted)
        return {(node, probe.node): probe for node, probes in answers.items() for probe in probes}

    def _probe_rendezvous_port(self) -> None:
        """Of the first node, from all nodes, itself included."""
        observed = self.observed
        head = observed.addresses.get(observed.head)
        ports = observed.ports.get(observed.head)
        if head is None or ports is None:
            return
        is_ours = ports.rendezvous_error is None
        target = _make_target(observed.head, head.address, observed.port, is_ours=is_ours)
        seconds = self.left(CONNECT_SECONDS)
        wanted = {node: {"targets": [target], "seconds": seconds} for node in observed.present}
        answers = self.pool.ask_for(list[ConnectionProbe], "connect", seconds, wanted)
        observed.port_probes = {node: probes[0] for node, probes in answers.items()}

    def _send_datagrams(self) -> None:
        """What arrives is compared with what its source reports to have sent, in time."""
        observed = self.observed
        pairs = [
            (source, target)
            for source, target in self._pairs(observed.addresses)
            if target in observed.ports and ":" not in observed.addresses[target].address
        ]
        targets: dict[str, list[Message]] = defaultdict(list)
        for source, target in pairs:
            mtu = min(observed.addresses[source].mtu, observed.addresses[target].mtu)
            targets[source].append(
                {
                    "address": observed.addresses[target].address,
                    "port": observed.ports[target].udp_port,
                    "large_bytes": min(max(mtu, 576), 65_535) - IP_UDP_HEADER_BYTES,
                }
            )
        wanted = {
            node: {
                "targets": held,
                "sender": observed.nodes.index(node),
                "num_small": NUM_SMALL,
                "num_large": NUM_LARGE,
            }
            for node, held in targets.items()
        }
        observed.sent = self.pool.ask("datagrams", self.left(DATAGRAM_SECONDS), wanted)
        time.sleep(self.left(0.3))  # for the last of them to arrive
        senders: dict[str, list[int]] = defaultdict(list)
        for source, target in pairs:
            if source in observed.sent:
                senders[target].append(observed.nodes.index(source))
        asked = {node: {"senders": held} for node, held in senders.items()}
        seconds = self.left(OPEN_SECONDS)
        answers = self.pool.ask_for(list[DatagramCount], "received", seconds, asked)
        for node, counts in answers.items():
            for received in counts:
                observed.received[(observed.nodes[received.sender], node)] = received

    def _stream(self) -> None:
        """Around the ring, all at once: each node sends to one and receives from one."""
        observed = self.observed
        nodes = [
            node
            for node in observed.present
            if node in observed.addresses and node in observed.ports
        ]
        seconds = self.left(STREAM_SECONDS)
        wanted = {
            source: {
                "node": target,
                "address": observed.addresses[target].address,
                "port": observed.ports[target].tcp_port,
                "seconds": seconds,
            }
            for source, target in zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)
            if source != target and observed.is_open((source, target))
        }
        for node, stream in self.pool.ask_for(
            StreamResult, "stream", seconds + 2.0, wanted
        ).items():
            observed.streams[(node, stream.node)] = stream

    def _check_torch(self) -> None:
        self.report("torch on each node")
        observed = self.observed
        observed.torch = self.pool.ask_for(TorchFacts, "torch", self.left(TORCH_SECONDS))
        observed.no_all_reduce = self._why_no_all_reduce()
        if observed.no_all_reduce is None:
            self.report("all-reduce over all nodes")
            self._reduce()

    def _why_no_all_reduce(self) -> str | None:
        observed = self.observed
        num_nodes = len(observed.nodes)
        num_loaded = sum(facts.error is None for facts in observed.torch.values())
        is_connected = all(observed.is_open(pair) for pair in self._pairs(observed.addresses))
        is_port_free = all(probe.is_ok for probe in observed.port_probes.values()) and not any(
            ports.rendezvous_error for ports in observed.ports.values()
        )
        reasons = {
            "there is only one node": num_nodes == 1,
            "not every node answers": len(observed.present) < num_nodes,
            "torch does not load on every node": num_loaded < num_nodes,
            "not every node reaches every other": not is_connected
            or len(observed.addresses) < num_nodes,
            f"port {observed.port} of {observed.head} is not available": not is_port_free,
            "the other checks took the time": self.left(REDUCE_SECONDS) < MIN_REDUCE_SECONDS,
        }
        return next((why for why, is_so in reasons.items() if is_so), None)

    def _reduce(self) -> None:
        observed = self.observed
        self.pool.ask("close_port", self.left(OPEN_SECONDS), {observed.head: {}})
        has_gpus = all(facts.num_gpus > 0 for facts in observed.torch.values())
        seconds = self.left(REDUCE_SECONDS)
        wanted = {
            node: {
                "backend": "nccl" if has_gpus else "gloo",
                "address": observed.addresses[observed.head].address,
                "port": observed.port,
                "rank": rank,
                "world_size": len(observed.nodes),
                "device": observed.addresses[node].device,
                "seconds": seconds,
            }
            for rank, node in enumerate(observed.nodes)
        }
        found = list(self.pool.ask_for(AllReduceResult, "reduce", seconds, wanted).values())
        errors = [result for result in found if result.error]
        if len(found) < len(observed.nodes) and not errors:
            errors = [AllReduceResult(error=f"it did not end in {seconds:.0f} s")]
        observed.reduce = errors[0] if errors else max(found, key=lambda r: r.seconds)

    def _check_folder(self) -> None:
        """A file planted by the first node is found by all; all race for names; then it grows."""
        nodes = self.pool.present
        if self.request.shared is None:
            return
        observed = self.observed.folder = FolderObservations(path=self.request.shared)
        if not nodes:
            return
        nonce = uuid.uuid4().hex
        folder = str(PurePosixPath(observed.path) / f".tightfit-preflight-{nonce[:12]}")

        def step(name: str, who: Sequence[str], names: Sequence[str] = ()) -> dict[str, FolderStep]:
            seconds = self.left(FOLDER_SECONDS)
            given: Message = {"step": name, "folder": folder, "nonce": nonce}
            given |= {"names": list(names), "seconds": seconds}
            return self.pool.ask_for(FolderStep, "folder", seconds, dict.fromkeys(who, given))

        first, others = nodes[0], nodes[1:]
        observed.planted = step("plant", [first]).get(first)
        if observed.planted is None or not observed.planted.is_done:
            return
        observed.found = step("find", others)
        finders = [node for node, found in observed.found.items() if found.is_done]
        observed.raced = step("race", [first, *finders])
        wrote = [raced.wrote for raced in observed.raced.values() if raced.is_done]
        observed.renamed = step("see_renamed", [first, *finders], wrote)
        if finders and step("grow", [first]):
            observed.grown = step("see_grown", finders)
        step("remove", [first])


def _make_target(node: str, address: str, port: int, *, is_ours: bool = True) -> Message:
    return {"node": node, "address": address, "port": port, "is_ours": is_ours}


# A whole preflight: ask the nodes, judge, report the findings and the options for the job.

AGENT = "tightfit.clusters.preflight.agent"
DROPPED_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
"""A job's own, which torch would follow in place of what it is given."""


class NodeReport(Frozen):
    """One node, and how `tightfit train` is to be started there."""

    name: str
    address: str | None
    interface: str | None
    clock_offset_seconds: float | None
    """Ahead of the machine that asked."""
    facts: NodeFacts | None
    options: tuple[str, ...]
    """Empty where the nodes cannot meet."""


class LinkReport(Frozen):
    """One direction between two nodes. None: not measured."""

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
    all_reduce: AllReduceResult | None


def make_agent_command(site: Site, prefix: str) -> AgentCommand:
    """The agent's command as the site starts everything: set-up lines first, then its Python."""
    unset = [word for name in DROPPED_VARIABLES for word in ("-u", name)]
    argv = after_setup(site, [*site.python_argv, *module_words(AGENT)])
    if site.container_image is not None and prefix.startswith("srun "):
        prefix = f"{prefix} --container-image={shlex.quote(site.container_image)}"
    return AgentCommand(prefix=prefix, argv=("env", *unset, *argv), env=site.environment)


def run_preflight(request: PreflightRequest, report: ReportProgress) -> PreflightReport:
    """In less than a minute, whatever is wrong."""
    return make_preflight_report(Collector(request, report).run())


def make_preflight_report(observed: Observations) -> PreflightReport:
    findings = tuple(list_findings(observed))
    worst = max((f.status for f in findings), key=list(Status).index, default=Status.OK)
    return PreflightReport(
        findings=findings,
        worst=worst,
        exit_code=SetupError.exit_code if worst is Status.ERROR else 0,
        seconds=observed.seconds,
        nodes=tuple(_report_node(observed, rank, node) for rank, node in enumerate(observed.nodes)),
        links=tuple(_report_link(observed, *pair) for pair in observed.probes),
        all_reduce=observed.reduce,
    )


def _report_node(observed: Observations, rank: int, node: str) -> NodeReport:
    place = observed.addresses.get(node)
    clock = observed.clocks.get(node)
    options: tuple[str, ...] = ()
    # Everything torchrun would guess is stated: names, addresses and devices do not matter then.
    if place is not None and 1 < len(observed.nodes) == len(observed.addresses):
        options = (
            "--nodes", str(len(observed.nodes)),
            "--rendezvous", f"{observed.addresses[observed.head].address}:{observed.port}",
            "--node-rank", str(rank),
            "--local-addr", place.address,
            "--interface", place.device,
        )  # fmt: skip
    return NodeReport(
        name=node,
        address=place.address if place else None,
        interface=place.device if place else None,
        clock_offset_seconds=clock.offset_seconds if clock else None,
        facts=observed.facts.get(node),
        options=options,
    )


def _report_link(observed: Observations, source: str, target: str) -> LinkReport:
    probe = observed.probes[(source, target)]
    stream = observed.streams.get((source, target))
    return LinkReport(
        source=source,
        target=target,
        outcome=probe.outcome.value,
        rtt_seconds=probe.rtt_seconds,
        lost_fraction=observed.lost_fraction((source, target)),
        bytes_per_second=stream.bytes_per_second if stream else None,
        resent_fraction=stream.resent_fraction if stream else None,
    )
