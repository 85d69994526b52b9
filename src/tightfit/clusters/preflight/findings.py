"""The findings of a preflight: nodes, versions, clocks, names, devices, links, shared folder."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from ipaddress import ip_address

from tightfit.clusters.preflight.agent import EXCLUSIVE, LINKED
from tightfit.clusters.preflight.observations import (
    ConnectionOutcome,
    ConnectionProbe,
    FolderObservations,
    NodeFacts,
    NodePair,
    Observations,
    host_of,
)
from tightfit.core.findings import Finding, Status
from tightfit.core.text import list_some
from tightfit.core.units import GIB, MIB, render_bytes, render_seconds
from tightfit.estimation.communication import ASSUMED_NETWORK_BYTES_PER_SECOND

CRITICAL_PACKAGES = ("tightfit", "torch", "torch's CUDA", "NCCL")
"""Two versions of these do not work together, or nobody knows; of others they mostly do."""
MAX_SKEW_SECONDS = 1.0
LITTLE_SHM_BYTES = 512 * MIB
"""NCCL keeps buffers there for the GPUs of a node; containers give 64 MiB."""
LITTLE_DISK_BYTES = 2 * GIB
FEW_OPEN_FILES = 4096
SLOW_IMPORT_SECONDS = 15.0
SLOW_LOOKUP_SECONDS = 1.0
LONG_DELAY_SECONDS = 1.0
SOME_LOSS, MUCH_LOSS = 0.01, 0.05
"""TCP halves its pace at each loss: 1% on a fast link leaves a fraction of it."""
FAR_LOWER = 0.5
LOPSIDED = 4.0
OK, INFO, WARNING, ERROR = Status.OK, Status.INFO, Status.WARNING, Status.ERROR
_UNANSWERED = {
    "facts": "it does not report what it is",
    "torch": "torch did not load",
    "open": "no port could be opened there",
    "routes": "it does not report its routes",
    "connect": "it did not finish connecting to the others",
    "datagrams": "it did not finish sending datagrams",
    "received": "it does not report which datagrams reached it",
    "stream": "the stream from there did not end",
}
"""Requests whose silence shows nowhere else."""
_RESOLVER = "see /etc/resolv.conf for a server that is down, or list the nodes in /etc/hosts"
_SHARED_FOLDER = "choose a folder that every node mounts and may write: --shared FOLDER"
_CONNECTION_FAILS = {
    ConnectionOutcome.REFUSED: "is refused",
    ConnectionOutcome.TIMEOUT: "is not answered",
    ConnectionOutcome.UNREACHABLE: "finds no route",
    ConnectionOutcome.STALLED: "opens, but data does not come through",
}
_SOURCE_LOCATION = re.compile(r"^\[[^\]]*\]\s*")
"""`[/pytorch/x.cc:78]` before an error of torch."""


def list_findings(observed: Observations) -> Iterator[Finding]:
    yield from _check_presence(observed)
    yield from _check_versions(observed)
    yield from _check_clocks(observed)
    yield from _check_gpus(observed)
    yield from _check_machines(observed)
    yield from _check_names(observed)
    if len(observed.present) > 1:
        yield from _check_devices(observed)
        yield from _check_port(observed)
        yield from _check_links(observed)
        yield from _check_bandwidth(observed)
        yield from _check_reduce(observed)
    if observed.folder is not None and observed.present:
        yield from _check_folder(observed.folder, observed)


def _finding(
    area: str, name: str, status: Status, detail: str, remedy: str | None = None
) -> Finding:
    return Finding(area=area, name=name, status=status, detail=detail, remedy=remedy)


# Nodes.


def _check_presence(observed: Observations) -> Iterator[Finding]:
    for node, why in observed.absent.items():
        detail = f"the agent does not start there: {why}"
        remedy = f"see whether a command runs on {node}, and whether this Python and tightfit "
        remedy += "are there too    (--run-with 'ssh {node}' says how a command gets there)"
        yield _finding("nodes", node, ERROR, detail, remedy)
    for (node, request), why in observed.silent.items():
        if request in _UNANSWERED:
            detail = f"{_UNANSWERED[request]}: {why}"
            remedy = f"see what keeps {node} busy: uptime, dmesg"
            yield _finding("nodes", node, WARNING, detail, remedy)
    if observed.present:
        detail = f"{len(observed.present)} of {len(observed.nodes)} answer"
        yield _finding("nodes", "agents", OK, detail)


def _check_versions(observed: Observations) -> Iterator[Finding]:
    if len(observed.present) < 2:
        return
    tables = {
        node: {**facts.packages, "Python": facts.python, "NVIDIA driver": facts.driver}
        for node, facts in observed.facts.items()
    }
    has_any = False
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        versions = {node: table.get(name) for node, table in tables.items()}
        if len(set(versions.values())) == 1:
            continue
        has_any = True
        by_version: dict[str, list[str]] = defaultdict(list)
        for node, version in versions.items():
            by_version[version or "none"].append(node)
        listed = [f"{version} on {list_some(nodes)}" for version, nodes in by_version.items()]
        status = ERROR if name in CRITICAL_PACKAGES else WARNING
        detail = f"differs: {'; '.join(listed)}"
        yield _finding("versions", name, status, detail, _unify_version(name, versions))
    if not has_any:
        first = tables[observed.present[0]]
        known = [f"{name} {first[name]}" for name in ("Python", "torch", "tightfit")
                 if first.get(name)]  # fmt: skip
        yield _finding("versions", "all", OK, f"the same: {', '.join(known)}")


def _unify_version(name: str, versions: Mapping[str, str | None]) -> str:
    known = [version for version in versions.values() if version is not None]
    if name in ("Python", "NVIDIA driver", "torch's CUDA", "NCCL") or not known:
        return f"use the same environment on all nodes, with one {name}"
    plain = max(known, key=known.count).partition("+")[0]
    return f"on the others: pip install {name}=={plain}    (or one environment that all nodes see)"


def _check_clocks(observed: Observations) -> Iterator[Finding]:
    if len(observed.clocks) < 2:
        return
    offsets = {node: clock.offset_seconds for node, clock in observed.clocks.items()}
    ahead, behind = max(offsets, key=offsets.__getitem__), min(offsets, key=offsets.__getitem__)
    skew = offsets[ahead] - offsets[behind]
    error = max(clock.error_seconds for clock in observed.clocks.values())
    if skew - 2 * error <= MAX_SKEW_SECONDS:
        detail = f"at most {(skew + 2 * error) * 1e3:.1f} ms apart"
        yield _finding("clock", "all", OK, detail)
        return
    middle = sorted(offsets.values())[len(offsets) // 2]
    off = max(offsets, key=lambda node: abs(offsets[node] - middle))
    name = off if len(offsets) > 2 else f"{behind} and {ahead}"
    detail = f"{ahead} is {render_seconds(skew)} ahead of {behind}: logs, leases and `make` "
    detail += "will be confused by it"
    remedy = f"on {ahead} and {behind}: chronyc tracking    (start chronyd or systemd-timesyncd)"
    yield _finding("clock", name, WARNING, detail, remedy)


def _check_gpus(observed: Observations) -> Iterator[Finding]:
    for node, facts in observed.torch.items():
        known = observed.facts[node].gpus if node in observed.facts else ()
        if facts.error is not None:
            remedy = "pip install 'tightfit[train]'    (on that node)"
            yield _finding("gpu", node, ERROR, f"torch does not load: {facts.error}", remedy)
        elif known and facts.num_gpus == 0:
            detail = f"the driver shows {len(known)} GPUs, torch {facts.version} none of them"
            remedy = "pip install torch for CUDA, not newer than the driver supports: "
            yield _finding("gpu", node, ERROR, detail, f"{remedy}tightfit doctor")
        elif facts.import_seconds > SLOW_IMPORT_SECONDS:
            detail = f"torch took {render_seconds(facts.import_seconds)} to load"
            remedy = "put the environment on a local disk, or into a container image"
            yield _finding("gpu", node, WARNING, detail, remedy)
    kinds = {node: facts.gpu_names for node, facts in observed.torch.items() if facts.error is None}
    if len(set(kinds.values())) > 1:
        listed = "; ".join(f"{node}: {_name_gpus(names)}" for node, names in kinds.items())
        remedy = "choose nodes of one kind: a job runs the same on each"
        yield _finding("gpu", "all", ERROR, f"the nodes differ: {listed}", remedy)
    elif any(kinds.values()):
        names = next(iter(kinds.values()))
        yield _finding("gpu", "all", OK, f"torch sees {_name_gpus(names)} on each node")
    elif kinds:
        yield _finding("gpu", "all", INFO, "torch sees no GPU: training would use the CPUs")


def _name_gpus(names: tuple[str, ...]) -> str:
    return f"{len(names)}x{names[0]}" if names else "no GPU"


def _check_machines(observed: Observations) -> Iterator[Finding]:
    for node, facts in observed.facts.items():
        detail = (
            f"{facts.num_cores} cores, {render_bytes(facts.free_memory_bytes)} of "
            f"{render_bytes(facts.memory_bytes)} RAM free, /dev/shm "
            f"{render_bytes(facts.shm_free_bytes)} free, temporary files "
            f"{render_bytes(facts.disk_free_bytes)} free"
        )
        yield _finding("machine", node, OK, detail)
        for is_low, warning, remedy in (
            (
                facts.shm_bytes < LITTLE_SHM_BYTES and len(facts.gpus) > 1,
                f"/dev/shm has {render_bytes(facts.shm_bytes)}, and NCCL needs it between GPUs",
                "docker run --shm-size 8g, or a Memory emptyDir at /dev/shm",
            ),
            (
                facts.disk_free_bytes < LITTLE_DISK_BYTES,
                f"{render_bytes(facts.disk_free_bytes)} free for temporary files",
                "export TMPDIR=/a/larger/disk",
            ),
            (
                0 < facts.max_open_files < FEW_OPEN_FILES,
                f"a process may open {facts.max_open_files} files; loaders and NCCL open many",
                "ulimit -n 65536    (before the job)",
            ),
            (
                facts.has_infiniband and facts.max_locked_bytes is not None,
                f"a process may lock {render_bytes(facts.max_locked_bytes or 0)} of memory; "
                "InfiniBand then fails or falls back to TCP",
                "ulimit -l unlimited    (in Slurm: LimitMEMLOCK=infinity for slurmd)",
            ),
        ):
            if is_low:
                yield _finding("machine", node, WARNING, warning, remedy)


# Names.


def _check_names(observed: Observations) -> Iterator[Finding]:
    findings = [
        *_check_peer_names(observed),
        *_check_own_names(observed),
        *_check_resolvers(observed),
    ]
    if not findings and observed.lookups and len(observed.present) > 1:
        detail = "every node resolves its own name and the others'"
        findings = [_finding("names", "all", OK, detail)]
    yield from findings


def _check_peer_names(observed: Observations) -> Iterator[Finding]:
    for node, answers in observed.lookups.items():
        known = {answer.name: answer for answer in answers}
        for peer in observed.nodes:
            host = host_of(peer)
            answer = known.get(host)
            if peer == node or answer is None:
                continue
            own = _own_addresses(observed.facts.get(peer))
            shown = ", ".join(answer.addresses[:3])
            if answer.error is not None:
                detail = f"cannot resolve {host}: {answer.error}"
            elif not own or any(address in own for address in answer.addresses):
                continue
            elif all(ip_address(address).is_loopback for address in answer.addresses):
                detail = f"resolves {host} to itself ({shown})"
            else:
                detail = f"resolves {host} to {shown}, which is not {peer}'s address"
            address = observed.defaults[peer].address if peer in observed.defaults else "ADDRESS"
            remedy = f"on {node}: echo '{address} {host}' >> /etc/hosts, or repair DNS    "
            remedy += "(the options below name addresses and do without names)"
            yield _finding("names", node, ERROR, detail, remedy)


def _own_addresses(facts: NodeFacts | None) -> set[str]:
    devices = facts.devices if facts else ()
    plain = {text.partition("/")[0] for device in devices for text in device.addresses}
    return {address for address in plain if not ip_address(address).is_loopback}


def _check_own_names(observed: Observations) -> Iterator[Finding]:
    """torchrun looks up the host's own name, unless it is given an address."""
    for node, answers in observed.lookups.items():
        name = observed.facts[node].hostname
        answer = next((answer for answer in answers if answer.name == name), None)
        if answer is None:
            continue
        if answer.error is not None:
            detail = f"cannot resolve its own name {name}: {answer.error}"
        elif all(ip_address(address).is_loopback for address in answer.addresses):
            shown = ", ".join(answer.addresses)
            detail = f"its own name {name} resolves to {shown}, where no other node reaches it"
        else:
            continue
        address = observed.defaults[node].address if node in observed.defaults else "ADDRESS"
        remedy = f"--local-addr {address} on {node}, or in its /etc/hosts: {address} {name}"
        yield _finding("names", node, WARNING, detail, remedy)


