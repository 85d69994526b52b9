"""Where a step's time goes: operations by part, and what each part would take at its ceiling.

Pure: from the rows of `_kernel_steps.py` and a calibration. A ceiling is the least work that a part
has to do, at the best rate that `tightfit calibrate` measured for work of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy
from tightfit.estimation.weights import num_trainable
from tightfit.hardware.calibration import BACKWARD_FLOPS, CAUSAL_FLOPS, Calibration
from tightfit.models.spec import ModelSpec

MATMUL, LORA, ATTENTION, UNPACKING = "matmul", "LoRA products", "attention", "nf4 unpacking"
FP8, CASTS = "fp8 products", "casts to fp8"
ELEMENTWISE, LOSS, OPTIMIZER = "norms, rotary, activations", "loss", "optimizer"
COPIES, OTHER, IDLE = "copies", "other", "idle"
PARTS = (
    *(MATMUL, FP8, LORA, ATTENTION, ELEMENTWISE, CASTS, UNPACKING, LOSS, OPTIMIZER),
    *(COPIES, OTHER, IDLE),
)

SCALED = "aten::_scaled_mm"
PRODUCTS = {
    **{"aten::mm": 0, "aten::bmm": 0, SCALED: 0},
    **{"aten::addmm": 1, "aten::addmm_": 1, "aten::baddbmm": 1},
}
"""Positions of the two operands in the recorded shapes."""
HOST_WAITS = frozenset({"Command Buffer Full"})
"""What the profiler tells among operations of the device, though only the host waits."""
MOST_READERS = 3
"""Adapters that go through one input together."""
UNPACKERS = {"bitsandbytes::dequantize_4bit": 0, "bitsandbytes::gemm_4bit": 1}
"""Position of the codes. The second's product is an operation of its own inside it."""
PASSES = {
    "LigerRMSNormFunctionBackward": 3,
    "RmsNormBackward": 3,
    "LigerSiLUMulFunctionBackward": 5,
    "LigerGELUMulFunctionBackward": 5,
}
"""Values moved per value of what is listed, where autograd's saved tensors are not listed."""
VALUE_BYTES = 2
"""Of what norms, activations and copies need to move. Passes in fp32 count as half of what they
move, since the part could do without them."""
LEAST_LOGIT_BYTES = 4
"""Each is read, and its gradient written in its place, in 16 bits."""
SETTLED_BYTES = 2**28
"""Tensors of less than this may stay in the card's cache."""

