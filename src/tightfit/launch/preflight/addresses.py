"""Under which address, and so over which device, the nodes are to meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, ip_address, ip_interface

from tightfit.launch.preflight.messages import Device, Facts, Lookup


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where one node is reached."""

    node: str
    address: str
    device: str
    mtu: int
    bits_per_second: float = 0.0


Seats = dict[str, Seat]


def host_of(node: str) -> str:
    """`me@host` is how ssh is told; the network knows `host`."""
    return node.rpartition("@")[2]


def seats_on(facts: Mapping[str, Facts], device: str) -> Seats:
    """Of the nodes that have this device, up and with an address."""
    found = {}
    for node, told in facts.items():
        for owner, address in _list_addresses(told):
            if owner.name == device and owner.is_up:
                found[node] = _seat(node, owner, address)
                break
    return found


def choose_seats(facts: Mapping[str, Facts], lookups: Mapping[str, Sequence[Lookup]]) -> Seats:
    """By the nodes' names where every one of them leads to its node; else by a shared network."""
    named = _by_name(facts, lookups)
    if len(named) == len(facts):
        return named
    shared = _by_network(facts)
    return shared if len(shared) == len(facts) else {**shared, **named}


def _by_name(facts: Mapping[str, Facts], lookups: Mapping[str, Sequence[Lookup]]) -> Seats:
    found = {}
    for node, told in facts.items():
        own = {address: device for device, address in _list_addresses(told)}
        for peer, answers in lookups.items():
            told_addresses = [
                address
                for answer in answers
                if answer.name == host_of(node) and peer != node
                for address in answer.addresses
            ]
            match = next((address for address in told_addresses if address in own), None)
            if match is not None:
                found[node] = _seat(node, own[match], match)
                break
    return found


def _by_network(facts: Mapping[str, Facts]) -> Seats:
    """The fastest network on which every node has an address of its own."""
    networks: dict[str, Seats] = {}
    for node, told in facts.items():
        for device in told.devices:
            for text in device.addresses if device.is_up else ():
                place = ip_interface(text)
                if isinstance(place, IPv4Interface) and not place.ip.is_loopback:
                    seat = _seat(node, device, str(place.ip))
                    networks.setdefault(str(place.network), {}).setdefault(node, seat)
    whole = [
        seats
        for seats in networks.values()
        if len({seat.address for seat in seats.values()}) == len(facts)
    ]
    return max(whole, key=_slowest, default={})


def _slowest(seats: Seats) -> float:
    return min(seat.bits_per_second for seat in seats.values())


def _list_addresses(facts: Facts) -> Iterator[tuple[Device, str]]:
    """Those by which others could come in, IPv4 first."""
    found = [
        (device, text.partition("/")[0]) for device in facts.devices for text in device.addresses
    ]
    usable = [
        (device, address)
        for device, address in found
        if not ip_address(address).is_loopback and not ip_address(address).is_link_local
    ]
    yield from sorted(usable, key=lambda item: ":" in item[1])


def _seat(node: str, device: Device, address: str) -> Seat:
    return Seat(
        node=node,
        address=address,
        device=device.name,
        mtu=device.mtu,
        bits_per_second=device.bits_per_second,
    )
