"""Which of a site's raw options for sbatch salloc takes too."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

KNOWN = frozenset(
    {"account", "acctg-freq", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters",
     "comment", "constraint", "container", "contiguous", "core-spec", "cores-per-socket",
     "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency",
     "distribution", "exclude", "exclusive", "extra-node-info", "get-user-env", "gid", "gpu-bind",
     "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres",
     "gres-flags", "hint", "hold", "job-name", "licenses", "mail-type", "mail-user", "mcs-label",
     "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice", "no-kill",
     "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu",
     "ntasks-per-node", "ntasks-per-socket", "overcommit", "oversubscribe", "partition", "power",
     "prefer", "priority", "profile", "qos", "quiet", "reboot", "reservation", "signal",
     "sockets-per-node", "spread-job", "switches", "thread-spec", "threads-per-core", "time",
     "time-min", "tmp", "uid", "use-min-nodes", "verbose", "wait-all-nodes", "wckey"}
)  # fmt: skip
"""Long names that mean the same to sbatch. Source: salloc(1) and sbatch(1) of Slurm 22.05."""
KNOWN_LETTERS = frozenset("ABCDFGHJLMNOQScdkmnpqstvwx")


def keep_known(lines: Sequence[str]) -> list[str]:
    """The words for salloc; options that only a batch script has (`--requeue`) are left out."""
    options = [option for line in lines for option in _split(line)]
    return [word for option in options if _is_known(option) for word in option]


def _split(line: str) -> Iterator[list[str]]:
    """Each option of a line with the words that are its value."""
    option: list[str] = []
    for word in shlex.split(line, comments=True):
        if word.startswith("-") and option:
            yield option
            option = []
        option.append(word)
    if option:
        yield option


def _is_known(option: Sequence[str]) -> bool:
    name = option[0]
    if name.startswith("--"):
        return name[2:].partition("=")[0] in KNOWN
    return name[1:2] in KNOWN_LETTERS
