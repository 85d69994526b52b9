"""Sustained rates of a GPU, and the bytes and launches that keep a step from its peak.

Every constant is a physical quantity with its source; `docs/formulas.md` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Attention, Loss, Method, Optimizer, Strategy
from tightfit.estimate.flops import Adapters, Workload
from tightfit.estimate.measured import attention_rates, bandwidth_at, find_table, stream_rate
from tightfit.estimate.weights import is_dora, is_target
from tightfit.hardware.measured_rates import MeasuredRates
from tightfit.hardware.types import Gpu
from tightfit.models.spec import ModelSpec

Capability = tuple[int, int]

SUSTAINED_FRACTION: dict[Capability, float] = {
    (7, 0): 0.76,
    (7, 5): 0.76,
    (8, 0): 0.87,
    (8, 6): 0.95,
    (8, 9): 0.95,
    (9, 0): 0.80,
    (10, 0): 0.776,
}
"""Best 16-bit matmul over the vendor's dense peak, by compute capability.

8.0, 9.0, 10.0: ml-engineering's maximum achievable matmul table (271 of 312,
794 of 989, 1745 of 2250). 7.0: 95 of 125 on V100; 8.6 and 8.9: 81 of 80 on
RTX 3090 Ti, 161 of 165 on RTX 4090 (github mli/transformers-benchmarks).
"""
UNKNOWN_SUSTAINED_FRACTION = 0.75
AMD_SUSTAINED_FRACTION = 0.51
"""668 of 1300 on MI300X. Source: ml-engineering, as above."""
FP32_SUSTAINED_FRACTION = 0.80
"""fp32 without tensor cores: 14 of 15.7 on V100 (mli/transformers-benchmarks), 50 of 67 on H200
(benchmarks/results/h200_rates.json)."""

CPU_SUSTAINED_FRACTION = {"fp32": 0.72, "bf16": 0.09}
"""Matmuls of a small model on a CPU, of cores x clock x vector units.

fp32: 86 to 106e9 of 134e9 for 576 to 1536 wide weights on one core with AVX-512; bf16: 330 to 500e9
of 2150e9 with tiles (torch 2.13, oneDNN), about half of it in a whole step of SmolLM2-135M.
"""
CPU_CALL_SECONDS = 10e-6
"""One small operation from Python: 5 to 6e-6 s by itself, more with the views around it."""

FLOPS_PER_WATT: dict[Capability, float] = {
    (7, 0): 0.33e12,
    (7, 5): 0.33e12,
    (8, 6): 0.33e12,
    (8, 9): 0.75e12,
}
"""Where the power limit, not the clock, bounds long matmuls.

24e12 at 70 W on T4 (forums.developer.nvidia.com, thread 264462), 95e12 at 300 W
on V100 and on RTX A6000 (mli/transformers-benchmarks). 8.9 is assumed: between
those and the 1.13e12 of H100, whose process is nearer.
"""

STREAM_FRACTION = 0.85
"""Copies and matmul operands, of the bandwidth on paper: 4.17 of 4.8e12 on H200 (as above)."""
ELEMENTWISE_FRACTION = 0.70
"""Elementwise kernels, likewise: 3.81 of 4.8e12 on H200 for one large tensor (as above), and less
for the tensors of one layer."""

HOPPER_SDPA_FRACTION = 0.54
"""SDPA on Hopper runs cuDNN's kernel: 539 of 989e12 at 128 wide heads, 388e12 at 64
(arXiv:2407.08608 figure 5); 485 and 304e12 at 2048 tokens on our H200 (h200_rates.json)."""
FLASH_FRACTION: dict[Capability, float] = {(8, 0): 0.60, (9, 0): 0.35, (10, 0): 0.35}
"""Attention kernels at long sequences, of the vendor's peak.

9.0: FlashAttention-2 on H100 reaches 335 of 989 (FlashAttention-3 paper,
arXiv:2407.08608, figure 5). 8.0: about 190 of 312 (FlashAttention-2,
arXiv:2307.08691, figure 4). 10.0: assumed as Hopper's.
"""
OTHER_FLASH_FRACTION = 0.50
CPU_FLASH_FRACTION = 0.65
"""Of the CPU's peak, likewise: a step of 1 x 1024 tokens took 4% longer than one of 4 x 256."""
PRE_AMPERE_FLASH_FRACTION = 0.30
"""Volta and Turing run SDPA's memory-efficient kernel; FlashAttention-2 needs 8.0."""
FLASH_HALF_SPEED_LENGTH = 320.0
"""Sequence length at which attention kernels run at half their long-sequence rate.

Source: fit to the causal rows 191, 260, 298, 319, 333, 335e12 at 512 to 16k, as above.
"""
FLASH_BACKWARD_FLOPS = 2.5
"""Backward over forward: the scores are computed again. Source: arXiv:2307.08691 section 4.1."""
FLASH_BACKWARD_SLOWDOWN = 1.25

