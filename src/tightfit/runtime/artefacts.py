"""From a user's name to an artefact: a run, an adapter, a model folder or a GGUF file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.strategy import Method, Strategy
from tightfit.runs.run_folder import RunFolder
from tightfit.runtime.model_files import import_gguf_tokenizer, locate_model


class ArtefactKind(str, Enum):
    """The format of the weights on disk."""

    MODEL = "model"
    """A Hugging Face folder with plain weights."""
    ADAPTER = "adapter"
    """peft's format; names its base model."""
    GPTQ = "gptq"
    BITSANDBYTES = "bitsandbytes"
    """A Hugging Face folder with nf4 or int8 weights."""
    GGUF = "gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """One model that can be loaded."""

    name: str
    """As the user wrote it."""
    kind: ArtefactKind
    path: Path
    """The folder or file of the artefact itself; of an adapter its own folder."""
    base: Path | None = None
    """Of an adapter: the folder of the model it was trained on."""
    tokenizer: Path
    """A folder with tokenizer.json and what belongs to it."""
    template: str | None = None
    """A template named in the run's recipe. None: the tokenizer's own."""
    strategy: Strategy | None = None
    """The strategy of the run that made it."""
    run: RunFolder | None = None


def find_artefact(name: str) -> Artefact:
    """The artefact that `name` refers to; checks its files, loads nothing. No network."""
    path = Path(name).expanduser()
    run = RunFolder(path=path)
    if run.is_run():
        return _from_run(name, run)
    if (path / "adapter_config.json").is_file():
        return _from_adapter(name, path)
    gguf = _find_gguf(path)
    if gguf is not None:
        return Artefact(
            name=name, kind=ArtefactKind.GGUF, path=gguf, tokenizer=import_gguf_tokenizer(gguf)
        )
    folder = locate_model(name)
    return Artefact(name=name, kind=_kind_of(folder), path=folder, tokenizer=folder)


def _find_gguf(path: Path) -> Path | None:
    """The file itself, or the only one of a folder that holds no other weights."""
    if path.suffix.lower() == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = sorted(path.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def _kind_of(folder: Path) -> ArtefactKind:
    stated = _read(folder / "config.json").get("quantization_config")
    if not isinstance(stated, dict):
        return ArtefactKind.MODEL
    method = str(stated.get("quant_method", "")).lower()
    if method in ("gptq", "auto-round", "auto_round"):
        return ArtefactKind.GPTQ
    if method == "bitsandbytes":
        return ArtefactKind.BITSANDBYTES
    raise InvalidInputError(
        f"{folder} is quantized with {method or 'an unnamed method'}, which no engine here reads.",
        remedy="name the model it was made from, or a GPTQ, bitsandbytes or GGUF version of it",
    )


def _from_run(name: str, run: RunFolder) -> Artefact:
    plan = run.read_plan()
    if plan.training is None:
        raise InvalidInputError(
            f"{run.path} holds a plan that was never prepared to run.",
            remedy=f"tightfit train {run.plan_path}",
        )
    is_adapter = plan.strategy.method is Method.LORA
    tuned = run.adapter_path if is_adapter else run.model_path
    if not (tuned / ("adapter_config.json" if is_adapter else "config.json")).is_file():
        raise NotFoundError(
            f"{run.path} has not left a tuned {'adapter' if is_adapter else 'model'} yet.",
            remedy="finish the run with the command that started it, then try again",
        )
    base = locate_model(plan.training.model_path) if is_adapter else None
    # The result has the template it was trained with; if it was lost, the plan names it.
    is_alone = base is None or (tuned / "tokenizer.json").is_file()
    return Artefact(
        name=name,
        kind=ArtefactKind.ADAPTER if is_adapter else ArtefactKind.MODEL,
        path=tuned,
        base=base,
        tokenizer=tuned if is_alone or base is None else base,
        template=None if is_alone else plan.training.template,
        strategy=plan.strategy,
        run=run,
    )


def _from_adapter(name: str, folder: Path) -> Artefact:
    parent = RunFolder(path=folder.parent)
    if folder.name == parent.adapter_path.name and parent.is_run():
        return _from_run(name, parent)
    base = _find_base(folder)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    return Artefact(
        name=name,
        kind=ArtefactKind.ADAPTER,
        path=folder,
        base=base,
        tokenizer=folder if has_tokenizer else base,
    )


def _find_base(adapter: Path) -> Path:
    name = _base_name(adapter)
    try:
        return locate_model(name)
    except NotFoundError as error:
        raise NotFoundError(
            f"The adapter {adapter} was trained on {name}, which is not on this machine.",
            remedy=f"put the base model there, or write its folder as base_model_name_or_path into "
            f"{adapter / 'adapter_config.json'}",
        ) from error


def _base_name(adapter: Path) -> str:
    path = adapter / "adapter_config.json"
    name = _read(path).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InvalidInputError(
            f"{path} does not name the adapter's base model.",
            remedy='add "base_model_name_or_path": "FOLDER OR HUB ID" to it',
        )
    return name


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
