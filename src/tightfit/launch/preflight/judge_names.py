"""Findings about names: what each node makes of the others' names and of its own."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

from tightfit.core.units import render_seconds
from tightfit.hardware.findings import Finding, Status
from tightfit.launch.preflight.addresses import host_of
from tightfit.launch.preflight.messages import Facts, Lookup
from tightfit.launch.preflight.seen import Seen

SLOW_SECONDS = 1.0
OPTIONS = "the options below name addresses and do without names"


def judge_names(seen: Seen) -> Iterator[Finding]:
    findings = [*_judge_peers(seen), *_judge_own(seen), *_judge_speed(seen)]
    if not findings and seen.lookups and len(seen.present) > 1:
        told = "every node resolves its own name and the others'"
        findings = [Finding(area="names", name="all", status=Status.OK, detail=told)]
    yield from findings


def _judge_peers(seen: Seen) -> Iterator[Finding]:
    for node, answers in seen.lookups.items():
        known = {answer.name: answer for answer in answers}
        for peer in seen.nodes:
            answer = known.get(host_of(peer))
            if peer != node and answer is not None:
                finding = _judge_peer(node, peer, answer, seen)
                if finding is not None:
                    yield finding


def _judge_peer(node: str, peer: str, answer: Lookup, seen: Seen) -> Finding | None:
    address = seen.plain_seats[peer].address if peer in seen.plain_seats else None
    entry = f"{address or 'ADDRESS'} {host_of(peer)}"
    remedy = f"on {node}: echo '{entry}' >> /etc/hosts, or repair DNS    ({OPTIONS})"
    if answer.fault is not None:
        return _fault(node, f"cannot resolve {host_of(peer)}: {answer.fault}", remedy)
    own = _own_addresses(seen.facts.get(peer))
    if not own or any(address in own for address in answer.addresses):
        return None
    shown = ", ".join(answer.addresses[:3])
    if all(ip_address(address).is_loopback for address in answer.addresses):
        detail = f"resolves {host_of(peer)} to itself ({shown})"
    else:
        detail = f"resolves {host_of(peer)} to {shown}, which is not {peer}'s address"
    return _fault(node, detail, remedy)


def _judge_own(seen: Seen) -> Iterator[Finding]:
    """torchrun asks for the host's own name, unless it is told an address."""
    for node, answers in seen.lookups.items():
        facts = seen.facts[node]
        answer = next((a for a in answers if a.name == facts.hostname), None)
        if answer is None:
            continue
        seat = seen.plain_seats.get(node)
        where = seat.address if seat else "ADDRESS"
        remedy = f"--local-addr {where} on {node}, or in its /etc/hosts: {where} {facts.hostname}"
        if answer.fault is not None:
            detail = f"cannot resolve its own name {facts.hostname}: {answer.fault}"
            yield _warn(node, detail, remedy)
        elif all(ip_address(address).is_loopback for address in answer.addresses):
            told = ", ".join(answer.addresses)
            detail = (
                f"its own name {facts.hostname} stands for {told}, where no other node reaches it"
            )
            yield _warn(node, detail, remedy)


def _judge_speed(seen: Seen) -> Iterator[Finding]:
    for node in seen.present:
        forward = max((a.seconds for a in seen.lookups.get(node, ())), default=0.0)
        routes = seen.routes.get(node, {}).values()
        backward = max((route.reverse_seconds for route in routes), default=0.0)
        slowest = max(forward, backward)
        if (node, "lookup") in seen.silent:
            yield _warn(node, "the resolver gives no answer at all", _RESOLVER)
        elif slowest > SLOW_SECONDS:
            kind = "a name" if forward >= backward else "an address's name"
            took = render_seconds(slowest)
            yield _warn(node, f"looking up {kind} takes {took}, for every peer anew", _RESOLVER)


_RESOLVER = "see /etc/resolv.conf for a server that is down, or list the nodes in /etc/hosts"


def _own_addresses(facts: Facts | None) -> set[str]:
    if facts is None:
        return set()
    texts = (text for device in facts.devices for text in device.addresses)
    plain = {text.partition("/")[0] for text in texts}
    return {address for address in plain if not ip_address(address).is_loopback}


def _fault(node: str, detail: str, remedy: str) -> Finding:
    return Finding(area="names", name=node, status=Status.FAULT, detail=detail, remedy=remedy)


def _warn(node: str, detail: str, remedy: str) -> Finding:
    return Finding(area="names", name=node, status=Status.WARNING, detail=detail, remedy=remedy)
