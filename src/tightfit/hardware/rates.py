"""Sustained rates of a GPU and its host: measured where a calibration exists, else fractions of the
vendor's figures.

Every constant is a physical quantity with its source; `docs/formulas.md` lists them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log, log2, sqrt

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.optimizers import Optimizer
from tightfit.core.strategy import Strategy
from tightfit.hardware.types import (
    FP8,
    FP8_EXACT,
    FP8_KINDS,
    AttentionRow,
    BandwidthRow,
    Gpu,
    MatmulRow,
    MeasuredRates,
)

FLASH_HALF_SPEED_LENGTH = 320.0
"""Sequence length at which attention kernels run at half their long-sequence rate.

Source: fit to the causal rows 191, 260, 298, 319, 333, 335e12 at 512 to 16k, of FlashAttention-2 on
H100 (arXiv:2407.08608 figure 5).
"""
NUM_NEIGHBOURS = 4
"""Number of nearest measured products to interpolate between. Leave-one-out on h200_rates.json: a
median error of 8.1%."""
SAME_SHAPE_DISTANCE = 1e-3
"""Squared distance in doublings, below which a shape counts as the measured one."""


class MatmulTable:
    """Seconds of any (m x k) by (k x n) product, interpolated from measured ones.

    A roofline of the best rate and the bandwidth, corrected by the ratio of measured to roofline
    time of the nearest shapes, weighted by the inverse square of their distance in doublings.
    Leaves out memory layouts, which make little difference.
    """

    def __init__(
        self, rows: Sequence[MatmulRow], *, value_bytes: int, bytes_per_second: float
    ) -> None:
        self.best_flops_per_second = max(2.0 * m * n * k / s for m, n, k, s in rows)
        self._value_bytes = value_bytes
        self._bytes_per_second = bytes_per_second
        self._rows = [
            (log2(m), log2(n), log2(k), log(seconds / self._roofline(m, n, k)))
            for m, n, k, seconds in rows
        ]
        self.seconds = lru_cache(maxsize=65_536)(self._seconds)

    def _seconds(self, m: float, n: float, k: float) -> float:
        return self._roofline(m, n, k) * exp(self._correction(log2(m), log2(n), log2(k)))

    def _roofline(self, m: float, n: float, k: float) -> float:
        moved = self._value_bytes * (m * n + m * k + n * k)
        return 2.0 * m * n * k / self.best_flops_per_second + moved / self._bytes_per_second

    def _correction(self, m: float, n: float, k: float) -> float:
        near = sorted(
            ((a - m) ** 2 + (b - n) ** 2 + (c - k) ** 2, ratio) for a, b, c, ratio in self._rows
        )[:NUM_NEIGHBOURS]
        weights = [1.0 / (distance + SAME_SHAPE_DISTANCE) for distance, _ in near]
        return sum(w * ratio for w, (_, ratio) in zip(weights, near, strict=True)) / sum(weights)


_tables: dict[tuple[int, str], tuple[MeasuredRates, MatmulTable | None]] = {}


def find_matmul_table(measured: MeasuredRates | None, dtype: Dtype) -> MatmulTable | None:
    """The table of one dtype, cached; None where it was not measured."""
    return _find_named_table(measured, dtype.value)


def find_fp8_matmul_table(
    measured: MeasuredRates | None, *, is_exact: bool = False
) -> MatmulTable | None:
    """The same for fp8 operands; the measurements account for the wider results.

    `is_exact`: with the backward pass's exact accumulation, if it was measured.
    """
    exact = _find_named_table(measured, FP8_EXACT) if is_exact else None
    return exact or _find_named_table(measured, FP8)


def _find_named_table(measured: MeasuredRates | None, name: str) -> MatmulTable | None:
    if measured is None:
        return None
    found = _tables.get((id(measured), name))
    if found is None:
        if len(_tables) >= 256:
            _tables.clear()
        # Keeps the rates alive, so that their id is not reused.
        found = (measured, _make_table(measured, name))
        _tables[id(measured), name] = found
    return found[1]


def _make_table(measured: MeasuredRates, name: str) -> MatmulTable | None:
    rows = measured.matmuls.get(name, ())
    stream = stream_rate(measured)
    if not rows or stream is None:
        return None
    value_bytes = 1 if name in FP8_KINDS else Dtype(name).value_bytes
    return MatmulTable(rows, value_bytes=value_bytes, bytes_per_second=stream)


def stream_rate(measured: MeasuredRates | None) -> float | None:
    """Bandwidth of copying the largest measured tensor."""
    return measured.copies[-1][1] if measured is not None and measured.copies else None


def bandwidth_at(rows: Sequence[BandwidthRow], tensor_bytes: float) -> float:
    """Bandwidth at a tensor size, interpolated on a log scale and constant beyond the ends."""
    points = [(float(size), rate) for size, rate in rows]
    return _between(points, tensor_bytes)


def attention_rates(
    rows: Sequence[AttentionRow], *, head_dim: int, seq_len: float
) -> tuple[float, float] | None:
    """Causal FLOP/s forward and backward.

    Kernels exist for a few head widths: another width takes as long as the next wider one. Beyond
    the measured lengths, rates follow the same curve as unmeasured ones.
    """
    if not rows:
        return None
    widths = sorted({row[0] for row in rows})
    width = next((each for each in widths if each >= head_dim), widths[-1])
    used = min(1.0, head_dim / width)
    points = sorted(row[1:] for row in rows if row[0] == width)
    nearest = min(max(seq_len, points[0][0]), points[-1][0])
    used *= (1.0 + FLASH_HALF_SPEED_LENGTH / nearest) / (1.0 + FLASH_HALF_SPEED_LENGTH / seq_len)
    forward = _between([(float(length), rate) for length, rate, _ in points], nearest)
    backward = _between([(float(length), rate) for length, _, rate in points], nearest)
    return used * forward, used * backward


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """A power law between neighbours, constant beyond the ends."""
    place = bisect_left([x for x, _ in points], at)
    if place == 0:
        return points[0][1]
    if place == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    share = log(at / x0) / log(x1 / x0)
    return y0 * exp(share * log(y1 / y0))


# Sustained rates

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
"""Other capabilities. Assumed."""
AMD_SUSTAINED_FRACTION = 0.51
"""668 of 1300 on MI300X. Source: ml-engineering, as above."""
FP32_SUSTAINED_FRACTION = 0.80
"""fp32 without tensor cores: 14 of 15.7 on V100 (mli/transformers-benchmarks), 50 of 67 on H200
(benchmarks/results/h200_rates.json)."""

FP8_SUSTAINED_FRACTION = 0.65
"""fp8 matmul of torch, of the vendor's dense peak: on an H200 1,290 of 1,979 inside of a step
(h200_throughput.json), 1,310 to 1,460 alone. Others are assumed alike."""

CPU_SUSTAINED_FRACTION = {"fp32": 0.72, "bf16": 0.09}
"""Matmuls of a small model on a CPU, of cores x clock x vector units.

