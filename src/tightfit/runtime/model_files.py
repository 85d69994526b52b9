"""From a model's name to the folder with its weights, config and tokenizer. No network.

Weight files are checked; GGUF files and slow tokenizers are converted once, into the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, UserError, first_line
from tightfit.core.files import atomic_folder, cache_folder
from tightfit.core.units import render_bytes
from tightfit.core.validation import printable
from tightfit.models.catalogue import find_alias, find_base, find_exact, list_models
from tightfit.models.gguf import read_gguf_model
from tightfit.models.resolve import (
    find_in_hub_cache,
    locate_hub_cache,
    read_synthetic,
    resolve_model,
)
from tightfit.runtime.libraries import silence_libraries

if TYPE_CHECKING:
    import torch


# Weight files

_LFS_START = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
_MAX_LISTED = 5


def has_weights(folder: Path) -> bool:
    """Whether the folder has a file that transformers would load, complete or not."""
    return bool(_list_candidates(folder))


def list_weight_files(folder: Path) -> list[Path]:
    """The files that transformers would load, an index first and then its shards."""
    candidates = _list_candidates(folder)
    if not candidates or candidates[0].suffix != ".json":
        return candidates[:1]
    try:
        weight_map = json.loads(candidates[0].read_bytes())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        names = []
    return [candidates[0], *(folder / name for name in names)]


def check_weights(folder: Path) -> None:
    """Raise if weights are missing, truncated, or lack a tensor; lists all problems."""
    candidates = _list_candidates(folder)
    if not candidates:
        raise NotFoundError(
            f"{folder} has a config.json and no weights.",
            remedy="put model.safetensors there, or name a folder that has it",
        )
    main = candidates[0]
    problems = _check_index(main) if main.suffix == ".json" else _check_files([main])
    if problems:
        shown = "; ".join(problems[:_MAX_LISTED])
        more = len(problems) - _MAX_LISTED
        raise InvalidInputError(
            f"The weights in {folder} are not whole: {shown}"
            f"{f'; and {more} more problems' if more > 0 else ''}.",
            remedy="fetch the model again; `hf download` resumes",
        )


def _list_candidates(folder: Path) -> list[Path]:
    """In the order of transformers: one safetensors file, their index, then pickles."""
    names = (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    )
    return [folder / name for name in names if _is_named(folder / name)]


def _is_named(path: Path) -> bool:
    return path.is_file() or path.is_symlink()  # a dangling link is a broken download


def _check_index(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        homes = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{index.name} cannot be read as an index of shards ({error!r})"]
    files = [index.parent / name for name in sorted(set(homes.values()))]
    problems = _check_files(files)
    if problems or files[0].suffix != ".safetensors":
        return problems
    stored = {path.name: set(read_safetensors_header(path)[1]) for path in files}
    lost = [name for name, file in sorted(homes.items()) if name not in stored[file]]
    return [f"{homes[name]} lacks the tensor {name}" for name in lost]


def _check_files(files: list[Path]) -> list[str]:
    problems = []
    for path in files:
        problem = (
            find_safetensors_error(path)
            if path.suffix == ".safetensors"
            else _find_pickle_error(path)
        )
        if problem is not None:
            problems.append(f"{path.name} {problem}")
    return problems


def find_safetensors_error(path: Path) -> str | None:
    """What is wrong with a safetensors file, as the end of a sentence; None if nothing."""
    problem = _find_common_error(path)
    if problem is not None:
        return problem
    try:
        start, tensors = read_safetensors_header(path)
        ends = [entry["data_offsets"][1] for entry in tensors.values()]
    except (OSError, ValueError, KeyError, IndexError, TypeError, struct.error):
        return "is no safetensors file, or is cut short in its header"
    expected = start + max(ends, default=0)
    found = path.stat().st_size
    if found < expected:
        return f"is cut short: {render_bytes(found)} of {render_bytes(expected)}"
    return None


def _find_pickle_error(path: Path) -> str | None:
    problem = _find_common_error(path)
    if problem is not None:
        return problem
    with path.open("rb") as stream:
        is_zip = stream.read(2) == b"PK"
    # A zip's directory is at its end: a truncated file has none. Older pickles are no zips.
    return "is cut short" if is_zip and not zipfile.is_zipfile(path) else None


def _find_common_error(path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_LFS_START))
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({(error.strerror or str(error)).lower()})"
    if start == _LFS_START:
        return "is a Git LFS pointer, not the file itself (git lfs pull)"
    return None if start else "is empty"


def read_safetensors_header(path: Path) -> tuple[int, dict[str, Any]]:
    """The byte at which values start, and each tensor's dtype, shape and data_offsets."""
    with path.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        if size > _MAX_HEADER_BYTES:
            raise ValueError("header too long")
        header = json.loads(stream.read(size))
    return 8 + size, {name: entry for name, entry in header.items() if name != "__metadata__"}


