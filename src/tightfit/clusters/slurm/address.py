"""Prints how other nodes reach this one: its address and network device, on the way to a peer.

    python -m tightfit.clusters.slurm.address PEER [DEVICE]

A node's own name often stands for 127.0.1.1 or for the wrong network, and `ip` is not on every
node. The route to a peer is the one that the job's traffic will take.
"""

from __future__ import annotations

import shutil
import socket
import sys
from contextlib import suppress

import psutil

from tightfit.core.errors import SetupError, UserError
from tightfit.hardware.commands import run_command

_ANY_PORT = 9
"""Discard: a UDP socket is connected there, and nothing is ever sent."""
_TIMEOUT_SECONDS = 20.0


def main(peer: str, device: str | None = None) -> int:
    try:
        address, found = probe_device(device) if device else probe_route(peer)
    except UserError as error:
        sys.stderr.write(f"error: {error.problem}\n  try: {error.remedy}\n")
        return error.exit_code
    sys.stdout.write(f"{address} {found}\n")
    return 0


def probe_route(peer: str) -> tuple[str, str]:
    """Address and device by which this machine reaches `peer`."""
    for target in (_resolve(peer), _resolve(_slurm_address(peer))):
        if target is None or target.startswith("127."):
            continue
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, _ANY_PORT))
            address = probe.getsockname()[0]
            return address, _device_of(address)
    raise SetupError(
        f"{socket.gethostname()} finds no way to {peer}: its name has no address that leads there.",
        remedy="name the network device in site.yaml: `interface: eth0`",
    )


def probe_device(device: str) -> tuple[str, str]:
    """The IPv4 address of a device by its name."""
    held = psutil.net_if_addrs()
    for entry in held.get(device, ()):
        if entry.family == socket.AF_INET:
            return entry.address, device
    names = ", ".join(sorted(name for name in held if name != "lo"))
    raise SetupError(
        f"{socket.gethostname()} has no network device {device} with an IPv4 address.",
        remedy=f"`interface:` in site.yaml with one of: {names}",
    )


def _resolve(name: str | None) -> str | None:
    if name is None:
        return None
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_DGRAM)
        return str(found[0][4][0])
    return None


def _slurm_address(node: str) -> str | None:
    """What Slurm itself calls the node by, where its name is of no use."""
    if shutil.which("scontrol") is None:
        return None
    with suppress(UserError):
        said = run_command(("scontrol", "-o", "show", "node", node), _TIMEOUT_SECONDS)
        words = [word for word in said.split() if word.startswith("NodeAddr=")]
        return words[0].removeprefix("NodeAddr=") if words else None
    return None


def _device_of(address: str) -> str:
    for device, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return device
    raise SetupError(
        f"No network device of {socket.gethostname()} has the address {address}.",
        remedy="name the device in site.yaml: `interface: eth0`",
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
