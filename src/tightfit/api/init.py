"""`init`: what is here, and a commented recipe made of it.

The rooms load when the verb is called: `--help` reads the options alone.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from tightfit.api.call import accepts_keywords
from tightfit.api.options.common import EvalRows, Method, On, complete_model
from tightfit.core.errors import UsageError, UserError
from tightfit.core.options import list_declared, path_option, switch_option, text_option
from tightfit.core.progress import Progress

if TYPE_CHECKING:
    from tightfit.core.recipe import Recipe
    from tightfit.models.spec import ModelSpec
    from tightfit.planning.plan import Plan

Found = TypeVar("Found")
DEFAULT_OUTPUT = Path("recipe.yaml")

INIT_EXAMPLES = """\b
Examples:
  tightfit init                          asks for a model, data and hardware
  tightfit init --model ./SmolLM2-135M --data train.jsonl --on here
  tightfit init --model Llama-3.1-8B --data train.jsonl --eval 0.05 --on slurm:gpu --method qlora
  tightfit init --output other.yaml --force
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """Ask for model, data and hardware, and write a commented recipe.

    Offers the models, data files and hardware that are here. What an option says is not asked;
    without a terminal nothing is, and --model, --data and --on are needed. The recipe is read
    back and planned; nothing is downloaded.
    """

    model: Annotated[
        str | None,
        text_option(
            "MODEL",
            "Catalogue name, cached hub id, folder with config.json, or GGUF file.",
            example="./my-model",
            complete=complete_model,
        ),
    ] = None
    data: str | None = text_option("FILE", "Rows to train on.", example="train.jsonl")
    eval: EvalRows = None
    on: On = None
    method: Method = None
    output: Path | None = path_option(
        f"The recipe. [default: {DEFAULT_OUTPUT}]", example=str(DEFAULT_OUTPUT)
    )
    force: bool = switch_option("Replace a recipe that is there.")
    progress: Progress | None = None

    @property
    def path(self) -> Path:
        return self.output or DEFAULT_OUTPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class InitResult:
    """The recipe that was written, its best plan, and what to do next."""

    path: Path
    recipe: Recipe
    plan: Plan | None
    error: UserError | None
    """Why there is no plan."""
    next_commands: tuple[str, ...]


NEEDED = ("model", "data", "on")


@accepts_keywords(InitOptions)
def init(options: InitOptions) -> InitResult:
    """Check what was named, write the recipe, read it back and plan it."""
    from tightfit.core.files import atomic_file, check_writable
    from tightfit.core.recipe import read_recipe

    check_free(options)
    _refuse_missing(options)
    assert options.model is not None
    spec = check_model(options.model)
    text = _write_text(options, spec)
    check_writable(options.path)
    with atomic_file(options.path) as partial:
        partial.write_text(text, encoding="utf-8")
        recipe = read_recipe(partial)
    plan, error = _plan(options)
    return InitResult(
        path=options.path,
        recipe=recipe,
        plan=plan,
        error=error,
        next_commands=tuple(_list_next(options, spec, is_planned=plan is not None)),
    )


def check_free(options: InitOptions) -> None:
    """Refuse a file that is there, before anybody is asked anything."""
    from tightfit.api.training.recipe import RECIPE_ENDINGS

    path = options.path
    if not path.name.lower().endswith(RECIPE_ENDINGS):
        other = path.with_suffix(RECIPE_ENDINGS[0]) if path.name else DEFAULT_OUTPUT
        raise UsageError(
            f"`--output {path}`: a recipe's name ends in {' or '.join(RECIPE_ENDINGS)}.",
            remedy=f"--output {shlex.quote(str(other))}",
        )
    if os.path.lexists(path) and not options.force:
        raise UsageError(
            f"{path} is there already, and is not replaced.",
            remedy=f"--output other.yaml, or --force    (tightfit plan {shlex.quote(str(path))} "
            "shows what it plans)",
        )


def list_missing(options: InitOptions) -> list[str]:
    """Fields that a recipe needs and that were not given."""
    return [name for name in NEEDED if getattr(options, name) is None]


def _refuse_missing(options: InitOptions) -> None:
    """One message with every missing option, and values for them that are here."""
    missing = list_missing(options)
    if not missing:
        return
    found = find_candidates(Path())
    offered = {"model": found.models, "data": found.data, "on": found.hardware}
    declared = list_declared(InitOptions)
    words = ["tightfit", "init"]
    for name in NEEDED:
        first = offered[name][0].value if offered[name] else declared[name].example
        words += [declared[name].name, getattr(options, name) or first]
    *others, last = (declared[name].name for name in missing)
    names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    raise UsageError(
        f"{names} missing, and without a terminal nobody can be asked.",
        remedy=shlex.join(words),
    )


# Each answer is checked as it is given.