fp32: 86 to 106e9 of 134e9 for 576 to 1536 wide weights on one core with AVX-512; bf16: 330 to 500e9
of 2150e9 with tiles (torch 2.13, oneDNN), about half of it in a whole step of SmolLM2-135M.
"""
CPU_CALL_SECONDS = 10e-6
"""One small operation from Python: 5 to 6e-6 s alone, more with the views around it."""

FLOPS_PER_WATT: dict[Capability, float] = {
    (7, 0): 0.33e12,
    (7, 5): 0.33e12,
    (8, 6): 0.33e12,
    (8, 9): 0.75e12,
}
"""GPUs on which the power limit, not the clock, bounds long matmuls.

24e12 at 70 W on T4 (forums.developer.nvidia.com, thread 264462), 95e12 at 300 W
on V100 and on RTX A6000 (mli/transformers-benchmarks). 8.9 is assumed: between
those and the 1.13e12 of H100, whose process is nearer.
"""

STREAM_FRACTION = 0.85
"""Copies and matmul operands, of the bandwidth on paper: 4.17 of 4.8e12 on H200 (as above)."""
ELEMENTWISE_FRACTION = 0.70
"""Elementwise kernels: 3.81 of 4.8e12 on H200 for one large tensor (as above), and less
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
"""Other capabilities. Assumed."""
CPU_FLASH_FRACTION = 0.65
"""Of the CPU's peak: a step of 1 x 1024 tokens took 4% longer than one of 4 x 256."""
PRE_AMPERE_FLASH_FRACTION = 0.30
"""Volta and Turing run SDPA's memory-efficient kernel; FlashAttention-2 needs 8.0."""
FLASH_BACKWARD_FLOPS = 2.5
"""Backward over forward: the scores are computed again. Source: arXiv:2307.08691 section 4.1."""
FLASH_BACKWARD_SLOWDOWN = 1.25
"""The backward kernel's rate is lower by this factor. Source: arXiv:2307.08691."""

