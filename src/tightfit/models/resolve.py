"""A model's name to its ModelSpec: a path, a catalogue name, a cached hub id, or a size."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from tightfit.core.errors import InvalidInputError, NotFoundError, UserError
from tightfit.core.reading import describe_kind, read_text
from tightfit.core.text import did_you_mean, printable
from tightfit.core.units import KIB
from tightfit.models.catalogue import (
    CatalogueRow,
    find_alias,
    find_base,
    find_exact,
    list_models,
    load_row,
    search_models,
)
from tightfit.models.config import forbidden, read_config, read_config_file
from tightfit.models.families.registry import read_generic
from tightfit.models.family import Reader
from tightfit.models.gguf import read_gguf_model
from tightfit.models.spec import ModelSpec

# Models that Hugging Face's own tools have already put on this disk. Never asks the network.

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def locate_hub_cache() -> Path | None:
    """Where hub downloads land, by the hub library's own rules."""
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        value = os.environ.get(variable)
        if value:
            return Path(value).expanduser() / below
    try:
        return Path.home() / ".cache/huggingface/hub"
    except RuntimeError:  # a user id without a home
        return None


def find_in_hub_cache(name: str, cache: Path | None) -> Path | None:
    """The snapshot folder of a hub id: that of `main`, else the newest that has a config."""
    if cache is None or len(name) > 200 or ".." in name or not _HUB_ID.fullmatch(name):
        return None
    home = cache / f"models--{name.replace('/', '--')}"
    try:
        named = home / "snapshots" / read_text(home / "refs" / "main", most_bytes=KIB).strip()
        if (named / "config.json").is_file():
            return named
    except (OSError, ValueError):
        pass  # no such ref; another revision may be there
    try:
        snapshots = [path.parent for path in home.glob("snapshots/*/config.json")]
        return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None


# A model known only by its size: `7e9-params`, `1B-params`. Shapes are assumed, and said to be.

