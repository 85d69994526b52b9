"""What adapters beyond plain LoRA, and folded ones, cannot be combined with."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Method, Sharding
from tightfit.estimate.weights import is_dora, is_target
from tightfit.planning.case import Case, Rule

_DORA_SHARDED = "https://github.com/huggingface/peft/issues/1731"
_FOLDED = "tightfit/runtime/folded_adapters.py"


def _adapts_bare_weights(case: Case) -> bool:
    return any(
        not part.is_module and is_target(part, case.strategy.lora_targets)
        for block in case.spec.blocks
        for part in block.linears
    )


FOLDED_RULES: tuple[Rule, ...] = (
    Rule(
        name="folded-method",
        reason="there are no adapters to fold: `{s.method.value}` trains none",
        source=_FOLDED,
        violated=lambda c: c.strategy.folded_adapters and c.strategy.method is not Method.LORA,
    ),
    Rule(
        name="folded-dropout",
        reason="folded adapters read the input that their matrix reads, which dropout would change",
        source=_FOLDED,
        violated=lambda c: c.strategy.folded_adapters and c.strategy.lora_dropout > 0,
    ),
    Rule(
        name="folded-dora",
        reason="DoRA divides by a norm between the two products, so they cannot be one",
        source=_FOLDED,
        violated=lambda c: c.strategy.folded_adapters and is_dora(c.strategy),
    ),
    Rule(
        name="folded-base",
        reason="folded adapters unpack the base matrix themselves, and {s.weights.value} has "
        "kernels of its own",
        source=_FOLDED,
        violated=lambda c: (
            c.strategy.folded_adapters and c.strategy.weights in (Dtype.INT8, Dtype.GPTQ4)
        ),
    ),
    Rule(
        name="folded-dtype",
        reason="folded adapters multiply in one number format: adapters are "
        "{s.adapter_dtype.value}, arithmetic is {s.compute.value}",
        source=_FOLDED,
        violated=lambda c: (
            c.strategy.folded_adapters and c.strategy.adapter_dtype is not c.strategy.compute
        ),
    ),
    Rule(
        name="folded-autocast",
        reason="autocast casts what each product reads, and folded adapters cast nothing",
        source=_FOLDED,
        violated=lambda c: c.strategy.folded_adapters and c.strategy.is_autocast,
    ),
    Rule(
        name="folded-zero3",
        reason="zero3 gathers a matrix when its own module is called, and folded adapters read it "
        "from outside: use fsdp, ddp or zero2",
        source="deepspeed 0.19, runtime/zero/parameter_offload.py",
        violated=lambda c: c.strategy.folded_adapters and c.strategy.sharding is Sharding.ZERO3,
    ),
)

ADAPTER_RULES: tuple[Rule, ...] = (
    *FOLDED_RULES,
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