KERNEL_GAP_SECONDS = 1.5e-6
"""Device time between two kernels of a full queue."""
HOST_FORWARD_SECONDS = 35e-6
"""Host time to get one kernel going from Python, with the views and checks around it.

This and the next three: between our H200 machine, a slow host (13 us for the smallest operation;
2.6 ms a layer for small models, 5.3 ms with checkpointing) and QwenLM's A100 rows (a third less).
"""
HOST_BACKWARD_SECONDS = 14e-6
"""The same in autograd's C++ engine."""
HOST_ADAPTER_KERNELS = 2
"""Kernels' worth of host work in one LoRA module beyond its kernels: peft's own Python."""
HOST_CHECKPOINT_SECONDS = 0.6e-3
"""Host work of recomputing one layer beyond its kernels: hooks, saved random states."""
ZERO3_HOOK_SECONDS = 120e-6
"""Host work of DeepSpeed's ZeRO-3 before and after each module, which the device waits for."""

EXPERT_LAYOUT_BYTES = 20.0
"""Traffic per held expert weight and pass: what grouped matmuls cost beyond their FLOPs.

Fit to Mixtral, Qwen3-MoE and gpt-oss on one H200 (h200_steps.json); fms-acceleration's Mixtral
rows on A100 agree. Experts that GPTQ packed run one by one and do not pay it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one device and its host sustain: measured where somebody did, else by the fractions."""

    matmul_flops_per_second: float
    adapter_flops_per_second: float
    attention_flops_per_second: float
    """At long sequences."""
    stream_bytes_per_second: float
    elementwise_bytes_per_second: float
    loss_bytes_per_second: float
    kernel_gap_seconds: float = KERNEL_GAP_SECONDS
    host_forward_seconds: float = HOST_FORWARD_SECONDS
    host_backward_seconds: float = HOST_BACKWARD_SECONDS
    host_checkpoint_seconds: float = HOST_CHECKPOINT_SECONDS
    measured_attention: tuple[float, float] | None = None
    """FLOP/s forward and backward at the job's own length, where they were measured."""
    measured: MeasuredRates | None = None


def find_rates(
    gpu: Gpu,
    strategy: Strategy,
    *,
    head_dim: int,
    seq_len: float | None = None,
    tensor_bytes: float | None = None,
) -> Rates:
    """Sustained rates for the strategy's arithmetic.

    fp32 runs without tensor cores: torch leaves TF32 off unless asked. `seq_len` and
    `tensor_bytes` say at which length and size measured rates are read.
    """
    compute, measured = strategy.compute, gpu.measured
    # Adapters in fp32 beside a 16-bit model that no autocast covers multiply in fp32.
    narrow = compute if strategy.is_autocast else strategy.adapter_dtype
    matmul = sustained_flops(gpu, compute)
    length = float(strategy.seq_len) if seq_len is None else seq_len
    # Another width, or another kernel, is another rate.
    is_sdpa = strategy.attention is Attention.SDPA and (
        measured is not None and compute.value_bytes == measured.attention_value_bytes
    )
    elementwise = ELEMENTWISE_FRACTION * gpu.memory_bytes_per_second
    loss = elementwise
    if measured is not None and measured.elementwise:
        largest = measured.elementwise[-1][0]
        elementwise = bandwidth_at(measured.elementwise, tensor_bytes or largest)
        loss = measured.loss_bytes_per_second or bandwidth_at(measured.elementwise, largest)
    return Rates(
        matmul_flops_per_second=matmul,
        adapter_flops_per_second=matmul if narrow is compute else sustained_flops(gpu, narrow),
        attention_flops_per_second=min(
            matmul, _flash_fraction(gpu, strategy.attention, head_dim) * gpu.flops(compute)
        ),
        stream_bytes_per_second=stream_bytes_per_second(gpu),
        elementwise_bytes_per_second=elementwise,
        loss_bytes_per_second=loss,
        measured_attention=attention_rates(measured, head_dim=head_dim, seq_len=length)
        if is_sdpa
        else None,
        measured=measured,
        **_host_seconds(gpu),
    )


