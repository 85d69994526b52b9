"""The batch script of a job: what Slurm is asked for, the site's set-up, and the job's own lines.

sbatch expands no variables in `#SBATCH` lines, so every value there is spelt out.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tightfit.core.errors import UsageError
from tightfit.core.units import MIB
from tightfit.launch.site import Site

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """One job as Slurm sees it."""

    name: str
    partition: str | None
    log: str
    """May hold %j (job), %A and %a (array and its task)."""
    body: tuple[str, ...]
    """Shell lines that do the work; the site's set-up has run before them."""
    num_nodes: int = 1
    gpus_per_node: int = 0
    gpu_kind: str | None = None
    """As GRES calls it. None: any GPU of the partition."""
    constraint: str | None = None
    """Features that a node must have, beside those of the site."""
    cores_per_node: int | None = None
    memory_bytes: int | None = None
    """Host memory per node."""
    seconds: float | None = None
    """Time limit. None: the partition's own."""
    array_size: int | None = None
    can_requeue: bool = False
    warn_seconds: int | None = None
    """SIGUSR1 comes to the script this long before the time limit. None: no warning."""


def write_script(job: BatchJob, site: Site) -> str:
    """The whole script. Pure: the same job and site give the same text."""
    # `module` and `conda` are functions that only a login shell knows.
    shell = "#!/bin/bash -l" if site.setup else "#!/bin/bash"
    options = [f"#SBATCH {option}" for option in _options(job, site)]
    lines = [shell, *options, "", *_prelude(job, site), *job.body]
    return "\n".join(lines).rstrip() + "\n"


def srun_words(site: Site, *, mounts: Iterable[str] = ()) -> list[str]:
    """`srun`, with the site's container where Pyxis starts it; `mounts` are folders it must see."""
    if site.container_image is None:
        return ["srun"]
    words = ["srun", f"--container-image={site.container_image}"]
    folders = list(dict.fromkeys(mounts))
    if folders:
        words.append("--container-mounts=" + ",".join(f"{path}:{path}" for path in folders))
    return words


def python_words(site: Site) -> list[str]:
    """The interpreter on a node, behind the container's own command where there is one."""
    is_prefix = site.container is not None and site.container_image is None
    prefix = shlex.split(site.container or "") if is_prefix else []
    return [*prefix, site.interpreter]


def render_time(seconds: float) -> str:
    """`D-HH:MM:SS`, whole minutes as Slurm counts them, rounded up."""
    minutes = max(1, math.ceil(seconds / 60))
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def clean_name(text: str) -> str:
    """A job's name as `squeue` shows it."""
    return _NOT_IN_A_NAME.sub("-", text).strip("-.")[:60] or "tightfit"


def _options(job: BatchJob, site: Site) -> Iterator[str]:
    slurm = site.slurm
    named = {
        "job-name": clean_name(job.name),
        "partition": job.partition or slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        "constraint": _both(slurm.constraint, job.constraint),
        "array": None if job.array_size is None else f"0-{job.array_size - 1}",
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": job.cores_per_node,
        "gres": _gres(job),
        "mem": None if job.memory_bytes is None else f"{math.ceil(job.memory_bytes / MIB)}M",
        "time": None if job.seconds is None else render_time(job.seconds),
        "signal": None if job.warn_seconds is None else f"B:USR1@{job.warn_seconds}",
    }
    for name, value in named.items():
        if value is not None:
            yield f"--{name}={_quote(str(value))}"
    yield "--requeue" if job.can_requeue else "--no-requeue"
    yield "--open-mode=append"
    yield f"--output={_quote(job.log)}"
    yield from slurm.extra


def _both(first: str | None, second: str | None) -> str | None:
    """Slurm's `&`: a node with the features of both."""
    return "&".join(part for part in (first, second) if part) or None


def _gres(job: BatchJob) -> str | None:
    if job.gpus_per_node == 0:
        return None
    return ":".join(part for part in ("gpu", job.gpu_kind, str(job.gpus_per_node)) if part)


def _quote(text: str) -> str:
    if "\n" in text or "\r" in text:
        raise UsageError(
            f"A batch script cannot hold the line break in {text!r}.",
            remedy="choose a folder whose name has none: --output FOLDER",
        )
    # `&` in a constraint needs no quotes here: no shell reads these lines.
    return text if re.fullmatch(r"[\w@%+=:,./&()\[\]*|-]+", text) else shlex.quote(text)


def _prelude(job: BatchJob, site: Site) -> Iterator[str]:
    if site.setup:
        yield "# The site's set-up, from site.yaml."
        yield from site.setup
    for name, value in site.environment.items():
        yield f"export {name}={shlex.quote(value)}"
    if job.cores_per_node is not None:
        yield "# Since Slurm 22.05 srun takes this from nowhere else."
        yield f"export SRUN_CPUS_PER_TASK={job.cores_per_node}"
    yield "# Where sbatch was told --export=NONE, srun would keep all of this from the job."
    yield "export SLURM_EXPORT_ENV=ALL"
    yield ""


def join_words(words: Sequence[str]) -> str:
    """Words as a shell reads them back; variables in double quotes are left to expand."""
    return " ".join(word if word.startswith('"$') else shlex.quote(word) for word in words)
