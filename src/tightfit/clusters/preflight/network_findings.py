"""Findings about the network between nodes: names, devices, port, each link, bandwidth."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address

from tightfit.clusters.preflight.messages import (
    ConnectionOutcome,
    ConnectionProbe,
    NameLookup,
    NetworkDevice,
    NodeFacts,
)
from tightfit.clusters.preflight.node_findings import list_nodes
from tightfit.clusters.preflight.observations import NodePair, Observations, host_of
from tightfit.core.findings import Finding, Status
from tightfit.core.units import render_seconds
from tightfit.estimation.communication import ASSUMED_NETWORK_BYTES_PER_SECOND

SLOW_SECONDS = 1.0
OPTIONS = "the options below name addresses and do without names"


def check_names(observed: Observations) -> Iterator[Finding]:
    findings = [*_check_peers(observed), *_check_own(observed), *_check_speed(observed)]
    if not findings and observed.lookups and len(observed.present) > 1:
        text = "every node resolves its own name and the others'"
        findings = [Finding(area="names", name="all", status=Status.OK, detail=text)]
    yield from findings


def _check_peers(observed: Observations) -> Iterator[Finding]:
    for node, answers in observed.lookups.items():
        known = {answer.name: answer for answer in answers}
        for peer in observed.nodes:
            answer = known.get(host_of(peer))
            if peer != node and answer is not None:
                finding = _check_peer(node, peer, answer, observed)
                if finding is not None:
                    yield finding


def _check_peer(node: str, peer: str, answer: NameLookup, observed: Observations) -> Finding | None:
    address = observed.defaults[peer].address if peer in observed.defaults else None
    entry = f"{address or 'ADDRESS'} {host_of(peer)}"
    remedy = f"on {node}: echo '{entry}' >> /etc/hosts, or repair DNS    ({OPTIONS})"
    if answer.error is not None:
        return _name_error(node, f"cannot resolve {host_of(peer)}: {answer.error}", remedy)
    own = _own_addresses(observed.facts.get(peer))
    if not own or any(address in own for address in answer.addresses):
        return None
    shown = ", ".join(answer.addresses[:3])
    if all(ip_address(address).is_loopback for address in answer.addresses):
        detail = f"resolves {host_of(peer)} to itself ({shown})"
    else:
        detail = f"resolves {host_of(peer)} to {shown}, which is not {peer}'s address"
    return _name_error(node, detail, remedy)


def _check_own(observed: Observations) -> Iterator[Finding]:
    """torchrun asks for the host's own name, unless it is text an address."""
    for node, answers in observed.lookups.items():
        facts = observed.facts[node]
        answer = next((a for a in answers if a.name == facts.hostname), None)
        if answer is None:
            continue
        node_address = observed.defaults.get(node)
        where = node_address.address if node_address else "ADDRESS"
        remedy = f"--local-addr {where} on {node}, or in its /etc/hosts: {where} {facts.hostname}"
        if answer.error is not None:
            detail = f"cannot resolve its own name {facts.hostname}: {answer.error}"
            yield _name_warning(node, detail, remedy)
        elif all(ip_address(address).is_loopback for address in answer.addresses):
            text = ", ".join(answer.addresses)
            detail = (
                f"its own name {facts.hostname} stands for {text}, where no other node reaches it"
            )
            yield _name_warning(node, detail, remedy)


def _check_speed(observed: Observations) -> Iterator[Finding]:
    for node in observed.present:
        forward = max((a.seconds for a in observed.lookups.get(node, ())), default=0.0)
        routes = observed.routes.get(node, {}).values()
        backward = max((route.reverse_seconds for route in routes), default=0.0)
        slowest = max(forward, backward)
        if (node, "lookup") in observed.silent:
            yield _name_warning(node, "the resolver gives no answer at all", _RESOLVER)
        elif slowest > SLOW_SECONDS:
            kind = "a name" if forward >= backward else "an address's name"
            took = render_seconds(slowest)
            yield _name_warning(
                node, f"looking up {kind} takes {took}, for every peer anew", _RESOLVER
            )


_RESOLVER = "see /etc/resolv.conf for a server that is down, or list the nodes in /etc/hosts"