def _host_seconds(gpu: Gpu) -> dict[str, float]:
    """What the host takes per kernel and layer; only what is not as `Rates` has it."""
    found = {"host_forward_seconds": CPU_CALL_SECONDS, "host_backward_seconds": CPU_CALL_SECONDS}
    found = found | {"host_checkpoint_seconds": 0.0} if gpu.is_cpu else {}
    names = ("kernel_gap", "host_forward", "host_backward", "host_checkpoint")
    for name in (f"{name}_seconds" for name in names):
        told = None if gpu.measured is None else getattr(gpu.measured, name)
        if told is not None:
            found[name] = told
    return found


def stream_bytes_per_second(gpu: Gpu) -> float:
    """Copies and matmul operands."""
    return stream_rate(gpu.measured) or STREAM_FRACTION * gpu.memory_bytes_per_second


def sustained_flops(gpu: Gpu, dtype: Dtype) -> float:
    """The best a long matmul reaches: measured, a fraction of the peak, or what power allows."""
    table = find_table(gpu.measured, dtype)
    if table is not None:
        return table.best_flops_per_second
    peak = gpu.flops(dtype)
    if gpu.is_cpu:
        kind = dtype.value if dtype.value in gpu.peak_flops else "fp32"
        return CPU_SUSTAINED_FRACTION[kind] * peak
    if dtype is Dtype.FP32 or dtype.value not in gpu.peak_flops:
        return FP32_SUSTAINED_FRACTION * peak
    if gpu.compute_capability is None:
        return AMD_SUSTAINED_FRACTION * peak
    capability = gpu.compute_capability
    reached = SUSTAINED_FRACTION.get(capability, UNKNOWN_SUSTAINED_FRACTION) * peak
    per_watt = FLOPS_PER_WATT.get(capability)
    if per_watt is None or gpu.tdp_watts is None:
        return reached
    return min(reached, per_watt * gpu.tdp_watts)


def _flash_fraction(gpu: Gpu, attention: Attention, head_dim: int) -> float:
    capability = gpu.compute_capability
    if gpu.is_cpu:
        return CPU_FLASH_FRACTION
    if capability == (9, 0) and attention is Attention.SDPA:
        return HOPPER_SDPA_FRACTION * min(1.0, sqrt(head_dim / 128))
    if capability is not None and capability < (8, 0):
        return PRE_AMPERE_FLASH_FRACTION
    return FLASH_FRACTION.get(capability or (0, 0), OTHER_FLASH_FRACTION)


def matmul_seconds(rates: Rates, *, flops: float, num_bytes: float) -> float:
    """Arithmetic at the sustained rate plus operands and result once through memory.

    Adding the two, where hardware overlaps them in part, is what makes small
    and thin matmuls reach less of the peak than large square ones: with 4096
    wide weights on an H200, 57% of the sustained rate at 512 tokens, 91% at 8192.
    """
    return flops / rates.matmul_flops_per_second + num_bytes / rates.stream_bytes_per_second


def attention_seconds(rates: Rates, *, flops: float, seq_len: float, backward: bool) -> float:
    """A fused attention kernel; `flops` are the forward pass's."""
    if rates.measured_attention is not None:
        forward_rate, backward_rate = rates.measured_attention
        return FLASH_BACKWARD_FLOPS * flops / backward_rate if backward else flops / forward_rate
    ramp = 1.0 + FLASH_HALF_SPEED_LENGTH / seq_len
    work = flops * (FLASH_BACKWARD_FLOPS * FLASH_BACKWARD_SLOWDOWN if backward else 1.0)
    return ramp * work / rates.attention_flops_per_second


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


COMPOSED_GELU = frozenset({"gpt2", "gptj", "codegen", "phi"})
"""Families whose configs name `gelu_new`, which transformers writes as separate operations."""


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
    has_composed_gelu = spec.model_type in COMPOSED_GELU
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
        if part.is_module and is_target(part, strategy.lora_targets)
    )


def adapter_bytes_per_token(adapters: Adapters, strategy: Strategy, *, backward: bool) -> float:
    """Traffic of LoRA beside the base matmuls, for one token.

    In the model's own dtype, forward: the input read again; the result
    written, scaled, and added (6 values an output). Backward: the scaled
    gradient, read by two matmuls (4); two matmuls on the input's side and a
    sum of gradients (5). fp32 adapters on a 16-bit model cast the input up, do
    all of that in 4 bytes, and cast down. Under autocast the casts remain, the
    rest is 16 bit. Source: peft `Linear.forward`.
    """
    if strategy.adapter_dtype is not Dtype.FP32 or strategy.compute is Dtype.FP32:
        value = strategy.compute.value_bytes
        inputs, outputs = (5 * value, 4 * value) if backward else (value, 6 * value)
    elif not strategy.is_autocast:
        inputs, outputs = (20, 22) if backward else (10, 28)
    else:
        inputs, outputs = (20, 10) if backward else (14, 12)
    if strategy.dora:
        outputs += DORA_OUTPUT_VALUES * strategy.compute.value_bytes
    if strategy.compile:
        outputs //= 2
    return float(inputs * adapters.inputs_used + outputs * adapters.outputs_used)