# Tokenizer files

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files that a model made from this one needs: tokenizer, chat template, stop tokens."""
CHAT_TEMPLATES_FOLDER = "additional_chat_templates"
"""A folder of named templates. Source: transformers `tokenization_utils_base.py`."""
_SENTENCEPIECE = ("tokenizer.model", "spiece.model")


def copy_tokenizer_files(source: Path, target: Path) -> list[Path]:
    """Copy those that exist; returns the copies."""
    copies = []
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            copies.append(_copy(source / name, target / name))
    for path in sorted((source / CHAT_TEMPLATES_FOLDER).glob("*.jinja")):
        (target / CHAT_TEMPLATES_FOLDER).mkdir(exist_ok=True)
        copies.append(_copy(path, target / CHAT_TEMPLATES_FOLDER / path.name))
    return copies


def copy_tuned_tokenizer_files(tuned: Path, base: Path, target: Path) -> list[Path]:
    """Copy the tuned model's files, and of the base's only those that cannot contradict them."""
    copies = copy_tokenizer_files(tuned, target)
    if tuned == base:
        return copies
    lacking = ["generation_config.json"]
    if _same_content(tuned / "tokenizer.json", base / "tokenizer.json"):
        lacking += _SENTENCEPIECE
    for name in lacking:
        if not (target / name).exists() and (base / name).is_file():
            copies.append(_copy(base / name, target / name))
    return copies


def _copy(source: Path, target: Path) -> Path:
    shutil.copyfile(source, target)
    return target


def _same_content(one: Path, other: Path) -> bool:
    try:
        return one.read_bytes() == other.read_bytes()
    except OSError:
        return False


# Other formats, converted into the cache

LARGE_MODEL_PARAMS = 2_000_000_000
"""Larger models are dequantized to bf16 instead of fp32, to save disk space."""
_SAMPLE_BYTES = 4 << 20
_SLOW_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def import_gguf(path: Path) -> Path:
    """The Hugging Face folder of a GGUF file, dequantized; made on the first call."""
    home = _gguf_cache_folder(path)
    if (home / "config.json").is_file():
        return home
    num_params = read_gguf_model(path).num_params  # raises for a truncated file
    is_large = num_params > LARGE_MODEL_PARAMS
    _check_room(home, num_params * (2 if is_large else 4))
    _make_once(home, lambda folder: _write_gguf(path, folder, is_large=is_large))
    return home


def import_gguf_tokenizer(path: Path) -> Path:
    """A folder with the tokenizer and template of a GGUF file; does not read its weights."""
    unpacked = _gguf_cache_folder(path)
    if (unpacked / "tokenizer.json").is_file():
        return unpacked
    home = unpacked.with_name(f"{unpacked.name}-tokenizer")
    if not (home / "tokenizer.json").is_file():
        read_gguf_model(path)  # raises for a truncated file
        _make_once(home, lambda folder: _write_gguf_tokenizer(path, folder))
    return home


def _gguf_cache_folder(path: Path) -> Path:
    """The cache folder of the converted model. Raise the number when the conversion changes."""
    return cache_folder() / "models" / f"gguf-2-{_digest(path)}"


def import_tokenizer(folder: Path) -> Path:
    """A folder with links to this one's files and a tokenizer.json made from its slow tokenizer."""
    stamp = [str(folder.resolve())]
    for name in _SLOW_TOKENIZERS:
        if (folder / name).is_file():
            stat = (folder / name).stat()
            stamp.append(f"{name} {stat.st_size} {stat.st_mtime_ns}")
    key = hashlib.sha256("\n".join(stamp).encode()).hexdigest()[:16]
    home = cache_folder() / "models" / f"tokenizer-{key}"
    if not (home / "tokenizer.json").is_file():
        _make_once(home, lambda new: _write_tokenizer(folder, new))
    _link_files(folder, home)
    return home


def has_slow_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer that can be turned into a tokenizer.json."""
    return any((folder / name).is_file() for name in _SLOW_TOKENIZERS)


def _digest(path: Path) -> str:
    """Of the size, the start (metadata and shapes) and the end, to avoid reading all of it."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_SAMPLE_BYTES))
        stream.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(stream.read())
    return digest.hexdigest()[:16]


