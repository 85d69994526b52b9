"""From a user's name to the files of a model or an artefact: run, adapter, model folder, GGUF file.

No network. Weight files are checked; GGUF files and slow tokenizers are converted once, into the
cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import MXFP4
from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, first_line
from tightfit.core.files import atomic_folder, cache_folder, describe_write_error
from tightfit.core.packages import require_packages
from tightfit.core.reading import read_json_file
from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy
from tightfit.core.text import printable
from tightfit.data.slow_tokenizer import SLOW_TOKENIZERS, check_slow_tokenizer
from tightfit.models.catalogue import find_alias, find_base, find_exact, is_gated, list_models
from tightfit.models.gguf import read_gguf_model
from tightfit.models.resolve import (
    find_in_hub_cache,
    locate_hub_cache,
    measure_weights,
    read_synthetic,
    resolve_model,
)
from tightfit.runs.run_folder import RunFolder
from tightfit.runtime.libraries import silence_libraries
from tightfit.runtime.output_folder import check_room
from tightfit.runtime.tensor_files import check_weights, has_weights

if TYPE_CHECKING:
    import torch


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


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copy those that exist."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    for path in sorted((source / CHAT_TEMPLATES_FOLDER).glob("*.jinja")):
        (target / CHAT_TEMPLATES_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(path, target / CHAT_TEMPLATES_FOLDER / path.name)


def copy_tuned_tokenizer_files(tuned: Path, base: Path, target: Path) -> None:
    """Copy the tuned model's files, and of the base's only those that cannot contradict them."""
    copy_tokenizer_files(tuned, target)
    lacking = ["generation_config.json"]
    own, theirs = tuned / "tokenizer.json", base / "tokenizer.json"
    if own.is_file() and theirs.is_file() and own.read_bytes() == theirs.read_bytes():
        lacking += _SENTENCEPIECE
    for name in lacking:
        if not (target / name).exists() and (base / name).is_file():
            shutil.copyfile(base / name, target / name)


# Other formats, converted into the cache

LARGE_MODEL_PARAMS = 2_000_000_000
"""Larger models are dequantized to bf16 instead of fp32, to save disk space."""
_SAMPLE_BYTES = 4 << 20


def import_gguf(path: Path) -> Path:
    """The Hugging Face folder of a GGUF file, dequantized; made on the first call."""
    home = _gguf_cache_folder(path)
    if (home / "config.json").is_file():
        return home
    import torch

    num_params = read_gguf_model(path).num_params  # raises for a truncated file
    dtype = torch.bfloat16 if num_params > LARGE_MODEL_PARAMS else torch.float32
    needed = int(num_params * dtype.itemsize * 1.03)
    check_room(home, needed, remedy="set TIGHTFIT_CACHE to a folder with more space")
    _make_once(home, lambda folder: _write_gguf(path, folder, dtype))
    return home


def import_gguf_tokenizer(path: Path) -> Path:
    """A folder with the tokenizer and template of a GGUF file; does not read its weights."""
    unpacked = _gguf_cache_folder(path)
    if (unpacked / "tokenizer.json").is_file():
        return unpacked
    home = unpacked.with_name(f"{unpacked.name}-tokenizer")
    if not (home / "tokenizer.json").is_file():
        read_gguf_model(path)  # raises for a truncated file
        _make_once(home, lambda folder: _write_gguf(path, folder, None))
    return home


def _gguf_cache_folder(path: Path) -> Path:
    """The cache folder of the converted model. Raise the number when the conversion changes."""
    # Of the size, the start (metadata and shapes) and the end, to avoid reading all of it.
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_SAMPLE_BYTES))
        stream.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(stream.read())
    return cache_folder() / "models" / f"gguf-3-{digest.hexdigest()[:16]}"


def import_tokenizer(folder: Path) -> Path:
    """A folder with links to this one's files and a tokenizer.json made from its slow tokenizer."""
    stamp = [str(folder.resolve())]
    for name in SLOW_TOKENIZERS:
        if (folder / name).is_file():
            stat = (folder / name).stat()
            stamp.append(f"{name} {stat.st_size} {stat.st_mtime_ns}")
    key = hashlib.sha256("\n".join(stamp).encode()).hexdigest()[:16]
    home = cache_folder() / "models" / f"tokenizer-{key}"
    if not (home / "tokenizer.json").is_file():
        _make_once(home, lambda new: _write_tokenizer(folder, new))
    for path in folder.iterdir():
        link = home / path.name
        if path.is_file() and not link.exists():
            link.unlink(missing_ok=True)  # a dangling link
            link.symlink_to(path.resolve())
    return home


