"""Advice that follows from a traced peak: single changes that lower it, each traced in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

from pydantic import NonNegativeInt, PositiveInt

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.frozen import Frozen
from tightfit.core.optimizers import Optimizer
from tightfit.core.profiles import Peak
from tightfit.core.settings import Loss, Method, Sharding
from tightfit.core.strategy import Strategy
from tightfit.planning.describe import describe_recomputing
from tightfit.planning.rules import Case, find_first_violation, without_dequantized_base
from tightfit.planning.space import list_long_row_levers
from tightfit.trace.result import TracedMemory

MOST_ALTERNATIVES = 5
LEAST_SAVING_FRACTION = 0.02
"""Of the peak; less is no advice."""

_Fields = dict[str, Any]
_Change = tuple[str, _Fields, float]
"""Words, fields of the strategy, and bytes of the peak that they may be expected to take away."""


class Advice(Frozen):
    """One change, traced: what it saves and how to ask for it."""

    words: str
    """`chunked loss`."""
    setting: dict[str, str]
    """Fields as `--set` takes them."""
    saving_bytes: PositiveInt
    """Of the peak, on each GPU."""
    new_peak_bytes: NonNegativeInt
    """Allocated."""
    makes_it_fit: bool
    """The job did not survive on this card before, and does now."""


class Alternative(NamedTuple):
    """A change that may lower the peak, not yet traced."""

    words: str
    setting: dict[str, str]
    strategy: Strategy
    expected_bytes: float
    """How much of the peak it is about; for the order only."""


def list_alternatives(case: Case, peak: Peak) -> list[Alternative]:
    """Single changes that touch what stands at this peak, most promising first.

    Each is legal on the case's node. What is expected of one is a guess from the peak alone:
    once it is pulled, another moment may be the fullest.
    """
    least = LEAST_SAVING_FRACTION * sum(peak.components.values())
    found = []
    for list_changes in _KINDS:
        for words, fields, expected in list_changes(case, peak):
            strategy = case.strategy.model_copy(update=fields)
            if expected <= least or find_first_violation(case._replace(strategy=strategy)):
                continue
            setting = {name: _write(value) for name, value in fields.items()}
            found.append(
                Alternative(
                    words=words, setting=setting, strategy=strategy, expected_bytes=expected
                )
            )
    found.sort(key=lambda alternative: -alternative.expected_bytes)
    return found[:MOST_ALTERNATIVES]


def judge_alternatives(
    alternatives: Sequence[Alternative],
    trace: Callable[[Strategy], TracedMemory | None],
    *,
    before: TracedMemory,
    capacity_bytes: int,
) -> tuple[Advice, ...]:
    """Those that save at least 2% of the peak, largest saving first.

    `trace` says None of what cannot be traced. `capacity_bytes` is what torch may reserve: the
    card's memory less the CUDA context.
    """
    judged = []
    for alternative in alternatives:
        after = trace(alternative.strategy)
        if after is None:
            continue
        saving = before.peak_allocated_bytes - after.peak_allocated_bytes
        if saving < max(1, LEAST_SAVING_FRACTION * before.peak_allocated_bytes):
            continue
        judged.append(
            Advice(
                words=alternative.words,
                setting=alternative.setting,
                saving_bytes=saving,
                new_peak_bytes=after.peak_allocated_bytes,
                makes_it_fit=after.smallest_capacity_bytes
                <= capacity_bytes
                < before.smallest_capacity_bytes,
            )
        )
    return tuple(sorted(judged, key=lambda advice: -advice.saving_bytes))


def _list_optimizers(case: Case, peak: Peak) -> Iterator[_Change]:
    used = case.strategy.optimizer
    if used.record.temporary == "all values" and "update" in peak.stage:
        made = _sum(peak, "temporary")
        yield "fused AdamW", {"optimizer": Optimizer.ADAMW}, made
    if used.record.state_values == 2 and not used.is_8bit:
        # Two moments of 2 or 4 bytes each become two of one.
        # State is in the dtype of the values it trains.
        is_full = case.strategy.method is Method.FULL
        trained = case.strategy.weights if is_full else case.strategy.adapter_dtype
        kept = 2 if trained in (Dtype.BF16, Dtype.FP16) else 4
        saved = _sum(peak, "optimizer") * (1 - 1 / kept)
        yield "8-bit optimizer state", {"optimizer": Optimizer.ADAMW_8BIT}, saved


def _list_losses(case: Case, peak: Peak) -> Iterator[_Change]:
    logits, used = _sum(peak, "logits"), case.strategy.loss
    if used in (Loss.PLAIN, Loss.KERNEL):
        # The 16-bit logits and their gradient stay; the fp32 copies go.
        yield "chunked loss", {"loss": Loss.CHUNKED}, 0.6 * logits
    if used is not Loss.FUSED:
        yield "fused loss", {"loss": Loss.FUSED}, 0.9 * logits
    if case.strategy.loss_chunk_factor > 1:
        gone = 1 - 1 / case.strategy.loss_chunk_factor
        yield "small loss chunks", {"loss_chunk_factor": 1}, gone * logits


def _list_recomputing(case: Case, peak: Peak) -> Iterator[_Change]:
    num_layers, strategy = case.spec.num_layers, case.strategy
    done = strategy.count_recomputed(num_layers)
    left = num_layers - done
    if left <= 0:
        return
    kept = _sum(peak, "activations")
    half = -(-num_layers // 2)
    for count in (half, num_layers):
        if count <= done:
            continue
        fields: _Fields = {"checkpointing": True}
        if count < num_layers or strategy.recomputed_layers is not None:
            fields["recomputed_layers"] = count
        words = "checkpointing"
        if count < num_layers:
            words = describe_recomputing(strategy.model_copy(update=fields))
        yield words, fields, 0.9 * kept * (count - done) / left


def _list_long_rows(case: Case, peak: Peak) -> Iterator[_Change]:
    strategy, count = case.strategy, case.strategy.count_recomputed(case.spec.num_layers)
    if not count or "backward" not in peak.stage:
        return
    for fields in list_long_row_levers(case.spec, strategy, case.node):
        if "mlp_tiles" in fields:
            yield "MLPs in tiles", fields, 0.5 * _sum(peak, "temporary")
        else:
            saved = fields["offloaded_inputs"] / count * _sum(peak, "activations")
            yield "layers' inputs in host memory", fields, saved


def _list_references(case: Case, peak: Peak) -> Iterator[_Change]:
    if case.strategy.copies_reference:  # as large as what it copies
        gone = _sum(peak, "weights") / 2
        yield "reference before training", {"precompute_reference": True}, gone


def _list_attention(case: Case, peak: Peak) -> Iterator[_Change]:
    if not case.strategy.attention.record.stores_scores:
        return
    # Of every token with every other, heads and more in front; or their mask.
    scores = sum(
        tensor.num_bytes
        for tensor in peak.tensors
        if len(tensor.shape) >= 3
        and tensor.shape[-1] == tensor.shape[-2]
        and tensor.category in ("activations", "temporary", "inputs")
    )
    fields: _Fields = {"attention": Attention.SDPA}
    if case.lacks_grouped_kernel:
        fields["repeat_keys"] = True  # else SDPA holds the scores itself
    yield "sdpa attention", fields, scores


def _list_batches(case: Case, peak: Peak) -> Iterator[_Change]:
    """Halved, or as near to it as divides the sequences evenly."""
    size = case.strategy.micro_batch
    sequences = size * case.strategy.grad_accum
    if size == 1:
        return
    less = next(part for part in range(size // 2, 0, -1) if sequences % part == 0)
    fields = {"micro_batch": less, "grad_accum": sequences // less}
    parts = ["activations", "logits", "inputs"]
    if "update" not in peak.stage:
        parts.append("temporary")
    following = _sum(peak, *parts)
    yield f"micro-batch {less} x {sequences // less}", fields, following * (1 - less / size)


def _list_weights(case: Case, peak: Peak) -> Iterator[_Change]:
    strategy = case.strategy
    if strategy.dequantized_base:
        bits = 8 if strategy.stores_fp8 else 8 * strategy.compute.value_bytes
        saved = _sum(peak, "weights") * (1 - 4.5 / bits) * 0.9
        yield "quantized base", without_dequantized_base(strategy), saved
    stored = {Dtype.FP32: 32, Dtype.BF16: 16, Dtype.FP16: 16, Dtype.INT8: 8}
    wide = stored.get(strategy.weights)
    if strategy.method is Method.LORA and wide is not None:
        # Embeddings, norms and head stay as they are.
        saved = _sum(peak, "weights") * (1 - 4.5 / wide) * 0.9
        yield "nf4 weights", {"weights": Dtype.NF4}, saved


def _list_shardings(case: Case, peak: Peak) -> Iterator[_Change]:
    strategy = case.strategy
    if strategy.world_size == 1 or strategy.sharding.shards_weights:
        return
    gone = 1 - 1 / strategy.world_size
    state = _sum(peak, "weights", "gradients", "optimizer")
    if strategy.sharding.is_zero:
        yield "zero3", {"sharding": Sharding.ZERO3}, _sum(peak, "weights", "gradients") * gone
    else:
        yield "fsdp", {"sharding": Sharding.FSDP}, state * gone


_KINDS: tuple[Callable[[Case, Peak], Iterator[_Change]], ...] = (
    _list_optimizers,
    _list_losses,
    _list_references,
    _list_attention,
    _list_batches,
    _list_recomputing,
    _list_long_rows,
    _list_shardings,
    _list_weights,
)
"""Of two that promise the same, what costs less time or quality first."""


def _sum(peak: Peak, *categories: str) -> int:
    return sum(peak.components.get(name, 0) for name in categories)


def _write(value: object) -> str:
    """A field's value as `--set` takes it."""
    if isinstance(value, Enum):
        return str(value.value)
    return str(value).lower() if isinstance(value, bool) else str(value)