_NUMBER = r"([0-9]{1,40}(?:\.[0-9]{1,40})?(?:e\+?[0-9]{1,3})?)\s*([kmbt]?)"
_SIZE = re.compile(_NUMBER + r"[\s_-]*params?", re.IGNORECASE)
_BARE_SIZE = re.compile(_NUMBER, re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
ASPECT = 128
"""Hidden width per layer of the GPT-3 and Llama families. Source: arXiv:2005.14165 table 2.1."""
HEAD_DIM = 128
VOCABULARY = 32_000
MIN_PARAMS = 10**7
MAX_PARAMS = 10**13


def read_synthetic(name: str) -> ModelSpec | None:
    """A Llama-shaped model of the size that `name` states; None where it states none.

    The count is exact: what whole layers leave over is put outside them.
    """
    match = _SIZE.fullmatch(name.strip())
    if match is None:
        return None
    stated = float(match[1]) * _FACTORS[match[2].lower()]
    if not MIN_PARAMS <= stated <= MAX_PARAMS:
        raise InvalidInputError(
            f"`{printable(name)}`: a model has 10 million to 10 trillion parameters.",
            remedy="state a size between, like 350M-params, 7B-params or 1.2T-params",
        )
    num_params = round(stated)
    spec = _largest_below(num_params, printable(name.strip()))
    left_over = num_params - spec.num_params
    return spec.model_copy(update={"outer_params": spec.outer_params + left_over})


def suggest_size(name: str) -> str | None:
    """`7B-params` for `7B`: how to plan for a size alone; None for any other name."""
    match = _BARE_SIZE.fullmatch(name.strip())
    if (
        match is None
        or not MIN_PARAMS <= float(match[1]) * _FACTORS[match[2].lower()] <= MAX_PARAMS
    ):
        return None
    return f"{match[1]}{match[2].upper()}-params"


def _largest_below(num_params: int, name: str) -> ModelSpec:
    hidden = max(HEAD_DIM, round((num_params * ASPECT / 12) ** (1 / 3) / HEAD_DIM) * HEAD_DIM)
    while True:
        layers = max(1, (num_params - 2 * VOCABULARY * hidden) // (12 * hidden * hidden))
        spec = read_config(
            {
                "model_type": "llama",
                "hidden_size": hidden,
                "intermediate_size": 8 * hidden // 3,
                "num_hidden_layers": layers,
                "num_attention_heads": hidden // HEAD_DIM,
                "num_key_value_heads": hidden // HEAD_DIM,
                "vocab_size": VOCABULARY,
                "tie_word_embeddings": False,
            },
            name=name,
            source=f"assumed from a size of {num_params:,} parameters",
        )
        if spec.num_params <= num_params or hidden == HEAD_DIM:
            warning = (
                f"only the size is known: {layers} Llama-like layers of width {hidden} are assumed"
            )
            return spec.model_copy(update={"warnings": (*spec.warnings, warning)})
        hidden -= HEAD_DIM


__all__ = ["CatalogueRow", "list_models", "resolve_model", "search_models"]

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")


def resolve_model(
    name: str, *, hub_cache: Path | None = None, read_unknown: Reader = read_generic
) -> ModelSpec:
    """Find a model by path, catalogue name, alias, cached hub id or mere size, in this order.

    Reads no weights and asks no network. `read_unknown` reads the config of a family that has no
    reader. Raises NotFoundError or InvalidInputError.
    """
    if not name.strip():
        raise NotFoundError("No model was named.", remedy="tightfit models")
    error: UserError | None = None
    try:
        on_disk = _read_path(name, read_unknown)
        if on_disk is not None:
            return on_disk
    except NotFoundError as not_a_model:
        error = not_a_model  # a folder without a model may share its name with one we know
    known = _read_known(name, hub_cache or locate_hub_cache(), read_unknown)
    if known is not None:
        return known
    sized = read_synthetic(name)
    if sized is not None:
        return sized
    raise error or _unknown(name)


def _read_known(name: str, cache: Path | None, read_unknown: Reader) -> ModelSpec | None:
    rows = list_models()
    row = find_exact(name, rows)
    if row is None:
        snapshot = find_in_hub_cache(name, cache)
        if snapshot is not None:
            return _read_folder(snapshot, read_unknown, name=name)
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


def _read_path(name: str, read_unknown: Reader) -> ModelSpec | None:
    try:
        path = Path(name).expanduser()
        mode = path.stat().st_mode
    except PermissionError as error:
        raise forbidden(Path(name), error) from error
    except (OSError, ValueError, RuntimeError):  # nothing there, too long, an unknown ~user
        return None
    if stat.S_ISDIR(mode):
        return _read_folder(path, read_unknown, name=path.resolve().name or name)
    kind = describe_kind(mode)
    if kind is None and path.suffix.lower() == ".gguf":
        return read_gguf_model(path)
    if kind is None and path.suffix.lower() == ".json":
        title = path.resolve().parent.name or path.name
        return read_config_file(path, name=title, read_unknown=read_unknown)
    raise InvalidInputError(
        f"{printable(name, most=400)} is {kind + ', ' if kind else ''}not a model.",
        remedy="name a folder with config.json, a config.json, or a .gguf file",
    )


def _has(folder: Path, name: str) -> bool:
    """Whether the folder holds this name, be it readable or not; a broken link counts."""
    try:
        (folder / name).lstat()
    except PermissionError as error:
        raise forbidden(folder, error) from error
    except OSError:
        return False
    return True


def _read_folder(folder: Path, read_unknown: Reader, *, name: str) -> ModelSpec:
    if _has(folder, "config.json"):
        spec = read_config_file(folder / "config.json", name=name, read_unknown=read_unknown)
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
    except OSError as error:
        raise forbidden(folder, error) from error
    if len(ggufs) == 1:
        return read_gguf_model(ggufs[0])
    if ggufs:
        raise InvalidInputError(
            f"{folder} holds {len(ggufs)} GGUF files.", remedy=f"name one of them: {ggufs[0]}"
        )
    raise NotFoundError(
        f"The folder {folder} has no config.json and no .gguf file.",
        remedy="name a folder that holds a model, or see: tightfit models",
    )


def measure_weights(folder: Path) -> int | None:
    """Bytes of a file, or of the weights in a folder, safetensors before older formats."""
    if folder.is_file():
        return folder.stat().st_size
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


def _unknown(name: str) -> NotFoundError:
    names = [row.model for row in list_models()]
    tails = {model.rpartition("/")[2]: model for model in names}
    hint = did_you_mean(name[:200], names if "/" in name else tails)
    sized = suggest_size(name)
    remedy = "tightfit models    (lists every name of the catalogue)"
    return NotFoundError(
        f"No model `{printable(name, most=100)}`: no such path, not in the catalogue, "
        f"not in the hub cache.{hint}",
        remedy=f"write {sized} for any model of that size, or {remedy}" if sized else remedy,
    )
