"""Write a Hugging Face folder as one GGUF file: metadata, tensor names and layouts, bytes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError, SetupError, UsageError
from tightfit.core.progress import Progress
from tightfit.core.units import MIB
from tightfit.export.gguf_tokenizer import read_vocabulary, settle_scheme, write_vocabulary
from tightfit.runtime.gguf.config import add_rope, make_rope_tensors, read_rope
from tightfit.runtime.gguf.families import (
    FAMILIES,
    Change,
    Family,
    check_config,
    choose_change,
    falcon_kv_heads,
    find_family,
)
from tightfit.runtime.libraries import silence_libraries
from tightfit.runtime.model_files import check_weights, has_slow_tokenizer, import_tokenizer
from tightfit.runtime.output_folder import check_room, whole_file
from tightfit.runtime.tensor_files import StoredTensor, StoredWeights

if TYPE_CHECKING:
    from torch import Tensor


USUAL_GEMMA3_PERIOD = 6
BLOOM_CONTEXT = 2048
"""Bloom's config does not say what it was trained on. Source: arXiv:2211.05100, table 3."""


def head_dim_of(config: Any) -> int:
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def write_architecture(writer: Any, model_type: str, config: Any) -> list[str]:
    """Write sizes, norms, positions and attention; returns what a user should know."""
    writer.add_block_count(int(config.num_hidden_layers))
    writer.add_context_length(_context_length(config))
    writer.add_embedding_length(int(config.hidden_size))
    writer.add_feed_forward_length(_feed_forward(model_type, config))
    writer.add_head_count(int(config.num_attention_heads))
    writer.add_vocab_size(int(config.vocab_size))
    writer.add_head_count_kv(_num_kv_heads(model_type, config))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))
    else:
        writer.add_layer_norm_eps(float(config.layer_norm_epsilon))
    if model_type in ("gpt2", "bloom"):
        return []
    if model_type == "falcon":
        writer.add_tensor_data_layout("jploski")  # queries, keys and values each in one piece
        return add_rope(writer, config)
    writer.add_key_length(head_dim_of(config))
    writer.add_value_length(head_dim_of(config))
    writer.add_rope_dimension_count(rotary_dim(config))
    return [*add_rope(writer, config), *_add_attention(writer, model_type, config)]


def rotary_dim(config: Any) -> int:
    """Rotary dimensions of a head; all of it in most models."""
    fraction = read_rope(config).get("partial_rotary_factor")
    if fraction is None:
        fraction = getattr(config, "partial_rotary_factor", None)
    return int(head_dim_of(config) * float(1.0 if fraction is None else fraction))


def _context_length(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "seq_length"):
        found = getattr(config, name, None)
        if found:
            return int(found)
    return BLOOM_CONTEXT


def _feed_forward(model_type: str, config: Any) -> int:
    if model_type == "bloom":
        return 4 * int(config.hidden_size)
    stated = {"gpt2": "n_inner", "falcon": "ffn_hidden_size"}.get(model_type, "intermediate_size")
    return int(getattr(config, stated, None) or 4 * config.hidden_size)


def _num_kv_heads(model_type: str, config: Any) -> int:
    if model_type == "falcon":
        return falcon_kv_heads(config)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _add_attention(writer: Any, model_type: str, config: Any) -> list[str]:
    """Sliding windows and soft caps."""
    window = int(getattr(config, "sliding_window", None) or 0)
    if model_type == "gemma2":
        writer.add_attn_logit_softcapping(float(config.attn_logit_softcapping or 0))
        writer.add_final_logit_softcapping(float(config.final_logit_softcapping or 0))
        writer.add_sliding_window(window)
        _require_period(config, 2)
        return []
    if model_type == "gemma3_text":
        return _add_gemma3(writer, config)
    if model_type == "phi3":
        writer.add_sliding_window(window)
    types = _layer_types(config)
    is_sliding = window and (not types or "sliding_attention" in types)
    if is_sliding and window < _context_length(config):
        return [
            f"It attends to the last {window:,} tokens; llama.cpp lets this family attend to all: "
            "answers differ in longer contexts."
        ]
    return []


