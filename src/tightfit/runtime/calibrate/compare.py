"""Measured rates compared with what estimates assume without a calibration. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.frozen import Frozen
from tightfit.core.optimizers import Optimizer
from tightfit.core.strategy import Strategy
from tightfit.estimation import communication as comms
from tightfit.estimation import traffic
from tightfit.estimation.memory import estimate_context_bytes
from tightfit.estimation.step_time import ADAPTER_KERNELS
from tightfit.hardware import rates as eff
from tightfit.hardware.calibration import BACKWARD_FLOPS, KERNEL, Calibration
from tightfit.hardware.types import Node

Unit = Literal["FLOP/s", "B/s", "B", "s", "weights/s"]
SHOWN_LENGTHS = (512, 2048, 8192)


Row = tuple[str, Unit, float, float | None]
"""A ComparedRate's fields."""


class ComparedRate(Frozen):
    """One line of the table."""

    name: str
    unit: Unit
    measured: float
    assumed: float | None = None
    """None if estimates make no assumption."""

    @property
    def ratio(self) -> float | None:
        return None if not self.assumed else self.measured / self.assumed


def compare_rates(found: Calibration, node: Node) -> tuple[ComparedRate, ...]:
    """`node` as the probe describes it, without measured rates."""
    gpu = node.gpu.model_copy(update={"measured": None})
    plain = node.model_copy(update={"gpu": gpu})
    rows = [
        *_compare_matmuls(found, plain),
        *_compare_attention(found, plain),
        *_compare_traffic(found, plain),
        *_compare_host(found, plain),
        *_compare_links(found, plain),
    ]
    if found.context_bytes is not None:
        assumed = estimate_context_bytes(1, is_cpu=found.is_cpu)
        rows.insert(0, ("CUDA context", "B", found.context_bytes, assumed))
    return tuple(
        ComparedRate(name=name, unit=unit, measured=measured, assumed=assumed)
        for name, unit, measured, assumed in rows
    )


def _usual(found: Calibration) -> Dtype:
    """The training dtype: that of most measured products."""
    rows = found.rates().matmuls
    return Dtype(max(rows, key=lambda dtype: len(rows[dtype]))) if rows else Dtype.FP32


def _rates(found: Calibration, node: Node, head_dim: int = 128) -> eff.DeviceRates:
    usual = Dtype.FP32 if found.is_cpu else _usual(found)
    strategy = Strategy(compute=usual, weights=usual, attention=Attention.SDPA)
    return eff.find_rates(node.gpu, strategy, head_dim=head_dim)


def _compare_matmuls(found: Calibration, node: Node) -> Iterator[Row]:
    for dtype in dict.fromkeys(row.dtype for row in found.matmuls):
        best = max(row.flops_per_second for row in found.matmuls if row.dtype == dtype)
        assumed = None
        if dtype in ("fp32", "bf16", "fp16"):
            assumed = eff.sustained_flops(node.gpu, Dtype(dtype))
        yield f"best {dtype} product", "FLOP/s", best, assumed
    rates, usual = _rates(found, node), _usual(found)
    for row in found.matmuls:
        is_shown = row.m >= row.n if row.k > row.n else row.m == 2048
        if row.dtype != usual.value or not is_shown or min(row.m, row.n, row.k) < 8:
            continue
        moved = usual.value_bytes * (row.m * row.n + row.m * row.k + row.n * row.k)
        seconds = eff.matmul_seconds(rates, flops=2.0 * row.m * row.n * row.k, num_bytes=moved)
        yield f"{row.dtype} product {row.m} x {row.k} x {row.n}", "s", row.seconds, seconds


