"""Variables by which sbatch would overrule what stands in a batch script."""

from __future__ import annotations

import re
from collections.abc import Mapping

_OPTION = re.compile(r"^#SBATCH --([a-z-]+)", re.MULTILINE)
_OVERRULES = {
    "account": ("ACCOUNT",),
    "array": ("ARRAY_INX",),
    "constraint": ("CONSTRAINT",),
    "gres": ("GRES", "GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK"),
    "job-name": ("JOB_NAME",),
    "mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "no-requeue": ("REQUEUE",),
    "open-mode": ("OPEN_MODE",),
    "output": ("OUTPUT",),
    "partition": ("PARTITION",),
    "qos": ("QOS",),
    "requeue": ("NO_REQUEUE",),
    "reservation": ("RESERVATION",),
    "signal": ("SIGNAL",),
    "time": ("TIMELIMIT",),
}
"""Options and the variables that win over them. Source: sbatch(1), input environment variables."""


def list_overruling(script: str, environ: Mapping[str, str]) -> list[str]:
    """Those that are set and contradict the script; what it leaves open they may say."""
    stated = _OPTION.findall(script)
    names = [f"SBATCH_{name}" for option in stated for name in _OVERRULES.get(option, ())]
    return [name for name in dict.fromkeys(names) if name in environ]
