"""The batch job that trains: from a plan and its run folder to the script's lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tightfit.launch.exits import EXIT_REQUEUE
from tightfit.launch.site import Site
from tightfit.launch.slurm.gres import GpuWords
from tightfit.launch.slurm.resources import Resources
from tightfit.launch.slurm.script import BatchJob, join_words, python_words, srun_words
from tightfit.ledger.run_folder import RunFolder
from tightfit.planning.plan import Plan

SCRIPT_FILE = "job.sbatch"
LOG_FILE = "slurm-%j.out"
MAX_FAULT_REQUEUES = 5
"""Starts after a death nobody asked for; one that comes again and again is no accident."""
_HEADER = "# Trains {name}, written by `tightfit submit`; by hand: sbatch {script}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What the script is written from."""

    plan: Plan
    run: Path
    partition: str
    gpu: GpuWords
    resources: Resources
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
    train = [*python_words(site), "-m", "tightfit", "train", '"$run"', "--as-planned"]
    yield f"{srun} --ntasks=1 \\"
    for option in options:
        yield f"  {shlex.quote(option)} \\"
    yield f"  {join_words(train)} &"


def _start_on_several(job: TrainingJob, site: Site) -> Iterator[str]:
    """Each node finds its own address on the way to the head, and the head to its neighbour."""
    count = job.plan.strategy.num_nodes
    python = join_words(python_words(site))
    device = f" {shlex.quote(site.interface)}" if site.interface else ""
    find = f"{python} -m tightfit.launch.slurm.address"
    srun = join_words(_srun(job, site))
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
    return srun_words(site, mounts=[str(job.run), *model])


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
    yield f"  {lost}) most={MAX_FAULT_REQUEUES} ;;"
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
