"""Write a Hugging Face folder as one GGUF file: metadata, tensor names and layouts, bytes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import MXFP4, PLAIN_DTYPES, Dtype
from tightfit.core.errors import InvalidInputError, first_line
from tightfit.core.packages import require_packages
from tightfit.core.progress import Progress
from tightfit.core.reading import read_json_file
from tightfit.core.text import did_you_mean, printable
from tightfit.core.units import MIB
from tightfit.export.gguf_tokenizer import read_vocabulary, settle_scheme, write_vocabulary
from tightfit.models.config import read_quant_method
from tightfit.models.families.registry import FAMILIES, find_family
from tightfit.models.family import Family, GgufLayout, count_leading_dense
from tightfit.runtime.gguf.file import (
    changed_shape,
    find_parts,
    get_rope,
    has_rope_factors,
    make_name_lookup,
    make_rope_tensors,
    write_rope,
)
from tightfit.runtime.libraries import silence_libraries, torch_dtype
from tightfit.runtime.model_files import has_slow_tokenizer, import_tokenizer
from tightfit.runtime.output_folder import check_room, whole_file
from tightfit.runtime.tensor_files import StoredTensor, StoredWeights, check_weights

if TYPE_CHECKING:
    from torch import Tensor


MXFP4_BLOCK, MXFP4_BLOCK_BYTES = 32, 17
"""Values that share a scale, and their codes with it. Source: OCP Microscaling Formats 1.0."""
_CODES, _SCALES = "_blocks", "_scales"
BLOOM_CONTEXT = 2048
"""Bloom's config does not say what it was trained on. Source: arXiv:2211.05100, table 3."""
TOKEN_BYTES = 2048
"""Of one token and its merges while they are read, checked and written. Measured."""
LIBRARY_BYTES = 120 * MIB
"""llama.cpp once it is loaded for the check of the tokenizer. Measured."""
_LEFT_OUT = (
    *(".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"),
    *(".attention.bias", ".attention.masked_bias"),
)
"""Buffers that old checkpoints carry and every program computes by itself."""
_WIDE = (
    *("_norm.weight", "position_embd.weight", ".bias"),
    *("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight"),
    *("ssm_conv1d.weight", "shortconv.conv.weight", "ssm_a", "ssm_d"),
)
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor of the file to be written."""

    name: str
    sources: tuple[str, ...]
    """Of several, which all have one shape, a stack is made."""
    shape: tuple[int, ...]
    dtype: Dtype
    take: Callable[[Tensor], Tensor] | None = None
    """What is done with the values of a source."""
    is_mxfp4: bool = False
    """The sources are MXFP4's codes and scales, in this order."""

    @property
    def num_bytes(self) -> int:
        if self.is_mxfp4:
            return math.prod(self.shape) // MXFP4_BLOCK * MXFP4_BLOCK_BYTES
        return math.prod(self.shape) * self.dtype.value_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPlan:
    """A planned conversion."""

    family: Family
    layout: GgufLayout
    config: Any
    weights: StoredWeights
    tensors: tuple[PlannedTensor, ...]
    dtype: Dtype
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
            sum(self.weights.tensors[name].num_bytes for name in t.sources)
            * (2 if t.take is not None or len(t.sources) > 1 else 1)
            + t.num_bytes
            for t in self.tensors
        )
        return largest + TOKEN_BYTES * int(self.config.vocab_size) + LIBRARY_BYTES

    def write(self, target: Path, report: Progress | None = None) -> tuple[str, ...]:
        """Write the file; returns what a user should know."""
        check_room(target, self.disk_bytes)
        embedding = next(tensor for tensor in self.tensors if tensor.name == _EMBEDDING)
        vocabulary, tokenizer = read_vocabulary(self.tokenizer, embedding.shape[0])
        scheme, notes = settle_scheme(vocabulary, tokenizer.encode)
        with whole_file(target) as partial:
            writer = _make_writer(partial, self)
            try:
                notes += _write_architecture(writer, self.layout, self.config)
                write_vocabulary(writer, vocabulary, scheme, self.name)
                _write_tensors(writer, self, report)
            finally:
                writer.close()
        return (*vocabulary.notes, *notes)


