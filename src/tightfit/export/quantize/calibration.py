"""Calibration text, and the importance of each matrix input measured on it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.files import atomic_file, cache_folder, write_atomic
from tightfit.core.progress import CountProgress
from tightfit.core.settings import MAX_SEQ_LEN, TrainOn
from tightfit.core.strategy import DataSource, Strategy
from tightfit.data.encode import EncodeRequest, encode_dataset
from tightfit.data.token_store import TokenStore
from tightfit.runtime.attention import choose_inference_attention
from tightfit.runtime.load import load_base
from tightfit.runtime.model_files import Artefact

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel


ROW_TOKENS = 512
GPU_ROWS = 128
CPU_ROWS = 32
"""Rows by default. GPTQ takes 128 (arXiv:2210.17323 section 4); on a CPU that would be hours for
little: 32 and 128 rows differ by less than the noise of the check."""
FEW_TOKENS = 8192
"""Below that the widest matrices see fewer tokens than they have inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Rows of equal length, and where they came from."""

    rows: NDArray[np.int32]
    source: str
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.rows.tobytes(), digest_size=8).hexdigest()

    @property
    def num_tokens(self) -> int:
        return int(self.rows.size)


def read_calibration(
    artefact: Artefact, file: Path | None, *, num_rows: int, max_positions: int = ROW_TOKENS
) -> Calibration:
    """Rows drawn evenly from a file, else the run's own data, else Python's documentation."""
    length = min(ROW_TOKENS, max_positions)
    notes = []
    store = None
    if file is not None:
        store, source = _encode(artefact, file), str(file)
    elif artefact.run is not None:
        with contextlib.suppress(UserError):  # the cache may no longer have them
            store = TokenStore(Path(artefact.run.read_tokens().train))
            source = f"{artefact.run.path}: its training data"
    if store is None:
        store, source = _encode(artefact, default_text()), "Python's documentation"
        notes.append(
            "Calibrated on Python's documentation; your own data tells more: --calibrate FILE with "
            "rows as `train` reads them, or plain text."
        )
    rows = _fill_rows(store, num_rows=num_rows, length=length)
    if not len(rows):
        raise InvalidInputError(
            f"{source} has {int(store.lengths.sum()):,} tokens; calibration needs at least "
            f"{length:,}.",
            remedy="name a larger file: --calibrate FILE",
        )
    if rows.size < FEW_TOKENS:
        notes.append(
            f"Calibrated on {rows.size:,} tokens, which is little; {FEW_TOKENS:,} or more are "
            "better."
        )
    return Calibration(rows=rows, source=source, notes=tuple(notes))


def _encode(artefact: Artefact, path: Path) -> TokenStore:
    return encode_dataset(
        EncodeRequest(
            sources=(DataSource(path=str(path)),),
            model_folder=artefact.tokenizer,
            template=artefact.template,
            train_on=TrainOn.ALL,
            seq_len=min(MAX_SEQ_LEN, 8192),
            skip_invalid=True,
        )
    ).train


def default_text() -> Path:
    """Python's own documentation, which comes with every Python: English prose and code.

    No text of the check is in it, so that quality is not measured on what was calibrated with.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:  # some distributions leave it out
        raise InvalidInputError(
            "There is no text to calibrate on.", remedy="name one: --calibrate FILE"
        ) from error
    text = "\n\n".join(topic.strip() for _, topic in sorted(topics.items())).encode()
    key = hashlib.blake2b(text, digest_size=8).hexdigest()
    path = cache_folder() / "calibration" / f"{key}.txt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    return path


