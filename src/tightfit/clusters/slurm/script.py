"""Batch scripts: what to request from Slurm for a plan, the site's set-up, the lines that train.

sbatch expands no variables in `#SBATCH` lines, so every value there is spelt out.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tightfit.clusters.nodes import expand_nodes
from tightfit.clusters.protocol import JobSpec
from tightfit.clusters.requirements import (
    count_restarts,
    count_slices,
    estimate_memory_request,
    estimate_run_seconds,
    round_limit,
)
from tightfit.clusters.site import Site, SlurmSite
from tightfit.core.errors import EXIT_REQUEUE, UsageError
from tightfit.core.import_path import LAUNCHER, module_words
from tightfit.core.units import MIB
from tightfit.hardware.inventory import ClusterNode, Inventory
from tightfit.planning.plan import Plan
from tightfit.runs.run_folder import RunFolder

_SIMPLE = re.compile(r"[\w.:=+-]+(?:\s*[&|]\s*[\w.:=+-]+)*")


def filter_nodes(inventory: Inventory, constraint: str | None) -> Inventory:
    """The inventory without nodes that lack the features.

    Leaves out brackets, counts and negation: those are for Slurm alone to judge.
    """
    if constraint is None or not _SIMPLE.fullmatch(constraint.strip()):
        return inventory
    nodes = tuple(node for node in inventory.nodes if _has_features(node.features, constraint))
    if not nodes:
        features = sorted({word for node in inventory.nodes for word in node.features})
        known = f"choose among: {', '.join(features[:20])}" if features else "its nodes have none"
        raise UsageError(
            f"No node of {inventory.source} has the features `{constraint.strip()}`.",
            remedy=f"--constraint with a feature that nodes have, here or in site.yaml; {known}",
        )
    return replace(inventory, nodes=nodes)


def _has_features(features: Collection[str], constraint: str) -> bool:
    """Slurm binds `&` and `|` alike, from left to right."""
    first, *rest = re.split(r"([&|])", constraint)
    found = first.strip() in features
    for sign, word in zip(rest[::2], rest[1::2], strict=True):
        is_held = word.strip() in features
        found = (found or is_held) if sign == "|" else (found and is_held)
    return found


_LETTERS = {
    "C": "constraint", "G": "gpus", "N": "nodes", "c": "cpus-per-task", "p": "partition",
    "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_PLANNED = ("nodes", "partition", "time", "gres", "gpus", "gpus-per-node", "ntasks-per-node",
            "cpus-per-task")  # fmt: skip
"""What the plan decides, and a raw option would decide otherwise. Source: sbatch(1)."""


def select_nodes(inventory: Inventory, slurm: SlurmSite) -> tuple[Inventory, tuple[str, ...]]:
    """The nodes that constraint and raw options leave, and notes on what the plan cannot follow."""
    stated = _read_raw_options(slurm.extra)
    # Raw options stand last in the script, and of two alike sbatch takes the last.
    found = filter_nodes(inventory, stated.get("constraint", slurm.constraint))
    notes = [
        f"`--{name}={stated[name]}` of `slurm: extra:` in site.yaml wins over what is planned"
        for name in _PLANNED
        if name in stated
    ]
    for name, is_kept in (("exclude", False), ("nodelist", True)):
        text = stated.get(name)
        if text is None or "partition" in stated:  # nodes of another partition than the plan's
            continue
        try:
            listed = expand_nodes(text)
        except UsageError:  # mostly a file of names
            notes.append(f"`--{name}={text}` of site.yaml is Slurm's to read: the plan is for all")
            continue
        nodes = tuple(node for node in found.nodes if (node.name in listed) == is_kept)
        if not nodes:
            raise UsageError(
                f"`--{name}={text}` of `slurm: extra:` leaves no node of {inventory.source}.",
                remedy="sinfo -N    (the nodes there are), then correct site.yaml",
            )
        if is_kept:
            notes.append(
                f"`--nodelist={text}` of site.yaml: Slurm gives a job all of the nodes that it "
                f"lists or none; --nodes {len(listed)} plans for all"
            )
        found = replace(found, nodes=nodes)
    return found, tuple(notes)


def _read_raw_options(lines: Sequence[str]) -> dict[str, str]:
    """Values by long name, of `--exclude=a`, `--exclude a`, `-x a` and `-xa`."""
    found: dict[str, str] = {}
    for line in lines:
        words = shlex.split(line, comments=True)
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if word.startswith("--"):
                name, sign, value = word[2:].partition("=")
            elif word.startswith("-"):
                name, sign, value = _LETTERS.get(word[1:2], ""), word[2:], word[2:]
            else:
                continue
            found[name] = value if sign else following
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRequest:
    """A GRES type, or a feature where the type is ambiguous; both None where any GPU will do."""

    kind: str | None = None
    constraint: str | None = None


def find_gpu_request(
    inventory: Inventory, *, partition: str, gpu_name: str, gpus_per_node: int
) -> GpuRequest:
    """The words that single out `gpu_name` among the nodes of a partition."""
    nodes = [node for node in inventory.nodes if partition in node.pools and node.devices]
    names_of: dict[str | None, set[str]] = {}
    for devices in (one for node in nodes for one in node.devices):
        names_of.setdefault(devices.kind, set()).add(devices.name)
    counted = Counter(
        devices.kind
        for node in nodes
        for devices in node.devices
        if devices.name == gpu_name and devices.count >= gpus_per_node
    )
    if not counted:
        return GpuRequest()
    # Typed before untyped, then the most nodes: one job can ask for one type only.
    kind = max(counted, key=lambda word: (word is not None, counted[word], word or ""))
    if names_of[kind] == {gpu_name}:
        return GpuRequest(kind=kind)
    return GpuRequest(kind=kind, constraint=_distinguishing_feature(nodes, gpu_name))


def _distinguishing_feature(nodes: Sequence[ClusterNode], gpu_name: str) -> str | None:
    """A feature that every node with the GPU has, and no node without it."""
    wanted: list[set[str]] = []
    others: list[set[str]] = []
    for node in nodes:
        has_it = any(devices.name == gpu_name for devices in node.devices)
        (wanted if has_it else others).append(set(node.features))
    telling = set.intersection(*wanted).difference(*others)
    return min(telling, key=lambda word: (len(word), word), default=None)


CORES_PER_GPU = 4
"""Where Slurm does not report how many a node has."""
MAX_WARN_FRACTION = 0.25
"""Of the time limit: a warning before a short limit must leave time to train in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResources:
    """Cores and memory are per node. None: Slurm's or the partition's own."""

    cores: int | None = None
    memory_bytes: int | None = None
    seconds: float | None = None
    """Time limit."""
    num_slices: int = 1
    """Starts that it takes to get through, where each ends at the time limit."""
    max_requeues: int = 0
    warn_seconds: int
    """SIGUSR1 comes to the script this long before the time limit."""


