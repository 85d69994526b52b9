"""From what a user calls a model to its ModelSpec: a path, a catalogue name, a cached hub id."""

from __future__ import annotations

from pathlib import Path

from tightfit.core.errors import InvalidInputError, NotFoundError, UserError
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
from tightfit.models.synthetic import read_synthetic

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
    warning = f"`{name}` is not in the catalogue; the shapes are those of `{base.model}`."
    return spec.model_copy(update={"warnings": (*spec.warnings, warning)})


def _read_path(name: str) -> ModelSpec | None:
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return _read_folder(path, name=path.resolve().name or name)
        if not path.is_file():
            return None
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, an unknown ~user
        return None
    if path.suffix.lower() == ".gguf":
        return _read_gguf(path)
    if path.suffix.lower() == ".json":
        return read_config_file(path, name=path.resolve().parent.name or path.name)
    raise InvalidInputError(
        f"{path} is not a model.",
        remedy="name a folder with config.json, a config.json, or a .gguf file",
    )


def _read_folder(folder: Path, *, name: str) -> ModelSpec:
    config = folder / "config.json"
    if config.is_file():
        spec = read_config_file(config, name=name)
        return spec.model_copy(update={"file_bytes": measure_weights(folder)})
    if (folder / "adapter_config.json").is_file():
        raise InvalidInputError(
            f"{folder} holds an adapter, not a model.", remedy="name the base model it was made for"
        )
    if (folder / "params.json").is_file():
        raise InvalidInputError(
            f"{folder} is in Meta's original format (params.json).",
            remedy="convert it to the Hugging Face format first, or name it from `tightfit models`",
        )
    ggufs = sorted(folder.glob("*.gguf"))
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
    shown = name if len(name) <= 100 else name[:97] + "..."
    return NotFoundError(
        f"No model `{shown}`: no such path, not in the catalogue, not in the hub cache.{hint}",
        remedy="tightfit models WORD    (search by a part of the name)",
    )
