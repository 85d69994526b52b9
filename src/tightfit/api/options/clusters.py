"""Options of submit, preflight and stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from tightfit.api.options.common import Json, model_argument
from tightfit.api.options.training import TrainingOptions, job_argument
from tightfit.clusters.schedulers import SchedulerOptions, name_clusters
from tightfit.clusters.staging import CopyMethod
from tightfit.core.options import Argument, count_option, switch_option, text_option, word_option
from tightfit.core.progress import Progress
from tightfit.core.settings import MAX_WORLD_SIZE, words_of

SUBMIT_EXAMPLES = """\b
Examples:
  tightfit submit recipe.yaml --on slurm:gpu
  tightfit submit recipe.yaml --on slurm:gpu --dry-run         shows plan and script only
  tightfit submit recipe.yaml --on slurm:gpu --nodes 2 --time-limit 12:00:00 --no-follow
  tightfit submit runs/mine --follow                           follows its job again
  tightfit submit recipe.yaml --on k8s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SubmitTarget(TrainingOptions):
    """What is submitted: `--help` lists it before the options of the schedulers."""

    job: Annotated[
        str,
        job_argument(
            "A recipe; a folder with weights, cached hub id or GGUF file; a saved plan; or the "
            "folder of a run, to follow its job or to go on with it."
        ),
    ] = field(kw_only=False)
    on: str | None = text_option(
        "CLUSTER",
        f"{name_clusters()} (this machine); slurm:gpu names a partition.",
        example="slurm:gpu",
    )
    nodes: int | None = count_option(
        "Nodes to use. [default: as few as it fits on]", most=MAX_WORLD_SIZE, example=2
    )
    requeue: bool = switch_option(
        "Save, queue again and resume at the time limit, when preempted, and after the loss of a "
        "node. [default: on]",
        has_off=True,
        default=True,
    )
    follow: bool | None = switch_option(
        "Follow the job until it ends. [default: on]", has_off=True, default=None
    )


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(SchedulerOptions, _SubmitTarget):
    """Plan for a cluster, submit the job, follow it, and report.

    The plan is made over what the cluster says it has. Data is encoded here, into the run's
    folder, which every node must see. The batch script stays in that folder. Ctrl-C asks whether
    to cancel the job. Account, modules, container and the like are in ~/.config/tightfit/site.yaml
    (docs/site.example.yaml).
    """


CANCEL_EXAMPLES = """\b
Examples:
  tightfit cancel runs/mine                  wherever it was submitted to
  tightfit cancel 4711                       by the number of its Slurm job
  tightfit cancel mine-1a2b3c --on k8s       by the name of its Kubernetes Job
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelOptions:
    """End a run's job; the run saves first.

    Also a run that `tightfit train` started on this machine. A job that is over already is no
    error. `tightfit submit RUN` goes on from the last checkpoint.
    """

    job: Annotated[
        str,
        Argument(
            name="RUN",
            metavar="RUN|JOB",
            help="The run's folder, or its name in runs/; or the job's number or name.",
            example="runs/mine",
        ),
    ] = field(kw_only=False)
    on: str | None = text_option(
        "CLUSTER",
        f"{name_clusters()}. [default: where the run was submitted to; slurm for a number]",
        example="slurm",
    )
    context: str | None = text_option("NAME", "Kubernetes: of the kubeconfig.", example="lab")
    namespace: str | None = text_option(
        "NAME", "Kubernetes: in place of site.yaml's or the context's.", example="team"
    )


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
    """Check the nodes of a job and the network between them in under a minute.

    Names, the rendezvous port, the network device, loss in each direction, bandwidth by TCP and by
    all-reduce, clocks, versions, GPUs and the shared folder; each problem with its remedy. At the
    end: the options that `tightfit train` is to be given on each node. Nothing is left running.

    The exit code is that of the worst finding: 0 for remarks, 6 for errors.
    """

    nodes: str | None = text_option(
        "A,B",
        "The nodes; the first is where they meet. [default: those of this Slurm job]",
        example="gpu[01-02]",
    )
    run_with: str | None = text_option(
        "PREFIX",
        "Runs a command on {node}. [default: srun in a Slurm job, else ssh]",
        example="'ssh {node}'",
    )
    interface: str | None = text_option(
        "NAME",
        "Network device that is to be used. [default: the one that leads to the others]",
        example="ib0",
    )
    port: int | None = count_option(
        "Rendezvous port on the first node. [default: 29500]",
        most=MAX_RENDEZVOUS_PORT,
        example=29500,
    )
    shared: str | None = text_option(
        "FOLDER",
        "A folder that all nodes are to share, as for runs. [default: `runs` of site.yaml]",
        example="/home/me/runs",
    )
    on: str | None = text_option(
        "slurm:PARTITION",
        "Take nodes of this partition for a few minutes, by salloc.",
        example="slurm:gpu",
    )
    num_nodes: int | None = count_option(
        "How many; with --on. [default: 2]", most=MAX_NODES, example=2
    )
    gpus_per_node: int | None = count_option(
        "GPUs to ask Slurm for; with --on.", most=MAX_GPUS, example=4
    )
    progress: Progress | None = None


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
        model_argument(
            "MODEL", "A model folder, a run, a cached hub id or a GGUF file.", example="./my-model"
        ),
    ] = field(default=None, kw_only=False)
    to: str | None = text_option(
        "FOLDER",
        "A RAM disk or local disk that every node has. [default: the site's stage_to, else "
        "/dev/shm]",
        example="/dev/shm",
    )
    nodes: str | None = text_option(
        "NAMES", "gpu[01-04],big01. [default: this machine]", example="gpu[01-04]"
    )
    on: str | None = text_option(
        "slurm:PARTITION",
        "The nodes of a Slurm partition, or with `slurm` those of the job this runs in.",
        example="slurm:gpu",
    )
    how: str | None = word_option(
        ("auto", *words_of(CopyMethod)), "auto measures and chooses. [default: auto]"
    )
    leave: str | None = text_option(
        "SIZE",
        "Memory to leave for the job on each node. [default: 5% and at least 1 GiB]",
        example="64GiB",
    )
    run_with: str | None = text_option(
        "WORDS",
        "How a command runs on a node. [default: the site's run_on_node; srun in a job; else 'ssh "
        "{node}']",
        example="'ssh {node}'",
    )
    interface: str | None = text_option(
        "DEVICE",
        "Network device between the nodes. [default: the site's, else the one between them]",
        example="ib0",
    )
    verify: bool = switch_option("Read a copy that is there already back, too.")
    dry_run: bool = switch_option(
        "Check and measure, and tell the choice; with --clean, tell what would go."
    )
    progress: Progress | None = None
    announce: Callable[..., None] | None = None
    """Called with the chosen method and the files before anything is copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    list_: bool = switch_option("Show what is staged where.", name="--list")
    clean: bool = switch_option("Remove MODEL's copies there, or all of yours without MODEL.")
    as_json: Json = False
