"""Which tensors a GGUF file holds, made from which of the folder's, in which format."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError
from tightfit.runtime.gguf.families import Family
from tightfit.runtime.gguf.layout import Change, choose_change
from tightfit.runtime.stored_weights import StoredTensor, StoredWeights

if TYPE_CHECKING:
    from torch import Tensor

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
    """What decides the plan."""

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
    # A sum is finite only where every value is, and is far quicker than asking each.
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