def _own_addresses(facts: NodeFacts | None) -> set[str]:
    if facts is None:
        return set()
    texts = (text for device in facts.devices for text in device.addresses)
    plain = {text.partition("/")[0] for text in texts}
    return {address for address in plain if not ip_address(address).is_loopback}


def _name_error(node: str, detail: str, remedy: str) -> Finding:
    return Finding(area="names", name=node, status=Status.FAULT, detail=detail, remedy=remedy)


def _name_warning(node: str, detail: str, remedy: str) -> Finding:
    return Finding(area="names", name=node, status=Status.WARNING, detail=detail, remedy=remedy)


# Findings about network devices: the one that was asked for, and the one that carries the way.


def check_devices(observed: Observations) -> Iterator[Finding]:
    if len(observed.present) < 2:
        return
    yield from _check_asked(observed)
    if len(observed.addresses) < len(observed.present):
        lost = [node for node in observed.present if node not in observed.addresses]
        yield _device_finding(
            list_nodes(lost),
            Status.FAULT,
            "no address is known under which the other nodes reach it: names do not lead there, "
            "and there is no network that all nodes have in common",
            "ip -brief address    (on each node), then --interface NAME",
        )
        return
    yield from _check_mtu(observed)
    yield from _check_routes(observed)
    devices = {node: node_address.device for node, node_address in observed.addresses.items()}
    text = ", ".join(
        f"{n} {node_address.device} ({node_address.address})"
        for n, node_address in observed.addresses.items()
    )
    if len(set(devices.values())) > 1:
        text += "; its name differs between nodes: give each node its own --interface"
    is_one = len(set(devices.values())) == 1
    yield _device_finding("in use", Status.OK if is_one else Status.INFO, text)


def _check_asked(observed: Observations) -> Iterator[Finding]:
    if observed.interface is None:
        return
    wrong = list(_list_errors(observed, observed.interface))
    if not wrong:
        return
    right = sorted(
        {node_address.device for node_address in observed.defaults.values()} - {observed.interface}
    )
    remedy = "ip -brief address    (on each node: which device has an address)"
    if len(right) == 1:
        remedy = f"--interface {right[0]}    (it carries the way between the nodes)"
    elif right:
        listed = ", ".join(f"{n}: {s.device}" for n, s in observed.defaults.items())
        remedy = f"each node with its own --interface    ({listed})"
    yield _device_finding(observed.interface, Status.FAULT, "; ".join(wrong[:8]), remedy)


def _list_errors(observed: Observations, asked: str) -> Iterator[str]:
    missing = []
    for node, facts in observed.facts.items():
        device = next((d for d in facts.devices if d.name == asked), None)
        if device is None:
            missing.append(node)
            have = ", ".join(d.name for d in facts.devices if d.name != "lo") or "none"
            yield f"{node} has no device {asked} (it has {have})"
        elif not device.is_up:
            missing.append(node)
            yield f"{asked} of {node} is down"
        elif not _has_address(device):
            missing.append(node)
            yield f"{asked} of {node} has no address"
    if not missing:
        yield from _list_detours(observed, asked)


def _has_address(device: NetworkDevice) -> bool:
    return any(not text.startswith(("fe80", "127.")) for text in device.addresses)


def _list_detours(observed: Observations, asked: str) -> Iterator[str]:
    """It is there, but what is sent to the others goes another way, or does not arrive."""
    for node in observed.present:
        for peer in observed.present:
            node_address = observed.requested.get(peer)
            if peer == node or node_address is None:
                continue
            route = observed.routes.get(node, {}).get(node_address.address)
            if route is not None and route.device != asked:
                way = f"through {route.device}" if route.device else "by no way at all"
                yield f"{node} reaches {asked} of {peer} ({node_address.address}) {way}"
                return
    if observed.addresses is not observed.requested and observed.requested_probes:
        works = any(probe.outcome is ConnectionOutcome.OK for probe in observed.probes.values())
        if works:
            yield f"{asked} does not connect the nodes: no connection over it succeeds"


def _check_mtu(observed: Observations) -> Iterator[Finding]:
    sizes = {node: node_address.mtu for node, node_address in observed.addresses.items()}
    if len(set(sizes.values())) == 1:
        return
    text = ", ".join(
        f"{node} {observed.addresses[node].device} {mtu}" for node, mtu in sizes.items()
    )
    yield _device_finding(
        "MTU",
        Status.WARNING,
        f"differs: {text}; large packets from one to the other may be lost",
        f"ip link set DEVICE mtu {min(sizes.values())}    (on all nodes)",
    )


