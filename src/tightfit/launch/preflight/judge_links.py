"""Findings about the ways between nodes: device, port, each direction of each link, bandwidth."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tightfit.core.units import render_seconds
from tightfit.estimate.communication import ASSUMED_NETWORK_BYTES_PER_SECOND
from tightfit.hardware.findings import Finding, Status
from tightfit.launch.preflight.judge_nodes import list_nodes
from tightfit.launch.preflight.messages import Knock, Outcome
from tightfit.launch.preflight.seen import Pair, Seen

SOME_LOSS, MUCH_LOSS = 0.01, 0.05
"""TCP halves its pace at each loss: 1% on a fast link leaves a fraction of it."""
FAR_LOWER = 0.5
LOPSIDED = 4.0
_PLACE_IN_CODE = re.compile(r"^\[[^\]]*\]\s*")
_ANSWERS = {
    Outcome.REFUSED: "is refused",
    Outcome.TIMEOUT: "is not answered",
    Outcome.UNREACHABLE: "finds no way",
    Outcome.STALLED: "opens, but data does not come through",
}


def judge_links(seen: Seen) -> Iterator[Finding]:
    if len(seen.present) < 2:
        return
    yield from _judge_port(seen)
    dead = set()
    for pair in _once(seen):
        finding = _judge_pair(seen, pair)
        if finding is not None:
            dead.add(frozenset(pair))
            yield finding
    alive = [pair for pair in seen.knocks if frozenset(pair) not in dead]
    yield from _judge_loss(seen, alive)
    yield from _judge_drops(seen)
    if not dead and seen.knocks:
        slowest = max((k.rtt_seconds or 0.0 for k in seen.knocks.values()), default=0.0)
        told = f"every node reaches every other; there and back in {slowest * 1e6:,.0f} µs or less"
        yield _found("network", "all", Status.OK, told)
    yield from _judge_bandwidth(seen)
    yield from _judge_reduce(seen)


def _judge_port(seen: Seen) -> Iterator[Finding]:
    doors = seen.doors.get(seen.head)
    if doors is None:
        return
    name = f"{seen.head}:{seen.port}"
    if doors.rendezvous_fault is not None:
        yield _found(
            "port",
            name,
            Status.FAULT,
            f"the rendezvous port {seen.port} of {seen.head} {doors.rendezvous_fault}",
            f"--port {seen.port + 1}, or end what holds it: ss -ltnp 'sport = :{seen.port}'",
        )
        return
    closed = {
        node: knock
        for node, knock in seen.port_knocks.items()
        if knock.outcome is not Outcome.OK
        and (node == seen.head or seen.is_open((node, seen.head)))
    }
    for node, knock in closed.items():
        yield _closed_port(seen, node, knock)
    reached = [node for node, knock in seen.port_knocks.items() if knock.outcome is Outcome.OK]
    if not closed and len(reached) == len(seen.present):
        yield _found("port", name, Status.OK, "free, and reached by every node")


def _closed_port(seen: Seen, node: str, knock: Knock) -> Finding:
    why = {
        Outcome.REFUSED: "a firewall turns it away",
        Outcome.TIMEOUT: "a firewall drops it without a word, while other ports are open",
    }.get(knock.outcome, knock.detail)
    return _found(
        "port",
        f"{seen.head}:{seen.port}",
        Status.FAULT,
        f"a connection from {node} to port {seen.port} of {seen.head} ({knock.address}) "
        f"{_ANSWERS[knock.outcome]}: {why}",
        f"open the port on {seen.head} for {node}, or choose one that is open: --port N",
    )


def _once(seen: Seen) -> Iterator[Pair]:
    """Each two nodes one time."""
    done = set()
    for source, target in seen.knocks:
        if frozenset((source, target)) not in done:
            done.add(frozenset((source, target)))
            yield source, target


def _judge_pair(seen: Seen, pair: Pair) -> Finding | None:
    """A fault where a connection does not work; which direction is lost, datagrams tell."""
    a, b = pair
    back = (b, a)
    if seen.is_open(pair) and seen.is_open(back):
        return None
    shares = {way: share for way in (pair, back) if (share := seen.lost_fraction(way)) is not None}
    if len(shares) == 2:
        other, lost = sorted(shares, key=shares.__getitem__)
        if shares[other] <= MUCH_LOSS < shares[lost]:
            return _one_way(seen, lost, other)
    knock = next(seen.knocks[p] for p in (pair, back) if p in seen.knocks and not seen.is_open(p))
    source = a if knock.node == b else b
    if set(shares.values()) == {1.0}:
        return _found(
            "network",
            f"{a} and {b}",
            Status.FAULT,
            f"nothing passes between them: a connection from {source} to {knock.address} "
            f"{_ANSWERS[knock.outcome]}",
            f"see cable, switch, VLAN and firewall between them; on {source}: ping {knock.address}",
        )
    return _filtered(seen, source, knock)


def _one_way(seen: Seen, lost: Pair, other: Pair) -> Finding:
    source, target = lost
    share = seen.lost_fraction(lost) or 0.0
    amount = "Everything" if share == 1.0 else f"{share:.0%} of what"
    told = "is lost" if share == 1.0 else "is lost on the way"
    return _found(
        "network",
        f"{source} to {target}",
        Status.FAULT,
        f"one-way: {amount.lower()} {source} sends to {target} {told}, while "
        f"{seen.heard[other].num_small} of {seen.sent[target]} datagrams from {target} to {source} "
        "arrive",
        f"see filters and the cable into {target}, and the way back; on {source}: "
        f"ip route get {seen.seats[target].address}, on {target}: "
        f"ip -s link show {seen.seats[target].device}",
    )


def _filtered(seen: Seen, source: str, knock: Knock) -> Finding:
    port_knock = seen.port_knocks.get(source)
    has_port = knock.node == seen.head and port_knock and port_knock.outcome is Outcome.OK
    only = f"; only port {seen.port} is open, and" if has_port else ":"
    detail = (
        f"a connection from {source} to port {knock.port} of {knock.node} "
        f"{_ANSWERS[knock.outcome]}{only} gloo and NCCL use ports of their own choice"
    )
    if knock.outcome is Outcome.STALLED and _large_lost(seen):
        return _narrow(seen, _large_lost(seen)[0])
    return _found(
        "network",
        f"{source} to {knock.node}",
        Status.FAULT,
        detail,
        f"let the firewall on {knock.node} accept all TCP ports from {source}",
    )


def _large_lost(seen: Seen) -> list[Pair]:
    return [
        pair
        for pair, heard in seen.heard.items()
        if heard.num_large + heard.num_dropped == 0
        and (seen.lost_fraction(pair) or 0.0) <= SOME_LOSS
    ]


def _narrow(seen: Seen, pair: Pair) -> Finding:
    source, target = pair
    mtu = min(seen.seats[source].mtu, seen.seats[target].mtu)
    return _found(
        "network",
        f"{source} to {target}",
        Status.FAULT,
        f"packets of the full size (MTU {mtu}) are lost on the way, small ones arrive: "
        "connections open and then hang",
        f"ip link set {seen.seats[source].device} mtu 1500 on all nodes, or jumbo frames in the "
        "switch",
    )


def _judge_loss(seen: Seen, alive: list[Pair]) -> Iterator[Finding]:
    narrow = set(_large_lost(seen))
    for pair in alive:
        source, target = pair
        share = seen.lost_fraction(pair)
        if share is None:
            continue
        if share == 1.0:
            told = f"no datagram from {source} reaches {target}, connections do: UDP is filtered"
            yield _found("network", f"{source} to {target}", Status.INFO, told)
        elif share >= SOME_LOSS:
            back = seen.lost_fraction((target, source))
            one_way = "one-way: " if back is not None and back < SOME_LOSS else ""
            other_way = "not known" if back is None else f"{back:.1%}"
            yield _found(
                "network",
                f"{source} to {target}",
                Status.FAULT if share >= MUCH_LOSS else Status.WARNING,
                f"{one_way}{share:.1%} of the packets from {source} to {target} are lost"
                f" ({other_way} the other way)",
                f"see the cable and the counters of drops: ip -s link show "
                f"{seen.seats[target].device} (on {target}), and the switch's",
            )
        elif pair in narrow:
            yield _narrow(seen, pair)


def _judge_drops(seen: Seen) -> Iterator[Finding]:
    dropped = {target: heard.num_dropped for (_, target), heard in seen.heard.items()}
    for node, num_dropped in dropped.items():
        if num_dropped:
            told = f"{num_dropped} datagrams reached {node}, which was too busy to take them in"
            yield _found("network", node, Status.INFO, f"{told}: not counted as lost")


def _judge_bandwidth(seen: Seen) -> Iterator[Finding]:
    rates = {p: s.bytes_per_second for p, s in seen.streams.items() if s.fault is None}
    if not rates:
        return
    told = "; ".join(f"{a} to {b} {render_bits(rate)}" for (a, b), rate in list(rates.items())[:8])
    yield _found("bandwidth", "TCP", Status.OK, told)
    slow = min(rates, key=rates.__getitem__)
    lowest = rates[slow]
    back = rates.get((slow[1], slow[0]))
    if lowest < FAR_LOWER * ASSUMED_NETWORK_BYTES_PER_SECOND:
        yield _found(
            "bandwidth",
            f"{slow[0]} to {slow[1]}",
            Status.WARNING,
            f"{render_bits(lowest)}, where plans assume "
            f"{render_bits(ASSUMED_NETWORK_BYTES_PER_SECOND)}",
            f"plan with what is there: --network {_as_option(lowest)}, or use a faster device",
        )
    elif back is not None and back > LOPSIDED * lowest:
        yield _found(
            "bandwidth",
            f"{slow[0]} to {slow[1]}",
            Status.WARNING,
            f"{render_bits(lowest)}, the other way {render_bits(back)}",
            f"see the link's duplex and errors: ethtool {seen.seats[slow[0]].device}",
        )


def _judge_reduce(seen: Seen) -> Iterator[Finding]:
    if seen.reduce is None:
        if seen.no_reduce is not None:
            told = f"not measured: {seen.no_reduce}"
            yield _found("bandwidth", "all-reduce", Status.INFO, told)
        return
    reduce = seen.reduce
    if reduce.fault is not None:
        device = seen.seats[seen.head].device
        yield _found(
            "bandwidth",
            "all-reduce",
            Status.FAULT,
            f"torch.distributed ({reduce.backend or 'all-reduce'}) fails over {device}: "
            f"{_PLACE_IN_CODE.sub('', reduce.fault)}",
            "NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL tell more; see the findings above",
        )
        return
    yield _found(
        "bandwidth",
        "all-reduce",
        Status.OK,
        f"{render_bits(reduce.bus_bytes_per_second)} over each link by {reduce.backend} "
        f"({reduce.num_bytes / 2**20:.0f} MiB over {list_nodes(list(seen.nodes))} in "
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


def _found(area: str, name: str, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area=area, name=name, status=status, detail=detail, remedy=remedy)
