"""Importance: the mean square of each input of each matrix on calibration text, kept as a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.cache import cache_folder
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError
from tightfit.core.files import sync
from tightfit.export.quantize.calibration import Calibration
from tightfit.export.quantize.gguf import Importance
from tightfit.runtime.load import LoadRequest, load_base

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

Report = Callable[[int, int], None]

_SUMS, _COUNTS = ".in_sum2", ".counts"
"""Endings of llama.cpp's own importance files. Source: tools/imatrix/imatrix.cpp."""


@dataclass(slots=True, kw_only=True)
class _Tally:
    total: torch.Tensor
    num_tokens: int = 0


@dataclass(slots=True, kw_only=True)
class _Sums:
    """By module name."""

    of: dict[str, _Tally] = field(default_factory=dict)

    def hook(self, name: str) -> Callable[..., None]:
        import torch

        def add(_module: Any, inputs: tuple[Any, ...], _output: Any) -> None:
            values = inputs[0].detach().reshape(-1, inputs[0].shape[-1]).float()
            tally = self.of.get(name)
            if tally is None:
                zeros = torch.zeros(values.shape[-1], device=values.device)
                tally = self.of[name] = _Tally(total=zeros)
            tally.total += values.square().sum(0)
            tally.num_tokens += values.shape[0]

        return add


def measure_importance(
    folder: Path,
    calibration: Calibration,
    *,
    architecture: str,
    device: torch.device | None = None,
    report: Report | None = None,
) -> Path:
    """The importance file of a model on this text; found in the cache or measured now."""
    path = _place(folder, calibration, architecture)
    if path.is_file():
        return path
    import torch

    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = Dtype.BF16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else Dtype.FP32
    model = load_base(folder, LoadRequest(weights=dtype, compute=dtype), device)
    sums = collect_sums(model, calibration.rows, report=report)
    named = name_tensors(sums.of, architecture, _num_layers(model))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_importance(path, named, calibration)
    return path


def collect_sums(
    model: PreTrainedModel, rows: NDArray[np.int32], *, report: Report | None = None
) -> _Sums:
    """Run the rows through the model's layers; the head is left out, as llama.cpp does."""
    import torch

    sums = _Sums()
    whole: Any = model
    was_training = whole.training
    whole.eval()
    body: Any = whole.base_model  # without the head: its scores are not asked for
    device = next(whole.parameters()).device
    with _hooked(model, sums), torch.inference_mode():
        for number, row in enumerate(rows, start=1):
            tokens = torch.as_tensor(row, dtype=torch.long, device=device)[None]
            body(input_ids=tokens, use_cache=False)
            if report is not None:
                report(number, len(rows))
    whole.train(was_training)
    return sums


@contextmanager
def _hooked(model: PreTrainedModel, sums: _Sums) -> Iterator[None]:
    import torch
    from transformers.pytorch_utils import Conv1D

    handles = [
        module.register_forward_hook(sums.hook(name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def name_tensors(
    sums: Mapping[str, _Tally], architecture: str, num_layers: int
) -> dict[str, _Tally]:
    """By the names the tensors have in a GGUF file; what has none there is left out."""
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


def write_importance(path: Path, sums: Mapping[str, _Tally], calibration: Calibration) -> None:
    """In llama.cpp's own format, so that its tools can use it too."""
    import gguf
    import numpy as np

    partial = path.with_name(f"{path.name}.partial")
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
        writer.close()
        sync(partial)
        partial.rename(path)
    finally:
        writer.close()
        partial.unlink(missing_ok=True)


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
            file=path.name,
            dataset=str(reader.fields["imatrix.datasets"].contents()[0]),
            num_chunks=int(reader.fields["imatrix.chunk_count"].contents()),
        )
    except (OSError, ValueError, KeyError, IndexError) as fault:
        raise InvalidInputError(
            f"{path} cannot be read as an importance file: {fault}.",
            remedy="delete it and run the same command again",
        ) from fault


def _mean(sums: NDArray[np.float32], counts: NDArray[np.float32]) -> NDArray[np.float32]:
    """Means by input; an expert that never saw a token weighs all inputs alike."""
    import numpy as np

    counts = counts.reshape(-1, 1)
    sums = sums.reshape(len(counts), -1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), 1.0).astype(np.float32)
    return np.ascontiguousarray(means.reshape(-1))


def _num_layers(model: PreTrainedModel) -> int:
    config: Any = model.config
    return int(config.num_hidden_layers)


def _place(folder: Path, calibration: Calibration, architecture: str) -> Path:
    """By what the weights and the text are; a change of either has a file of its own."""
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin") or path.name == "config.json":
            stat = path.stat()
            digest.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    digest.update(f"{calibration.digest} {architecture}".encode())
    return cache_folder() / "importance" / f"{digest.hexdigest()}.gguf"
