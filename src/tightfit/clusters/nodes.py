"""Nodes: host lists as Slurm writes them, the command that reaches a node, where nodes meet.

`python -m tightfit.clusters.nodes PEER [DEVICE]` prints this node's address and network device.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import product
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import psutil

from tightfit.core.errors import SetupError, UsageError, UserError
from tightfit.hardware.command import run_command

if TYPE_CHECKING:
    from tightfit.clusters.site import Site


MAX_NODES = 10_000
SSH_PREFIX = "ssh -o BatchMode=yes {node}"
"""Never asks for a password: nobody could type one."""
SRUN_PREFIX = "srun --overlap -N1 -n1 -w {node}"
JOB_VARIABLE = "SLURM_JOB_ID"
NODES_VARIABLE = "SLURM_JOB_NODELIST"
NODE_PLACEHOLDER = "{node}"

_REMOTE_SHELLS = ("ssh", "gsissh", "autossh", "rsh", "oarsh")
"""They join their words with spaces and hand them to a shell on the other side."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*")
_ENTRY = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
"""Up to a comma outside brackets."""
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodes(text: str) -> tuple[str, ...]:
    """The names in `gpu[01-04,7],big01` (as Slurm writes them) or `a,b`, each once, in order."""
    if _ENTRY.sub("", text.strip()).strip(","):
        raise _unreadable(text, "its brackets do not match")
    names: dict[str, None] = {}
    for entry in filter(str.strip, _ENTRY.findall(text)):
        choices = [
            (plain,) if plain else tuple(_expand_ranges(ranges, text))
            for ranges, plain in _PIECE.findall(entry.strip())
        ]
        for parts in product(*choices):
            name = "".join(parts)
            if not _NAME.fullmatch(name):
                raise _unreadable(text, f"`{name[:60]}` is not a node's name")
            names[name] = None
            if len(names) > MAX_NODES:
                raise _unreadable(text, f"it names more than {MAX_NODES:,} nodes")
    if not names:
        raise _unreadable(text, "it names no node")
    return tuple(names)


def _expand_ranges(ranges: str, text: str) -> Iterator[str]:
    """`01-04,7`: zeros in front are part of the name."""
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise _unreadable(text, f"`[{ranges[:60]}]` is not a list of numbers")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first) or int(last) - int(first) >= MAX_NODES:
            raise _unreadable(text, f"`{part[:60]}` is not a range from low to high")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def _unreadable(text: str, why: str) -> UsageError:
    return UsageError(
        f"The list of nodes `{text[:100]}` cannot be read: {why}.",
        remedy="--nodes gpu[01-04],big01    or --nodes a,b",
    )


def node_prefix(site: Site, environ: Mapping[str, str]) -> str:
    """The words before a command that is to run on `{node}`."""
    if site.run_on_node is not None:
        return site.run_on_node
    return SRUN_PREFIX if environ.get(JOB_VARIABLE) else SSH_PREFIX


def node_command(
    node: str, argv: Sequence[str], *, prefix: str, env: Mapping[str, str] | None = None
) -> list[str]:
    """The words that run `argv` on the node, with `env` set there and not only here."""
    words = _split_prefix(prefix)
    there = [*argv]
    if env:
        there = ["env", *(f"{name}={value}" for name, value in env.items()), *argv]
    if any(PurePath(word).name in _REMOTE_SHELLS for word in words):
        there = [shlex.join(there)]
    return [*(word.replace(NODE_PLACEHOLDER, node) for word in words), *there]


def _split_prefix(prefix: str) -> list[str]:
    try:
        words = shlex.split(prefix)
        problem = f"does not contain {NODE_PLACEHOLDER}"
    except ValueError as error:
        words, problem = [], f"cannot be read: {error}"
    if not any(NODE_PLACEHOLDER in word for word in words):
        raise UsageError(
            f"The command before a node's own, `{prefix[:100]}`, {problem}.",
            remedy="--run-with 'ssh {node}'",
        )
    return words


# Where the nodes of one job meet.