def _check_resolvers(observed: Observations) -> Iterator[Finding]:
    for node in observed.present:
        forward = max((one.seconds for one in observed.lookups.get(node, ())), default=0.0)
        routes = observed.routes.get(node, {}).values()
        backward = max((route.reverse_seconds for route in routes), default=0.0)
        if (node, "lookup") in observed.silent:
            detail = "the resolver gives no answer at all"
        elif max(forward, backward) > SLOW_LOOKUP_SECONDS:
            kind = "a name" if forward >= backward else "an address's name"
            took = render_seconds(max(forward, backward))
            detail = f"looking up {kind} takes {took}, for every peer anew"
        else:
            continue
        yield _finding("names", node, WARNING, detail, _RESOLVER)


# Network devices: the one that was asked for, and those that carry the traffic.


def _check_devices(observed: Observations) -> Iterator[Finding]:
    addresses = observed.addresses
    if observed.interface is not None:
        yield from _check_requested_device(observed, observed.interface)
    if len(addresses) < len(observed.present):
        lost = [node for node in observed.present if node not in addresses]
        detail = "no address is known under which the other nodes reach it: names do not lead "
        detail += "there, and there is no network that all nodes have in common"
        remedy = "ip -brief address    (on each node), then --interface NAME"
        yield _finding("interface", list_some(lost), ERROR, detail, remedy)
        return
    sizes = {place.mtu for place in addresses.values()}
    if len(sizes) > 1:
        listed = ", ".join(
            f"{node} {place.device} {place.mtu}" for node, place in addresses.items()
        )
        detail = f"differs: {listed}; large packets from one to the other may be lost"
        remedy = f"ip link set DEVICE mtu {min(sizes)}    (on all nodes)"
        yield _finding("interface", "MTU", WARNING, detail, remedy)
    for node, place in addresses.items():
        # A node that answers over another device than it is called at confuses NCCL and filters.
        for peer, other in addresses.items():
            route = observed.routes.get(node, {}).get(other.address)
            if peer != node and route and route.device and route.device != place.device:
                detail = f"is called at {place.device} ({place.address}), but reaches {peer} "
                detail += f"through {route.device} ({route.source})"
                remedy = f"--interface {route.device}, where all nodes have it"
                yield _finding("interface", node, WARNING, detail, remedy)
                break
    detail = ", ".join(f"{n} {place.device} ({place.address})" for n, place in addresses.items())
    status = OK
    if len({place.device for place in addresses.values()}) > 1:
        status = INFO
        detail += "; its name differs between nodes: give each node its own --interface"
    yield _finding("interface", "in use", status, detail)