def check_model(name: str) -> ModelSpec:
    from tightfit.runtime.resolve import resolve_model

    return resolve_model(name)


def check_data(name: str) -> str:
    """The format of the first row of a file or folder, or of a part of one."""
    from tightfit.core.strategy import DataSource
    from tightfit.data.sources import open_source, read_source

    rows = read_source(open_source(DataSource(path=name)))
    return next(iter(rows))[1].name


def check_eval(text: str) -> None:
    """A file or a share of the rows, as `train --eval` takes it."""
    from tightfit.api.training.recipe import read_eval
    from tightfit.core.recipe import Recipe

    for source in read_eval(Recipe(model="unnamed"), text)["data"]:
        check_data(source.path)


def check_hardware(text: str) -> str:
    """The hardware in words."""
    from tightfit.hardware.resolve import resolve_hardware
    from tightfit.planning.describe import describe_gpus

    groups = resolve_hardware(text).groups
    return " + ".join(
        group.node.gpu.name
        if group.node.gpu.is_cpu
        else describe_gpus(
            group.node.gpu.name, num_nodes=group.num_nodes, gpus_per_node=group.node.num_gpus
        )
        for group in groups
    )


# The recipe's text.


def _write_text(options: InitOptions, spec: ModelSpec) -> str:
    from tightfit.core.recipe_text import write_recipe
    from tightfit.core.units import render_count

    assert options.model is not None
    assert options.data is not None
    assert options.on is not None
    row_format = check_data(options.data)
    stated: dict[str, Any] = {
        "model": _model_from(options.model, options.path.parent),
        "data": _path_from(options.data, options.path.parent),
        "on": options.on,
        "method": options.method or "auto",
    }
    if options.eval is not None:
        stated |= _state_eval(options.eval, stated["data"], options.path.parent)
    name = shlex.quote(str(options.path))
    title = (
        f"tightfit plan {name}\n"
        f"tightfit train {name}       (again: goes on)\n\n"
        "A key behind a # is not stated: the planner chooses it, or it has the default that is\n"
        "said beside it. Relative paths start at this file's folder."
    )
    remarks = {
        "model": f"{render_count(spec.num_params)} parameters",
        "data": f"rows: {row_format}",
        "on": check_hardware(options.on),
        "method": "or: full, lora, qlora; auto leaves it to the planner",
    }
    return write_recipe(stated, remarks=remarks, title=title)


def _state_eval(text: str, data: str, folder: Path) -> dict[str, Any]:
    from tightfit.api.training.recipe import read_eval
    from tightfit.core.recipe import Recipe

    check_eval(text)
    read = read_eval(Recipe(model="unnamed"), text)
    held_out = [
        {"path": _path_from(source.path, folder), "split": "eval"} for source in read["data"]
    ]
    if held_out:
        return {"data": [{"path": data}, *held_out]}
    return {"eval_fraction": read["eval_fraction"]}


def _path_from(text: str, folder: Path) -> str:
    """A path as the recipe in `folder` has to write it."""
    if Path(text).is_absolute() or text.startswith("~"):
        return text
    return os.path.relpath(text, folder)


def _model_from(name: str, folder: Path) -> str:
    """A folder or file here starts with a dot, so that the recipe's folder counts; or a name."""
    if not Path(name).expanduser().exists():
        return name
    written = _path_from(name, folder)
    return written if written.startswith(("/", "~", "../")) else f"./{written}"


def _plan(options: InitOptions) -> tuple[Plan | None, UserError | None]:
    from tightfit.api.options.training import PlanOptions
    from tightfit.api.plan import plan

    try:
        found = plan(PlanOptions(str(options.path), top=1, progress=options.progress))
    except UserError as error:
        return None, error
    return found.best, None


def _list_next(options: InitOptions, spec: ModelSpec, *, is_planned: bool) -> Iterator[str]:
    from tightfit.models.catalogue import is_gated

    assert options.model is not None
    assert options.on is not None
    name = shlex.quote(str(options.path))
    if not is_planned:
        return
    missing = _find_download(options.model, spec)
    if missing is not None and is_gated(missing):
        yield f"hf auth login    (accept its licence first: https://huggingface.co/{missing})"
    if missing is not None:
        yield f"hf download {missing}    (its weights are not on this machine)"
    scheduler = options.on.partition(":")[0].casefold()
    if scheduler in ("slurm", "k8s", "kubernetes"):
        yield f"tightfit submit {name}"
    elif scheduler in ("here", "cpu"):
        yield f"tightfit train {name}"
    else:
        yield f"tightfit train {name}    (on that machine)"


def _find_download(model: str, spec: ModelSpec) -> str | None:
    """The hub id of a model whose weights are not on this disk."""
    from tightfit.models.resolve import find_in_hub_cache, locate_hub_cache

    if Path(model).expanduser().exists():
        return None
    hub_id = spec.source.removeprefix("catalogue:") if ":" in spec.source else model
    return None if find_in_hub_cache(hub_id, locate_hub_cache()) else hub_id


