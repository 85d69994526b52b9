"""Bytes that a step moves beside its matmuls, or their equivalent in time.

Every constant is a physical quantity with its source; `docs/formulas.md` lists them.
"""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import Loss, Method
from tightfit.core.strategy import Strategy
from tightfit.estimation.flops import AdapterSums, Workload, recomputes_logits
from tightfit.estimation.weights import can_fuse_trained_projections, is_dora, is_lora_target
from tightfit.hardware.rates import (
    DEQUANTIZE_BYTES,
    DeviceRates,
    measured_update_seconds,
    update_bytes,
)
from tightfit.models.families.registry import find_family
from tightfit.models.spec import ModelSpec

EXPERT_LAYOUT_BYTES = 20.0
"""Traffic per held expert weight and pass: what grouped matmuls cost beyond their FLOPs.

Fit to Mixtral, Qwen3-MoE and gpt-oss on one H200 (h200_steps.json); fms-acceleration's Mixtral
rows on A100 agree. Experts that GPTQ packed run one by one and do not pay it.
"""
EAGER_PAIR_BYTES = 26.0
"""Bytes per (query, key) pair and head of eager attention in 16 bit, forward.

Scores written (2), scaled (4), masked (4), cast to fp32 for softmax (6),
softmax (8) and cast back (6), less what the cast and softmax share (4), read
by the second matmul (2), rounded down. Source: transformers `eager_attention_forward`.
"""


def stream_value_bytes(strategy: Strategy) -> int:
    """Bytes of one activation between the matmuls.

    fp32 weights under autocast leave embeddings, norms and residuals in fp32;
    so does upcasting what is not quantized. FSDP's mixed precision casts all
    weights, and with them the activations.
    """
    if strategy.compute is Dtype.FP32:
        return 4
    if strategy.weights.is_quantized:
        return 4 if strategy.upcast_unquantized else 2
    return 4 if strategy.weights is Dtype.FP32 and not strategy.sharding.is_fsdp else 2


def elementwise_bytes_per_token(work: Workload, strategy: Strategy, *, spec: ModelSpec) -> float:
    """Forward traffic of everything between the matmuls of all layers, for one token.

    Eager RMSNorm as transformers writes it: cast up, square, mean, scale, cast
    back, weigh: 24 bytes and 4 values. LayerNorm is one kernel. Rotation: half
    turned and joined, two products, one sum, 10 values. `gelu_new`, where a
    family uses it, is 8 kernels, 17 values. Fused or compiled kernels read
    their inputs and write their outputs once.
    """
    is_rms_norm, is_gated = spec.is_rms_norm, spec.is_gated_mlp
    is_rotary = spec.position_params == 0
    has_composed_gelu = find_family(spec.model_type).composes_gelu
    value = stream_value_bytes(strategy)
    fused = strategy.fused_kernels or strategy.compile
    norm = 2 * value if fused or not is_rms_norm else 24 + 4 * value
    rotary = (2 * value if fused else 10 * value) if is_rotary else 0
    activation = (3 if fused else 5) * value if is_gated else 2 * value
    if has_composed_gelu and not strategy.compile:
        activation = 17 * value
    residual = 3 * value * work.hidden_size * work.num_norms
    if strategy.compile:
        residual //= 2  # compiled into the norm that follows
    casts = 0
    if value == 4 and strategy.compute is not Dtype.FP32:
        casts = 6 * (work.inputs_used + work.outputs_used)
    experts = 6 * value * work.hidden_size * work.num_expert_layers
    return (
        norm * (work.norm_width + work.head_norm_width)
        + rotary * (work.query_width + work.key_width)
        + activation * work.mlp_width_used
        + 2 * value * work.query_width
        + residual
        + casts
        + experts
    )


DORA_OUTPUT_VALUES = 8
"""DoRA per output value and pass: base and adapter each read, scaled and written, then added twice.
Counted in peft `DoraLinearLayer.forward`."""
DORA_WEIGHT_VALUES = 8
"""DoRA per adapted weight and forward pass: the adapter's product written, scaled, added to the
base and normed, each read again. Counted in `get_weight_norm`; beside it an identity as wide as the
input."""


