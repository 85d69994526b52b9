"""Options of doctor, models, hardware, runs and version."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tightfit.api.options.choices import complete_gpu, complete_model, empty_value
from tightfit.api.options.common import On, path_option, refuse_empty
from tightfit.api.options.declare import Argument, Option

DOCTOR_EXAMPLES = """\b
Examples:
  tightfit doctor
  tightfit doctor --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Check this machine; each problem with its remedy.

    Looks at GPUs and driver, memory, disk, packages, Slurm, Kubernetes and hub access. Needs
    neither a GPU nor torch. The exit code tells the worst finding: 0 for remarks, 6 for faults.
    """


# What `tightfit models` accepts.

MODELS_EXAMPLES = """\b
Examples:
  tightfit models                    every model of the catalogue
  tightfit models qwen               those whose name contains a word
  tightfit models Llama-2-7b         one model, with the count of each part
  tightfit models ./my-model --json  a folder with config.json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsOptions:
    """List, search or show models.

    Nothing is downloaded: names come from the catalogue inside the package, the local hub
    cache, or files you point at.
    """

    name: Annotated[
        str | None,
        Argument(
            metavar="[WORD|NAME]",
            help="A word to search for; or a catalogue name, hub id, folder or GGUF file to show.",
            complete=complete_model,
            read=refuse_empty("NAME", "Llama-2-7b"),
            show_default=False,
        ),
    ] = field(default=None, kw_only=False)


# What `tightfit hardware` accepts.

HARDWARE_EXAMPLES = """\b
Examples:
  tightfit hardware                       every GPU of the catalogue
  tightfit hardware a100                  those whose name contains a word
  tightfit hardware T4                    one card, each number with its source
  tightfit hardware --on here             this machine
  tightfit hardware --on slurm            a Slurm cluster: partitions, what is free, what is down
  tightfit hardware --on slurm:gpu --each every node of one partition
  tightfit hardware --on '6xT4 + 2xRTX-6000' --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOptions:
    """List, search or show GPUs, or a cluster with --on.

    With --on, shows a machine or cluster as tightfit understands it; of Slurm and Kubernetes
    also what is free now, and why some nodes take no jobs.
    """

    name: Annotated[
        str | None,
        Argument(
            metavar="[WORD|NAME]",
            help="A word to search for, or the name of one GPU.",
            complete=complete_gpu,
            read=refuse_empty("NAME", "T4"),
            show_default=False,
        ),
    ] = field(default=None, kw_only=False)
    on: On = None
    each: Annotated[
        bool,
        Option("--each", help="With --on slurm or k8s: every node, not only the kinds."),
    ] = False


# What `tightfit runs` accepts.

RUNS_EXAMPLES = """\b
Examples:
  tightfit runs                           every run in runs/, newest first
  tightfit runs /data/team/runs           those of another folder
  tightfit runs sql-lora                  one run: results, predicted beside measured
  tightfit runs sql-lora sql-qlora        what differs, and the results side by side
  tightfit runs sql-lora sql-qlora --plot loss.png
  tightfit runs sql-lora --html report.html
"""


def _refuse_empty_names(values: list[str] | None) -> list[str] | None:
    if any(not value.strip() for value in values or ()):
        raise empty_value("RUN", "runs/my-run")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsOptions:
    """List, show, compare and plot runs.

    A run is a folder that `tightfit train` made. One is shown in full; several are compared.
    """

    names: Annotated[
        list[str] | None,
        Argument(
            metavar="RUN|FOLDER",
            help="Runs, by folder or by name in runs/, or folders with runs. [default: runs/]",
            read=_refuse_empty_names,
            show_default=False,
        ),
    ] = field(default=None, kw_only=False)
    plot: Annotated[
        Path | None,
        path_option(
            "--plot", "Draw loss, memory and predictions: .png or .html.", example="runs.png"
        ),
    ] = None
    html: Annotated[
        Path | None,
        path_option("--html", "Write the whole report as one HTML file.", example="report.html"),
    ] = None


# What `tightfit version` accepts.

VERSION_EXAMPLES = """\b
Examples:
  tightfit version
  tightfit version --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionOptions:
    """Print the version of tightfit and of Python."""