def plan_gguf(
    source: Path, *, dtype: Dtype, tokenizer: Path | None = None, name: str | None = None
) -> GgufPlan:
    """Check everything that decides the file, and refuse what cannot be converted."""
    require_packages("Writing GGUF", "torch", "transformers")
    require_packages("Writing GGUF", "gguf", extra="gguf")
    if (source / "adapter_config.json").is_file() and not (source / "config.json").is_file():
        raise InvalidInputError(
            f"{source} holds an adapter, not a model.",
            remedy=f"merge first: tightfit merge {source}",
        )
    family, layout, config = open_model(source)
    check_weights(source)
    weights = StoredWeights(source)
    folder = tokenizer or source
    # A folder with no tokenizer at all is left to the reader, which says what is missing.
    if not (folder / "tokenizer.json").is_file() and has_slow_tokenizer(folder):
        folder = import_tokenizer(folder)
    return GgufPlan(
        family=family,
        layout=layout,
        config=config,
        weights=weights,
        tensors=tuple(_plan_tensors(weights, family, layout, config, dtype)),
        dtype=dtype,
        name=name or source.absolute().name,
        tokenizer=folder,
    )


def open_model(source: Path) -> tuple[Family, GgufLayout, Any]:
    """The family of a model folder and transformers' config; raises if llama.cpp cannot have it."""
    family, layout = _find_layout(source)
    config = _load_config(source)
    _check_config(layout, config)
    return family, layout, config


def has_own_head(layout: GgufLayout, config: Any) -> bool:
    """Whether the file has an output matrix."""
    return layout.needs_head or not _is_tied(config)