# What is here: models, data files, hardware.

MAX_DEPTH = 2
MAX_FOLDERS = 500
"""A folder with more is somebody's home: what lies first in it is offered."""
_DATA_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".pq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A value that an option could have, and what it is."""

    value: str
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What was found, the likeliest first."""

    models: tuple[Candidate, ...]
    data: tuple[Candidate, ...]
    held_out: tuple[Candidate, ...]
    """Files whose names say that they are not to be trained on."""
    hardware: tuple[Candidate, ...]


def find_candidates(folder: Path) -> Candidates:
    """Models and data files in `folder` and two levels below, cached models, and hardware."""
    from tightfit.data.sources import is_held_out

    folders = list(_list_folders(folder))
    is_model = {path for path in folders if (path / "config.json").is_file()}
    files = [
        path
        for inner in folders
        if inner not in is_model
        for path in sorted(inner.iterdir())
        if path.is_file() and not path.name.startswith(".")
    ]
    data = [
        (path, about)
        for path in files
        if path.name.lower().endswith(_DATA_ENDINGS)
        and (about := _try(partial(check_data, str(path)))) is not None
    ]
    data.sort(key=lambda found: ("train" not in found[0].name.lower(), str(found[0])))
    return Candidates(
        models=tuple(_find_models([path for path in folders if path in is_model], files)),
        data=tuple(_candidate(*found) for found in data if not is_held_out(found[0])),
        held_out=tuple(_candidate(*found) for found in data if is_held_out(found[0])),
        hardware=tuple(_find_hardware()),
    )


def _candidate(path: Path, about: str) -> Candidate:
    from tightfit.core.units import render_bytes

    return Candidate(value=str(path), about=f"{about}, {render_bytes(path.stat().st_size)}")


def _list_folders(top: Path) -> Iterator[Path]:
    """Breadth first; not those of runs, nor hidden ones."""
    level, num_found = [top], 0
    for _ in range(MAX_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            num_found += 1
            if num_found > MAX_FOLDERS:
                return
            try:
                inner = sorted(folder.iterdir())
            except OSError:
                continue
            yield folder
            below += [
                path
                for path in inner
                if not path.name.startswith((".", "__"))
                and path.is_dir()
                and not (path / "plan.json").is_file()
            ]
        level = below


def _find_models(folders: list[Path], files: list[Path]) -> Iterator[Candidate]:
    from tightfit.models.resolve import find_in_hub_cache, locate_hub_cache, measure_weights

    ggufs = [path for path in files if path.suffix.lower() == ".gguf"]
    for path in (*folders, *ggufs):
        if measure_weights(path) is None:
            continue
        about = _try(partial(_describe_model, str(path)))
        if about is not None:
            name = str(path)
            yield Candidate(value=name if path.is_absolute() else f"./{name}", about=about)
    cache = locate_hub_cache()
    try:
        cached = sorted(path.name for path in cache.glob("models--*")) if cache else []
    except OSError:
        return
    for entry in cached:
        name = entry.removeprefix("models--").replace("--", "/")
        snapshot = find_in_hub_cache(name, cache)
        if snapshot is None or measure_weights(snapshot) is None:
            continue
        about = _try(partial(_describe_model, name))
        if about is not None:
            yield Candidate(value=name, about=f"{about}, in the hub cache")


def _describe_model(name: str) -> str:
    from tightfit.core.units import render_count

    return f"{render_count(check_model(name).num_params)} parameters"


def _find_hardware() -> Iterator[Candidate]:
    """This machine first where it has a GPU or there is no Slurm."""
    from tightfit.hardware.inventory import count_totals
    from tightfit.hardware.resolve import resolve_hardware
    from tightfit.hardware.slurm import probe_slurm_inventory

    here = []
    about = _try(partial(check_hardware, "here"))
    if about is not None:
        here = [Candidate(value="here", about=about)]
    has_gpu = bool(here) and not resolve_hardware("here").groups[0].node.gpu.is_cpu
    slurm = []
    inventory = _try(probe_slurm_inventory) if shutil.which("sinfo") else None
    by_pool = [] if inventory is None else [inventory.only(pool.name) for pool in inventory.pools]
    for only in by_pool:
        totals = count_totals(only)
        about = f"{totals.num_gpus} GPUs in {totals.num_nodes} nodes"
        slurm.append((totals.num_gpus == 0, Candidate(value=only.source, about=about)))
    of_slurm = [candidate for _, candidate in sorted(slurm, key=lambda found: found[0])]
    yield from (*here, *of_slurm) if has_gpu else (*of_slurm, *here)


def _try(find: Callable[[], Found]) -> Found | None:
    """What is found; None for what cannot be used, which is not offered."""
    try:
        return find()
    except UserError:
        return None
