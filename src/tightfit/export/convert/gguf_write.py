"""A Hugging Face folder written as one GGUF file, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.core.errors import EnvironmentFaultError, InvalidInputError, UsageError
from tightfit.core.units import MIB
from tightfit.export.convert.gguf_metadata import head_dim_of, rotary_dim, write_architecture
from tightfit.export.convert.gguf_tensors import (
    VALUE_BYTES,
    PlannedTensor,
    TensorJob,
    convert_values,
    iterate_bytes,
    plan_tensors,
)
from tightfit.export.convert.gguf_tokenizer_check import settle_scheme
from tightfit.export.convert.gguf_vocabulary import read_vocabulary, write_vocabulary
from tightfit.runtime.finished_folder import check_room
from tightfit.runtime.gguf.families import FAMILIES, check_config, find_family
from tightfit.runtime.gguf.rope import make_rope_tensors
from tightfit.runtime.import_models import has_old_tokenizer, import_tokenizer
from tightfit.runtime.quiet import silence_libraries
from tightfit.runtime.stored_weights import StoredWeights
from tightfit.runtime.weight_files import check_weights
from tightfit.runtime.whole_output import whole_file

Watch = Callable[[str, int, int], None]
"""What is being done, how much of it is done, of how much."""
TOKEN_BYTES = 2048
"""Of one token and its merges while they are read, checked and written. Measured."""
LIBRARY_BYTES = 120 * MIB
"""llama.cpp once it is loaded for the check of the tokenizer. Measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPlan:
    """A conversion thought through, nothing written yet."""

    model_type: str
    config: Any
    weights: StoredWeights
    tensors: tuple[PlannedTensor, ...]
    dtype: str
    name: str
    tokenizer: Path

    @property
    def disk_bytes(self) -> int:
        """Of the tensors, and of a vocabulary as long as its tokens usually are."""
        return sum(tensor.num_bytes for tensor in self.tensors) + 64 * int(self.config.vocab_size)

    @property
    def extra_bytes(self) -> int:
        """Memory beside what the process holds: a tensor as stored, changed and written."""
        largest = max(
            self.weights.tensors[t.source].num_bytes * (2 if t.change else 1) + t.num_bytes
            for t in self.tensors
        )
        return largest + TOKEN_BYTES * int(self.config.vocab_size) + LIBRARY_BYTES


def plan_gguf(
    source: Path, *, dtype: str, tokenizer: Path | None = None, name: str | None = None
) -> GgufPlan:
    """Look at everything that decides the file, and refuse what cannot be converted."""
    if dtype not in VALUE_BYTES:
        raise UsageError(f"`{dtype}` is no format of a GGUF here.", remedy="f16, bf16 or f32")
    _require_gguf()
    if (source / "adapter_config.json").is_file() and not (source / "config.json").is_file():
        raise InvalidInputError(
            f"{source} holds an adapter, not a model.",
            remedy=f"merge first: tightfit merge {source}",
        )
    model_type, family = find_family(source)
    config = _load_config(source)
    check_config(model_type, config)
    check_weights(source)
    weights = StoredWeights(source)
    job = TensorJob(model_type=model_type, family=family, config=config, dtype=dtype)
    return GgufPlan(
        model_type=model_type,
        config=config,
        weights=weights,
        tensors=tuple(plan_tensors(weights, job)),
        dtype=dtype,
        name=name or source.absolute().name,
        tokenizer=_tokenizer_folder(tokenizer or source),
    )


def write_gguf(plan: GgufPlan, target: Path, watch: Watch | None = None) -> list[str]:
    """Write the file; returns what a user should know."""
    check_room(target, plan.disk_bytes)
    embedding = next(tensor for tensor in plan.tensors if tensor.name == "token_embd.weight")
    vocabulary, tokenizer = read_vocabulary(plan.tokenizer, embedding.shape[0])
    scheme, notes = settle_scheme(vocabulary, tokenizer.encode)
    with whole_file(target) as partial:
        writer = _make_writer(partial, plan)
        try:
            notes += write_architecture(writer, plan.model_type, plan.config)
            write_vocabulary(writer, vocabulary, scheme, plan.name)
            _write_tensors(writer, plan, watch)
        finally:
            writer.close()
    return [*vocabulary.notes, *notes]


def _make_writer(path: Path, plan: GgufPlan) -> Any:
    import gguf

    kinds = gguf.LlamaFileType
    writer: Any = gguf.GGUFWriter(path, FAMILIES[plan.model_type].architecture)
    writer.add_type(gguf.GGUFType.MODEL)
    num_values = sum(math.prod(tensor.shape) for tensor in plan.tensors)
    writer.add_size_label(gguf.size_label(num_values, num_values, 0, 0))
    file_type = {"f32": kinds.ALL_F32, "f16": kinds.MOSTLY_F16, "bf16": kinds.MOSTLY_BF16}
    writer.add_file_type(file_type[plan.dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return writer


def _write_tensors(writer: Any, plan: GgufPlan, watch: Watch | None) -> None:
    """The list of tensors first, then each one read, changed, written and forgotten."""
    import gguf
    import numpy as np
    import torch

    kinds = {name: gguf.GGMLQuantizationType[name.upper()] for name in VALUE_BYTES}
    extra = make_rope_tensors(plan.config, _rope_width(plan))
    for name, values in extra.items():
        writer.add_tensor_info(
            name, tuple(values.shape), np.dtype(np.float32), values.nbytes, kinds["f32"]
        )
    for tensor in plan.tensors:
        # numpy has no bf16; the writer looks only at the format that is named.
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float16), tensor.num_bytes, kinds[tensor.dtype]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in extra.values():
        writer.write_tensor_data(values.numpy())
    total = sum(tensor.num_bytes for tensor in plan.tensors)
    for tensor, done in iterate_bytes(list(plan.tensors)):
        values = convert_values(plan.weights.read(tensor.source), tensor)
        writer.write_tensor_data(values.view(torch.uint8).numpy())
        if watch is not None:
            watch("writing", done, total)
    writer.flush()


def _rope_width(plan: GgufPlan) -> int:
    return rotary_dim(plan.config) if plan.model_type == "phi3" else head_dim_of(plan.config)


def _load_config(source: Path) -> Any:
    from transformers import AutoConfig

    silence_libraries()
    try:
        return AutoConfig.from_pretrained(str(source), local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError) as fault:
        lines = str(fault).strip().splitlines() or [type(fault).__name__]
        raise InvalidInputError(
            f"transformers cannot read {source / 'config.json'}: {lines[0].rstrip('.')}.",
            remedy="fetch the model's config.json again",
        ) from fault


def _tokenizer_folder(folder: Path) -> Path:
    if (folder / "tokenizer.json").is_file() or not has_old_tokenizer(folder):
        return folder  # without any tokenizer the reader of it says what is missing
    return import_tokenizer(folder)


def _require_gguf() -> None:
    from importlib.util import find_spec

    for package in ("gguf", "torch", "transformers"):
        if find_spec(package) is None:
            raise EnvironmentFaultError(
                f"Writing GGUF needs the {package} package, which is not installed.",
                remedy="pip install 'tightfit[gguf]'"
                if package == "gguf"
                else "pip install 'tightfit[train]'",
            )