def _check_requested_device(observed: Observations, device: str) -> Iterator[Finding]:
    problems = list(_list_device_problems(observed, device))
    if not problems:
        return
    right = sorted({place.device for place in observed.defaults.values()} - {device})
    remedy = "ip -brief address    (on each node: which device has an address)"
    if len(right) == 1:
        remedy = f"--interface {right[0]}    (it carries the traffic between the nodes)"
    elif right:
        listed = ", ".join(f"{node}: {place.device}" for node, place in observed.defaults.items())
        remedy = f"each node with its own --interface    ({listed})"
    yield _finding("interface", device, ERROR, "; ".join(problems[:8]), remedy)


def _list_device_problems(observed: Observations, name: str) -> Iterator[str]:
    is_everywhere = True
    for node, facts in observed.facts.items():
        device = next((one for one in facts.devices if one.name == name), None)
        if device is None:
            have = ", ".join(one.name for one in facts.devices if one.name != "lo") or "none"
            yield f"{node} has no device {name} (it has {have})"
        elif not device.is_up:
            yield f"{name} of {node} is down"
        elif all(text.startswith(("fe80", "127.")) for text in device.addresses):
            yield f"{name} of {node} has no address"
        else:
            continue
        is_everywhere = False
    if not is_everywhere:
        return
    # It is there, but what is sent to the others takes another route, or does not arrive.
    for node in observed.present:
        for peer, place in observed.requested.items():
            route = observed.routes.get(node, {}).get(place.address)
            if peer != node and route is not None and route.device != name:
                through = f"through {route.device}" if route.device else "by no route at all"
                yield f"{node} reaches {name} of {peer} ({place.address}) {through}"
                return
    is_tried = observed.addresses is not observed.requested and observed.requested_probes
    if is_tried and any(probe.is_ok for probe in observed.probes.values()):
        yield f"{name} does not connect the nodes: no connection over it succeeds"