def find_resources(
    plan: Plan, *, max_seconds: float | None, asked_seconds: float | None, warn: int
) -> JobResources:
    """`max_seconds` is the partition's limit, `asked_seconds` the user's own."""
    predicted = estimate_run_seconds(plan)
    seconds = asked_seconds
    if seconds is None and predicted is not None:
        seconds = round_limit(predicted)
    if seconds is None or (max_seconds is not None and seconds > max_seconds):
        seconds = max_seconds
    warned = warn if seconds is None else int(min(warn, max(seconds * MAX_WARN_FRACTION, 1)))
    slices = count_slices(predicted, limit=seconds, warn_seconds=warned)
    node, ranks = plan.hardware.node, plan.strategy.gpus_per_node
    cores = CORES_PER_GPU * ranks
    if node.num_cores is not None:  # the GPUs' share of the node's
        cores = max(1, node.num_cores * ranks // node.num_gpus)
    most = node.host_memory_bytes
    return JobResources(
        cores=cores,
        memory_bytes=None if most is None else estimate_memory_request(plan, most_bytes=most),
        seconds=seconds,
        num_slices=slices,
        max_requeues=count_restarts(slices),
        warn_seconds=warned,
    )


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
    gpu: GpuRequest = GpuRequest()
    resources: JobResources | None = None
    array_size: int | None = None
    can_requeue: bool = False


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


def render_time(seconds: float) -> str:
    """`D-HH:MM:SS`, whole minutes as Slurm counts them, rounded up."""
    minutes = round_minutes(seconds) // 60
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"


def round_minutes(seconds: float) -> int:
    """Seconds of a limit as Slurm counts it: in whole minutes, rounded up. Source: sbatch(1)."""
    return 60 * max(1, math.ceil(seconds / 60))


def clean_name(text: str) -> str:
    """A job's name as `squeue` shows it."""
    return _NOT_IN_A_NAME.sub("-", text).strip("-.")[:60] or "tightfit"


def _options(job: BatchJob, site: Site) -> Iterator[str]:
    slurm, asked = site.slurm, job.resources or JobResources(warn_seconds=0)
    gres = ":".join(filter(None, ("gpu", job.gpu.kind, str(job.gpus_per_node))))
    named = {
        "job-name": clean_name(job.name),
        "partition": job.partition or slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
        # Slurm's `&`: a node with the features of both.
        "constraint": "&".join(filter(None, (slurm.constraint, job.gpu.constraint))) or None,
        "array": None if job.array_size is None else f"0-{job.array_size - 1}",
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": asked.cores,
        "gres": gres if job.gpus_per_node else None,
        "mem": asked.memory_bytes and f"{math.ceil(asked.memory_bytes / MIB)}M",
        "time": asked.seconds and render_time(asked.seconds),
        "signal": f"B:USR1@{asked.warn_seconds}" if asked.warn_seconds else None,
    }
    for name, value in named.items():
        if value is not None:
            yield f"--{name}={_quote(str(value))}"
    yield "--requeue" if job.can_requeue else "--no-requeue"
    yield "--open-mode=append"
    yield f"--output={_quote(job.log)}"
    yield from slurm.extra


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
        yield "# The site's set-up, from site.yaml: a command that fails ends the job, but not one"
        yield "# inside a file that is sourced."
        yield "trap 'code=$? line=$LINENO; if [ ${#BASH_SOURCE[@]} -le 1 ]; then"
        yield '  echo "set-up of site.yaml failed with $code: $(sed -n "${line}p" "$0")"'
        yield "  exit $code"
        yield "fi' ERR"
        yield from site.setup
        yield "trap - ERR"
    for name, value in site.environment.items():
        yield f"export {name}={shlex.quote(value)}"
    if job.resources is not None and job.resources.cores is not None:
        yield "# Since Slurm 22.05 srun takes this from nowhere else."
        yield f"export SRUN_CPUS_PER_TASK={job.resources.cores}"
    yield "# As -P -m, which needs Python 3.11: without the current folder on the search path."
    yield f"export {LAUNCHER_VARIABLE}={shlex.quote(LAUNCHER)}"
    yield "# With --export=NONE of sbatch, srun would keep all of this from the job."
    yield "export SLURM_EXPORT_ENV=ALL"
    yield ""


LAUNCHER_VARIABLE = "launcher"


def join_argv(words: Sequence[str]) -> str:
    """Words as a script's shell reads them back; variables in double quotes are left to expand."""
    named = (f'"${LAUNCHER_VARIABLE}"' if word == LAUNCHER else word for word in words)
    return " ".join(word if word.startswith('"$') else shlex.quote(word) for word in named)


# The batch job that trains: from a plan and its run folder to the script's lines.

SCRIPT_FILE = "job.sbatch"
LOG_FILE = "slurm-%j.out"
MAX_FAILURE_REQUEUES = 5
"""Starts after a death nobody asked for; one that comes again and again is no accident."""


def make_batch_job(
    spec: JobSpec, site: Site, *, partition: str, gpu: GpuRequest, resources: JobResources
) -> BatchJob:
    """The training job as Slurm sees it."""
    strategy = spec.plan.strategy
    is_cpu = spec.plan.hardware.node.gpu.is_cpu
    return BatchJob(
        name=f"tightfit-{spec.run.name}",
        partition=partition,
        log=f"{str(spec.run).replace('%', '%%')}/{LOG_FILE}",
        body=tuple(_body(spec, site, resources.max_requeues)),
        num_nodes=strategy.num_nodes,
        gpus_per_node=0 if is_cpu else strategy.gpus_per_node,
        gpu=gpu,
        resources=resources,
        can_requeue=spec.can_requeue,
    )


def _body(spec: JobSpec, site: Site, max_requeues: int) -> Iterator[str]:
    script, num_nodes = shlex.quote(str(spec.run / SCRIPT_FILE)), spec.plan.strategy.num_nodes
    yield f"# Trains {spec.plan.model.name}, written by `tightfit submit`; by hand: sbatch {script}"
    yield f"run={shlex.quote(str(spec.run))}"
    yield ""
    training = spec.plan.training
    srun = srun_argv(site, mounts=[str(spec.run), *([training.model_path] if training else [])])
    if num_nodes > 1:
        yield from _start_on_several(join_argv(srun), site, num_nodes)
    else:
        train = [*site.python_argv, *module_words("tightfit", "train", '"$run"', "--as-planned")]
        yield f"{srun[0]} --ntasks=1 \\"
        for option in srun[1:]:
            yield f"  {shlex.quote(option)} \\"
        yield f"  {join_argv(train)} &"
    yield ""
    yield from _wait(is_spread=num_nodes > 1)
    yield ""
    yield from (
        _requeue(max_requeues, is_spread=num_nodes > 1) if spec.can_requeue else ("exit $code",)
    )


def _start_on_several(srun: str, site: Site, count: int) -> Iterator[str]:
    """Each node finds its address on the route to the head, and the head to its neighbour."""
    python = join_argv(site.python_argv)
    device = f" {shlex.quote(site.interface)}" if site.interface else ""
    find = f"{python} {join_argv(module_words('tightfit.clusters.nodes'))}"
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
    yield "# All nodes print the same: the first prints it here, the others in files."
    yield 'if [ "$SLURM_NODEID" != 0 ]; then exec >>"$run/node-$SLURM_NODEID.out" 2>&1; fi'
    train = join_argv(module_words("tightfit", "train", '"$run"', "--as-planned"))
    yield f"{python} {train} --nodes {count} \\"
    yield '  --rendezvous "$head:$port" --node-rank "$SLURM_NODEID" \\'
    yield '  --local-addr "${me[0]}" --interface "${me[1]}"'
    yield "code=$?"
    yield "# Saved and stopped: not a bad exit, which would end the others while they save."
    yield f"if [ $code = {EXIT_REQUEUE} ]; then code=0; fi"
    yield "exit $code"


def _wait(*, is_spread: bool) -> Iterator[str]:
    yield "step=$!"
    yield "# Slurm warns this script before the time limit; training then saves and stops."
    yield "trap 'echo \"the time limit is near: saving\"; kill -USR1 $step' USR1"
    yield "# A cancelled or preempted job is signalled by Slurm itself; this script waits for it."
    yield "# Ignored, not caught: bash loses a USR1 that comes while it handles a TERM."
    yield "trap '' TERM"
    yield "while kill -0 $step 2>/dev/null; do wait $step; done"
    yield "wait $step"
    yield "code=$?"
    yield "trap : TERM  # what follows may be ended"
    if is_spread:
        state = RunFolder(path=Path("$run")).state_path
        yield f'if [ $code = 0 ] && grep -q \'"status": *"stopped"\' "{state}"; then'
        yield f"  code={EXIT_REQUEUE}"
        yield "fi"


def _requeue(max_requeues: int, *, is_spread: bool) -> Iterator[str]:
    """75 is asked for; 1 and signals are a lost node; other codes would be the same again."""
    lost = "1|129|13?|14?" if is_spread else "129|13?|14?"
    yield "# Saved and stopped goes back to the queue and resumes there; so does a death that may"
    yield "# be due to the node. A job that was cancelled is no longer RUNNING."
    yield "case $code in"
    yield f"  {EXIT_REQUEUE}) most={max_requeues} ;;"
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


# Nodes for a preflight: the same site's options for `salloc`.

SBATCH_ONLY = frozenset(
    {"array", "batch", "error", "export", "export-file", "ignore-pbs", "input",
     "kill-on-invalid-dep", "no-requeue", "open-mode", "output", "parsable", "requeue",
     "test-only", "wait", "wrap"}
)  # fmt: skip
"""Long names that salloc does not know. Source: salloc(1) and sbatch(1) of Slurm 22.05."""
SBATCH_LETTERS = frozenset("abeioW")
PREFLIGHT_MINUTES = 3
"""The checks take less than one; the rest is for srun."""


def allocation_command(
    words: Sequence[str],
    site: Site,
    *,
    partition: str | None,
    num_nodes: int,
    gpus_per_node: int = 0,
) -> list[str]:
    """`salloc ... words`: it runs them here, with the nodes' names in the environment.

    The site's raw options come first: of two that contradict each other salloc takes the last.
    """
    slurm = site.slurm
    given = {
        "--job-name": "tightfit-preflight",
        "--partition": partition or slurm.partition,
        "--nodes": num_nodes,
        "--ntasks-per-node": 1,
        "--time": PREFLIGHT_MINUTES,
        "--gpus-per-node": gpus_per_node or None,
        "--account": slurm.account,
        "--qos": slurm.qos,
        "--constraint": slurm.constraint,
        "--reservation": slurm.reservation,
    }
    options = [f"{name}={value}" for name, value in given.items() if value is not None]
    return ["salloc", *keep_salloc_options(slurm.extra), *options, *words]


def keep_salloc_options(lines: Sequence[str]) -> list[str]:
    """The words for salloc; options that only a batch script has (`--requeue`) are left out."""
    kept = []
    is_kept = False
    for word in (word for line in lines for word in shlex.split(line, comments=True)):
        if word.startswith("--"):
            is_kept = word[2:].partition("=")[0] not in SBATCH_ONLY
        elif word.startswith("-"):
            is_kept = word[1:2] not in SBATCH_LETTERS
        if is_kept:  # an option, or the words that are its value
            kept.append(word)
    return kept
