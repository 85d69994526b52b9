"""From a model's name to the folder its weights, config and tokenizer lie in. No network, ever."""

from __future__ import annotations

import json
from pathlib import Path

from tightfit.core.errors import InvalidInputError, NotFoundError
from tightfit.core.faults import printable
from tightfit.models.aliases import find_alias, find_base, find_exact
from tightfit.models.catalogue import list_models
from tightfit.models.hub_cache import find_in_hub_cache, locate_hub_cache
from tightfit.models.resolve import resolve_model
from tightfit.models.synthetic import read_synthetic
from tightfit.runtime.import_models import has_old_tokenizer, import_gguf, import_tokenizer
from tightfit.runtime.weight_files import check_weights, has_weights


def locate_model(name: str, *, needs_weights: bool = True) -> Path:
    """A folder with config.json, whole weights and tokenizer.json.

    `name` is a folder, a finished full-tuning run, a GGUF file, or a hub id that
    is in the local cache. Without `needs_weights` config.json alone will do.
    """
    if not name.strip():
        raise NotFoundError("No model was named.", remedy="tightfit models")
    path = _as_path(name)
    if path is not None and path.is_dir():
        return _open_folder(path, needs_weights=needs_weights)
    if path is not None and path.suffix.lower() == ".gguf":
        return import_gguf(path)
    if path is not None and path.name == "config.json":
        return _open_folder(path.parent, needs_weights=needs_weights)
    if path is not None:
        raise InvalidInputError(
            f"{printable(name, most=400)} is not a model.",
            remedy="name a folder with config.json and weights, or a .gguf file",
        )
    cached = _find_cached(name)
    if cached is None:
        raise _not_here(name)
    return _open_folder(cached, needs_weights=needs_weights)


def _as_path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, an unknown ~user
        return None


def _open_folder(folder: Path, *, needs_weights: bool) -> Path:
    if (folder / "plan.json").is_file():
        return _open_run(folder, needs_weights=needs_weights)
    if (folder / "adapter_config.json").is_file() and not has_weights(folder):
        raise InvalidInputError(
            f"{folder} holds an adapter, not a model.",
            remedy=f"name its base model: {_base_of(folder)}",
        )
    if not (folder / "config.json").is_file() or (needs_weights and not has_weights(folder)):
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return import_gguf(ggufs[0])
        if ggufs or not (folder / "config.json").is_file():
            resolve_model(str(folder))  # says what the folder holds instead
            raise NotFoundError(
                f"{folder} holds {len(ggufs)} GGUF files and no other weights.",
                remedy=f"name one of them: {ggufs[0]}",
            )
    if not needs_weights:
        return folder
    check_weights(folder)
    return with_tokenizer(folder)


def with_tokenizer(folder: Path) -> Path:
    """The folder that the tokenizer is read from: this one, or what was imported from it."""
    if (folder / "tokenizer.json").is_file():
        return folder
    if has_old_tokenizer(folder):
        return import_tokenizer(folder)
    raise NotFoundError(
        f"{folder} has no tokenizer.",
        remedy="put the model's tokenizer.json and tokenizer_config.json there",
    )


def _open_run(run: Path, *, needs_weights: bool) -> Path:
    if (run / "model" / "config.json").is_file():
        return _open_folder(run / "model", needs_weights=needs_weights)
    if (run / "adapter" / "adapter_config.json").is_file():
        raise InvalidInputError(
            f"{run} is a run that trained an adapter; it holds no whole model.",
            remedy=f"name its base model: {_base_of(run / 'adapter')}",
        )
    raise NotFoundError(
        f"{run} is a run that has not left a model yet.",
        remedy="finish it with the command that started it, or name its base model",
    )


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads((adapter / "adapter_config.json").read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    return str(base) if base else "see its adapter_config.json"


def _find_cached(name: str) -> Path | None:
    """The hub cache's snapshot of this id, or of the catalogue's row that the name means."""
    cache = locate_hub_cache()
    rows = list_models()
    exact = find_exact(name, rows)
    found = find_in_hub_cache(exact.model if exact else name, cache)
    if found is not None or exact is not None:
        return found
    row = find_alias(name, rows)
    return None if row is None else find_in_hub_cache(row.model, cache)


def _not_here(name: str) -> NotFoundError:
    """Known but not on this disk, or not known at all."""
    rows = list_models()
    row = find_exact(name, rows) or find_alias(name, rows)
    if row is None and find_base(name, rows) is None:
        if read_synthetic(name) is not None:
            return NotFoundError(
                f"`{printable(name)}` is a size, not a model that could be trained.",
                remedy="name a model: tightfit models",
            )
        resolve_model(name)  # says what was looked for, and what was perhaps meant
    hub_id = row.model if row is not None else name
    return NotFoundError(
        f"The weights of {printable(hub_id)} are not on this machine; only its shapes are known.",
        remedy=f"hf download {hub_id}    (where there is internet; copy the folder here and name "
        "it by its path, or keep it in HF_HOME)",
    )