def _compare_attention(found: Calibration, node: Node) -> Iterator[Row]:
    for row in found.attention:
        if row.kind != "sdpa" or not row.is_causal or row.length not in SHOWN_LENGTHS:
            continue
        rates = _rates(found, node, row.head_dim)
        for name, seconds, is_backward in (
            ("forward", row.forward_seconds, False),
            ("backward", row.backward_seconds, True),
        ):
            flops = row.forward_flops
            assumed = eff.attention_seconds(
                rates, flops=flops, seq_len=row.length, backward=is_backward
            )
            work = flops * (BACKWARD_FLOPS if is_backward else 1.0)
            title = f"attention {name}, {row.length} tokens, heads of {row.head_dim}"
            yield title, "FLOP/s", work / seconds, work / assumed
    # Forward time of attention that materializes its scores, per billion of them.
    rates = _rates(found, node)
    for name, (forward, _) in found.rates().score_seconds.items():
        each = traffic.EAGER_PAIR_BYTES / rates.elementwise_bytes_per_second
        each += 4.0 * 128 / rates.matmul_flops_per_second
        known = 1e9 * each if name == "eager" else None
        yield f"{name} attention, 1e9 scores, heads of 128", "s", 1e9 * forward, known


def _compare_traffic(found: Calibration, node: Node) -> Iterator[Row]:
    rates = _rates(found, node)
    assumed = {
        "copy": rates.stream_bytes_per_second,
        "elementwise": rates.elementwise_bytes_per_second,
        "loss": rates.loss_bytes_per_second,
    }
    for row in found.traffic:
        is_chain = row.kind in ("copy", "elementwise")
        size = f", {row.tensor_bytes / 2**20:g} MiB" if is_chain else ""
        yield row.kind + size, "B/s", row.bytes_per_second, assumed.get(row.kind)
    for update in found.optimizers:
        dtype = Dtype(update.dtype)
        is_ours = update.by == KERNEL
        optimizer = Optimizer.ADAMW_KERNEL if is_ours else Optimizer.ADAMW
        strategy = Strategy(method="full", weights=dtype, optimizer=optimizer)
        kind = "AdamW in our kernel," if is_ours else "fused AdamW in"
        seconds = 1e9 * update.seconds / update.num_params
        known = 1e9 * traffic.optimizer_seconds_per_param(strategy, rates)
        yield f"{kind} {update.dtype}, 1e9 values", "s", seconds, known
    if found.nf4_weights_per_second is not None:
        known = rates.stream_bytes_per_second / eff.DEQUANTIZE_BYTES[Dtype.NF4]
        yield "unpacking nf4", "weights/s", found.nf4_weights_per_second, known


def _compare_host(found: Calibration, node: Node) -> Iterator[Row]:
    if found.host_times is None:
        return
    rates, own, times = _rates(found, node), found.rates(), found.host_times
    yield "host: one small operation", "s", times.op_seconds, None
    yield "host: its backward", "s", times.backward_op_seconds, None
    adapter_seconds = rates.host_forward_seconds * (ADAPTER_KERNELS + eff.HOST_ADAPTER_KERNELS)
    for name, measured, assumed in (
        ("a layer's kernel, forward", own.host_forward_seconds, rates.host_forward_seconds),
        ("a layer's kernel, backward", own.host_backward_seconds, rates.host_backward_seconds),
        ("a recomputed layer's extra", own.host_checkpoint_seconds, rates.host_checkpoint_seconds),
        ("a LoRA module, forward", own.host_adapter_forward_seconds, adapter_seconds),
    ):
        if measured is not None:
            yield f"host: {name}", "s", measured, assumed
    if own.kernel_gap_seconds is not None:
        yield "from kernel to kernel", "s", own.kernel_gap_seconds, rates.kernel_gap_seconds


def _compare_links(found: Calibration, node: Node) -> Iterator[Row]:
    links = comms.find_links(node, network_bytes_per_second=None)
    if found.host_link is not None:
        for name, rate in (
            ("pinned host memory to device", found.host_link.to_device_bytes_per_second),
            ("device to pinned host memory", found.host_link.from_device_bytes_per_second),
        ):
            yield name, "B/s", rate, links.host
    for row in found.collectives:
        name = f"{row.kind} of {row.num_bytes / 2**20:g} MiB, {row.num_ranks} GPUs, as a ring"
        yield name, "B/s", row.ring_bytes_per_second, links.inside