def _fill_rows(store: TokenStore, *, num_rows: int, length: int) -> NDArray[np.int32]:
    """Shuffled rows of the data, concatenated and cut into equal lengths."""
    import numpy as np

    order = np.random.default_rng(0).permutation(len(store))
    pieces, count = [], 0
    for index in order:
        if count >= num_rows * length:
            break
        tokens = store.row(int(index)).tokens
        pieces.append(tokens)
        count += len(tokens)
    whole = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    found = min(num_rows, len(whole) // length)
    return np.ascontiguousarray(whole[: found * length], dtype=np.int32).reshape(found, length)


# Importance of matrix inputs, cached as a file in llama.cpp's own format.


_SUMS, _COUNTS = ".in_sum2", ".counts"
"""Endings of llama.cpp's own importance files. Source: tools/imatrix/imatrix.cpp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """How much each input of each tensor matters: the mean square it carries on real text."""

    values: Mapping[str, NDArray[np.float32]]
    """By the tensor's name in the GGUF file."""
    dataset: str
    num_chunks: int


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Of one module's inputs."""

    total: torch.Tensor
    num_tokens: int = 0


def measure_importance(
    folder: Path,
    calibration: Calibration,
    *,
    architecture: str,
    device: torch.device | None = None,
    report: CountProgress | None = None,
) -> Path:
    """The importance file of a model on this text; found in the cache or measured now."""
    path = _cache_path(folder, calibration, architecture)
    if path.is_file():
        return path
    import torch

    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = Dtype.BF16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else Dtype.FP32
    strategy = Strategy(weights=dtype, compute=dtype)
    model = load_base(folder, strategy, device, attention=choose_inference_attention(folder))
    sums = _sum_squares(model, calibration.rows, report)
    config: Any = model.config
    path.parent.mkdir(parents=True, exist_ok=True)
    named = _name_tensors(sums, architecture, int(config.num_hidden_layers))
    _write_importance(path, named, calibration)
    return path


def _sum_squares(
    model: PreTrainedModel, rows: NDArray[np.int32], report: CountProgress | None
) -> dict[str, _Tally]:
    """Run the rows through the model's layers; the head is left out, as llama.cpp does."""
    import torch
    from transformers.pytorch_utils import Conv1D

    sums: dict[str, _Tally] = {}

    def hook(name: str) -> Callable[..., None]:
        def add(_module: Any, inputs: tuple[Any, ...], _output: Any) -> None:
            values = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).float()
            if name not in sums:
                sums[name] = _Tally(total=torch.zeros(values.shape[-1], device=values.device))
            sums[name].total += values.square().sum(0)
            sums[name].num_tokens += values.shape[0]

        return add

    whole: Any = model
    whole.eval()
    for name, module in whole.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            module.register_forward_hook(hook(name))
    body = whole.base_model  # without the head, whose logits are not needed
    device = next(whole.parameters()).device
    with torch.inference_mode():
        for number, row in enumerate(rows, start=1):
            tokens = torch.as_tensor(row, dtype=torch.long, device=device)[None]
            body(input_ids=tokens, use_cache=False)
            if report is not None:
                report(number, len(rows))
    return sums


def _name_tensors(
    sums: Mapping[str, _Tally], architecture: str, num_layers: int
) -> dict[str, _Tally]:
    """Renamed to GGUF tensor names; modules without one are left out."""
    import gguf

    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in by_name:
        raise InvalidInputError(
            f"The gguf package does not know the architecture {architecture}.",
            remedy="pip install -U gguf, or leave the importance out: --no-importance",
        )
    names = gguf.get_tensor_name_map(by_name[architecture], num_layers)
    found = {name: names.get_name(name) for name in sums}
    return {f"{place}.weight": sums[name] for name, place in found.items() if place is not None}


def _write_importance(path: Path, sums: Mapping[str, _Tally], calibration: Calibration) -> None:
    """In llama.cpp's own format, so that its tools can use it too."""
    import gguf
    import numpy as np

    with atomic_file(path) as partial:
        writer = gguf.GGUFWriter(partial, "imatrix")
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", [calibration.source])
        writer.add_uint32("imatrix.chunk_count", len(calibration.rows))
        writer.add_uint32("imatrix.chunk_size", int(calibration.rows.shape[1]))
        for name, tally in sums.items():
            writer.add_tensor(name + _SUMS, tally.total.cpu().numpy().astype(np.float32)[None])
            writer.add_tensor(name + _COUNTS, np.full((1, 1), tally.num_tokens, dtype=np.float32))
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def read_importance(path: Path) -> Importance:
    """The file's means by tensor. Also reads files that llama.cpp's tools have made."""
    import gguf
    import numpy as np

    try:
        reader = gguf.GGUFReader(path)
        parts = {tensor.name: np.asarray(tensor.data, np.float32) for tensor in reader.tensors}
        values = {
            name.removesuffix(_SUMS): _mean(parts[name], parts[name.removesuffix(_SUMS) + _COUNTS])
            for name in parts
            if name.endswith(_SUMS)
        }
        return Importance(
            values=values,
            dataset=str(reader.fields["imatrix.datasets"].contents()[0]),
            num_chunks=int(reader.fields["imatrix.chunk_count"].contents()),
        )
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise InvalidInputError(
            f"{path} cannot be read as an importance file: {error}.",
            remedy="delete it and run the same command again",
        ) from error


def _mean(sums: NDArray[np.float32], counts: NDArray[np.float32]) -> NDArray[np.float32]:
    """Means by input; an expert that saw no token weighs all inputs equally."""
    import numpy as np

    counts = counts.reshape(-1, 1)
    sums = sums.reshape(len(counts), -1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), 1.0).astype(np.float32)
    return np.ascontiguousarray(means.reshape(-1))


def _cache_path(folder: Path, calibration: Calibration, architecture: str) -> Path:
    """The cache file, named by the weights and the text."""
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin") or path.name == "config.json":
            stat = path.stat()
            digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    digest.update(f"{calibration.digest} {architecture}".encode())
    return cache_folder() / "importance" / f"{digest.hexdigest()}.gguf"
