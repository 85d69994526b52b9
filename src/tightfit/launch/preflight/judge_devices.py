"""Findings about network devices: the one that was asked for, and the one that carries the way."""

from __future__ import annotations

from collections.abc import Iterator

from tightfit.hardware.findings import Finding, Status
from tightfit.launch.preflight.judge_nodes import list_nodes
from tightfit.launch.preflight.messages import Device, Outcome
from tightfit.launch.preflight.seen import Seen


def judge_devices(seen: Seen) -> Iterator[Finding]:
    if len(seen.present) < 2:
        return
    yield from _judge_asked(seen)
    if len(seen.seats) < len(seen.present):
        lost = [node for node in seen.present if node not in seen.seats]
        yield _found(
            list_nodes(lost),
            Status.FAULT,
            "no address is known under which the other nodes reach it: names do not lead there, "
            "and there is no network that all nodes have in common",
            "ip -brief address    (on each node), then --interface NAME",
        )
        return
    yield from _judge_mtu(seen)
    yield from _judge_routes(seen)
    devices = {node: seat.device for node, seat in seen.seats.items()}
    told = ", ".join(f"{n} {seat.device} ({seat.address})" for n, seat in seen.seats.items())
    if len(set(devices.values())) > 1:
        told += "; its name differs between nodes: give each node its own --interface"
    is_one = len(set(devices.values())) == 1
    yield _found("in use", Status.OK if is_one else Status.INFO, told)


def _judge_asked(seen: Seen) -> Iterator[Finding]:
    if seen.interface is None:
        return
    wrong = list(_list_faults(seen, seen.interface))
    if not wrong:
        return
    right = sorted({seat.device for seat in seen.plain_seats.values()} - {seen.interface})
    remedy = "ip -brief address    (on each node: which device has an address)"
    if len(right) == 1:
        remedy = f"--interface {right[0]}    (it carries the way between the nodes)"
    elif right:
        listed = ", ".join(f"{n}: {s.device}" for n, s in seen.plain_seats.items())
        remedy = f"each node with its own --interface    ({listed})"
    yield _found(seen.interface, Status.FAULT, "; ".join(wrong[:8]), remedy)


def _list_faults(seen: Seen, asked: str) -> Iterator[str]:
    missing = []
    for node, facts in seen.facts.items():
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
        yield from _list_detours(seen, asked)


def _has_address(device: Device) -> bool:
    return any(not text.startswith(("fe80", "127.")) for text in device.addresses)


def _list_detours(seen: Seen, asked: str) -> Iterator[str]:
    """It is there, but what is sent to the others goes another way, or does not arrive."""
    for node in seen.present:
        for peer in seen.present:
            seat = seen.asked_seats.get(peer)
            if peer == node or seat is None:
                continue
            route = seen.routes.get(node, {}).get(seat.address)
            if route is not None and route.device != asked:
                way = f"through {route.device}" if route.device else "by no way at all"
                yield f"{node} reaches {asked} of {peer} ({seat.address}) {way}"
                return
    if seen.seats is not seen.asked_seats and seen.asked_knocks:
        works = any(knock.outcome is Outcome.OK for knock in seen.knocks.values())
        if works:
            yield f"{asked} does not connect the nodes: no connection over it succeeds"


def _judge_mtu(seen: Seen) -> Iterator[Finding]:
    sizes = {node: seat.mtu for node, seat in seen.seats.items()}
    if len(set(sizes.values())) == 1:
        return
    told = ", ".join(f"{node} {seen.seats[node].device} {mtu}" for node, mtu in sizes.items())
    yield _found(
        "MTU",
        Status.WARNING,
        f"differs: {told}; large packets from one to the other may be lost",
        f"ip link set DEVICE mtu {min(sizes.values())}    (on all nodes)",
    )


def _judge_routes(seen: Seen) -> Iterator[Finding]:
    """A node that answers over another device than it is called at confuses NCCL and filters."""
    for node, seat in seen.seats.items():
        for peer, other in seen.seats.items():
            route = seen.routes.get(node, {}).get(other.address)
            if peer != node and route and route.device and route.device != seat.device:
                yield _found(
                    node,
                    Status.WARNING,
                    f"is called at {seat.device} ({seat.address}), but reaches {peer} through "
                    f"{route.device} ({route.source})",
                    f"--interface {route.device}, where all nodes have it",
                )
                break


def _found(name: str, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area="interface", name=name, status=status, detail=detail, remedy=remedy)
