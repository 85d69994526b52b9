"""What fp8 products need, and cannot be combined with."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Method
from tightfit.estimate.weights import UNPACKED_FAMILIES
from tightfit.planning.case import T5_TYPES, Case, Rule

_FP8 = "tightfit/runtime/fp8_linear.py"
_OTHER_LINEARS = UNPACKED_FAMILIES | {"gpt2"}


def _is_bf16(case: Case) -> bool:
    """Whether matrices are bf16 once they are plain, and everything else is."""
    s = case.strategy
    has_bf16 = s.weights in (Dtype.BF16, Dtype.NF4) and s.compute is Dtype.BF16
    return has_bf16 and not s.is_autocast


FP8_RULES: tuple[Rule, ...] = (
    Rule(
        name="fp8-capability",
        reason="fp8 products need compute capability 8.9; {c.gpu.name} is {c.capability}",
        source="torch._scaled_mm, torch 2.13",
        violated=lambda c: (
            c.strategy.has_fp8
            and not c.is_cpu
            and (c.gpu.compute_capability is None or c.is_below(8, 9))
        ),
    ),
    Rule(
        name="fp8-cpu",
        reason="CPUs have no fp8 units: products would be slower than in bf16",
        source="torch._scaled_mm on CPUs, torch 2.13",
        violated=lambda c: c.strategy.has_fp8 and c.is_cpu,
    ),
    Rule(
        name="fp8-method",
        reason="fp8 products are for training: `{s.method.value}` trains nothing",
        source=_FP8,
        violated=lambda c: c.strategy.has_fp8 and c.strategy.method is Method.LOAD,
    ),
    Rule(
        name="fp8-dtype",
        reason="fp8 products are made of plain bf16 weights and activations: weights are "
        "{s.weights.value}, arithmetic is {s.compute.value}",
        source=_FP8,
        violated=lambda c: c.strategy.has_fp8 and not _is_bf16(c),
    ),
    Rule(
        name="fp8-packed",
        reason="fp8 products are made of matrices that are unpacked once, and these stay packed in "
        "nf4: --set unpacked_base=true",
        source=_FP8,
        violated=lambda c: (
            c.strategy.fp8 and c.strategy.weights is Dtype.NF4 and not c.strategy.unpacked_base
        ),
    ),
    Rule(
        name="fp8-family",
        reason="linear layers of {m.model_type} are of a class of their own, which has no fp8 "
        "products",
        source="transformers 5.22: Conv1D of gpt2, FalconLinear",
        violated=lambda c: c.strategy.has_fp8 and c.spec.model_type in _OTHER_LINEARS,
    ),
    Rule(
        name="fp8-frozen-family",
        reason="{m.model_type} casts what a matrix reads to the format that it is kept in, which "
        "would be fp8 under LoRA",
        source="transformers 5.22: T5DenseActDense.forward",
        violated=lambda c: c.strategy.stores_fp8 and c.spec.model_type in T5_TYPES,
    ),
    Rule(
        name="fp8-adapters",
        reason="adapters beside fp8 weights must be folded: --set folded_adapters=true",
        source=_FP8,
        violated=lambda c: c.strategy.stores_fp8 and not c.strategy.folded_adapters,
    ),
    Rule(
        name="fp8-gradients-method",
        reason="fp8 gradients are for full tuning: LoRA leaves the matrices frozen",
        source=_FP8,
        violated=lambda c: c.strategy.fp8_gradients and c.strategy.method is Method.LORA,
    ),
    Rule(
        name="fp8-twice",
        reason="fp8 covers the backward pass already: set fp8 or fp8_gradients, not both",
        source=_FP8,
        violated=lambda c: c.strategy.fp8 and c.strategy.fp8_gradients,
    ),
    Rule(
        name="fp8-sharded",
        reason="{s.sharding.value} cuts weights into shards in their own format, which fp8 copies "
        "are not made for yet: use single or ddp",
        source=_FP8,
        violated=lambda c: c.strategy.has_fp8 and c.strategy.sharding.shards_optimizer,
    ),
)