def _add_gemma3(writer: Any, config: Any) -> list[str]:
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(float(config.final_logit_softcapping))
    types = _layer_types(config)
    if "sliding_attention" not in types:
        return []
    period = next(
        (at + 1 for at, kind in enumerate(types) if kind == "full_attention"), USUAL_GEMMA3_PERIOD
    )
    _require_period(config, period)
    writer.add_sliding_window(int(config.sliding_window))
    writer.add_sliding_window_pattern(period)
    local = read_rope(config, "sliding_attention").get("rope_theta")
    if local is not None:
        writer.add_rope_freq_base_swa(float(local))
    return []


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or [])


def _require_period(config: Any, period: int) -> None:
    """llama.cpp supports full attention only in every n-th layer."""
    for at, kind in enumerate(_layer_types(config)):
        if (kind == "full_attention") != (at % period == period - 1):
            raise InvalidInputError(
                f"Layer {at} of this model is of the kind {kind}, where llama.cpp expects another: "
                f"it lets every {period}th layer attend to all tokens.",
                remedy="use the model with --engine transformers",
            )


# Tensors of the file.

VALUE_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_LEFT_OUT = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias")
"""Buffers that old checkpoints carry and every program computes by itself."""
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor of the file to be written."""

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    change: Change | None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * VALUE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorJob:
    """Inputs of the plan."""

    model_type: str
    family: Family
    config: Any
    dtype: str


def plan_tensors(weights: StoredWeights, job: TensorJob) -> list[PlannedTensor]:
    """Every tensor in the order of the layers; refuses what is unknown or missing."""
    import gguf

    architecture = _architecture(job.family.architecture)
    names: Any = gguf.get_tensor_name_map(architecture, int(job.config.num_hidden_layers))
    planned, strange = {}, []
    for stored in weights.tensors.values():
        if stored.name.endswith(_LEFT_OUT) or not _is_weight(stored):
            continue
        source = job.family.name_of(stored.name)
        name = names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            strange.append(stored.name)
            continue
        change = choose_change(job.model_type, source, job.config)
        is_turned = job.model_type == "gpt2" and change is not None
        planned[name] = PlannedTensor(
            name=name,
            source=stored.name,
            shape=stored.shape[::-1] if is_turned else stored.shape,
            dtype="f32" if _stays_wide(name, stored.shape) else job.dtype,
            change=change,
        )
    if strange:
        raise InvalidInputError(
            f"The weights hold {strange[0]}, which llama.cpp's {job.family.architecture} models "
            f"do not have ({len(strange)} such tensors).",
            remedy="check that config.json belongs to these weights",
        )
    _settle_head(planned, weights, job)
    _check_whole(planned, job.config)
    return sorted(planned.values(), key=_order)


def _is_weight(stored: StoredTensor) -> bool:
    """Whole numbers are buffers, such as causal masks. Eight bits are a quantized model."""
    if stored.dtype.is_floating_point and stored.dtype.itemsize == 1:
        raise InvalidInputError(
            f"{stored.path.name} holds {stored.name} in 8 bit: the model is quantized.",
            remedy="convert the model that it was made from",
        )
    return stored.dtype.is_floating_point


def convert_values(values: Tensor, planned: PlannedTensor) -> Tensor:
    """Rearranged and in the wanted format; refuses values that the format cannot hold."""
    import torch

    if planned.change is not None:
        values = planned.change(values)
    wanted = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[planned.dtype]
    converted = values.to(wanted).contiguous()
    # A finite sum proves that all values are finite, and is much faster than testing each.
    has_doubt = not math.isfinite(float(converted.sum(dtype=torch.float32)))
    if has_doubt and not torch.isfinite(converted).all():
        raise _unstorable(planned, is_given=not bool(torch.isfinite(values).all()))
    return converted


def _unstorable(planned: PlannedTensor, *, is_given: bool) -> InvalidInputError:
    if is_given:
        return InvalidInputError(
            f"The tensor {planned.source} holds values that are no numbers (NaN or infinite).",
            remedy="fetch or train the model again",
        )
    return InvalidInputError(
        f"The tensor {planned.source} holds values beyond 65,504, the largest of {planned.dtype}.",
        remedy="--dtype bf16, or --dtype f32",
    )


def _architecture(name: str) -> Any:
    import gguf

    return next(key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == name)


def _stays_wide(name: str, shape: tuple[int, ...]) -> bool:
    """llama.cpp reads vectors, norms and position tables in 32 bit only."""
    return len(shape) <= 1 or name.endswith("_norm.weight") or name == "position_embd.weight"


def _settle_head(planned: dict[str, PlannedTensor], weights: StoredWeights, job: TensorJob) -> None:
    """A head that is tied is left out; the same rule as transformers has for a head that differs.

    A tied head that stands in the weights with other values is a head of its own there.
    """
    import torch

    embedding, head = planned.get(_EMBEDDING), planned.get(_HEAD)
    is_tied = bool(getattr(job.config, "tie_word_embeddings", True))
    if embedding is None or (head is None and not is_tied):
        lacking = "a head (lm_head.weight)" if embedding else "an embedding"
        raise InvalidInputError(
            f"The weights lack {lacking}.", remedy="fetch the model again, or name another folder"
        )
    if head is None:
        return
    if is_tied and torch.equal(weights.read(embedding.source), weights.read(head.source)):
        del planned[_HEAD]
    elif not job.family.can_untie:
        raise InvalidInputError(
            f"The model has a head of its own, which llama.cpp's {job.family.architecture} "
            "models cannot have.",
            remedy="use the model with --engine transformers",
        )


def _check_whole(planned: dict[str, PlannedTensor], config: Any) -> None:
    """Every layer has what the others have, and there are as many as config.json says."""
    per_layer: dict[int, set[str]] = defaultdict(set)
    for name in planned:
        found = re.match(r"blk\.(\d+)\.(.+)", name)
        if found:
            per_layer[int(found[1])].add(found[2])
    everything = set().union(*per_layer.values())
    for layer in range(int(config.num_hidden_layers)):
        lost = sorted(everything - per_layer.get(layer, set()))
        if lost or not everything:
            raise InvalidInputError(
                f"Layer {layer} of the model lacks {', '.join(lost[:3]) or 'all weights'}.",
                remedy="fetch the model again; `hf download` goes on where it stopped",
            )


def _order(tensor: PlannedTensor) -> tuple[int, int, str]:
    """The embedding, the layers by number, what follows them."""
    found = re.match(r"blk\.(\d+)\.", tensor.name)
    if found:
        return (1, int(found[1]), tensor.name)
    return (0 if tensor.name.startswith(("token_embd", "position_embd")) else 2, 0, tensor.name)


def iterate_bytes(planned: list[PlannedTensor]) -> Iterator[tuple[PlannedTensor, int]]:
    """Each tensor with the bytes written once it is done."""
    done = 0
    for tensor in planned:
        done += tensor.num_bytes
        yield tensor, done


# The file, tensor by tensor.

TOKEN_BYTES = 2048
"""Of one token and its merges while they are read, checked and written. Measured."""
LIBRARY_BYTES = 120 * MIB
"""llama.cpp once it is loaded for the check of the tokenizer. Measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPlan:
    """A planned conversion."""

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


def write_gguf(plan: GgufPlan, target: Path, watch: Progress | None = None) -> list[str]:
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


def _write_tensors(writer: Any, plan: GgufPlan, watch: Progress | None) -> None:
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
    except (ValueError, KeyError, TypeError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InvalidInputError(
            f"transformers cannot read {source / 'config.json'}: {lines[0].rstrip('.')}.",
            remedy="fetch the model's config.json again",
        ) from error


def _tokenizer_folder(folder: Path) -> Path:
    if (folder / "tokenizer.json").is_file() or not has_slow_tokenizer(folder):
        return folder  # reading the tokenizer reports what is missing
    return import_tokenizer(folder)


def _require_gguf() -> None:
    from importlib.util import find_spec

    for package in ("gguf", "torch", "transformers"):
        if find_spec(package) is None:
            raise SetupError(
                f"Writing GGUF needs the {package} package, which is not installed.",
                remedy="pip install 'tightfit[gguf]'"
                if package == "gguf"
                else "pip install 'tightfit[train]'",
            )