_ATTENTION = ("attention", "flash_", "cudnn_attention", "varlen")
_SOFTMAXES = ("aten::_softmax", "aten::_softmax_backward_data")
_LOSS = ("crossentropy", "cross_entropy", "log_softmax", "nll_loss")
_OPTIMIZER = ("_adamw", "optimizer_update", "_foreach_", "vector_norm", "optimizer.step")
_COPIES = frozenset(
    f"aten::{name}"
    for name in (
        *("copy_", "_to_copy", "clone", "cat", "stack", "fill_", "zero_", "index", "index_put_"),
        *("_index_put_impl_", "embedding", "embedding_dense_backward", "index_select", "arange"),
        *("split_with_sizes_copy", "_chunk_cat", "nonzero", "masked_select", "slice_backward"),
    )
)
_ELEMENTWISE = frozenset(
    f"aten::{name}"
    for name in (
        *("mul", "mul_", "add", "add_", "sub", "div", "div_", "pow", "mean", "sum", "rsqrt", "neg"),
        *("silu", "silu_", "silu_backward", "gelu", "gelu_backward", "sigmoid", "tanh"),
        *("tanh_backward", "native_layer_norm", "native_layer_norm_backward", "native_dropout"),
        *("native_dropout_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "where"),
        *("cos", "sin", "sigmoid_backward", "threshold_backward", "relu", "masked_fill"),
    )
)
_FUSED = ("triton_", "compiledfunction", "liger", "rmsnorm")
"""Compiled layers, Liger's kernels and ours, whatever attention and loss have not claimed."""
_CASTS = frozenset(
    f"_{name}{end}"
    for name in ("TrainedProduct", "Fp8TrainedProducts", "JoinedProducts", "FrozenProduct")
    for end in ("", "Backward")
)
"""Operations of `runtime/kernels/fp8.py` other than products."""

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Of the job: what shapes alone do not tell."""

    vocab_size: int
    lora_rank: int | None
    seq_len: int
    head_dim: int
    num_logits: int
    num_trained: int
    optimizer_bytes: int
    """Per trained value, what an update has to read and write."""


def gather_facts(spec: ModelSpec, strategy: Strategy) -> Facts:
    """Of rows that are full; each one's first token is not predicted."""
    num_rows = strategy.micro_batch * strategy.grad_accum
    is_lora = strategy.method is Method.LORA
    dtype = strategy.adapter_dtype if is_lora else strategy.weights
    return Facts(
        vocab_size=spec.vocab_size,
        lora_rank=strategy.lora_rank if is_lora else None,
        seq_len=strategy.seq_len,
        head_dim=spec.head_dim,
        num_logits=num_rows * (strategy.seq_len - 1) * spec.vocab_size,
        num_trained=num_trainable(spec, strategy),
        optimizer_bytes=count_update_bytes(strategy.optimizer, dtype.value_bytes),
    )


def count_update_bytes(optimizer: Optimizer, value_bytes: int) -> int:
    """Clipping reads gradients once; AdamW reads weight, gradient and two moments, and writes
    weight and moments."""
    is_8bit = optimizer in (Optimizer.ADAMW_8BIT, Optimizer.ADAMW_PAGED_8BIT)
    return value_bytes + 3 * value_bytes + 4 * (1 if is_8bit else value_bytes)


def classify(name: str, shapes: Shapes, facts: Facts) -> str:
    """The part that an operation belongs to."""
    lower = name.lower()
    is_product = name in PRODUCTS
    rules = (
        (name == SCALED, FP8),
        (name in _CASTS, CASTS),
        (is_product and _is_thin(name, shapes, facts), LORA),
        (is_product, MATMUL),
        (name in UNPACKERS, UNPACKING),
        (name in _SOFTMAXES or any(word in lower for word in _ATTENTION), ATTENTION),
        (_has_logits(shapes, facts) or any(word in lower for word in _LOSS), LOSS),
        (any(word in lower for word in _OPTIMIZER), OPTIMIZER),
        (name in _COPIES or lower.startswith(("memcpy", "memset")), COPIES),
        (name in _ELEMENTWISE or any(word in lower for word in _FUSED), ELEMENTWISE),
    )
    return next((part for is_it, part in rules if is_it), OTHER)


def _is_thin(name: str, shapes: Shapes, facts: Facts) -> bool:
    if facts.lora_rank is None:
        return False
    left, right = shapes[PRODUCTS[name] : PRODUCTS[name] + 2]
    ranks = {facts.lora_rank * count for count in range(1, MOST_READERS + 1)}
    return not ranks.isdisjoint((*left, *right))


def _has_logits(shapes: Shapes, facts: Facts) -> bool:
    """Values per word; the embedding's matrix has its words first."""
    return any(len(shape) > 1 and shape[-1] == facts.vocab_size for shape in shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The best rates that one device was measured at."""

    matmul_flops_per_second: float
    fp8_flops_per_second: float | None
    sustained_flops_per_second: float | None
    """When the card does nothing but products."""
    attention_forward_flops_per_second: float
    attention_backward_flops_per_second: float
    """At the job's length and head width, or the nearest that were measured."""
    stream_bytes_per_second: float
    nf4_weights_per_second: float | None


def read_ceilings(calibration: Calibration, facts: Facts) -> Ceilings:
    best = {
        dtype: max(
            (one.flops_per_second for one in calibration.matmuls if one.dtype == dtype),
            default=None,
        )
        for dtype in ("bf16", "fp8")
    }
    if best["bf16"] is None:
        raise ValueError("the calibration has no products in bf16")
    hot = calibration.sustained
    near = min(
        (one for one in calibration.attention if one.kind == "sdpa" and one.is_causal),
        key=lambda one: (
            abs(math.log2(one.head_dim / facts.head_dim)),
            abs(math.log2(one.length / facts.seq_len)),
        ),
    )
    streams = [
        one.bytes_per_second
        for one in calibration.traffic
        if one.kind in ("copy", "elementwise") and one.tensor_bytes >= SETTLED_BYTES
    ]
    return Ceilings(
        matmul_flops_per_second=best["bf16"],
        fp8_flops_per_second=best["fp8"],
        sustained_flops_per_second=None if hot is None else hot.flops_per_second,
        attention_forward_flops_per_second=near.forward_flops / near.forward_seconds,
        attention_backward_flops_per_second=(
            BACKWARD_FLOPS * near.forward_flops / near.backward_seconds
        ),
        stream_bytes_per_second=max(streams),
        nf4_weights_per_second=calibration.nf4_weights_per_second,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an operation has to do, and the least time for it."""

    amount: float
    unit: str
    seconds: float


def count_work(part: str, row: dict[str, Any], facts: Facts, ceilings: Ceilings) -> Work | None:
    """Of all repeats of one operation; None where its shapes do not tell."""
    name, shapes, count = row["op"], row["shapes"], row["count"]
    bandwidth = ceilings.stream_bytes_per_second
    if part in (MATMUL, FP8, LORA):
        flops, moved = (count * amount for amount in _count_product(name, shapes))
        rate = ceilings.fp8_flops_per_second if part == FP8 else ceilings.matmul_flops_per_second
        if part == LORA:
            seconds = max(flops / ceilings.matmul_flops_per_second, moved / bandwidth)
            return Work(amount=moved, unit="byte", seconds=seconds)
        return None if rate is None else Work(amount=flops, unit="flop", seconds=flops / rate)
    if part == ATTENTION:
        return _count_attention(name, shapes, count, facts, ceilings)
    if part == UNPACKING and ceilings.nf4_weights_per_second is not None:
        weights = 2 * math.prod(shapes[UNPACKERS[name]]) * count
        seconds = weights / ceilings.nf4_weights_per_second
        return Work(amount=weights, unit="weight", seconds=seconds)
    if part in (ELEMENTWISE, COPIES) and any(shapes):
        moved = count * _count_values(part, name, shapes) * VALUE_BYTES
        return Work(amount=moved, unit="byte", seconds=moved / bandwidth)
    return None


def _count_product(name: str, shapes: Shapes) -> tuple[float, float]:
    """FLOPs, and bytes of operands and result; what is added to is read as well."""
    left, right = shapes[PRODUCTS[name] : PRODUCTS[name] + 2]
    num_out = math.prod(left[:-1]) * right[-1]
    added = num_out if PRODUCTS[name] else 0
    moved = math.prod(left) + math.prod(right) + num_out + added
    return 2.0 * num_out * left[-1], float(moved * VALUE_BYTES)


def _count_attention(
    name: str, shapes: Shapes, count: int, facts: Facts, ceilings: Ceilings
) -> Work | None:
    """Over rows that are full, whatever the order of heads and tokens."""
    is_backward = "backward" in name.lower()
    query = shapes[int(is_backward)] if len(shapes) > 1 else []
    if len(query) < 3 or name in _SOFTMAXES:
        return None
    flops = CAUSAL_FLOPS * math.prod(query) * facts.seq_len * count
    if is_backward:
        flops *= BACKWARD_FLOPS
        rate = ceilings.attention_backward_flops_per_second
    else:
        rate = ceilings.attention_forward_flops_per_second
    return Work(amount=flops, unit="flop", seconds=flops / rate)


def _count_values(part: str, name: str, shapes: Shapes) -> int:
    sizes = [math.prod(shape) for shape in shapes if shape]
    if name in PASSES:
        return PASSES[name] * max(sizes)
    if part == COPIES:
        return 2 * max(sizes)
    return sum(sizes) + max(sizes)


def count_part(part: str, facts: Facts, ceilings: Ceilings) -> Work | None:
    """Of parts whose least work follows from the job, not from how it was done."""
    if part == LOSS:
        moved = facts.num_logits * LEAST_LOGIT_BYTES
    elif part == OPTIMIZER:
        moved = facts.num_trained * facts.optimizer_bytes
    else:
        return None
    return Work(amount=moved, unit="byte", seconds=moved / ceilings.stream_bytes_per_second)


def describe_parts(
    step: dict[str, Any], ops: Iterable[dict[str, Any]], facts: Facts, ceilings: Ceilings
) -> list[dict[str, Any]]:
    """One row per part that took time: the shares add up to the step."""
    seconds = dict.fromkeys(PARTS, 0.0)
    counts = dict.fromkeys(PARTS, 0)
    works: dict[str, list[Work]] = {part: [] for part in PARTS}
    waited = 0.0
    for row in ops:
        if row["op"] in HOST_WAITS:
            waited += row["seconds"]
            continue
        part = classify(row["op"], row["shapes"], facts)
        seconds[part] += row["seconds"]
        counts[part] += row["count"]
        work = count_work(part, row, facts, ceilings)
        works[part] += [work] if work is not None else []
    seconds[OTHER] += step["left_out_seconds"]
    seconds[IDLE] = max(0.0, step["step_seconds"] - (step["device_seconds"] - waited))
    whole = sum(seconds.values())
    rows = []
    for part in PARTS:
        if seconds[part]:
            given = count_part(part, facts, ceilings)
            found = [given] if given is not None else works[part]
            row = {"job": step["name"], "part": part, "count": counts[part]}
            row |= {"seconds": seconds[part], "fraction_of_step": seconds[part] / whole}
            rows.append(row | _relate(seconds[part], found, part, ceilings))
    return rows


def _relate(seconds: float, works: list[Work], part: str, ceilings: Ceilings) -> dict[str, Any]:
    if not works:
        return {}
    amount, least = sum(work.amount for work in works), sum(work.seconds for work in works)
    found = {
        "work": amount,
        "unit": works[0].unit,
        "rate": amount / seconds,
        "ceiling_rate": amount / least,
        "ceiling_seconds": least,
        "fraction_of_ceiling": least / seconds,
    }
    if part == MATMUL and ceilings.sustained_flops_per_second is not None:
        found["fraction_of_sustained"] = amount / seconds / ceilings.sustained_flops_per_second
    return found


def render_parts(rows: Sequence[dict[str, Any]]) -> str:
    """A table of one job."""
    lines = [
        f"{'part':28} {'ms':>8} {'share':>6} {'kernels':>8} {'rate':>14} {'ceiling':>14}"
        f" {'of it':>6} {'at best':>8}"
    ]
    for row in rows:
        text = f"{row['part']:28} {1e3 * row['seconds']:8.2f} {row['fraction_of_step']:6.1%}"
        text += f" {row['count']:8}"
        if "rate" in row:
            text += f" {_rate(row['rate'], row['unit'])} {_rate(row['ceiling_rate'], row['unit'])}"
            text += f" {row['fraction_of_ceiling']:6.0%} {1e3 * row['ceiling_seconds']:8.2f}"
        if "fraction_of_sustained" in row:
            text += f"  ({row['fraction_of_sustained']:.0%} of sustained)"
        lines.append(text)
    whole = sum(row["seconds"] for row in rows)
    # What has no ceiling keeps its time; only waiting would be gone.
    best = sum(row.get("ceiling_seconds", row["seconds"]) for row in rows if row["part"] != IDLE)
    lines.append(f"{'step':28} {1e3 * whole:8.2f} {1:6.0%} {'':45} {best / whole:6.0%}")
    return "\n".join(lines)


def _rate(rate: float, unit: str) -> str:
    word = {"flop": "TFLOP/s", "byte": "TB/s", "weight": "T val/s"}[unit]
    return f"{f'{rate / 1e12:.2f} {word}':>14}"
