"""Models in other formats, turned once into a Hugging Face folder in the cache."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.cache import cache_folder
from tightfit.core.errors import EnvironmentFaultError, InvalidInputError, UserError
from tightfit.core.files import sync
from tightfit.core.units import render_bytes
from tightfit.models.gguf_spec import read_gguf_model
from tightfit.runtime.quiet import silence_libraries

if TYPE_CHECKING:
    import torch

LARGE_MODEL_PARAMS = 2_000_000_000
"""Beyond this, dequantized values are written in bf16 instead of fp32 to spare the disk."""
_SAMPLE_BYTES = 4 << 20
_SLOW_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def import_gguf(path: Path) -> Path:
    """The folder of a GGUF file's model with its matrices unpacked; made on the first call."""
    home = _gguf_home(path)
    if (home / "config.json").is_file():
        return home
    num_params = read_gguf_model(path).num_params  # also refuses a file that is cut short
    is_large = num_params > LARGE_MODEL_PARAMS
    _check_room(home, num_params * (2 if is_large else 4))
    _make_once(home, lambda folder: _write_gguf(path, folder, is_large=is_large))
    return home


def import_gguf_tokenizer(path: Path) -> Path:
    """A folder with the tokenizer and template of a GGUF file; its weights stay unread."""
    unpacked = _gguf_home(path)
    if (unpacked / "tokenizer.json").is_file():
        return unpacked
    home = unpacked.with_name(f"{unpacked.name}-tokenizer")
    if not (home / "tokenizer.json").is_file():
        read_gguf_model(path)  # refuses a file that is cut short
        _make_once(home, lambda folder: _write_gguf_tokenizer(path, folder))
    return home


def _gguf_home(path: Path) -> Path:
    """Where the file's model lies once unpacked. Another number: it is unpacked otherwise."""
    return cache_folder() / "models" / f"gguf-2-{_digest(path)}"


def import_tokenizer(folder: Path) -> Path:
    """A folder with links to this one's files and a tokenizer.json made from its old tokenizer."""
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


def has_old_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer that can be turned into a tokenizer.json."""
    return any((folder / name).is_file() for name in _SLOW_TOKENIZERS)


def _digest(path: Path) -> str:
    """Of the size, the start (all metadata and shapes) and the end: no need to read it whole."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_SAMPLE_BYTES))
        stream.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(stream.read())
    return digest.hexdigest()[:16]


def _make_once(home: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder under another name, then rename it; whoever comes second finds it done."""
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=home.parent, prefix=f"{home.name}.", suffix=".partial"))
    except OSError as fault:
        raise _cannot_write(home, fault) from fault
    try:
        fill(work)
        for path in work.iterdir():
            path.chmod(0o644)  # safetensors and mkdtemp keep others out; a cache may be shared
            sync(path)
        work.chmod(0o755)
        work.rename(home)
        sync(home.parent)
    except OSError as fault:
        if not home.is_dir():
            raise _cannot_write(home, fault) from fault
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _cannot_write(home: Path, fault: OSError) -> EnvironmentFaultError:
    return EnvironmentFaultError(
        f"Cannot write the converted model to {home}: {fault.strerror or fault}.",
        remedy="set TIGHTFIT_CACHE to a folder that is writable and has free space",
    )


def _check_room(home: Path, needed_bytes: int) -> None:
    existing = next(parent for parent in home.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes * 1.05:
        raise EnvironmentFaultError(
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
    """Families that our own reader does not know."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    silence_libraries()
    options = {"gguf_file": path.name, "local_files_only": True}
    # Where transformers has GgufConfig it keeps matrices packed unless told; before, it unpacked.
    packing = getattr(transformers, "GgufConfig", None)
    extra = {} if packing is None else {"quantization_config": packing(dequantize=True)}
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no setting stops
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(path.parent), dtype=dtype, **options, **extra
            )
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **options)
    except (ImportError, ValueError, KeyError, RuntimeError, OSError) as fault:
        raise _unconvertible(path, fault) from fault
    model.hf_quantizer = None  # or saving would write what is no longer there
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def _write_gguf_tokenizer(path: Path, folder: Path) -> None:
    _require_gguf(path)
    from tightfit.runtime.gguf.config import is_known
    from tightfit.runtime.gguf.file import GgufFile
    from tightfit.runtime.gguf.tokenizer import read_marks
    from tightfit.runtime.gguf.unpack import write_speech

    file = GgufFile(path)
    if is_known(file):
        write_speech(file, read_marks(file), folder)
        return
    from transformers import AutoTokenizer

    silence_libraries()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(
                str(path.parent), gguf_file=path.name, local_files_only=True
            )
    except (ImportError, ValueError, KeyError, RuntimeError, OSError) as fault:
        raise _unconvertible(path, fault) from fault
    tokenizer.save_pretrained(str(folder))


def _require_gguf(path: Path) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as fault:
        raise _unconvertible(path, fault) from fault


def _unconvertible(path: Path, fault: Exception) -> UserError:
    lines = str(fault).strip().splitlines() or [type(fault).__name__]
    if isinstance(fault, ImportError):
        return EnvironmentFaultError(
            f"Unpacking {path.name} needs a package that is missing: {lines[0].rstrip('.')}.",
            remedy="pip install gguf",
        )
    return InvalidInputError(
        f"transformers cannot unpack {path}: {lines[0].rstrip('.')}.",
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
    except Exception as fault:  # a converter per family, each with faults of its own
        lines = str(fault).strip().splitlines() or [type(fault).__name__]
        raise InvalidInputError(
            f"The tokenizer of {folder} cannot be converted: {lines[0].rstrip('.')}.",
            remedy="pip install sentencepiece tiktoken protobuf, or put a tokenizer.json there",
        ) from fault
    if not (new / "tokenizer.json").is_file():
        raise InvalidInputError(
            f"The tokenizer of {folder} has no fast form, which training needs.",
            remedy="put a tokenizer.json there",
        )


def _link_files(folder: Path, home: Path) -> None:
    """Everything but the tokenizer stays where it is."""
    for path in folder.iterdir():
        link = home / path.name
        if path.is_file() and not link.exists():
            link.unlink(missing_ok=True)  # a link whose target has moved
            link.symlink_to(path.resolve())