def _make_once(home: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder under a temporary name, then rename it; another process may be faster."""
    try:
        with atomic_folder(home, is_shared=True) as work:
            fill(work)
    except OSError as error:
        if not home.is_dir():
            raise _cannot_write(home, error) from error


def _cannot_write(home: Path, error: OSError) -> SetupError:
    return SetupError(
        f"Cannot write the converted model to {home}: {error.strerror or error}.",
        remedy="set TIGHTFIT_CACHE to a folder that is writable and has free space",
    )


def _check_room(home: Path, needed_bytes: int) -> None:
    existing = next(parent for parent in home.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes * 1.05:
        raise SetupError(
            f"The model takes {render_bytes(needed_bytes)} once unpacked; {existing} has "
            f"{render_bytes(free)} free.",
            remedy="set TIGHTFIT_CACHE to a folder with more space",
        )


def _write_gguf(path: Path, folder: Path, *, is_large: bool) -> None:
    import torch

    _require_gguf(path)
    from tightfit.runtime.gguf.config import is_known
    from tightfit.runtime.gguf.file import GgufFile
    from tightfit.runtime.gguf.unpack import fill_unpacked, plan_unpack

    dtype = torch.bfloat16 if is_large else torch.float32
    if is_known(GgufFile(path)):
        fill_unpacked(plan_unpack(path, dtype), folder)
    else:
        _write_by_transformers(path, folder, dtype)


def _write_by_transformers(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """For families that our own reader does not support."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    silence_libraries()
    options = {"gguf_file": path.name, "local_files_only": True}
    # With GgufConfig transformers keeps matrices quantized by default; before, it dequantized.
    packing = getattr(transformers, "GgufConfig", None)
    extra = {} if packing is None else {"quantization_config": packing(dequantize=True)}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting disables
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(path.parent), dtype=dtype, **options, **extra
            )
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **options)
    except (ImportError, ValueError, KeyError, RuntimeError, OSError) as error:
        raise _unconvertible(path, error) from error
    model.hf_quantizer = None  # or saving would write quantization settings
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _write_gguf_tokenizer(path: Path, folder: Path) -> None:
    _require_gguf(path)
    from tightfit.runtime.gguf.config import is_known
    from tightfit.runtime.gguf.file import GgufFile
    from tightfit.runtime.gguf.tokenizer import read_special_tokens
    from tightfit.runtime.gguf.unpack import write_tokenizer_folder

    file = GgufFile(path)
    if is_known(file):
        write_tokenizer_folder(file, read_special_tokens(file), folder)
        return
    from transformers import AutoTokenizer

    silence_libraries()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(
                str(path.parent), gguf_file=path.name, local_files_only=True
            )
    except (ImportError, ValueError, KeyError, RuntimeError, OSError) as error:
        raise _unconvertible(path, error) from error
    tokenizer.save_pretrained(str(folder))


def _require_gguf(path: Path) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise _unconvertible(path, error) from error


def _unconvertible(path: Path, error: Exception) -> UserError:
    if isinstance(error, ImportError):
        return SetupError(
            f"Unpacking {path.name} needs a package that is missing: {first_line(error)}.",
            remedy="pip install gguf",
        )
    return InvalidInputError(
        f"transformers cannot unpack {path}: {first_line(error)}.",
        remedy="name the model's own folder (config.json and safetensors) instead",
    )


def _write_tokenizer(folder: Path, new: Path) -> None:
    from transformers import AutoTokenizer

    silence_libraries()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        tokenizer.save_pretrained(str(new))
    except Exception as error:  # a converter per family, each with problems of its own
        raise InvalidInputError(
            f"The tokenizer of {folder} cannot be converted: {first_line(error)}.",
            remedy="pip install sentencepiece tiktoken protobuf, or put a tokenizer.json there",
        ) from error
    if not (new / "tokenizer.json").is_file():
        raise InvalidInputError(
            f"The tokenizer of {folder} has no fast form, which training needs.",
            remedy="put a tokenizer.json there",
        )


def _link_files(folder: Path, home: Path) -> None:
    """Link everything but the tokenizer."""
    for path in folder.iterdir():
        link = home / path.name
        if path.is_file() and not link.exists():
            link.unlink(missing_ok=True)  # a dangling link
            link.symlink_to(path.resolve())


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
    if has_slow_tokenizer(folder):
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