def _is_tied(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", True))


def _find_layout(folder: Path) -> tuple[Family, GgufLayout]:
    """The family of a model folder; raises if it cannot be converted."""
    try:
        config = dict(read_json_file(folder / "config.json", allows_infinity=True))
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInputError(
            f"{folder / 'config.json'} cannot be read ({error}).",
            remedy="name a folder with config.json and weights",
        ) from error
    model_type = str(config.get("model_type", ""))
    family = find_family(model_type)
    if family.gguf is None:
        known = sorted(name for name, record in FAMILIES.items() if record.gguf is not None)
        shown = printable(model_type) or "no model_type"
        why = f": {family.gguf_problem}" if family.gguf_problem else ""
        hint = "" if why else did_you_mean(model_type, known)
        raise InvalidInputError(
            f"{folder} is of the family {shown}, which cannot be written as GGUF here{why}.{hint}",
            remedy=f"name a model of one of: {', '.join(known)}",
        )
    is_mxfp4 = read_quant_method(config) == MXFP4
    if config.get("quantization_config") and not (is_mxfp4 and family.gguf.keeps_mxfp4):
        raise InvalidInputError(
            f"{folder} is quantized, and its values cannot be had back.",
            remedy="convert the model that it was made from; tightfit quantize makes small GGUFs",
        )
    heads = config.get("architectures") or ["ForCausalLM"]
    if not str(heads[0]).endswith(("ForCausalLM", "LMHeadModel")):
        raise InvalidInputError(
            f"{folder} is a {printable(str(heads[0]))}, not a model that writes text.",
            remedy="name a model whose architecture ends in ForCausalLM",
        )
    return family, family.gguf


def _load_config(source: Path) -> Any:
    from transformers import AutoConfig

    silence_libraries()
    try:
        return AutoConfig.from_pretrained(
            str(source), local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InvalidInputError(
            f"transformers cannot read {source / 'config.json'}: {first_line(error)}.",
            remedy="fetch the model's config.json again",
        ) from error


def _check_config(layout: GgufLayout, config: Any) -> None:
    """Raise for settings that llama.cpp would silently ignore."""
    names = ("hidden_activation", "hidden_act", "activation_function", "activation")
    stated = (getattr(config, name, None) for name in names)
    activation = next((str(name) for name in stated if name), "gelu")
    obstacle = layout.find_obstacle(config)
    if activation not in layout.activations:
        obstacle = f"the activation {activation}"
    if has_rope_factors(config) and not layout.reads_rope_factors:
        obstacle = "a scaling for each rotary frequency (llama3 or longrope)"
    if obstacle is not None:
        raise InvalidInputError(
            f"This {config.model_type} model has {obstacle}, which llama.cpp cannot compute.",
            remedy="use it with --engine transformers; tightfit quantize --to nf4 or gptq-4 "
            "shrinks it",
        )


# Metadata.


def _write_architecture(writer: Any, layout: GgufLayout, config: Any) -> list[str]:
    """Write sizes, norms, positions and attention; returns what a user should know."""
    inner = getattr(config, layout.inner_key, None) if layout.inner_key else None
    names = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
    context = next((int(n) for name in names if (n := getattr(config, name, None))), BLOOM_CONTEXT)
    writer.add_block_count(int(config.num_hidden_layers))
    writer.add_context_length(context)
    writer.add_embedding_length(int(config.hidden_size))
    if layout.find_inner is not None:
        inner = layout.find_inner(config)
    writer.add_feed_forward_length(int(inner or 4 * config.hidden_size))
    writer.add_head_count(int(config.num_attention_heads))
    writer.add_vocab_size(int(config.vocab_size))
    count_kv_heads = layout.list_kv_heads or layout.count_kv_heads
    writer.add_head_count_kv(count_kv_heads(config))
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(float(config.rms_norm_eps))
    else:
        stated = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
        epsilon = next(getattr(config, name) for name in stated if hasattr(config, name))
        writer.add_layer_norm_eps(float(epsilon))
    if layout.expert_inner_key is not None:
        writer.add_expert_count(count_experts(config))
        writer.add_expert_used_count(int(config.num_experts_per_tok))
        writer.add_expert_feed_forward_length(int(getattr(config, layout.expert_inner_key)))
    if layout.has_rotary and layout.states_head_dim:
        writer.add_key_length(_head_dim(config))
        writer.add_value_length(_head_dim(config))
        writer.add_rope_dimension_count(_rotary_dim(config))
    notes = write_rope(writer, config) if layout.has_rotary else []
    if layout.write_attention is not None:
        layout.write_attention(writer, config)
    window = int(getattr(config, "sliding_window", None) or 0)
    kinds = getattr(config, "layer_types", None)
    is_sliding = window and (not kinds or "sliding_attention" in kinds)
    if is_sliding and window < context and not layout.computes_windows:
        notes.append(
            f"It attends to the last {window:,} tokens; llama.cpp lets this family attend to all: "
            "answers differ in longer contexts."
        )
    return notes


def count_experts(config: Any) -> int:
    """Of each layer."""
    names = ("num_local_experts", "num_experts")
    return next((int(n) for name in names if (n := getattr(config, name, None))), 0)


def _head_dim(config: Any) -> int:
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def _rotary_dim(config: Any) -> int:
    """Rotary dimensions of a head; all of it in most models."""
    fraction = get_rope(config).get("partial_rotary_factor")
    if fraction is None:
        fraction = getattr(config, "partial_rotary_factor", None)
    return int(_head_dim(config) * float(1.0 if fraction is None else fraction))


# Tensors.


def _plan_tensors(
    weights: StoredWeights, family: Family, layout: GgufLayout, config: Any, dtype: Dtype
) -> list[PlannedTensor]:
    """Every tensor in the order of the layers; refuses what is unknown or missing."""
    look_up = make_name_lookup(family, int(config.num_hidden_layers))
    planned: dict[str, PlannedTensor] = {}
    stacks: dict[str, dict[int, str]] = defaultdict(dict)
    strange = []
    for stored in weights.tensors.values():
        if layout.keeps_mxfp4 and stored.name.endswith(_CODES):
            planned |= _plan_mxfp4(stored, weights, look_up, layout, config)
            continue
        if stored.name.endswith(_LEFT_OUT) or not _is_weight(stored):
            continue
        if layout.drops_later_layers and _is_later_layer(stored.name, config):
            continue
        for part in find_parts(layout, stored.name, config):
            name = look_up(part.name)
            if name is None:
                strange.append(stored.name)
                continue
            shape = stored.shape if part.take is None else changed_shape(part.take, stored.shape)
            if part.index is not None:
                stacks[name][part.index] = stored.name
                shape = (len(stacks[name]), *shape)
            planned[name] = PlannedTensor(
                name=name,
                sources=(stored.name,),
                shape=shape,
                dtype=Dtype.FP32 if _is_wide(name, shape) else dtype,
                take=part.take,
            )
    for name, numbered in stacks.items():
        sources = _check_stack(name, numbered, weights, config)
        planned[name] = replace(planned[name], sources=sources)
    if strange:
        raise InvalidInputError(
            f"The weights hold {strange[0]}, which llama.cpp's {family.architecture} models "
            f"do not have ({len(strange)} such tensors).",
            remedy="check that config.json belongs to these weights",
        )
    _settle_head(planned, weights, family, layout, config)
    _check_layers(planned, config)
    return sorted(planned.values(), key=_order)


def _plan_mxfp4(
    stored: StoredTensor,
    weights: StoredWeights,
    look_up: Callable[[str], str | None],
    layout: GgufLayout,
    config: Any,
) -> dict[str, PlannedTensor]:
    """The tensors that become of MXFP4's codes: of gate and up together every other row each."""
    name = stored.name.removesuffix(_CODES)
    if f"{name}{_SCALES}" not in weights.tensors:
        raise InvalidInputError(
            f"The weights lack {name}{_SCALES}.",
            remedy="fetch the model again; `hf download` goes on where it stopped",
        )
    parts = find_parts(layout, name, config)
    experts, rows, blocks, _ = stored.shape
    planned = {}
    for at, part in enumerate(parts):
        found = look_up(part.name)
        assert found is not None
        planned[found] = PlannedTensor(
            name=found,
            sources=(stored.name, f"{name}{_SCALES}"),
            shape=(experts, rows // len(parts), blocks * MXFP4_BLOCK),
            dtype=Dtype.BF16,
            take=_every(len(parts), at),
            is_mxfp4=True,
        )
    return planned


def _every(step: int, at: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x[:, at::step]


def _repack_mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """From pairs of neighbours in a byte to values half a block apart; the codes are the same.

    Source: `repack_mxfp4_blocks` in ggml-org/llama.cpp, `conversion/base.py`.
    """
    import torch

    low, high = codes & 0x0F, codes >> 4
    values = torch.stack((low, high), dim=-1).flatten(-2)
    half = MXFP4_BLOCK // 2
    packed = values[..., :half] | (values[..., half:] << 4)
    return torch.cat((scales[..., None], packed), dim=-1).contiguous()


def _is_later_layer(name: str, config: Any) -> bool:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= int(config.num_hidden_layers)


def _is_wide(name: str, shape: tuple[int, ...]) -> bool:
    """llama.cpp reads vectors, norms, routers and position tables in 32 bit only."""
    return len(shape) <= 1 or name.endswith(_WIDE)


def _check_stack(
    name: str, numbered: Mapping[int, str], weights: StoredWeights, config: Any
) -> tuple[str, ...]:
    """The stored tensors of a stack in order; raises if one is missing or of another shape."""
    count = count_experts(config) if "_exps" in name else len(numbered)
    lost = [number for number in range(count) if number not in numbered]
    if lost or len(numbered) != count:
        raise InvalidInputError(
            f"The weights hold {len(numbered)} of the {count} matrices of {name}.",
            remedy="fetch the model again; `hf download` goes on where it stopped",
        )
    sources = tuple(numbered[number] for number in range(count))
    if len({weights.tensors[source].shape for source in sources}) > 1:
        raise InvalidInputError(
            f"The matrices of {name} are of different shapes.",
            remedy="check that config.json belongs to these weights",
        )
    return sources


def _is_weight(stored: StoredTensor) -> bool:
    """Whole numbers are buffers, such as causal masks. Eight bits are a quantized model."""
    if stored.dtype.is_floating_point and stored.dtype.itemsize == 1:
        raise InvalidInputError(
            f"{stored.path.name} holds {stored.name} in 8 bit: the model is quantized.",
            remedy="convert the model that it was made from",
        )
    return stored.dtype.is_floating_point


def _settle_head(
    planned: dict[str, PlannedTensor],
    weights: StoredWeights,
    family: Family,
    layout: GgufLayout,
    config: Any,
) -> None:
    """Leave out a tied head, unless the weights hold it with other values, as transformers does."""
    import torch

    embedding, head = planned.get(_EMBEDDING), planned.get(_HEAD)
    is_tied = _is_tied(config)
    if embedding is None or (head is None and not is_tied):
        lacking = "a head (lm_head.weight)" if embedding else "an embedding"
        raise InvalidInputError(
            f"The weights lack {lacking}.", remedy="fetch the model again, or name another folder"
        )
    if head is None:
        if layout.needs_head:
            planned[_HEAD] = replace(embedding, name=_HEAD)
        return
    if layout.needs_head:
        return
    if is_tied and torch.equal(weights.read(embedding.sources[0]), weights.read(head.sources[0])):
        del planned[_HEAD]
    elif not layout.can_untie:
        raise InvalidInputError(
            f"The model has a head of its own, which llama.cpp's {family.architecture} "
            "models cannot have.",
            remedy="use the model with --engine transformers",
        )


def _check_layers(planned: dict[str, PlannedTensor], config: Any) -> None:
    """Every layer has what the others of its kind have; there are as many as config.json says."""
    per_layer: dict[int, set[str]] = defaultdict(set)
    for name in planned:
        if found := re.match(r"blk\.(\d+)\.(.+)", name):
            per_layer[int(found[1])].add(found[2])
    types = getattr(config, "layer_types", None) or ()
    mixed = {at for at, kind in enumerate(types) if kind in ("linear_attention", "conv", "mamba")}
    dense = count_leading_dense(config)
    for layer in range(int(config.num_hidden_layers)):
        kind = (layer in mixed, layer < dense)
        alike = (at for at in per_layer if (at in mixed, at < dense) == kind)
        everything = set().union(*(per_layer[at] for at in alike))
        lost = sorted(everything - per_layer.get(layer, set()))
        if lost or not everything:
            raise InvalidInputError(
                f"Layer {layer} of the model lacks {', '.join(lost[:3]) or 'all weights'}.",
                remedy="fetch the model again; `hf download` goes on where it stopped",
            )


def _order(tensor: PlannedTensor) -> tuple[int, int, str]:
    """The embedding, the layers by number, what follows them."""
    if found := re.match(r"blk\.(\d+)\.", tensor.name):
        return (1, int(found[1]), tensor.name)
    return (0 if tensor.name.startswith(("token_embd", "position_embd")) else 2, 0, tensor.name)


def _make_writer(path: Path, plan: GgufPlan) -> Any:
    import gguf

    writer: Any = gguf.GGUFWriter(path, plan.family.architecture)
    writer.add_type(gguf.GGUFType.MODEL)
    num_values = sum(math.prod(tensor.shape) for tensor in plan.tensors)
    of_experts = sum(math.prod(tensor.shape) for tensor in plan.tensors if "_exps" in tensor.name)
    count = count_experts(plan.config) if of_experts else 0
    shared, each = num_values - of_experts, of_experts // max(count, 1)
    writer.add_size_label(gguf.size_label(num_values, shared, each, count))
    amount = "ALL" if plan.dtype is Dtype.FP32 else "MOSTLY"
    kind = gguf.LlamaFileType[f"{amount}_{plan.dtype.gguf_name.upper()}"]
    if any(tensor.is_mxfp4 for tensor in plan.tensors):
        kind = gguf.LlamaFileType.MOSTLY_MXFP4_MOE
    writer.add_file_type(kind)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return writer


def _write_tensors(writer: Any, plan: GgufPlan, report: Progress | None) -> None:
    """The list of tensors first, then each one read, changed, written and forgotten."""
    import gguf
    import numpy as np
    import torch

    kinds = {d: gguf.GGMLQuantizationType[d.gguf_name.upper()] for d in PLAIN_DTYPES}
    find_dim = _rotary_dim if plan.layout.rope_spans_rotary_dim else _head_dim
    has_rotary = plan.layout.has_rotary
    extra = make_rope_tensors(plan.config, find_dim(plan.config)) if has_rotary else {}
    for name, values in extra.items():
        writer.add_tensor_info(
            name, tuple(values.shape), np.dtype(np.float32), values.nbytes, kinds[Dtype.FP32]
        )
    for tensor in plan.tensors:
        kind = gguf.GGMLQuantizationType.MXFP4 if tensor.is_mxfp4 else kinds[tensor.dtype]
        # numpy has no bf16; the writer looks only at the format that is named.
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float16), tensor.num_bytes, kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for values in extra.values():
        writer.write_tensor_data(values.numpy())
    total, done = sum(tensor.num_bytes for tensor in plan.tensors), 0
    for tensor in plan.tensors:
        values = _convert_values(plan.weights, tensor)
        writer.write_tensor_data(values.view(torch.uint8).numpy())
        done += tensor.num_bytes
        if report is not None:
            report("writing", done, total)
    writer.flush()


def _convert_values(weights: StoredWeights, planned: PlannedTensor) -> Tensor:
    """Rearranged and in the wanted format; refuses values that the format cannot hold."""
    import torch

    parts = [weights.read(source) for source in planned.sources]
    if planned.take is not None:
        parts = [planned.take(part) for part in parts]
    if planned.is_mxfp4:
        return _repack_mxfp4(*parts)
    values = parts[0] if len(planned.shape) == parts[0].ndim else torch.stack(parts)
    converted = values.to(torch_dtype(planned.dtype)).contiguous()
    # A finite sum proves that all values are finite, and is much faster than testing each.
    if math.isfinite(float(converted.sum(dtype=torch.float32))):
        return converted
    if not torch.isfinite(values).all():
        raise InvalidInputError(
            f"The tensor {planned.sources[0]} holds values that are no numbers (NaN or infinite).",
            remedy="fetch or train the model again",
        )
    if not torch.isfinite(converted).all():
        raise InvalidInputError(
            f"The tensor {planned.sources[0]} holds values beyond 65,504, the largest of "
            f"{planned.dtype.gguf_name}.",
            remedy="--dtype bf16, or --dtype f32",
        )
    return converted
