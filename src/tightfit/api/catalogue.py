"""`models`, `hardware` and `doctor`: the offline catalogues, a cluster, and this machine.

The catalogues load when a verb is called: `--help` reads the options alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tightfit.api.call import accepts_keywords
from tightfit.api.options.common import On, complete_gpu, complete_model
from tightfit.core.errors import NotFoundError, UsageError
from tightfit.core.options import Argument, path_option, switch_option

if TYPE_CHECKING:
    from tightfit.hardware.catalogue import GpuRecord
    from tightfit.hardware.checkup import Checkup
    from tightfit.hardware.inventory import Inventory
    from tightfit.hardware.types import Cluster, Gpu
    from tightfit.models.catalogue import CatalogueRow
    from tightfit.models.spec import ModelSpec

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
            name="NAME",
            metavar="[WORD|NAME]",
            help="A word to search for; or a catalogue name, hub id, folder or GGUF file to show.",
            complete=complete_model,
            example="Llama-2-7b",
        ),
    ] = field(default=None, kw_only=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsResult:
    """The models that were found, each with its row of the catalogue, where it has one."""

    models: tuple[ModelSpec, ...]
    rows: tuple[CatalogueRow | None, ...]
    is_search: bool
    """False: the name meant exactly one model."""


@accepts_keywords(ModelsOptions)
def models(options: ModelsOptions) -> ModelsResult:
    """The whole catalogue, the models whose name contains a word, or one model."""
    from tightfit.models.resolve import list_models, search_models
    from tightfit.runtime.resolve import resolve_model

    if options.name is None:
        return _list(list_models())
    found = search_models(options.name)
    try:
        spec = resolve_model(options.name)
    except NotFoundError:
        if not found:
            raise
        return _list(found)
    # `qwen2.5` is also the alias of one model, but a part of many names means a search.
    if len(found) > 1 and not _is_exact(options.name, spec):
        return _list(found)
    row = next((row for row in list_models() if spec.source == f"catalogue:{row.model}"), None)
    return ModelsResult(models=(spec,), rows=(row,), is_search=False)


def _list(rows: Sequence[CatalogueRow]) -> ModelsResult:
    from tightfit.models.catalogue import load_row

    specs = tuple(load_row(row) for row in rows)
    return ModelsResult(models=specs, rows=tuple(rows), is_search=True)


def _is_exact(name: str, spec: ModelSpec) -> bool:
    """The name is the model's own, with or without its owner and the `-hf` of converted ones."""
    if not spec.source.startswith("catalogue:"):
        return True
    known = {spec.name.lower(), spec.name.lower().rpartition("/")[2]}
    return bool({name.lower(), f"{name.lower()}-hf"} & known)


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
            name="NAME",
            metavar="[WORD|NAME]",
            help="A word to search for, or the name of one GPU.",
            complete=complete_gpu,
            example="T4",
        ),
    ] = field(default=None, kw_only=False)
    on: On = None
    each: bool = switch_option("With --on slurm or k8s: every node, not only the kinds.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareResult:
    """What was asked for; the other fields are empty."""

    gpus: tuple[Gpu, ...] = ()
    record: GpuRecord | None = None
    """One card, each number with its source."""
    cluster: Cluster | None = None
    inventory: Inventory | None = None
    """Of a scheduler's cluster: every node and what is free."""


@accepts_keywords(HardwareOptions)
def hardware(options: HardwareOptions) -> HardwareResult:
    """The catalogue, the cards whose name contains a word, one card, or what `on` means."""
    from tightfit.hardware.catalogue import describe_gpu, list_gpus, match_gpu, search_gpus

    if options.each and options.on is None:
        raise UsageError(
            "--each lists the nodes of a cluster.", remedy="tightfit hardware --on slurm --each"
        )
    if options.on is not None and options.name is not None:
        raise UsageError(
            "A GPU name and --on ask for two different things.",
            remedy=f"tightfit hardware {options.name}, or tightfit hardware --on {options.on}",
        )
    if options.on is not None:
        return _describe_cluster(options.on, each=options.each)
    if options.name is None:
        return HardwareResult(gpus=tuple(list_gpus()))
    # One card if the word names one, else all that contain it.
    word = options.name
    found = search_gpus(word)
    try:
        match = match_gpu(word)
    except NotFoundError:
        inside = [gpu for gpu in found if _folded(word) in _folded(gpu.name)]
        if not inside:
            raise
        return HardwareResult(gpus=tuple(inside))
    if match.others and len(found) > 1:
        return HardwareResult(gpus=tuple(found))
    return HardwareResult(record=describe_gpu(match.gpu.name))


def _folded(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _describe_cluster(text: str, *, each: bool) -> HardwareResult:
    from tightfit.hardware.resolve import probe_inventory, resolve_hardware

    inventory = probe_inventory(text)
    if inventory is not None:
        return HardwareResult(inventory=inventory)
    if each:
        raise UsageError(
            "--each lists the nodes of a cluster that runs Slurm or Kubernetes.",
            remedy="tightfit hardware --on slurm --each, or without --each",
        )
    return HardwareResult(cluster=resolve_hardware(text))


DOCTOR_EXAMPLES = """\b
Examples:
  tightfit doctor
  tightfit doctor --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Check this machine; each problem with its remedy.

    Looks at GPUs and driver, memory, disk, packages, Slurm, Kubernetes and hub access. Needs
    neither a GPU nor torch. The exit code is that of the worst
    finding: 0 for remarks, 6 for errors.
    """


@accepts_keywords(DoctorOptions)
def doctor(_options: DoctorOptions) -> Checkup:
    """Run all checks; `exit_code` is 6 if something will not work, else 0."""
    from tightfit.hardware.checkup import run_checkup

    return run_checkup()


# Options of `runs`, whose functions load the runs' figures and pages, and of `version`.

RUNS_EXAMPLES = """\b
Examples:
  tightfit runs                           every run in runs/, newest first
  tightfit runs /data/team/runs           those of another folder
  tightfit runs sql-lora                  one run: results, predicted beside measured
  tightfit runs sql-lora sql-qlora        what differs, and the results side by side
  tightfit runs sql-lora sql-qlora --plot loss.png
  tightfit runs sql-lora --html report.html
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsOptions:
    """List, show, compare and plot runs.

    A run is a folder that `tightfit train` made. One is shown in full; several are compared.
    """

    names: Annotated[
        list[str] | None,
        Argument(
            name="RUN",
            metavar="RUN|FOLDER",
            help="Runs, by folder or by name in runs/, or folders with runs. [default: runs/]",
            example="runs/my-run",
        ),
    ] = field(default=None, kw_only=False)
    plot: Path | None = path_option(
        "Draw loss, memory and predictions: .png or .html.", example="runs.png"
    )
    html: Path | None = path_option(
        "Write the whole report as one HTML file.", example="report.html"
    )


VERSION_EXAMPLES = """\b
Examples:
  tightfit version
  tightfit version --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionOptions:
    """Print the version of tightfit and of Python."""
