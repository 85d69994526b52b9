"""Batch scripts: what Slurm is asked for, the site's set-up, and the lines that train.

sbatch expands no variables in `#SBATCH` lines, so every value there is spelt out.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tightfit.clusters.site import Site
from tightfit.clusters.slurm.resources import GpuRequest, JobResources
from tightfit.core.errors import EXIT_REQUEUE, UsageError
from tightfit.core.units import MIB
from tightfit.planning.plan import Plan
from tightfit.runs.run_folder import RunFolder

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


def srun_argv(site: Site, *, mounts: Iterable[str] = ()) -> list[str]:
    """`srun`, with the site's container where Pyxis starts it; `mounts` are folders it must see."""
    if site.container_image is None:
        return ["srun"]
    words = ["srun", f"--container-image={site.container_image}"]
    folders = list(dict.fromkeys(mounts))
    if folders:
        words.append("--container-mounts=" + ",".join(f"{path}:{path}" for path in folders))
    return words


def python_argv(site: Site) -> list[str]:
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
        "constraint": _join_constraints(slurm.constraint, job.constraint),
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


def _join_constraints(first: str | None, second: str | None) -> str | None:
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


def join_argv(words: Sequence[str]) -> str:
    """Words as a shell reads them back; variables in double quotes are left to expand."""
    return " ".join(word if word.startswith('"$') else shlex.quote(word) for word in words)


# The batch job that trains: from a plan and its run folder to the script's lines.

SCRIPT_FILE = "job.sbatch"
LOG_FILE = "slurm-%j.out"
MAX_FAILURE_REQUEUES = 5
"""Starts after a death nobody asked for; one that comes again and again is no accident."""
_HEADER = "# Trains {name}, written by `tightfit submit`; by hand: sbatch {script}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What the script is written from."""

    plan: Plan
    run: Path
    partition: str
    gpu: GpuRequest
    resources: JobResources
    can_requeue: bool


def make_batch_job(job: TrainingJob, site: Site) -> BatchJob:
    """The job as Slurm sees it."""
    plan, strategy = job.plan, job.plan.strategy
    is_cpu = plan.hardware.node.gpu.is_cpu
    return BatchJob(
        name=f"tightfit-{job.run.name}",
        partition=job.partition,
        log=f"{str(job.run).replace('%', '%%')}/{LOG_FILE}",
        body=tuple(_body(job, site)),
        num_nodes=strategy.num_nodes,
        gpus_per_node=0 if is_cpu else strategy.gpus_per_node,
        gpu_kind=job.gpu.kind,
        constraint=job.gpu.constraint,
        cores_per_node=job.resources.cores,
        memory_bytes=job.resources.memory_bytes,
        seconds=job.resources.seconds,
        can_requeue=job.can_requeue,
        warn_seconds=job.resources.warn_seconds,
    )


def _body(job: TrainingJob, site: Site) -> Iterator[str]:
    run = shlex.quote(str(job.run))
    yield _HEADER.format(name=job.plan.model.name, script=shlex.quote(str(job.run / SCRIPT_FILE)))
    yield f"run={run}"
    yield ""
    if job.plan.strategy.num_nodes > 1:
        yield from _start_on_several(job, site)
    else:
        yield from _start_on_one(job, site)
    yield ""
    yield from _wait(job)
    yield ""
    yield from _requeue(job) if job.can_requeue else ("exit $code",)


def _start_on_one(job: TrainingJob, site: Site) -> Iterator[str]:
    srun, *options = _srun(job, site)
    train = [*python_argv(site), "-m", "tightfit", "train", '"$run"', "--as-planned"]
    yield f"{srun} --ntasks=1 \\"
    for option in options:
        yield f"  {shlex.quote(option)} \\"
    yield f"  {join_argv(train)} &"


