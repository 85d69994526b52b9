"""What a base that is unpacked once cannot be combined with."""

from __future__ import annotations

from typing import Any

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Method, Strategy
from tightfit.estimate.weights import UNPACKED_FAMILIES
from tightfit.planning.case import Rule

_UNPACKED = "tightfit/runtime/unpacked.py"

UNPACKED_RULES: tuple[Rule, ...] = (
    Rule(
        name="unpacked-weights",
        reason="only a frozen nf4 base can be unpacked once, and this is `{s.method.value}` over "
        "{s.weights.value} weights",
        source=_UNPACKED,
        violated=lambda c: (
            c.strategy.unpacked_base
            and (c.strategy.method is not Method.LORA or c.strategy.weights is not Dtype.NF4)
        ),
    ),
    Rule(
        name="unpacked-family",
        reason="transformers packs none of {m.model_type}'s layers, so that none can be unpacked",
        source="transformers 5.22: replace_with_bnb_linear, FalconLinear",
        violated=lambda c: c.strategy.unpacked_base and c.spec.model_type in UNPACKED_FAMILIES,
    ),
    Rule(
        name="unpacked-sharding",
        reason="an unpacked base lies whole on every GPU, and {s.sharding.value} spreads packed "
        "weights: use ddp",
        source=_UNPACKED,
        violated=lambda c: c.strategy.unpacked_base and c.strategy.sharding.shards_optimizer,
    ),
    Rule(
        name="unpacked-upcast",
        reason="packed matrices answer in the fp32 of raised norms, which unpacked ones would not",
        source=_UNPACKED,
        violated=lambda c: c.strategy.unpacked_base and c.strategy.upcast_unquantized,
    ),
)


def without_unpacking(strategy: Strategy) -> dict[str, Any]:
    """What keeps an nf4 base packed: fp8 products are made of unpacked matrices alone."""
    return {"unpacked_base": False} | ({"fp8": False} if strategy.fp8 else {})