def _check_routes(observed: Observations) -> Iterator[Finding]:
    """A node that answers over another device than it is called at confuses NCCL and filters."""
    for node, node_address in observed.addresses.items():
        for peer, other in observed.addresses.items():
            route = observed.routes.get(node, {}).get(other.address)
            if peer != node and route and route.device and route.device != node_address.device:
                yield _device_finding(
                    node,
                    Status.WARNING,
                    f"is called at {node_address.device} ({node_address.address}), but reaches "
                    f"{peer} through {route.device} ({route.source})",
                    f"--interface {route.device}, where all nodes have it",
                )
                break


def _device_finding(name: str, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area="interface", name=name, status=status, detail=detail, remedy=remedy)


# Findings about the ways between nodes: device, port, each direction of each link, bandwidth.

SOME_LOSS, MUCH_LOSS = 0.01, 0.05
"""TCP halves its pace at each loss: 1% on a fast link leaves a fraction of it."""
FAR_LOWER = 0.5
LOPSIDED = 4.0
_PLACE_IN_CODE = re.compile(r"^\[[^\]]*\]\s*")
_ANSWERS = {
    ConnectionOutcome.REFUSED: "is refused",
    ConnectionOutcome.TIMEOUT: "is not answered",
    ConnectionOutcome.UNREACHABLE: "finds no way",
    ConnectionOutcome.STALLED: "opens, but data does not come through",
}


def check_links(observed: Observations) -> Iterator[Finding]:
    if len(observed.present) < 2:
        return
    yield from _check_port(observed)
    dead = set()
    for pair in _once(observed):
        finding = _check_pair(observed, pair)
        if finding is not None:
            dead.add(frozenset(pair))
            yield finding
    alive = [pair for pair in observed.probes if frozenset(pair) not in dead]
    yield from _check_loss(observed, alive)
    yield from _check_drops(observed)
    if not dead and observed.probes:
        slowest = max((k.rtt_seconds or 0.0 for k in observed.probes.values()), default=0.0)
        text = f"every node reaches every other; there and back in {slowest * 1e6:,.0f} µs or less"
        yield _link_finding("network", "all", Status.OK, text)
    yield from _check_bandwidth(observed)
    yield from _check_reduce(observed)


def _check_port(observed: Observations) -> Iterator[Finding]:
    ports = observed.ports.get(observed.head)
    if ports is None:
        return
    name = f"{observed.head}:{observed.port}"
    if ports.rendezvous_error is not None:
        yield _link_finding(
            "port",
            name,
            Status.FAULT,
            f"the rendezvous port {observed.port} of {observed.head} {ports.rendezvous_error}",
            f"--port {observed.port + 1}, or end what holds it: "
            f"ss -ltnp 'sport = :{observed.port}'",
        )
        return
    closed = {
        node: probe
        for node, probe in observed.port_probes.items()
        if probe.outcome is not ConnectionOutcome.OK
        and (node == observed.head or observed.is_open((node, observed.head)))
    }
    for node, probe in closed.items():
        yield _closed_port(observed, node, probe)
    reached = [
        node
        for node, probe in observed.port_probes.items()
        if probe.outcome is ConnectionOutcome.OK
    ]
    if not closed and len(reached) == len(observed.present):
        yield _link_finding("port", name, Status.OK, "free, and reached by every node")


def _closed_port(observed: Observations, node: str, probe: ConnectionProbe) -> Finding:
    why = {
        ConnectionOutcome.REFUSED: "a firewall turns it away",
        ConnectionOutcome.TIMEOUT: "a firewall drops it without a word, while other ports are open",
    }.get(probe.outcome, probe.detail)
    return _link_finding(
        "port",
        f"{observed.head}:{observed.port}",
        Status.FAULT,
        f"a connection from {node} to port {observed.port} of {observed.head} ({probe.address}) "
        f"{_ANSWERS[probe.outcome]}: {why}",
        f"open the port on {observed.head} for {node}, or choose one that is open: --port N",
    )


