"""Calibration: what `tightfit calibrate` measured on one machine, and the rates that follow."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from tightfit.core.frozen import FiniteFrozen
from tightfit.hardware.types import (
    FP8,
    FP8_EXACT,
    AttentionRow,
    BandwidthRow,
    Gpu,
    MatmulRow,
    MeasuredRates,
)

FORMAT = 1
"""Of the file. One with another number is measured again, not guessed at."""
ESTIMATED_DTYPES = ("fp32", "fp16", "bf16", FP8, FP8_EXACT)
"""Arithmetic that strategies can ask for; tf32 is measured to be shown."""
CAUSAL_FLOPS, BACKWARD_FLOPS = 2.0, 2.5
"""Of a causal square per head channel; backward over forward (arXiv:2307.08691 section 4.1)."""
LOSS_BYTES = 36.0
"""Traffic of the plain loss per logit, as `estimation/traffic.py` counts it."""
LEAST_OWN_FRACTION = 0.25
"""Of a kernel's time, what is surely its own once the gap is taken off: noise must not make a
rate without bound."""


class MatmulTime(FiniteFrozen):
    """An (m x k) by (k x n) product."""

    dtype: str
    m: PositiveInt
    n: PositiveInt
    k: PositiveInt
    seconds: PositiveFloat

    @property
    def flops_per_second(self) -> float:
        return 2.0 * self.m * self.n * self.k / self.seconds


class AttentionTime(FiniteFrozen):
    """Attention over whole sequences."""

    kind: Literal["sdpa", "masked", "math", "eager", "varlen"] = "sdpa"
    """As SDPA chooses, the same with a mask as a matrix, by SDPA's kernel that writes the scores
    out, as transformers' eager, or over documents of one length laid end to end."""
    dtype: str
    batch: PositiveInt
    heads: PositiveInt
    length: PositiveInt
    head_dim: PositiveInt
    is_causal: bool
    forward_seconds: PositiveFloat
    backward_seconds: PositiveFloat

    @property
    def forward_flops(self) -> float:
        """Of the pairs that the mask leaves."""
        pairs = self.batch * self.heads * self.length**2 * self.head_dim
        return CAUSAL_FLOPS * pairs * (1.0 if self.is_causal else 2.0)

    @property
    def num_scores(self) -> int:
        return self.batch * self.heads * self.length**2


class TrafficTime(FiniteFrozen):
    """A kernel that is bound by memory."""

    kind: Literal["copy", "elementwise", "softmax", "sum", "loss", "indexed"]
    tensor_bytes: PositiveInt
    moved_bytes: PositiveFloat
    """Read and written together."""
    seconds: PositiveFloat

    @property
    def bytes_per_second(self) -> float:
        return self.moved_bytes / self.seconds


TORCH: Literal["torch"] = "torch"
KERNEL: Literal["kernel"] = "kernel"


class OptimizerTime(FiniteFrozen):
    """One step of AdamW, with weights, gradients and state in one dtype."""

    dtype: str
    num_params: PositiveInt
    seconds: PositiveFloat
    by: Literal["torch", "kernel"] = "torch"
    """torch's fused one, or our kernel, which clips in the same pass and was found to update
    as torch does."""

    @property
    def seconds_per_param(self) -> float:
        return _short(self.seconds / self.num_params)


class HostTimes(FiniteFrozen):
    """What Python and torch take to start work."""

    op_seconds: PositiveFloat
    """One small operation, forward."""
    backward_op_seconds: PositiveFloat
    """One small operation of autograd's engine."""
    kernel_seconds: PositiveFloat | None = None
    """From one small kernel's start to the next one's, with a full queue; None on a CPU."""
    layer_forward_seconds: PositiveFloat | None = None
    """One small decoder layer of transformers; None where it is not installed."""
    layer_backward_seconds: PositiveFloat | None = None
    layer_checkpoint_seconds: NonNegativeFloat | None = None
    """What recomputing that layer adds to a step."""
    kernels_per_layer: PositiveFloat | None = None
    """As the estimate counts them in its forward pass."""
    adapter_forward_seconds: NonNegativeFloat | None = None
    """What one LoRA module adds to that layer; None where peft is not installed."""
    adapter_backward_seconds: float | None = None


