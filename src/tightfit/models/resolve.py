"""From what a user calls a model to its ModelSpec: a path, a catalogue name, a cached hub id."""

from __future__ import annotations

import stat
from pathlib import Path

from tightfit.core.errors import (
    EnvironmentFaultError,
    InvalidInputError,
    NotFoundError,
    UserError,
)
from tightfit.core.faults import printable
from tightfit.core.files import describe_kind
from tightfit.core.suggest import did_you_mean
from tightfit.models.aliases import find_alias, find_base, find_exact
from tightfit.models.catalogue import (
    CatalogueRow,
    list_models,
    load_row,
    search_models,
)
from tightfit.models.config import read_config_file
from tightfit.models.hub_cache import find_in_hub_cache, locate_hub_cache
from tightfit.models.spec import ModelSpec
from tightfit.models.synthetic import read_synthetic, suggest_size

__all__ = ["CatalogueRow", "list_models", "resolve_model", "search_models"]

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")


def resolve_model(name: str, *, hub_cache: Path | None = None) -> ModelSpec:
    """Find a model by path, catalogue name, alias, cached hub id or mere size, in this order.

    Reads no weights and asks no network. Raises NotFoundError or InvalidInputError.
    """
    if not name.strip():
        raise NotFoundError("No model was named.", remedy="tightfit models")
    fault: UserError | None = None
    try:
        on_disk = _read_path(name)
        if on_disk is not None:
            return on_disk
    except NotFoundError as not_a_model:
        fault = not_a_model  # a folder without a model may share its name with one we know
    known = _read_known(name, hub_cache or locate_hub_cache())
    if known is not None:
        return known
    sized = read_synthetic(name)
    if sized is not None:
        return sized
    raise fault or _unknown(name)


def _read_known(name: str, cache: Path | None) -> ModelSpec | None:
    rows = list_models()
    row = find_exact(name, rows)
    if row is None:
        snapshot = find_in_hub_cache(name, cache)
        if snapshot is not None:
            return _read_folder(snapshot, name=name)
        row = find_alias(name, rows)
    if row is not None:
        return load_row(row)
    base = find_base(name, rows)
    if base is None:
        return None
    spec = load_row(base)
    warning = (
        f"`{printable(name)}` is not in the catalogue; the shapes are those of `{base.model}`."
    )
    return spec.model_copy(update={"warnings": (*spec.warnings, warning)})


def _read_path(name: str) -> ModelSpec | None:
    try:
        path = Path(name).expanduser()
        mode = path.stat().st_mode
    except PermissionError as fault:
        raise _forbidden(name, fault) from fault
    except (OSError, ValueError, RuntimeError):  # nothing there, too long, an unknown ~user
        return None
    if stat.S_ISDIR(mode):
        return _read_folder(path, name=path.resolve().name or name)
    kind = describe_kind(mode)
    if kind is None and path.suffix.lower() == ".gguf":
        return _read_gguf(path)
    if kind is None and path.suffix.lower() == ".json":
        return read_config_file(path, name=path.resolve().parent.name or path.name)
    raise InvalidInputError(
        f"{printable(name, most=400)} is {kind + ', ' if kind else ''}not a model.",
        remedy="name a folder with config.json, a config.json, or a .gguf file",
    )


def _forbidden(name: str, fault: OSError) -> EnvironmentFaultError:
    return EnvironmentFaultError(
        f"Cannot read {printable(name, most=400)}: {(fault.strerror or str(fault)).lower()}.",
        remedy="ask its owner for permission to read the folder and its files",
    )


def _has(folder: Path, name: str) -> bool:
    """Whether the folder holds this name, be it readable or not; a broken link counts."""
    try:
        (folder / name).lstat()
    except PermissionError as fault:
        raise _forbidden(str(folder), fault) from fault
    except OSError:
        return False
    return True


def _read_folder(folder: Path, *, name: str) -> ModelSpec:
    if _has(folder, "config.json"):
        spec = read_config_file(folder / "config.json", name=name)
        return spec.model_copy(update={"file_bytes": measure_weights(folder)})
    if _has(folder, "adapter_config.json"):
        raise InvalidInputError(
            f"{folder} holds an adapter, not a model.", remedy="name the base model it was made for"
        )
    if _has(folder, "params.json"):
        raise InvalidInputError(
            f"{folder} is in Meta's original format (params.json).",
            remedy="convert it to the Hugging Face format first, or name it from `tightfit models`",
        )
    try:
        ggufs = sorted(item for item in folder.iterdir() if item.suffix.lower() == ".gguf")
    except OSError as fault:
        raise _forbidden(str(folder), fault) from fault
    if len(ggufs) == 1:
        return _read_gguf(ggufs[0])
    if ggufs:
        raise InvalidInputError(
            f"{folder} holds {len(ggufs)} GGUF files.", remedy=f"name one of them: {ggufs[0]}"
        )
    raise NotFoundError(
        f"The folder {folder} has no config.json and no .gguf file.",
        remedy="name a folder that holds a model, or see: tightfit models",
    )


def measure_weights(folder: Path) -> int | None:
    """Bytes of the weights in a folder, safetensors before older formats; None without any."""
    for pattern in _WEIGHTS:
        try:
            sizes = [
                path.stat().st_size
                for path in folder.glob(pattern)
                if not path.name.startswith(_NOT_WEIGHTS)
            ]
        except OSError:
            return None
        if sizes:
            return sum(sizes)
    return None


def _read_gguf(path: Path) -> ModelSpec:
    from tightfit.models.gguf_spec import read_gguf_model

    return read_gguf_model(path)


def _unknown(name: str) -> NotFoundError:
    names = [row.model for row in list_models()]
    tails = {model.rpartition("/")[2]: model for model in names}
    hint = did_you_mean(name[:200], names if "/" in name else tails)
    sized = suggest_size(name)
    remedy = "tightfit models WORD    (search by a part of the name)"
    return NotFoundError(
        f"No model `{printable(name, most=100)}`: no such path, not in the catalogue, "
        f"not in the hub cache.{hint}",
        remedy=f"write {sized} for any model of that size, or {remedy}" if sized else remedy,
    )