def _once(observed: Observations) -> Iterator[NodePair]:
    """Each two nodes one time."""
    done = set()
    for source, target in observed.probes:
        if frozenset((source, target)) not in done:
            done.add(frozenset((source, target)))
            yield source, target


def _check_pair(observed: Observations, pair: NodePair) -> Finding | None:
    """An error where a connection does not work; which direction is lost, datagrams tell."""
    a, b = pair
    back = (b, a)
    if observed.is_open(pair) and observed.is_open(back):
        return None
    shares = {
        way: share for way in (pair, back) if (share := observed.lost_fraction(way)) is not None
    }
    if len(shares) == 2:
        other, lost = sorted(shares, key=shares.__getitem__)
        if shares[other] <= MUCH_LOSS < shares[lost]:
            return _one_way(observed, lost, other)
    probe = next(
        observed.probes[p] for p in (pair, back) if p in observed.probes and not observed.is_open(p)
    )
    source = a if probe.node == b else b
    if set(shares.values()) == {1.0}:
        return _link_finding(
            "network",
            f"{a} and {b}",
            Status.FAULT,
            f"nothing passes between them: a connection from {source} to {probe.address} "
            f"{_ANSWERS[probe.outcome]}",
            f"see cable, switch, VLAN and firewall between them; on {source}: ping {probe.address}",
        )
    return _filtered(observed, source, probe)


def _one_way(observed: Observations, lost: NodePair, other: NodePair) -> Finding:
    source, target = lost
    share = observed.lost_fraction(lost) or 0.0
    amount = "Everything" if share == 1.0 else f"{share:.0%} of what"
    text = "is lost" if share == 1.0 else "is lost on the way"
    return _link_finding(
        "network",
        f"{source} to {target}",
        Status.FAULT,
        f"one-way: {amount.lower()} {source} sends to {target} {text}, while "
        f"{observed.received[other].num_small} of {observed.sent[target]} datagrams from {target} "
        f"to {source} "
        "arrive",
        f"see filters and the cable into {target}, and the way back; on {source}: "
        f"ip route get {observed.addresses[target].address}, on {target}: "
        f"ip -s link show {observed.addresses[target].device}",
    )


def _filtered(observed: Observations, source: str, probe: ConnectionProbe) -> Finding:
    port_probe = observed.port_probes.get(source)
    has_port = (
        probe.node == observed.head and port_probe and port_probe.outcome is ConnectionOutcome.OK
    )
    only = f"; only port {observed.port} is open, and" if has_port else ":"
    detail = (
        f"a connection from {source} to port {probe.port} of {probe.node} "
        f"{_ANSWERS[probe.outcome]}{only} gloo and NCCL use ports of their own choice"
    )
    if probe.outcome is ConnectionOutcome.STALLED and _large_lost(observed):
        return _narrow(observed, _large_lost(observed)[0])
    return _link_finding(
        "network",
        f"{source} to {probe.node}",
        Status.FAULT,
        detail,
        f"let the firewall on {probe.node} accept all TCP ports from {source}",
    )


def _large_lost(observed: Observations) -> list[NodePair]:
    return [
        pair
        for pair, received in observed.received.items()
        if received.num_large + received.num_dropped == 0
        and (observed.lost_fraction(pair) or 0.0) <= SOME_LOSS
    ]


def _narrow(observed: Observations, pair: NodePair) -> Finding:
    source, target = pair
    mtu = min(observed.addresses[source].mtu, observed.addresses[target].mtu)
    return _link_finding(
        "network",
        f"{source} to {target}",
        Status.FAULT,
        f"packets of the full size (MTU {mtu}) are lost on the way, small ones arrive: "
        "connections open and then hang",
        f"ip link set {observed.addresses[source].device} mtu 1500 on all nodes, or jumbo frames "
        "in the "
        "switch",
    )