KERNEL_GAP_SECONDS = 1.5e-6
"""Device time between two kernels of a full queue. Assumed."""
HOST_FORWARD_SECONDS = 35e-6
"""Host time to launch one kernel from Python, with the views and checks around it.

This and the next three: between our H200 machine, a slow host (13 us for the smallest operation;
2.6 ms a layer for small models, 5.3 ms with checkpointing) and QwenLM's A100 rows (a third less).
"""
HOST_BACKWARD_SECONDS = 14e-6
"""The same in autograd's C++ engine."""
HOST_ADAPTER_KERNELS = 2
"""Host work in one LoRA layer beyond its kernels (peft's own Python), in kernels."""
HOST_FUSED_LORA_KERNELS = 3
"""The same for fused LoRA, an autograd function in Python: beyond the base's matmul the host took
0.89 of peft's time, forward and backward (torch 2.13, one core)."""
HOST_CHECKPOINT_SECONDS = 0.6e-3
"""Host work of recomputing one layer beyond its kernels: hooks, saved random states."""
ZERO3_HOOK_SECONDS = 120e-6
"""Host work of DeepSpeed's ZeRO-3 before and after each module; the device waits for it. Fit to
Qwen-1.8B on one A100, ZeRO-3 against none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Sustained rates of one device and its host: measured, or fractions of the peak."""

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
    masked_attention: tuple[float, float] | None = None
    """The same with an explicit mask."""
    fp8_flops_per_second: float = 0.0
    """0 where the strategy has no fp8 products."""
    measured: MeasuredRates | None = None


def find_rates(
    gpu: Gpu,
    strategy: Strategy,
    *,
    head_dim: int,
    seq_len: float | None = None,
    tensor_bytes: float | None = None,
) -> DeviceRates:
    """Sustained rates for the strategy's arithmetic.

    fp32 runs without tensor cores: torch leaves TF32 off by default. Measured rates are read at
    `seq_len` and `tensor_bytes`; the length of packed rows is that of their documents.
    """
    compute, measured = strategy.compute, gpu.measured
    # Adapters in fp32 beside a 16-bit model that no autocast covers multiply in fp32.
    narrow = compute if strategy.is_autocast else strategy.adapter_dtype
    matmul = sustained_flops(gpu, compute)
    length = float(strategy.seq_len) if seq_len is None else seq_len
    elementwise = ELEMENTWISE_FRACTION * gpu.memory_bytes_per_second
    loss = elementwise
    if measured is not None and measured.elementwise:
        largest = measured.elementwise[-1][0]
        elementwise = bandwidth_at(measured.elementwise, tensor_bytes or largest)
        if not (strategy.fused_kernels or strategy.compile):
            elementwise = _mix_indexed(elementwise, measured)
        loss = measured.loss_bytes_per_second or bandwidth_at(measured.elementwise, largest)
    plain, masked = _attention_rows(measured, strategy)
    return DeviceRates(
        matmul_flops_per_second=matmul,
        adapter_flops_per_second=matmul if narrow is compute else sustained_flops(gpu, narrow),
        attention_flops_per_second=min(
            matmul, _flash_fraction(gpu, strategy.attention, head_dim) * gpu.flops(compute)
        ),
        stream_bytes_per_second=stream_bytes_per_second(gpu),
        elementwise_bytes_per_second=elementwise,
        loss_bytes_per_second=loss,
        measured_attention=attention_rates(plain, head_dim=head_dim, seq_len=length),
        masked_attention=attention_rates(masked, head_dim=head_dim, seq_len=length),
        fp8_flops_per_second=sustained_fp8_flops(gpu) if strategy.has_fp8 else 0.0,
        measured=measured,
        **_host_seconds(gpu),
    )


