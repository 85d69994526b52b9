"""Options of submit, preflight and stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tightfit.api.options.choices import complete_job, complete_model
from tightfit.api.options.common import (
    EffectiveBatch,
    Epochs,
    EvalRows,
    Network,
    PlanMethod,
    SeqLen,
    Settings,
    Template,
    count_option,
    path_option,
    refuse_empty,
    switch_option,
    text_option,
    word_option,
)
from tightfit.api.options.declare import Argument, Option
from tightfit.api.options.training import (
    Again,
    Data,
    Fresh,
    LearningRate,
    LogTo,
    MaxSteps,
    PlanNumber,
    TrainingSeed,
)
from tightfit.core.progress import Progress
from tightfit.core.settings import MAX_WORLD_SIZE

KUBERNETES_KINDS = ("job", "trainjob")

ObjectKind = Annotated[
    str | None,
    word_option(
        "--as",
        KUBERNETES_KINDS,
        "Kubernetes: a plain Job, or a TrainJob. [default: trainjob where Kubeflow Trainer is "
        "installed and can say all that the job needs]",
    ),
]
WriteTo = Annotated[
    Path | None,
    path_option(
        "--write", "Kubernetes: write the objects as YAML in place of applying them.",
        example="job.yaml",
    ),
]  # fmt: skip
KubeContext = Annotated[
    str | None,
    text_option("--context", "NAME", "Kubernetes: of the kubeconfig.", example="lab"),
]
Namespace = Annotated[
    str | None,
    text_option(
        "--namespace", "NAME", "Kubernetes: in place of site.yaml's or the context's.",
        example="team",
    ),
]  # fmt: skip
StageModel = Annotated[
    bool,
    switch_option("--stage", "Kubernetes: each pod first copies the model to its RAM disk."),
]


# What `tightfit submit` accepts. None: a recipe, site.yaml or the planner says it.

SUBMIT_EXAMPLES = """\b
Examples:
  tightfit submit recipe.yaml --on slurm:gpu
  tightfit submit recipe.yaml --on slurm:gpu --dry-run         shows plan and script only
  tightfit submit recipe.yaml --on slurm:gpu --nodes 2 --time-limit 12:00:00 --no-follow
  tightfit submit runs/mine --follow                           follows its job again
  tightfit submit recipe.yaml --on k8s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """Plan for a cluster, submit the job, follow it, and report.

    The plan is made over what the cluster says it has. Data is encoded here, into the run's
    folder, which every node must see. The batch script stays in that folder. Ctrl-C asks whether
    to cancel the job. Account, modules, container and the like are in ~/.config/tightfit/site.yaml
    (docs/site.example.yaml).
    """

    job: Annotated[
        str,
        Argument(
            metavar="RECIPE.YAML|MODEL|PLAN.JSON|RUN",
            help="A recipe; a folder with weights, cached hub id or GGUF file; a saved plan; or "
            "the folder of a run, to follow its job or to go on with it.",
            complete=complete_job,
            read=refuse_empty("MODEL", "./my-model"),
            show_default=False,
        ),
    ] = field(kw_only=False)
    on: Annotated[
        str | None,
        text_option(
            "--on", "CLUSTER", "slurm:PARTITION, slurm, k8s, or here.", example="slurm:gpu"
        ),
    ] = None
    data: Data = None
    eval: EvalRows = None
    network: Network = None
    method: PlanMethod = None
    seq_len: SeqLen = None
    epochs: Epochs = None
    max_steps: MaxSteps = None
    lr: LearningRate = None
    effective_batch: EffectiveBatch = None
    template: Template = None
    seed: TrainingSeed = None
    settings: Settings = None
    plan: PlanNumber = 1
    output: Annotated[
        Path | None,
        path_option(
            "--output",
            "Folder of the run, seen by every node. [default: runs/MODEL-METHOD-N]",
            example="runs/mine",
        ),
    ] = None
    log_to: LogTo = None
    fresh: Fresh = False
    again: Again = False
    nodes: Annotated[
        int | None,
        count_option(
            "--nodes",
            "Nodes to use. [default: as few as it fits on]",
            most=MAX_WORLD_SIZE,
            example=2,
        ),
    ] = None
    time_limit: Annotated[
        str | None,
        text_option(
            "--time-limit",
            "TIME",
            "As Slurm writes it. [default: from the predicted time]",
            example="12:00:00",
        ),
    ] = None
    account: Annotated[
        str | None, text_option("--account", "NAME", "Whom to charge.", example="proj042")
    ] = None
    qos: Annotated[
        str | None, text_option("--qos", "NAME", "Quality of service.", example="normal")
    ] = None
    constraint: Annotated[
        str | None,
        text_option("--constraint", "FEATURES", "What nodes must have.", example="ib"),
    ] = None
    reservation: Annotated[
        str | None, text_option("--reservation", "NAME", "Nodes set aside.", example="course")
    ] = None
    requeue: Annotated[
        bool,
        switch_option(
            "--requeue/--no-requeue",
            "Save, queue again and resume at the time limit, when preempted, and after the loss "
            "of a node. [default: on]",
        ),
    ] = True
    kind: ObjectKind = None
    write: WriteTo = None
    context: KubeContext = None
    namespace: Namespace = None
    stage: StageModel = False
    follow: Annotated[
        bool | None,
        switch_option("--follow/--no-follow", "Watch the job until it ends. [default: on]"),
    ] = None
    dry_run: Annotated[
        bool, switch_option("--dry-run", "Show plan and script; submit nothing.")
    ] = False


# What `tightfit preflight` accepts.

MAX_NODES = 256
MAX_RENDEZVOUS_PORT = 65_534
MAX_GPUS = 64