def has_slow_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer that can be turned into a tokenizer.json."""
    return any((folder / name).is_file() for name in SLOW_TOKENIZERS)


def _make_once(home: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder under a temporary name, then rename it; another process may be faster."""
    try:
        with atomic_folder(home, is_shared=True) as work:
            fill(work)
    except OSError as error:
        if not home.is_dir():
            raise SetupError(
                f"Cannot write the converted model to {home}: {describe_write_error(error, home)}.",
                remedy="set TIGHTFIT_CACHE to a folder that is writable and has free space",
            ) from error


def _write_gguf(path: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """The dequantized model; without a dtype its tokenizer alone."""
    require_packages(f"Unpacking {path.name}", "gguf", extra="gguf")
    from tightfit.runtime.gguf.file import GgufFile
    from tightfit.runtime.gguf.unpack import plan_unpack, write_tokenizer_folder

    file = GgufFile(path)
    if dtype is not None and file.family is not None:
        plan_unpack(path, dtype).fill(folder)
        return
    if dtype is not None:
        _write_by_transformers(path, folder, dtype)
        return
    try:
        write_tokenizer_folder(file, folder)
    except InvalidInputError as error:
        with contextlib.suppress(InvalidInputError):
            _write_by_transformers(path, folder, None)
            return
        raise error


def _write_by_transformers(path: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """For families that our own reader does not support. Without a dtype: the tokenizer alone."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    silence_libraries()
    options: dict[str, Any] = {
        "gguf_file": path.name, "local_files_only": True, "trust_remote_code": False
    }  # fmt: skip
    # With GgufConfig transformers keeps matrices quantized by default; before, it dequantized.
    packing = getattr(transformers, "GgufConfig", None)
    extra = {} if packing is None else {"quantization_config": packing(dequantize=True)}
    made: list[Any] = []
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting disables
            if dtype is not None:
                model: Any = AutoModelForCausalLM.from_pretrained(
                    str(path.parent), dtype=dtype, **options, **extra
                )
                model.hf_quantizer = None  # or saving would write quantization settings
                made.append(model)
            made.append(AutoTokenizer.from_pretrained(str(path.parent), **options))
    except (ImportError, ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
        raise InvalidInputError(
            f"transformers cannot unpack {path}: {first_line(error)}.",
            remedy="name the model's own folder (config.json and safetensors) instead",
        ) from error
    for part in made:
        part.save_pretrained(str(folder))


def _write_tokenizer(folder: Path, new: Path) -> None:
    from transformers import AutoTokenizer

    silence_libraries()
    check_slow_tokenizer(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        tokenizer.save_pretrained(str(new))
    except BaseException as error:  # a converter per family, each with problems of its own
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InvalidInputError(
            f"The tokenizer of {folder} cannot be converted: {first_line(error)}.",
            remedy="pip install sentencepiece tiktoken protobuf, or put a tokenizer.json there",
        ) from error
    if not (new / "tokenizer.json").is_file():
        raise InvalidInputError(
            f"The tokenizer of {folder} has no fast form, which training needs.",
            remedy="put a tokenizer.json there",
        )


# From a name to a folder


def locate_model(name: str, *, needs_weights: bool = True) -> Path:
    """A folder with config.json, whole weights and tokenizer.json.

    `name` is a folder, a finished full-tuning run, a GGUF file, or a hub id that
    is in the local cache. Without `needs_weights` config.json alone will do.
    """
    if not name.strip():
        raise NotFoundError("No model was named.", remedy="tightfit models")
    try:
        path: Path | None = Path(name).expanduser()
        path = path if path is not None and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, an unknown ~user
        path = None
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
    base = read_json(adapter / "adapter_config.json").get("base_model_name_or_path")
    return str(base) if base else "see its adapter_config.json"


def read_json(path: Path) -> dict[str, Any]:
    """A file's object; empty where there is no file, or nothing of the kind in it."""
    try:
        found = read_json_file(path, allows_infinity=True)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


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
    shown = printable(hub_id)
    problem = f"The weights of {shown} are not on this machine; only its shapes are known."
    command = f"hf download {hub_id}"
    if is_gated(hub_id):
        why, command = _describe_gate(hub_id)
        problem += f" {why}"
    return NotFoundError(
        problem,
        remedy=f"{command}    (where there is internet; copy the folder here and name it by its "
        "path, or keep it in HF_HOME)",
    )


def _describe_gate(hub_id: str) -> tuple[str, str]:
    """Why a download would be refused, and the command that is not."""
    from tightfit.hardware.checkup import find_token, find_token_file

    found = find_token(os.environ, has_file=Path.is_file)
    file = find_token_file(os.environ)
    state = f"one is in {found}" if found else f"there is no variable HF_TOKEN and no file {file}"
    why = (
        f"It is gated: accept its licence at https://huggingface.co/{printable(hub_id)}; the "
        f"download then needs a token of that account ({state})."
    )
    return why, f"hf download {hub_id}" if found else f"hf auth login && hf download {hub_id}"


# From a user's name to an artefact: a run, an adapter, a model folder or a GGUF file.


class ArtefactKind(str, Enum):
    """The format of the weights on disk."""

    MODEL = "model"
    """A Hugging Face folder with plain weights."""
    ADAPTER = "adapter"
    """peft's format; names its base model."""
    GPTQ = "gptq"
    BITSANDBYTES = "bitsandbytes"
    """A Hugging Face folder with nf4 or int8 weights."""
    COMPRESSED = "compressed-tensors"
    """A Hugging Face folder as llm-compressor and auto-round write them for vLLM."""
    GGUF = "gguf"

    @property
    def is_quantized_folder(self) -> bool:
        return self in (ArtefactKind.GPTQ, ArtefactKind.BITSANDBYTES, ArtefactKind.COMPRESSED)


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

    @property
    def size_bytes(self) -> int:
        """Of the weights on disk; of an adapter its base's too."""
        return sum(measure_weights(path) or 0 for path in (self.path, self.base) if path)


def find_artefact(name: str) -> Artefact:
    """The artefact that `name` refers to; checks its files, loads nothing. No network."""
    path = Path(name).expanduser()
    run = RunFolder(path=path)
    if run.is_run():
        return _from_run(name, run)
    if (path / "adapter_config.json").is_file():
        return _from_adapter(name, path)
    gguf = find_gguf(path)
    if gguf is not None:
        return Artefact(
            name=name, kind=ArtefactKind.GGUF, path=gguf, tokenizer=import_gguf_tokenizer(gguf)
        )
    folder = locate_model(name)
    return Artefact(name=name, kind=_kind_of(folder), path=folder, tokenizer=folder)


def find_gguf(path: Path) -> Path | None:
    """The file itself, or the only one of a folder that holds no other weights."""
    if path.suffix.lower() == ".gguf" and path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = sorted(path.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def _kind_of(folder: Path) -> ArtefactKind:
    stated = read_json(folder / "config.json").get("quantization_config")
    if not isinstance(stated, dict):
        return ArtefactKind.MODEL
    method = str(stated.get("quant_method", "")).lower()
    if method in ("gptq", "auto-round", "auto_round"):
        return ArtefactKind.GPTQ
    if method in (ArtefactKind.BITSANDBYTES.value, ArtefactKind.COMPRESSED.value):
        return ArtefactKind(method)
    if method == MXFP4:  # as the model was published; loading unpacks it
        return ArtefactKind.MODEL
    raise InvalidInputError(
        f"{folder} is quantized with {method or 'an unnamed method'}, which no engine here reads.",
        remedy="name the model it was made from, or a GPTQ, compressed-tensors, bitsandbytes or "
        "GGUF version of it",
    )


_COMPRESSED_FLOATS = {
    "float-quantized": "fp8",
    "mxfp4-pack-quantized": "mxfp4",
    "nvfp4-pack-quantized": "nvfp4",
}


def read_compressed_format(folder: Path) -> str:
    """The format by vLLM's name: `fp8`, `w4a16`, `w4a16-asym`, `mxfp4`, `nvfp4`, ...

    Where layers differ, the first group's.
    """
    try:
        config = read_json_file(folder / "config.json", allows_infinity=True)
        stated = config["quantization_config"]
        group = next(iter(stated["config_groups"].values()))
        layout, weights = str(group.get("format") or stated["format"]), group["weights"]
        if layout in _COMPRESSED_FLOATS:
            return _COMPRESSED_FLOATS[layout]
        if weights["type"] != "int":
            return layout
        activations = (group.get("input_activations") or {}).get("num_bits", 16)
        asymmetric = "" if weights.get("symmetric", True) else "-asym"
        return f"w{int(weights['num_bits'])}a{int(activations)}{asymmetric}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise InvalidInputError(
            f"{folder / 'config.json'} does not say how the weights are packed.",
            remedy="fetch or make the model again: tightfit quantize MODEL --to w4a16",
        ) from error


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
    path = adapter / "adapter_config.json"
    name = read_json(path).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise InvalidInputError(
            f"{path} does not name the adapter's base model.",
            remedy='add "base_model_name_or_path": "FOLDER OR HUB ID" to it',
        )
    try:
        return locate_model(name)
    except NotFoundError as error:
        raise NotFoundError(
            f"The adapter {adapter} was trained on {name}, which is not on this machine.",
            remedy=f"put the base model there, or write its folder as base_model_name_or_path into "
            f"{path}",
        ) from error