def _attention_rows(
    measured: MeasuredRates | None, strategy: Strategy
) -> tuple[tuple[AttentionRow, ...], tuple[AttentionRow, ...]]:
    """Measured attention without and with an explicit mask.

    Rates of another dtype or kernel do not apply.
    """
    if measured is None or strategy.compute.value_bytes != measured.attention_value_bytes:
        return (), ()
    is_sdpa = strategy.attention is Attention.SDPA
    masked = measured.masked_attention if is_sdpa else ()
    varlen = strategy.attention.record.varlen
    if varlen == "always" or (strategy.packing and varlen != "never"):
        return measured.document_attention, masked
    return measured.attention if is_sdpa else (), masked


def skips_cross_document_pairs(gpu: Gpu, strategy: Strategy) -> bool:
    """Whether attention over a packed row skips pairs of tokens from two documents.

    Flash does. SDPA is replaced by the same kernel where the GPU supports it, which is known once
    it was measured.
    """
    plain, _ = _attention_rows(gpu.measured, strategy)
    is_always = strategy.attention.record.varlen == "always"
    return strategy.packing and (is_always or bool(plain))


def _host_seconds(gpu: Gpu) -> dict[str, float]:
    """Host seconds per kernel and layer where they differ from the defaults of `DeviceRates`."""
    found = {"host_forward_seconds": CPU_CALL_SECONDS, "host_backward_seconds": CPU_CALL_SECONDS}
    found = found | {"host_checkpoint_seconds": 0.0} if gpu.is_cpu else {}
    names = ("kernel_gap", "host_forward", "host_backward", "host_checkpoint")
    for name in (f"{name}_seconds" for name in names):
        measured = None if gpu.measured is None else getattr(gpu.measured, name)
        if measured is not None:
            found[name] = measured
    return found


def stream_bytes_per_second(gpu: Gpu) -> float:
    """Bandwidth of copies and matmul operands."""
    return stream_rate(gpu.measured) or STREAM_FRACTION * gpu.memory_bytes_per_second


INDEXED_SHARE = 0.25
INDEXED_BYTES = 5.0
"""Share of the traffic between a layer's matmuls in kernels that compute each address separately,
and the bytes per value; counted in traces of the jobs in h200_trace_dev.json (0.17 to 0.37)."""


def _mix_indexed(bandwidth: float, measured: MeasuredRates) -> float:
    """Mean bandwidth of all kernels between matmuls."""
    found = measured.indexed_values_per_second
    if found is None:
        return bandwidth
    return 1.0 / ((1.0 - INDEXED_SHARE) / bandwidth + INDEXED_SHARE / (INDEXED_BYTES * found))


INDEXED_VALUE_FLOPS = 176.0
"""fp32 operations in the time of one separately addressed value: 380e9 values a second on an H200
(h200_kernels.json)."""


def indexed_values_per_second(gpu: Gpu) -> float:
    """Rate of broadcast, strided or upcast tensors, whose addresses are computed one by one."""
    measured = None if gpu.measured is None else gpu.measured.indexed_values_per_second
    return measured or gpu.flops(Dtype.FP32) / INDEXED_VALUE_FLOPS


def sustained_flops(gpu: Gpu, dtype: Dtype) -> float:
    """Best rate of a long matmul: measured, a fraction of the peak, or limited by power."""
    table = find_matmul_table(gpu.measured, dtype)
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