def dora_bytes(spec: ModelSpec, strategy: Strategy) -> float:
    """Traffic of the weight norms in one forward pass, whatever the batch."""
    if not is_dora(strategy):
        return 0.0
    return strategy.compute.value_bytes * sum(
        block.num_layers
        * part.in_features
        * (DORA_WEIGHT_VALUES * part.out_features + 2 * part.in_features)
        for block in spec.blocks
        for part in block.linears
        if part.is_module and is_lora_target(part, strategy.lora_targets)
    )


def adapter_bytes_per_token(adapters: AdapterSums, strategy: Strategy, *, backward: bool) -> float:
    """Traffic of LoRA beside the base matmuls, for one token.

    In the model's own dtype, forward: the input read again; the result
    written, scaled, and added (6 values an output). Backward: the scaled
    gradient, read by two matmuls (4); two matmuls on the input's side and a
    sum of gradients (5). fp32 adapters on a 16-bit model cast the input up, do
    all of that in 4 bytes, and cast down. Under autocast the casts remain, the
    rest is 16 bit. Source: peft `Linear.forward`.

    Fused LoRA, forward: the input read again, the output read and written by
    the product that is added to it, unless an augmented weight makes it part
    of the first. Backward: the gradient read by two matmuls, the input by one,
    and its gradient read and written. Fused projections share the traffic of
    their input and its gradient.
    """
    value = strategy.compute.value_bytes
    num_outputs = adapters.outputs_used - (0 if backward else adapters.outputs_saved)
    if strategy.fused_lora:
        inputs, outputs = (3 * value, 2 * value) if backward else (value, 2 * value)
    elif strategy.adapter_dtype is not Dtype.FP32 or strategy.compute is Dtype.FP32:
        inputs, outputs = (5 * value, 4 * value) if backward else (value, 6 * value)
    elif not strategy.is_autocast:
        inputs, outputs = (20, 22) if backward else (10, 28)
    else:
        inputs, outputs = (20, 10) if backward else (14, 12)
    if strategy.dora:
        outputs += DORA_OUTPUT_VALUES * value
    if strategy.compile and not strategy.fused_lora:
        outputs //= 2
    num_inputs = adapters.inputs_used - adapters.inputs_saved
    return float(inputs * num_inputs + outputs * num_outputs)


FP8_CAST_BYTES = 3.0
"""Per value cast from bf16 by rows: read, and written in fp8."""
FP8_COLUMN_CAST_BYTES = 5.0
"""By columns: read for the largest value of each, read again, and written."""
FP8_TRANSPOSE_BYTES = 2.0
"""Per frozen fp8 value in the backward pass: read by rows, written by columns."""


def fp8_bytes(
    work: Workload, strategy: Strategy, *, spec: ModelSpec, tokens: float, backward: bool
) -> float:
    """Traffic of casts to fp8 in one pass. Counted in `runtime/kernels/fp8.py`.

    Forward: inputs, each once, and trained weights. Backward: gradients; by columns what a trained
    weight's gradient is made of, and the weight; frozen weights are transposed.
    """
    if not strategy.has_fp8 or (strategy.fp8_gradients and not backward):
        return 0.0
    weights = work.module_weights
    if not backward:
        values = tokens * work.module_inputs_used
        return FP8_CAST_BYTES * (values + (0 if strategy.stores_fp8 else weights))
    moved = FP8_CAST_BYTES * tokens * work.module_outputs_used
    if strategy.stores_fp8:
        return moved + FP8_TRANSPOSE_BYTES * weights
    # Recomputed layers cast a shared input once each, unless their projections are fused.
    is_fused = can_fuse_trained_projections(spec.model_type, strategy)
    is_shared = is_fused or not strategy.checkpointing
    inputs = work.module_inputs_used if is_shared else work.inputs_used
    columns = tokens * (inputs + work.outputs_used) + weights
    return moved + FP8_COLUMN_CAST_BYTES * columns