# Links: the rendezvous port, each direction of each link, bandwidth.


def _check_port(observed: Observations) -> Iterator[Finding]:
    head, port = observed.head, observed.port
    name = f"{head}:{port}"
    if head not in observed.ports:
        return
    problem = observed.ports[head].rendezvous_error
    if problem is not None:
        remedy = f"--port {port + 1}, or end what holds it: ss -ltnp 'sport = :{port}'"
        yield _finding(
            "port", name, ERROR, f"the rendezvous port {port} of {head} {problem}", remedy
        )
        return
    closed = {
        node: probe
        for node, probe in observed.port_probes.items()
        if not probe.is_ok and (node == head or observed.is_open((node, head)))
    }
    reasons = {
        ConnectionOutcome.REFUSED: "a firewall turns it away",
        ConnectionOutcome.TIMEOUT: "a firewall drops it without a word, while other ports are open",
    }
    for node, probe in closed.items():
        detail = f"a connection from {node} to port {port} of {head} ({probe.address}) "
        detail += f"{_CONNECTION_FAILS[probe.outcome]}: {reasons.get(probe.outcome, probe.detail)}"
        remedy = f"open the port on {head} for {node}, or choose one that is open: --port N"
        yield _finding("port", name, ERROR, detail, remedy)
    num_reached = sum(probe.is_ok for probe in observed.port_probes.values())
    if num_reached == len(observed.present):
        yield _finding("port", name, OK, "free, and reached by every node")


