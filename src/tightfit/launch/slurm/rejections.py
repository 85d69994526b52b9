"""What sbatch says when it refuses a job, and what to do about it."""

from __future__ import annotations

import re

from tightfit.core.errors import EnvironmentFaultError, NotFoundError, UsageError, UserError

_SITE = "in ~/.config/tightfit/site.yaml"
_NOISE = re.compile(
    r"^(?:`sh`|`sbatch`) failed: |^sbatch: |^(?:error|fatal): |^Batch job submission failed: "
    r"|^allocation failure: "
)
_KNOWN: tuple[tuple[str, type[UserError], str], ...] = (
    ("policy", UsageError, "squeue --me    (what you hold already), or another --qos NAME"),
    (
        "account",
        UsageError,
        f"--account NAME, or `slurm: account:` {_SITE}    (sacctmgr show user $USER -s: yours)",
    ),
    ("qos", UsageError, f"--qos NAME, or `slurm: qos:` {_SITE}    (sacctmgr show qos)"),
    ("partition", NotFoundError, "sinfo -s    (partitions that there are), then --on slurm:NAME"),
    ("time limit", UsageError, "--time-limit HH:MM:SS within the partition's    (sinfo -s)"),
    ("feature", UsageError, "--constraint with a feature that nodes have    (sinfo -o '%N %f')"),
    ("reservation", UsageError, "--reservation NAME    (scontrol show reservation)"),
    ("gres", UsageError, "sinfo -o '%N %G'    (GPUs as this cluster calls them)"),
    ("memory", UsageError, "sinfo -o '%N %m'    (memory per node), then --nodes with more"),
    ("node configuration", UsageError, "sinfo -o '%N %P %G %c %m'    (what its nodes have)"),
    ("node count", UsageError, "--nodes with fewer, or another partition    (sinfo -s)"),
    ("controller", EnvironmentFaultError, "scontrol ping    (is Slurm up?), then the same again"),
    ("socket timed out", EnvironmentFaultError, "the same again in a minute; Slurm is busy"),
    ("limit", UsageError, "squeue --me    (what you hold already), then the same again"),
    ("script", UsageError, "the raw options in site.yaml (`slurm: extra:`) are the likely cause"),
)
"""A part of Slurm's sentence, the kind of error, and the remedy; the first that matches."""


def explain_rejection(said: str, fault: UserError | None) -> UserError:
    """One message with a remedy for what Slurm said; `fault` where no word of it is known."""
    reason = said.strip()
    while (shorter := _NOISE.sub("", reason)) != reason:
        reason = shorter
    if "not on this machine" in reason or "gave no answer" in reason:
        return EnvironmentFaultError(reason, remedy="run this on a login node of the cluster")
    text = reason.rstrip(".")
    for part, kind, remedy in _KNOWN:
        if part in text.casefold():
            return kind(f"Slurm refuses the job: {text}.", remedy=remedy)
    remedy = (
        "sbatch --test-only job.sbatch    (in the run's folder)" if fault is None else fault.remedy
    )
    return EnvironmentFaultError(f"Slurm refuses the job: {text}.", remedy=remedy)