ELEMENTWISE_BACKWARD = 2.0
"""Backward over forward traffic: the gradient comes in, the saved input is read, one goes out."""


WIDE_VOCABULARY = 200_000
"""Words beyond which the rows of logits that a GPU's blocks work on no longer fit its cache: the
passes over a row inside log-softmax and its gradient read memory again. Published speeds with
50,432 to 152,064 words are met without them (published_time.json)."""
WIDE_LOSS_BYTES = 16.0
"""Those passes, two forward and two backward, in fp32. BLOOM-1b7 (250,880 words) is slower with
chunks of tokens than with the fused loss, where layers are compiled (full tuning, one H200)."""


def loss_bytes_per_token(work: Workload, strategy: Strategy) -> float:
    """Forward and backward traffic of the loss over the vocabulary, for one token.

    Plain: cast up 6, log-softmax 8, its gradient 4 + 12, cast back 6. Fused:
    the chunk of logits read, and its gradient written over it. The fused loss of preferences
    is torch's: cast up and summed in both passes, then the gradient and its cast.
    """
    if not strategy.is_trained:
        return 0.0
    if recomputes_logits(strategy):
        return work.vocab_size * (2 * LOG_PROB_BYTES + 14.0)
    if strategy.loss is Loss.FUSED:
        return 8.0 * work.vocab_size
    again = WIDE_LOSS_BYTES if work.vocab_size > WIDE_VOCABULARY else 0.0
    return work.vocab_size * (36.0 + again)


LOG_PROB_BYTES = 10.0
"""Per token and word of a pass without gradients: logits cast up, 6, and the sum of exponentials
over what that wrote, 4."""


ZERO_MASTER_BYTES = 40.0
"""DeepSpeed keeps fp32 weights and moments beside 16-bit weights: as fp32 AdamW, and a cast."""


def optimizer_seconds_per_param(strategy: Strategy, rates: DeviceRates) -> float:
    """Time of the update on the device, per trained value."""
    record = strategy.optimizer.record
    if record.seconds_per_param is not None:
        return record.seconds_per_param
    is_full = strategy.method is Method.FULL
    stored = strategy.weights if is_full else strategy.adapter_dtype
    value = 2 if stored.is_quantized else stored.value_bytes
    num_bytes = update_bytes(strategy.optimizer, value)
    if strategy.sharding.is_zero and value == 2:
        num_bytes = max(num_bytes, ZERO_MASTER_BYTES)
    measured = measured_update_seconds(rates.measured, strategy.optimizer, value_bytes=value)
    if measured is None:
        return num_bytes / rates.stream_bytes_per_second
    if strategy.optimizer is Optimizer.ADAMW_KERNEL:
        return measured
    return measured * num_bytes / update_bytes(Optimizer.ADAMW, value)


INT8_ACTIVATION_BYTES = 65.0
"""LLM.int8() per input or output value: rounded, scaled, outliers separated, rescaled.

Fit to Llama-2-7B on one H200, int8 against bf16 (benchmarks/results/h200_steps.json).
"""


def dequantize_seconds(
    work: Workload, rates: DeviceRates, strategy: Strategy, *, tokens: float, backward: bool
) -> float:
    """Dequantizing every quantized matrix once, MLPs' once a tile, plus int8's work on
    activations."""
    dtype = strategy.weights
    if not dtype.is_quantized:
        return 0.0
    packed = work.packed_weights(strategy)
    again = (strategy.mlp_tiles - 1) * work.mlp_weights_held / max(1, work.weights_held)
    packed = int(packed * (1 + again))  # each tile of an MLP dequantizes its matrices
    nf4_rate = None if rates.measured is None else rates.measured.nf4_weights_per_second
    if dtype is Dtype.NF4 and nf4_rate is not None:
        return packed / nf4_rate
    num_bytes = packed * DEQUANTIZE_BYTES[dtype]
    if dtype is Dtype.INT8 and not backward:
        num_bytes = INT8_ACTIVATION_BYTES * tokens * (work.inputs_used + work.outputs_used)
    return num_bytes / rates.stream_bytes_per_second