DEFAULT_PORT = 29_500
"""torchrun's own."""
MAX_RESTARTS = 20
"""Times a job of several nodes starts again by itself after a node was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The meeting point, and how this node reaches it."""

    endpoint: str
    """`host:port`; torchrun opens the store on that host."""
    node_rank: int | None = None
    """Names this node's lock where several share a host name; ranks are dealt by torchrun."""
    local_address: str | None = None
    """Under which the other nodes reach this one. None: its host name."""
    interface: str | None = None
    """Network device for NCCL and gloo. None: they choose."""
    max_restarts: int = MAX_RESTARTS
    is_here: bool | None = None
    """Whether the endpoint is this machine. None: torchrun guesses, by the host's name alone."""


def parse_endpoint(text: str) -> str:
    """`host` or `host:port` as `host:port`."""
    host, colon, port = text.strip().rpartition(":")
    if not colon:
        host, port = text.strip(), str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise UsageError(
            f"`--rendezvous {text}` is not HOST:PORT.", remedy=f"--rendezvous node1:{DEFAULT_PORT}"
        )
    return f"{host}:{port}"


def probe_is_here(endpoint: str) -> bool | None:
    """Whether an address of the endpoint is this machine's own; None where it has no address.

    torchrun looks up the host's name alone, and so does not know the second network of a
    machine, nor a machine whose name resolves to 127.0.1.1.
    """
    host = endpoint.rpartition(":")[0]
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        # A pod starts before the cluster's name service knows it, and knows itself already.
        return True if host.partition(".")[0] == socket.gethostname() else None
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: Any) -> bool:
    """A socket can be bound to no address but one's own."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
    except OSError:
        return False
    return True


# How other nodes reach this one. A node's own name often resolves to 127.0.1.1 or to the wrong
# network, and `ip` is not on every node; the route to a peer is the one that traffic will take.

_DISCARD_PORT = 9
_TIMEOUT_SECONDS = 20.0
_VIRTUAL_DEVICES = ("lo", "docker", "virbr", "veth", "cni")


def main(peer: str, device: str | None = None) -> int:
    try:
        address, found = probe_address(peer, device)
    except UserError as error:
        sys.stderr.write(f"{error.as_lines()}\n")
        return error.exit_code
    sys.stdout.write(f"{address} {found}\n")
    return 0


def probe_address(peer: str, device: str | None, *, may_guess: bool = False) -> tuple[str, str]:
    """This node's address for the others, and its device: the given one, or the route to a peer's.

    `may_guess`: where the peer's name leads nowhere, the first device that is up.
    """
    host, owners = socket.gethostname(), list_addresses()
    if device is not None:
        for address, owner in owners.items():
            if owner == device:
                return address, device
        names = ", ".join(sorted({name for name in owners.values() if name != "lo"}))
        raise SetupError(
            f"{host} has no network device {device} with an address.",
            remedy=f"--interface, or `interface:` in site.yaml, with one of: {names}",
        )
    for name in (peer, _slurm_address(peer)):
        source = name and find_route_source(name)
        if source in owners and not ip_address(source).is_loopback:
            return source, owners[source]
    stats = psutil.net_if_stats()
    for address, owner in owners.items() if may_guess else ():
        if stats[owner].isup and not owner.startswith(_VIRTUAL_DEVICES):
            return address, owner
    raise SetupError(
        f"{host} finds no route to {peer}: its name has no address that works.",
        remedy="name the network device: --interface eth0, or `interface: eth0` in site.yaml",
    )


def list_addresses() -> dict[str, str]:
    """This machine's addresses and their devices, IPv4 first."""
    found = [
        (entry.family, entry.address.partition("%")[0], device)
        for device, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return {address: device for _, address, device in found}


def find_route_source(host: str) -> str | None:
    """The address from which this machine would send to a host; IPv4 where it has one."""
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
        family, kind, _, _, target = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket only looks up its route: nothing is sent
            return str(probe.getsockname()[0]).partition("%")[0]
    return None


def _slurm_address(node: str) -> str | None:
    """What Slurm itself calls the node by, where its name is of no use."""
    if shutil.which("scontrol") is None:
        return None
    with suppress(UserError):
        output = run_command(("scontrol", "-o", "show", "node", node), _TIMEOUT_SECONDS)
        words = [word for word in output.split() if word.startswith("NodeAddr=")]
        return words[0].removeprefix("NodeAddr=") if words else None
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