ELEMENTWISE_BACKWARD = 2.0
"""Backward over forward traffic: the gradient comes in, the saved input is read, one goes out."""


def loss_bytes_per_token(work: Workload, strategy: Strategy) -> float:
    """Forward and backward traffic of the loss over the vocabulary, for one token.

    Plain: cast up 6, log-softmax 8, its gradient 4 + 12, cast back 6. Fused:
    the slice of logits read, and its gradient written over it.
    """
    if not strategy.is_trained:
        return 0.0
    return work.vocab_size * (8.0 if strategy.loss is Loss.FUSED else 36.0)


OPTIMIZER_BYTES: dict[Optimizer, tuple[float, float]] = {
    Optimizer.ADAMW: (13.0, 6.0),
    Optimizer.ADAMW_FOREACH: (21.0, 18.0),
    Optimizer.SGD_MOMENTUM: (0.0, 8.0),
    Optimizer.ADAFACTOR: (60.0, 12.0),
}
"""Traffic, or its equal in time, per parameter: fixed, and per byte of a value.

AdamW: 6.0e-12 s per bf16 and 8.9e-12 s per fp32 parameter fused, 14.1 and 23.0e-12 s foreach, on
H200 (h200_rates.json). A plain count of fused AdamW is 7 values. SGD and Adafactor: counted.
"""
EIGHT_BIT_SECONDS_PER_PARAM = 30e-12
"""bitsandbytes' 8-bit AdamW is bound by arithmetic: 27 to 39e-12 s on H200 (h200_steps.json),
about 25e-12 s on A100 (torchtune README)."""
ZERO_MASTER_BYTES = 40.0
"""DeepSpeed keeps fp32 weights and moments beside 16-bit weights: as fp32 AdamW, and a cast."""


def optimizer_seconds_per_param(strategy: Strategy, rates: Rates) -> float:
    """Time of the update on the device, per trained value."""
    if strategy.optimizer in (Optimizer.ADAMW_8BIT, Optimizer.ADAMW_PAGED_8BIT):
        return EIGHT_BIT_SECONDS_PER_PARAM
    is_full = strategy.method is Method.FULL
    stored = strategy.weights if is_full else strategy.adapter_dtype
    value = 2 if stored.is_quantized else stored.value_bytes
    fixed, per_byte = OPTIMIZER_BYTES[strategy.optimizer]
    num_bytes = fixed + per_byte * value
    if strategy.sharding.is_zero and value == 2:
        num_bytes = max(num_bytes, ZERO_MASTER_BYTES)
    told = {} if rates.measured is None else rates.measured.adamw_seconds_per_param
    fused = told.get("fp32" if value == 4 else "bf16")
    if fused is not None:
        fixed, per_byte = OPTIMIZER_BYTES[Optimizer.ADAMW]
        return fused * num_bytes / (fixed + per_byte * value)
    return num_bytes / rates.stream_bytes_per_second


DEQUANTIZE_BYTES: dict[Dtype, float] = {Dtype.NF4: 9.0, Dtype.INT8: 4.0, Dtype.GPTQ4: 20.0}
"""Traffic, or its equal in time, to unpack one weight to 16 bit.

nf4: 451e9 weights per second on H200 (h200_rates.json). GPTQ: 75e-3 s per pass of 6.5e9 weights on
A100, the difference of QwenLM's Q-LoRA and LoRA rows.
"""
INT8_ACTIVATION_BYTES = 65.0
"""LLM.int8() per input or output value: rounded, scaled, outliers set apart, rescaled.

Fit to Llama-2-7B on one H200, int8 against bf16 (benchmarks/results/h200_steps.json).
"""


def dequantize_seconds(
    work: Workload, rates: Rates, dtype: Dtype, *, tokens: float, backward: bool
) -> float:
    """Unpacking every quantized matrix once, plus what int8 does to activations."""
    if not dtype.is_quantized:
        return 0.0
    packed = work.packed_weights(dtype)
    nf4_rate = None if rates.measured is None else rates.measured.nf4_weights_per_second
    if dtype is Dtype.NF4 and nf4_rate is not None:
        return packed / nf4_rate
    num_bytes = packed * DEQUANTIZE_BYTES[dtype]
    if dtype is Dtype.INT8 and not backward:
        num_bytes = INT8_ACTIVATION_BYTES * tokens * (work.inputs_used + work.outputs_used)
    return num_bytes / rates.stream_bytes_per_second
