"""A command with `--hosts` runs in a process of its own, which may be lost with a host."""

from __future__ import annotations

import sys

OPTION = "--hosts"


def run_in_guard(words: list[str]) -> int | None:
    """The exit code of a command line with `--hosts`; None where it is to run in this process."""
    hosts = _named_hosts(words)
    if hosts is None:
        return None
    from tightfit.engines.llama.rpc_guard import join_guard, run_guarded
    from tightfit.engines.llama.rpc_hosts import read_hosts

    if join_guard():
        return None
    return run_guarded([sys.executable, "-m", "tightfit", *words], read_hosts(hosts))


def _named_hosts(words: list[str]) -> str | None:
    """As the option parser will read it: the last one counts."""
    found = None
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, sign, value = word.partition("=")
        if name == OPTION:
            found = value if sign else following
    return found
