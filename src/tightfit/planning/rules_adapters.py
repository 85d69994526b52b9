"""What adapters beyond plain LoRA cannot be combined with."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Method, Sharding
from tightfit.estimate.weights import is_dora, is_target
from tightfit.planning.case import Case, Rule

_DORA_SHARDED = "https://github.com/huggingface/peft/issues/1731"


def _adapts_bare_weights(case: Case) -> bool:
    return any(
        not part.is_module and is_target(part, case.strategy.lora_targets)
        for block in case.spec.blocks
        for part in block.linears
    )


ADAPTER_RULES: tuple[Rule, ...] = (
    Rule(
        name="dora-method",
        reason="DoRA is a kind of adapter; `{s.method.value}` has none",
        source="https://arxiv.org/abs/2402.09353",
        violated=lambda c: c.strategy.dora and c.strategy.method is Method.FULL,
    ),
    Rule(
        name="dora-experts",
        reason="DoRA does not take the experts of {m.name}, which are bare parameters: name "
        "modules with --set lora_targets=",
        source="peft 0.21, lora/layer.py ParamWrapper",
        violated=lambda c: is_dora(c.strategy) and _adapts_bare_weights(c),
    ),
    Rule(
        name="dora-zero3",
        reason="DoRA reads the base weights outside their own module, where zero3 has already "
        "let go of them: use fsdp, ddp or zero2",
        source=_DORA_SHARDED,
        violated=lambda c: is_dora(c.strategy) and c.strategy.sharding is Sharding.ZERO3,
    ),
    Rule(
        name="dora-sharded-quantized",
        reason="DoRA on sharded {s.weights.value} weights fails when adapters are made: it copies "
        "the packed base",
        source=_DORA_SHARDED,
        violated=lambda c: (
            is_dora(c.strategy)
            and c.strategy.weights in (Dtype.NF4, Dtype.INT8)
            and c.strategy.sharding.shards_weights
        ),
        severity="warning",
    ),
)