def _check_links(observed: Observations) -> Iterator[Finding]:
    broken = set()
    for a, b in observed.probes:
        is_open = observed.is_open((a, b)) and observed.is_open((b, a))
        if not is_open and frozenset((a, b)) not in broken:
            broken.add(frozenset((a, b)))
            yield _explain_broken_link(observed, (a, b))
    narrow = _list_narrow_links(observed)
    for pair in observed.probes:
        if frozenset(pair) not in broken:
            yield from _check_loss(observed, pair, is_narrow=pair in narrow)
    dropped = {target: count.num_dropped for (_, target), count in observed.received.items()}
    for node, num_dropped in dropped.items():
        if num_dropped:
            detail = f"{num_dropped} datagrams reached {node}, which was too busy to take them in"
            yield _finding("network", node, INFO, f"{detail}: not counted as lost")
    if not broken and observed.probes:
        slowest = max(probe.rtt_seconds or 0.0 for probe in observed.probes.values())
        detail = f"every node reaches every other; round trips of {slowest * 1e6:,.0f} µs or less"
        yield _finding("network", "all", OK, detail)


def _explain_broken_link(observed: Observations, pair: NodePair) -> Finding:
    """Why a connection fails; datagrams show which direction is lost."""
    a, b = pair
    back = (b, a)
    shares = {
        link: share for link in (pair, back) if (share := observed.lost_fraction(link)) is not None
    }
    if len(shares) == 2:
        other, lost = sorted(shares, key=shares.__getitem__)
        if shares[other] <= MUCH_LOSS < shares[lost]:
            return _explain_one_way(observed, lost, shares[lost])
    probe = next(
        observed.probes[p] for p in (pair, back) if p in observed.probes and not observed.is_open(p)
    )
    source = a if probe.node == b else b
    if set(shares.values()) == {1.0}:
        detail = f"nothing passes between them: a connection from {source} to {probe.address} "
        detail += _CONNECTION_FAILS[probe.outcome]
        remedy = "see cable, switch, VLAN and firewall between them; "
        remedy += f"on {source}: ping {probe.address}"
        return _finding("network", f"{a} and {b}", ERROR, detail, remedy)
    return _explain_filter(observed, source, probe)


def _explain_one_way(observed: Observations, lost: NodePair, share: float) -> Finding:
    source, target = lost
    amount = "everything" if share == 1.0 else f"{share:.0%} of what"
    arrived = observed.received[(target, source)].num_small
    place = observed.addresses[target]
    return _finding(
        "network",
        f"{source} to {target}",
        ERROR,
        f"one-way: {amount} {source} sends to {target} is lost, while {arrived} of "
        f"{observed.sent[target]} datagrams from {target} to {source} arrive",
        f"see filters and the cable into {target}, and the route back; on {source}: "
        f"ip route get {place.address}, on {target}: ip -s link show {place.device}",
    )


