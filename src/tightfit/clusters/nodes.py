"""Nodes by name: host lists as Slurm writes them, and a command started on one of them."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING

from tightfit.core.errors import SetupError, UsageError

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
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodes(text: str) -> tuple[str, ...]:
    """The names in `gpu[01-04,7],big01` (as Slurm writes them) or `a,b`, each once, in order."""
    names: dict[str, None] = {}
    for entry in _split_entries(text):
        for name in _expand_entry(entry, text):
            if not _NAME.fullmatch(name):
                raise _unreadable(text, f"`{name[:60]}` is not a node's name")
            names[name] = None
            if len(names) > MAX_NODES:
                raise _unreadable(text, f"it stands for more than {MAX_NODES:,} nodes")
    if not names:
        raise _unreadable(text, "it names no node")
    return tuple(names)


def _split_entries(text: str) -> list[str]:
    """At the commas outside brackets."""
    entries, depth = [""], 0
    for letter in text.strip():
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise _unreadable(text, "its brackets do not match")
        if letter == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += letter
    if depth:
        raise _unreadable(text, "its brackets do not match")
    return [entry.strip() for entry in entries if entry.strip()]


def _expand_entry(entry: str, text: str) -> Iterator[str]:
    choices = [
        (plain,) if plain else tuple(_expand_ranges(ranges, text))
        for ranges, plain in (found.groups() for found in _PIECE.finditer(entry))
    ]
    for parts in product(*choices):
        yield "".join(parts)


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
    """What stands before a command that is to run on `{node}`."""
    if site.run_on_node is not None:
        return site.run_on_node
    return SRUN_PREFIX if environ.get(JOB_VARIABLE) else SSH_PREFIX


def node_command(
    node: str, argv: Sequence[str], *, prefix: str, env: Mapping[str, str] | None = None
) -> list[str]:
    """The words that run `argv` on the node, with `env` set there and not only here."""
    words = _split_prefix(prefix)
    there = [*_settings(env or {}), *argv]
    if any(PurePath(word).name in _REMOTE_SHELLS for word in words):
        there = [shlex.join(there)]
    return [*(word.replace(NODE_PLACEHOLDER, node) for word in words), *there]


def _settings(env: Mapping[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in env.items())] if env else []


def _split_prefix(prefix: str) -> list[str]:
    try:
        words = shlex.split(prefix)
    except ValueError as error:
        raise UsageError(
            f"The command before a node's own, `{prefix[:100]}`, cannot be read: {error}.",
            remedy="--run-with 'ssh {node}'",
        ) from error
    if not any(NODE_PLACEHOLDER in word for word in words):
        raise UsageError(
            f"The command before a node's own, `{prefix[:100]}`, does not say {NODE_PLACEHOLDER}.",
            remedy="--run-with 'ssh {node}'",
        )
    return words


def start_on_node(
    node: str,
    argv: Sequence[str],
    *,
    prefix: str,
    env: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:
    """Start `argv` on a node with pipes to it; it is to end when its stdin closes.

    In a session of its own, so that Ctrl-C reaches this process alone. Nothing outlives a
    killed parent: its end of the pipe closes, here and, through ssh or srun, over there.
    """
    words = node_command(node, argv, prefix=prefix, env=env)
    try:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise SetupError(
            f"`{words[0]}`, which is to reach {node}, does not start: {error.strerror or error}.",
            remedy="say how a command runs on a node: --run-with 'ssh {node}'",
        ) from error