def sustained_fp8_flops(gpu: Gpu) -> float:
    """The same for fp8 operands; bf16's where the GPU has no fp8, which a rule excludes."""
    table = find_fp8_matmul_table(gpu.measured)
    if table is not None:
        return table.best_flops_per_second
    peak = gpu.peak_flops.get(FP8)
    return sustained_flops(gpu, Dtype.BF16) if peak is None else FP8_SUSTAINED_FRACTION * peak


def _flash_fraction(gpu: Gpu, attention: Attention, head_dim: int) -> float:
    capability = gpu.compute_capability
    if gpu.is_cpu:
        return CPU_FLASH_FRACTION
    if capability == (9, 0) and attention is Attention.SDPA:
        return HOPPER_SDPA_FRACTION * min(1.0, sqrt(head_dim / 128))
    if capability is not None and capability < (8, 0):
        return PRE_AMPERE_FLASH_FRACTION
    return FLASH_FRACTION.get(capability or (0, 0), OTHER_FLASH_FRACTION)


def matmul_seconds(rates: DeviceRates, *, flops: float, num_bytes: float) -> float:
    """Arithmetic at the sustained rate plus operands and result once through memory.

    Adding the two, where hardware overlaps them in part, is what makes small
    and thin matmuls reach less of the peak than large square ones: with 4096
    wide weights on an H200, 57% of the sustained rate at 512 tokens, 91% at 8192.
    """
    return flops / rates.matmul_flops_per_second + num_bytes / rates.stream_bytes_per_second


def product_slowdown(measured: MeasuredRates | None, *, share: float) -> float:
    """Factor on products at the clock that the GPU's power limit allows.

    With products alone the clock falls to its sustained rate; memory-bound kernels in between let
    it recover in proportion to their time. `share` is the products' share of the step.
    """
    left = None if measured is None else measured.sustained_fraction
    return 1.0 if left is None else 1.0 + share * (1.0 / left - 1.0)


def attention_seconds(
    rates: DeviceRates, *, flops: float, seq_len: float, backward: bool, is_masked: bool = False
) -> float:
    """A fused attention kernel; `flops` are the forward pass's.

    `is_masked`: with an explicit mask.
    """
    measured = (rates.masked_attention if is_masked else None) or rates.measured_attention
    if measured is not None:
        forward_rate, backward_rate = measured
        return FLASH_BACKWARD_FLOPS * flops / backward_rate if backward else flops / forward_rate
    ramp = 1.0 + FLASH_HALF_SPEED_LENGTH / seq_len
    work = flops * (FLASH_BACKWARD_FLOPS * FLASH_BACKWARD_SLOWDOWN if backward else 1.0)
    return ramp * work / rates.attention_flops_per_second


def update_bytes(optimizer: Optimizer, value_bytes: int) -> float:
    """Traffic of one update, or its equivalent in time, per parameter."""
    fixed, per_byte = optimizer.record.update_bytes or (0.0, 0.0)
    return fixed + per_byte * value_bytes


def measured_update_seconds(
    measured: MeasuredRates | None, optimizer: Optimizer, *, value_bytes: int
) -> float | None:
    """Measured seconds per parameter of AdamW: our kernel's, or torch's for all others."""
    if measured is None:
        return None
    is_ours = optimizer is Optimizer.ADAMW_KERNEL
    kernel, fused = measured.adamw_kernel_seconds_per_param, measured.adamw_seconds_per_param
    return (kernel if is_ours else fused).get("fp32" if value_bytes == 4 else "bf16")


DEQUANTIZE_BYTES: dict[Dtype, float] = {Dtype.NF4: 9.0, Dtype.INT8: 4.0, Dtype.GPTQ4: 20.0}
"""Traffic, or its equivalent in time, to dequantize one weight to 16 bit.

nf4: 451e9 weights per second on H200 (h200_rates.json). GPTQ: 75e-3 s per pass of 6.5e9 weights on
A100, the difference of QwenLM's Q-LoRA and LoRA rows.
"""
