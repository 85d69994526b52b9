"""Models without memory behind them of families that have no reader, and what they hold."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from tightfit.models.families.registry import find_family
from tightfit.models.spec import ModelSpec
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.module_tree import build

DEPTH = 4
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1000,
}
LinearKey = tuple[str, int, int, bool]


def list_types(*, with_reader: bool) -> list[str]:
    """Causal families of the installed transformers."""
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    return sorted(
        {
            config.model_type
            for config in mapping
            if (find_family(config.model_type).read is not None) is with_reader
        }
    )


def try_build(model_type: str) -> tuple[nn.Module, Any] | None:
    """A few layers of the family's default widths, or all it has, or none where it needs more."""
    for sizes in ({"num_hidden_layers": DEPTH}, {}, SIZES):
        try:
            return build({"model_type": model_type, **sizes})
        except Exception:  # whatever modelling code raises for a config that lacks something
            continue
    return None


@cache
def pick_llama_like() -> str:
    """A family without a reader whose config has Llama's names: one that has none yet."""
    for model_type in list_types(with_reader=False):
        try:
            _, config = build({"model_type": model_type, **SIZES})
        except Exception:
            continue
        stated = {key: getattr(config, key, None) for key in SIZES}
        if stated == SIZES and not config.is_encoder_decoder:
            return model_type
    raise AssertionError("every family has a reader: this fallback has nothing left to do")


def count_real(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def real_linears(model: nn.Module) -> Counter[LinearKey]:
    """Every linear of the layers; one whose weight an earlier one holds is not counted."""
    found: Counter[LinearKey] = Counter()
    seen: set[int] = set()
    for layer in decoder_layers(model):
        for path, part in layer.named_modules():
            if isinstance(part, (nn.Linear, Conv1D)) and id(part.weight) not in seen:
                seen.add(id(part.weight))
                shape = tuple(part.weight.shape)
                ins, outs = shape if isinstance(part, Conv1D) else shape[::-1]
                found[path.rpartition(".")[2], ins, outs, part.bias is not None] += 1
    return found


def our_linears(spec: ModelSpec) -> Counter[LinearKey]:
    found: Counter[LinearKey] = Counter()
    for block in spec.blocks:
        for part in block.linears:
            if part.is_module:
                key = (part.name, part.in_features, part.out_features, part.bias)
                found[key] += block.num_layers * part.copies
    return found