PREFLIGHT_EXAMPLES = """\b
Examples:
  tightfit preflight --nodes gpu01,gpu02 --shared /home/me/runs
  tightfit preflight --nodes 'gpu[01-04]' --interface ib0 --run-with 'ssh {node}'
  tightfit preflight --on slurm:gpu --num-nodes 2 --gpus-per-node 4
  tightfit preflight                         inside a Slurm job: its own nodes
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions:
    """Check the nodes of a job, and the ways between them, in under a minute.

    Names, the rendezvous port, the network device, loss in each direction, bandwidth by TCP and by
    all-reduce, clocks, versions, GPUs and the shared folder; each problem with its remedy. At the
    end: the options that `tightfit train` is to be given on each node. Nothing is left running.

    The exit code tells the worst finding: 0 for remarks, 6 for faults.
    """

    nodes: Annotated[
        str | None,
        text_option(
            "--nodes",
            "A,B",
            "The nodes; the first is where they meet. [default: those of this Slurm job]",
            example="gpu[01-02]",
        ),
    ] = None
    run_with: Annotated[
        str | None,
        text_option(
            "--run-with",
            "PREFIX",
            "Runs a command on {node}. [default: srun in a Slurm job, else ssh]",
            example="'ssh {node}'",
        ),
    ] = None
    interface: Annotated[
        str | None,
        text_option(
            "--interface",
            "NAME",
            "Network device that is to be used. [default: the one that leads to the others]",
            example="ib0",
        ),
    ] = None
    port: Annotated[
        int | None,
        count_option(
            "--port",
            "Rendezvous port on the first node. [default: 29500]",
            most=MAX_RENDEZVOUS_PORT,
            example=29500,
        ),
    ] = None
    shared: Annotated[
        str | None,
        text_option(
            "--shared",
            "FOLDER",
            "A folder that all nodes are to share, as for runs. [default: `runs` of site.yaml]",
            example="/home/me/runs",
        ),
    ] = None
    on: Annotated[
        str | None,
        text_option(
            "--on",
            "slurm:PARTITION",
            "Take nodes of this partition for a few minutes, by salloc.",
            example="slurm:gpu",
        ),
    ] = None
    num_nodes: Annotated[
        int | None,
        count_option("--num-nodes", "How many; with --on. [default: 2]", most=MAX_NODES, example=2),
    ] = None
    gpus_per_node: Annotated[
        int | None,
        count_option(
            "--gpus-per-node", "GPUs to ask Slurm for; with --on.", most=MAX_GPUS, example=4
        ),
    ] = None
    progress: Progress | None = None


# What `tightfit stage` accepts.

STAGE_METHODS = ("auto", "all-read", "tree", "chain")

STAGE_EXAMPLES = """\b
Examples:
  tightfit stage Llama-2-7b
  tightfit stage ./my-model --nodes gpu[01-16] --to /dev/shm
  tightfit stage ./my-model --on slurm:gpu --dry-run
  tightfit stage --list --nodes gpu[01-16]
  tightfit stage ./my-model --nodes gpu[01-16] --clean
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """Copy a model to the RAM disks of many nodes, the fastest way.

    Measures how fast one node reads the model, how fast all of them do at once, and how fast they
    pass it on to each other; then all read, or one reads and the others get it in a chain or a
    tree. Checks that it fits before it copies, and every block after. A copy that was interrupted
    goes on where it stopped, and one that is whole is left as it is.

    `generate`, `chat`, `serve`, `train` and `farm` use a copy by themselves while it is exactly the
    model they were asked for.
    """

    model: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="A model folder, a run, a cached hub id or a GGUF file.",
            complete=complete_model,
            read=refuse_empty("MODEL", "./my-model"),
            show_default=False,
        ),
    ] = field(default=None, kw_only=False)
    to: Annotated[
        str | None,
        text_option(
            "--to",
            "FOLDER",
            "A RAM disk or local disk that every node has. [default: the site's stage_to, else "
            "/dev/shm]",
            example="/dev/shm",
        ),
    ] = None
    nodes: Annotated[
        str | None,
        text_option(
            "--nodes", "NAMES", "gpu[01-04],big01. [default: this machine]", example="gpu[01-04]"
        ),
    ] = None
    on: Annotated[
        str | None,
        text_option(
            "--on",
            "slurm:PARTITION",
            "The nodes of a Slurm partition, or with `slurm` those of the job this runs in.",
            example="slurm:gpu",
        ),
    ] = None
    how: Annotated[
        str | None,
        word_option("--how", STAGE_METHODS, "auto measures and chooses. [default: auto]"),
    ] = None
    leave: Annotated[
        str | None,
        text_option(
            "--leave",
            "SIZE",
            "Memory to leave for the job on each node. [default: 5% and at least 1 GiB]",
            example="64GiB",
        ),
    ] = None
    run_with: Annotated[
        str | None,
        text_option(
            "--run-with",
            "WORDS",
            "How a command runs on a node. [default: the site's run_on_node; srun in a job; else "
            "'ssh {node}']",
            example="'ssh {node}'",
        ),
    ] = None
    interface: Annotated[
        str | None,
        text_option(
            "--interface",
            "DEVICE",
            "Network device between the nodes. [default: the site's, else the way to each other]",
            example="ib0",
        ),
    ] = None
    verify: Annotated[
        bool, Option("--verify", help="Read a copy that is there already back, too.")
    ] = False
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Check and measure, and tell the choice; with --clean, tell what would go.",
        ),
    ] = False
    progress: Progress | None = None
    announce: Callable[..., None] | None = None
    """Called with the chosen method and the files before anything is copied."""