def _check_loss(observed: Observations, alive: list[NodePair]) -> Iterator[Finding]:
    narrow = set(_large_lost(observed))
    for pair in alive:
        source, target = pair
        share = observed.lost_fraction(pair)
        if share is None:
            continue
        if share == 1.0:
            text = f"no datagram from {source} reaches {target}, connections do: UDP is filtered"
            yield _link_finding("network", f"{source} to {target}", Status.INFO, text)
        elif share >= SOME_LOSS:
            back = observed.lost_fraction((target, source))
            one_way = "one-way: " if back is not None and back < SOME_LOSS else ""
            other_way = "not known" if back is None else f"{back:.1%}"
            yield _link_finding(
                "network",
                f"{source} to {target}",
                Status.FAULT if share >= MUCH_LOSS else Status.WARNING,
                f"{one_way}{share:.1%} of the packets from {source} to {target} are lost"
                f" ({other_way} the other way)",
                f"see the cable and the counters of drops: ip -s link show "
                f"{observed.addresses[target].device} (on {target}), and the switch's",
            )
        elif pair in narrow:
            yield _narrow(observed, pair)


def _check_drops(observed: Observations) -> Iterator[Finding]:
    dropped = {target: received.num_dropped for (_, target), received in observed.received.items()}
    for node, num_dropped in dropped.items():
        if num_dropped:
            text = f"{num_dropped} datagrams reached {node}, which was too busy to take them in"
            yield _link_finding("network", node, Status.INFO, f"{text}: not counted as lost")


def _check_bandwidth(observed: Observations) -> Iterator[Finding]:
    rates = {p: s.bytes_per_second for p, s in observed.streams.items() if s.error is None}
    if not rates:
        return
    text = "; ".join(f"{a} to {b} {render_bits(rate)}" for (a, b), rate in list(rates.items())[:8])
    yield _link_finding("bandwidth", "TCP", Status.OK, text)
    slow = min(rates, key=rates.__getitem__)
    lowest = rates[slow]
    back = rates.get((slow[1], slow[0]))
    if lowest < FAR_LOWER * ASSUMED_NETWORK_BYTES_PER_SECOND:
        yield _link_finding(
            "bandwidth",
            f"{slow[0]} to {slow[1]}",
            Status.WARNING,
            f"{render_bits(lowest)}, where plans assume "
            f"{render_bits(ASSUMED_NETWORK_BYTES_PER_SECOND)}",
            f"plan with what is there: --network {_as_option(lowest)}, or use a faster device",
        )
    elif back is not None and back > LOPSIDED * lowest:
        yield _link_finding(
            "bandwidth",
            f"{slow[0]} to {slow[1]}",
            Status.WARNING,
            f"{render_bits(lowest)}, the other way {render_bits(back)}",
            f"see the link's duplex and errors: ethtool {observed.addresses[slow[0]].device}",
        )


def _check_reduce(observed: Observations) -> Iterator[Finding]:
    if observed.reduce is None:
        if observed.no_all_reduce is not None:
            text = f"not measured: {observed.no_all_reduce}"
            yield _link_finding("bandwidth", "all-reduce", Status.INFO, text)
        return
    reduce = observed.reduce
    if reduce.error is not None:
        device = observed.addresses[observed.head].device
        yield _link_finding(
            "bandwidth",
            "all-reduce",
            Status.FAULT,
            f"torch.distributed ({reduce.backend or 'all-reduce'}) fails over {device}: "
            f"{_PLACE_IN_CODE.sub('', reduce.error)}",
            "NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL tell more; see the findings above",
        )
        return
    yield _link_finding(
        "bandwidth",
        "all-reduce",
        Status.OK,
        f"{render_bits(reduce.bus_bytes_per_second)} over each link by {reduce.backend} "
        f"({reduce.num_bytes / 2**20:.0f} MiB over {list_nodes(list(observed.nodes))} in "
        f"{render_seconds(reduce.seconds)}; a few bytes in {reduce.latency_seconds * 1e6:,.0f} µs)",
    )


def render_bits(bytes_per_second: float) -> str:
    """As networks are sold: bits, in thousands."""
    bits = bytes_per_second * 8
    for unit, size in (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}" if bits < 1e3 * size else f"{bits / size:.0f} {unit}"
    return f"{bits:.0f} b/s"


def _as_option(bytes_per_second: float) -> str:
    """What `--network` reads: nothing under 1 Mb/s."""
    return render_bits(max(bytes_per_second, 125_000.0)).replace(" ", "")


def _link_finding(
    area: str, name: str, status: Status, detail: str, remedy: str | None = None
) -> Finding:
    return Finding(area=area, name=name, status=status, detail=detail, remedy=remedy)