def _explain_filter(observed: Observations, source: str, probe: ConnectionProbe) -> Finding:
    narrow = _list_narrow_links(observed)
    if probe.outcome is ConnectionOutcome.STALLED and narrow:
        return _explain_narrow(observed, narrow[0])
    at_port = observed.port_probes.get(source)
    has_port = probe.node == observed.head and at_port is not None and at_port.is_ok
    only = f"; only port {observed.port} is open, and" if has_port else ":"
    return _finding(
        "network",
        f"{source} to {probe.node}",
        ERROR,
        f"a connection from {source} to port {probe.port} of {probe.node} "
        f"{_CONNECTION_FAILS[probe.outcome]}{only} gloo and NCCL use ports of their own choice",
        f"let the firewall on {probe.node} accept all TCP ports from {source}",
    )


def _list_narrow_links(observed: Observations) -> list[NodePair]:
    """Links that lose packets of the full size, and no others."""
    return [
        pair
        for pair, received in observed.received.items()
        if received.num_large + received.num_dropped == 0
        and (observed.lost_fraction(pair) or 0.0) <= SOME_LOSS
    ]


def _explain_narrow(observed: Observations, pair: NodePair) -> Finding:
    source, target = (observed.addresses[node] for node in pair)
    detail = f"packets of the full size (MTU {min(source.mtu, target.mtu)}) are lost between the "
    detail += "nodes, small ones arrive: connections open and then hang"
    remedy = f"ip link set {source.device} mtu 1500 on all nodes, or jumbo frames in the switch"
    return _finding("network", f"{pair[0]} to {pair[1]}", ERROR, detail, remedy)


def _check_loss(observed: Observations, pair: NodePair, *, is_narrow: bool) -> Iterator[Finding]:
    source, target = pair
    name = f"{source} to {target}"
    share = observed.lost_fraction(pair)
    if share is None:
        return
    if share == 1.0:
        detail = f"no datagram from {source} reaches {target}, connections do: UDP is filtered"
        yield _finding("network", name, INFO, detail)
    elif share >= SOME_LOSS:
        back = observed.lost_fraction((target, source))
        one_way = "one-way: " if back is not None and back < SOME_LOSS else ""
        other = "not known" if back is None else f"{back:.1%}"
        status = ERROR if share >= MUCH_LOSS else WARNING
        detail = f"{one_way}{share:.1%} of the packets from {source} to {target} are lost "
        detail += f"({other} in the other direction)"
        remedy = "see the cable and the counters of drops: ip -s link show "
        remedy += f"{observed.addresses[target].device} (on {target}), and the switch's"
        yield _finding("network", name, status, detail, remedy)
    elif is_narrow:
        yield _explain_narrow(observed, pair)


def _check_bandwidth(observed: Observations) -> Iterator[Finding]:
    rates = {p: s.bytes_per_second for p, s in observed.streams.items() if s.error is None}
    if not rates:
        return
    shown = list(rates.items())[:8]
    listed = "; ".join(f"{a} to {b} {render_bits(rate)}" for (a, b), rate in shown)
    yield _finding("bandwidth", "TCP", OK, listed)
    slow = min(rates, key=rates.__getitem__)
    source, target = slow
    lowest, back = rates[slow], rates.get((target, source))
    if lowest < FAR_LOWER * ASSUMED_NETWORK_BYTES_PER_SECOND:
        assumed = render_bits(ASSUMED_NETWORK_BYTES_PER_SECOND)
        detail = f"{render_bits(lowest)}, where plans assume {assumed}"
        # --network takes nothing under 1 Mb/s.
        option = render_bits(max(lowest, 125_000.0)).replace(" ", "")
        remedy = f"plan with what is there: --network {option}, or use a faster device"
        yield _finding("bandwidth", f"{source} to {target}", WARNING, detail, remedy)
    elif back is not None and back > LOPSIDED * lowest:
        detail = f"{render_bits(lowest)}, in the other direction {render_bits(back)}"
        device = observed.addresses[source].device
        remedy = f"see the link's duplex and errors: ethtool {device}"
        yield _finding("bandwidth", f"{source} to {target}", WARNING, detail, remedy)