class HostLink(FiniteFrozen):
    """Copies between the device and pinned host memory."""

    to_device_bytes_per_second: PositiveFloat
    from_device_bytes_per_second: PositiveFloat


class CollectiveTime(FiniteFrozen):
    """One collective over all GPUs of the machine; `num_bytes` is the whole tensor."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    num_ranks: PositiveInt
    num_bytes: PositiveInt
    seconds: PositiveFloat

    @property
    def ring_bytes_per_second(self) -> float:
        """What each rank passes on to its neighbour."""
        passes = 2 if self.kind == "all_reduce" else 1
        return passes * self.num_bytes * (self.num_ranks - 1) / self.num_ranks / self.seconds


class Calibration(FiniteFrozen):
    """One machine's measured rates, whole: one JSON file beside the ledger."""

    format: Literal[1] = 1
    gpu_name: str
    """As the catalogue, or tightfit's own probe, calls it."""
    host: str
    date: str
    """UTC, ISO 8601."""
    num_gpus: PositiveInt
    is_cpu: bool
    device: str
    """As the driver or the kernel calls it."""
    driver_version: str | None = None
    versions: dict[str, str]
    seconds: NonNegativeFloat
    """What measuring took."""
    context_bytes: PositiveInt | None = None
    matmuls: tuple[MatmulTime, ...] = ()
    """Each after a rest."""
    sustained: MatmulTime | None = None
    """One of them once more, after nothing but products."""
    attention: tuple[AttentionTime, ...] = ()
    traffic: tuple[TrafficTime, ...] = ()
    optimizers: tuple[OptimizerTime, ...] = ()
    nf4_weights_per_second: PositiveFloat | None = None
    host_times: HostTimes | None = None
    host_link: HostLink | None = None
    collectives: tuple[CollectiveTime, ...] = ()
    skipped: tuple[str, ...] = ()
    """What was not measured, and why."""
    warnings: tuple[str, ...] = ()
    """What may have disturbed it."""

    def apply(self, gpu: Gpu) -> Gpu:
        """The same device, with these rates in place of the catalogue's fractions."""
        return gpu.model_copy(update={"measured": self.rates()})

    def rates(self) -> MeasuredRates:
        """The few numbers that an estimate reads."""
        indexed = self._best_rate("indexed")
        return MeasuredRates(
            date=self.date[:10],
            matmuls=self._matmul_rows(),
            sustained_fraction=self._sustained_fraction(),
            attention=self._attention_rows("sdpa"),
            masked_attention=self._attention_rows("masked"),
            document_attention=self._attention_rows("varlen"),
            attention_value_bytes=4 if self.is_cpu else 2,
            score_seconds=self._score_seconds(),
            copies=self._bandwidth_rows("copy"),
            elementwise=self._bandwidth_rows("elementwise"),
            # Each value is read once and written once.
            indexed_values_per_second=None
            if indexed is None
            else _short(indexed / (8 if self.is_cpu else 4)),
            loss_bytes_per_second=self._best_rate("loss"),
            adamw_seconds_per_param=self._update_rates(TORCH),
            adamw_kernel_seconds_per_param=self._update_rates(KERNEL),
            nf4_weights_per_second=self.nf4_weights_per_second,
            context_bytes=self.context_bytes,
            **self._host_rates(),
            **self._link_rates(),
        )

    def _update_rates(self, by: str) -> dict[str, float]:
        return {one.dtype: one.seconds_per_param for one in self.optimizers if one.by == by}

    def _own_seconds(self, seconds: float) -> float:
        """A kernel's time without the gap around it, which estimates count apart."""
        gap = (None if self.host_times is None else self.host_times.kernel_seconds) or 0.0
        return _short(max(seconds - gap, LEAST_OWN_FRACTION * seconds))

    def _matmul_rows(self) -> dict[str, tuple[MatmulRow, ...]]:
        rows = {
            dtype: tuple(
                (one.m, one.n, one.k, self._own_seconds(one.seconds))
                for one in self.matmuls
                if one.dtype == dtype
            )
            for dtype in ESTIMATED_DTYPES
        }
        return {dtype: found for dtype, found in rows.items() if found}

    def _sustained_fraction(self) -> float | None:
        """Of the rate after a rest."""
        hot = self.sustained
        if hot is None:
            return None
        like = (hot.dtype, hot.m, hot.n, hot.k)
        rested = [one for one in self.matmuls if (one.dtype, one.m, one.n, one.k) == like]
        return _short(min(1.0, rested[0].seconds / hot.seconds)) if rested else None

    def _attention_rows(self, kind: str) -> tuple[AttentionRow, ...]:
        return tuple(
            (
                one.head_dim,
                one.length,
                _short(one.forward_flops / self._own_seconds(one.forward_seconds)),
                _short(BACKWARD_FLOPS * one.forward_flops / one.backward_seconds),
            )
            for one in self.attention
            if one.kind == kind and (one.is_causal or kind != "sdpa")
        )

    def _score_seconds(self) -> dict[str, tuple[float, float]]:
        """Of the longest sequences that were tried."""
        longest = sorted(self.attention, key=lambda one: one.length)
        return {
            one.kind: (
                _short(one.forward_seconds / one.num_scores),
                _short(one.backward_seconds / one.num_scores),
            )
            for one in longest
            if one.kind in ("math", "eager")
        }

    def _bandwidth_rows(self, kind: str) -> tuple[BandwidthRow, ...]:
        found = (one for one in self.traffic if one.kind == kind)
        return tuple(
            (one.tensor_bytes, _short(one.moved_bytes / self._own_seconds(one.seconds)))
            for one in sorted(found, key=lambda one: one.tensor_bytes)
        )

    def _best_rate(self, kind: str) -> float | None:
        return max((one.bytes_per_second for one in self.traffic if one.kind == kind), default=None)

    def _host_rates(self) -> dict[str, float | None]:
        times = self.host_times
        if times is None:
            return {}
        forward = backward = None
        if times.kernels_per_layer and times.layer_forward_seconds:
            forward = _short(times.layer_forward_seconds / times.kernels_per_layer)
        if times.kernels_per_layer and times.layer_backward_seconds:
            # The estimate counts two backward kernels for one forward.
            backward = _short(times.layer_backward_seconds / times.kernels_per_layer / 2)
        beyond = None
        if times.layer_checkpoint_seconds is not None and times.layer_forward_seconds:
            beyond = max(0.0, times.layer_checkpoint_seconds - times.layer_forward_seconds)
        return {
            "kernel_gap_seconds": times.kernel_seconds,
            "host_forward_seconds": forward,
            "host_backward_seconds": backward,
            "host_checkpoint_seconds": beyond,
            "host_adapter_forward_seconds": times.adapter_forward_seconds,
            "host_adapter_backward_seconds": times.adapter_backward_seconds,
        }

    def _link_rates(self) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        if self.host_link is not None:
            found["host_link_bytes_per_second"] = min(
                self.host_link.to_device_bytes_per_second,
                self.host_link.from_device_bytes_per_second,
            )
        shared = [one for one in self.collectives if one.kind != "all_reduce"]
        if shared:
            small = min(shared, key=lambda one: one.num_bytes)
            rate = max(one.ring_bytes_per_second for one in self.collectives)
            carried = small.num_bytes * (small.num_ranks - 1) / small.num_ranks / rate
            found["link_bytes_per_second"] = rate
            found["link_latency_seconds"] = max(0.0, small.seconds - carried)
        return found


def _short(value: float) -> float:
    """Four digits: a plan carries these numbers, and no measurement is better than that."""
    return float(f"{value:.4g}")