def _start_on_several(job: TrainingJob, site: Site) -> Iterator[str]:
    """Each node finds its own address on the way to the head, and the head to its neighbour."""
    count = job.plan.strategy.num_nodes
    python = join_argv(python_argv(site))
    device = f" {shlex.quote(site.interface)}" if site.interface else ""
    find = f"{python} -m tightfit.clusters.slurm.address"
    srun = join_argv(_srun(job, site))
    yield "# Where the nodes meet: the first one's address on the network between them."
    yield 'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))'
    yield "export run second=${nodes[1]} port=$((20000 + SLURM_JOB_ID % 10000))"
    yield f'found=($({srun} --nodes=1 --ntasks=1 --nodelist="${{nodes[0]}}" \\'
    yield f'  {find} "$second"{device})) || exit'
    yield "export head=${found[0]}"
    yield ""
    each = "\n".join(f"  {line}" for line in _on_each(python, find, device, count=count))
    quoted = each.replace("'", "'\"'\"'")
    yield f"{srun} --nodes={count} --ntasks={count} --kill-on-bad-exit=1 --wait=0 bash -c '"
    yield f"{quoted}"
    yield "' &"


def _on_each(python: str, find: str, device: str, *, count: int) -> Iterator[str]:
    """What every node runs, with its own number in SLURM_NODEID."""
    yield "peer=$head"
    yield 'if [ "$SLURM_NODEID" = 0 ]; then peer=$second; fi'
    yield f'me=($({find} "$peer"{device})) || exit'
    yield "# All nodes tell the same story: the first tells it here, the others in files."
    yield 'if [ "$SLURM_NODEID" != 0 ]; then exec >>"$run/node-$SLURM_NODEID.out" 2>&1; fi'
    yield f'{python} -m tightfit train "$run" --as-planned --nodes {count} \\'
    yield '  --rendezvous "$head:$port" --node-rank "$SLURM_NODEID" \\'
    yield '  --local-addr "${me[0]}" --interface "${me[1]}"'
    yield "code=$?"
    yield "# Saved and stopped: not a bad exit, which would end the others while they save."
    yield f"if [ $code = {EXIT_REQUEUE} ]; then code=0; fi"
    yield "exit $code"


def _srun(job: TrainingJob, site: Site) -> list[str]:
    training = job.plan.training
    model = [] if training is None else [training.model_path]
    return srun_argv(site, mounts=[str(job.run), *model])


def _wait(job: TrainingJob) -> Iterator[str]:
    yield "step=$!"
    yield "# Slurm warns this script before the time limit; what trains hears it, saves and stops."
    yield "trap 'echo \"the time limit is near: saving\"; kill -USR1 $step' USR1"
    yield "# A cancelled or preempted job is told by Slurm itself; this script sees it through."
    yield "# Ignored, not caught: bash loses a USR1 that comes while it handles a TERM."
    yield "trap '' TERM"
    yield "while kill -0 $step 2>/dev/null; do wait $step; done"
    yield "wait $step"
    yield "code=$?"
    yield "trap : TERM  # what follows may be ended"
    if job.plan.strategy.num_nodes > 1:
        state = RunFolder(path=Path("$run")).state_path
        yield f'if [ $code = 0 ] && grep -q \'"status": *"stopped"\' "{state}"; then'
        yield f"  code={EXIT_REQUEUE}"
        yield "fi"


def _requeue(job: TrainingJob) -> Iterator[str]:
    """75 is asked for; 1 and signals are a lost node; other codes would be the same again."""
    is_spread = job.plan.strategy.num_nodes > 1
    lost = "1|129|13?|14?" if is_spread else "129|13?|14?"
    yield "# Saved and stopped goes back to the queue and resumes there; so does a death that may"
    yield "# be the node's fault. A job that was cancelled is no longer RUNNING."
    yield "case $code in"
    yield f"  {EXIT_REQUEUE}) most={job.resources.max_requeues} ;;"
    yield f"  {lost}) most={MAX_FAILURE_REQUEUES} ;;"
    yield "  *) exit $code ;;"
    yield "esac"
    yield "restarts=${SLURM_RESTART_COUNT:-0}"
    yield 'if [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" != RUNNING ]; then exit $code; fi'
    yield "if [ $restarts -ge $most ]; then"
    yield '  echo "ended with $code after $restarts restarts: given up"'
    yield "  exit 1"
    yield "fi"
    yield 'echo "ended with $code: back to the queue (restart $((restarts + 1)) of $most)"'
    yield 'scontrol requeue "$SLURM_JOB_ID" && sleep 600  # until Slurm ends this script'
    yield "exit $code"