def _check_reduce(observed: Observations) -> Iterator[Finding]:
    reduce = observed.reduce
    if reduce is None:
        if observed.no_all_reduce is not None:
            detail = f"not measured: {observed.no_all_reduce}"
            yield _finding("bandwidth", "all-reduce", INFO, detail)
    elif reduce.error is not None:
        device = observed.addresses[observed.head].device
        detail = f"torch.distributed ({reduce.backend or 'all-reduce'}) fails over {device}: "
        detail += _SOURCE_LOCATION.sub("", reduce.error)
        remedy = "NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL show more; see the findings "
        yield _finding("bandwidth", "all-reduce", ERROR, detail, f"{remedy}above")
    else:
        detail = (
            f"{render_bits(reduce.bus_bytes_per_second)} over each link by {reduce.backend} "
            f"({reduce.num_bytes / 2**20:.0f} MiB over {list_some(list(observed.nodes))} in "
            f"{render_seconds(reduce.seconds)}; a few bytes in "
            f"{reduce.latency_seconds * 1e6:,.0f} µs)"
        )
        yield _finding("bandwidth", "all-reduce", OK, detail)


def render_bits(bytes_per_second: float) -> str:
    """As networks are sold: bits, in thousands."""
    bits = bytes_per_second * 8
    for unit, size in (("Gb/s", 1e9), ("Mb/s", 1e6), ("kb/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}" if bits < 1e3 * size else f"{bits / size:.0f} {unit}"
    return f"{bits:.0f} b/s"


# The shared folder.


def _check_folder(folder: FolderObservations, observed: Observations) -> Iterator[Finding]:
    errors = [
        _finding("folder", folder.path, ERROR, detail, remedy)
        for detail, remedy in _list_folder_errors(folder, observed)
    ]
    if not errors:
        delay = max((step.seconds for step in folder.grown.values()), default=0.0)
        detail = "the same and writable on every node; exclusive create, link and rename work; "
        detail += f"a change is seen after {render_seconds(delay)}"
        yield _finding("folder", folder.path, OK, detail)
    yield from errors
    for node, step in folder.grown.items():
        if not step.is_done or step.seconds > LONG_DELAY_SECONDS:
            more = "more than " if not step.is_done else ""
            detail = f"{node} sees a changed file only after {more}{render_seconds(step.seconds)}"
            remedy = "mount with shorter attribute caching (NFS: actimeo=1), or expect slow "
            yield _finding("folder", folder.path, WARNING, detail, f"{remedy}hand-over of work")


def _list_folder_errors(
    folder: FolderObservations, observed: Observations
) -> Iterator[tuple[str, str]]:
    """Details and remedies."""
    head = observed.head
    if folder.planted is None or not folder.planted.is_done:
        why = folder.planted.detail if folder.planted else "no answer: the file system may hang"
        yield f"{head} cannot write there: {why}", _SHARED_FOLDER
        return
    for node in observed.present[1:]:
        step = folder.found.get(node)
        if step is None:
            detail = f"{node} gives no answer about it: the file system may hang there"
            yield detail, f"on {node}: ls {folder.path}; mount"
        elif not step.is_done:
            detail = f"not shared: {node} does not see what {head} writes there: {step.detail}"
            remedy = f"mount the same file system on {node}, or name one: --shared FOLDER    "
            yield detail, f"{remedy}(on {node}: df {folder.path})"
    for node, step in folder.raced.items():
        if not step.is_done:
            detail = f"{node} sees it, but cannot write and rename there: {step.detail}"
            yield detail, _SHARED_FOLDER
    if not folder.raced or not all(step.is_done for step in folder.raced.values()):
        return
    races = {EXCLUSIVE: "creating a file exclusively", LINKED: "linking a file to a name"}
    for name, meaning in races.items():
        num_winners = sum(name in step.won for step in folder.raced.values())
        if num_winners != 1:
            detail = f"{meaning}, which one node may win, succeeded on {num_winners} nodes: "
            remedy = "use another file system for runs and for `farm`: --shared FOLDER"
            yield f"{detail}leases would be given twice", remedy
    blind = [node for node, step in folder.renamed.items() if not step.is_done]
    if blind:
        detail = f"{', '.join(blind)} does not see files under the names that others gave them"
        yield detail, "mount it without caching of names (lookupcache)"
