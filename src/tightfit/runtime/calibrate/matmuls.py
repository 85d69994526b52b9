"""Matrix products in the shapes of language models from 0.1B to 13B, LoRA's thin ones included."""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch.nn import functional

from tightfit.hardware.calibration import MatmulTime
from tightfit.hardware.measured_rates import FP8, FP8_EXACT, FP8_KINDS
from tightfit.runtime.calibrate.bench import Bench, Work, time_after_work
from tightfit.runtime.fp8_casts import scale_rows
from tightfit.runtime.fp8_linear import multiply_rows

Shape = tuple[int, int, int]
"""m, n, k: tokens, outputs, inputs in a forward pass."""

GPU_TOKENS = (512, 2048, 8192)
GPU_LINEARS = ((3072, 768), (2048, 2048), (8192, 2048), (4096, 4096), (11008, 4096), (13824, 5120))
"""n, k: linear layers of GPT-2 small, Llama-3.2-1B, Llama-2-7B and Llama-2-13B."""
WEIGHT_GRADIENT: Shape = (11008, 4096, 8192)
"""k is the tokens."""
GPU_OTHERS: tuple[Shape, ...] = (
    (2048, 4096, 11008),
    *((4096, 4096, 2048), WEIGHT_GRADIENT),
    *((2048, 32000, 4096), (2048, 128256, 4096), (8192, 50304, 2048)),  # vocabularies
    # The fused loss's slices of 8192 tokens, and the gradient of one's input
    *((256, 128256, 4096), (1024, 128256, 4096), (1024, 32000, 4096), (256, 4096, 128256)),
)
LORA_SHAPES: tuple[Shape, ...] = (
    *((2048, 16, 4096), (8192, 16, 4096), (8192, 64, 4096), (8192, 16, 11008), (2048, 8, 2048)),
    *((2048, 4096, 16), (8192, 4096, 16), (8192, 11008, 64), (2048, 2048, 8)),
    *((16, 4096, 8192), (4096, 16, 8192)),  # gradients of both matrices
)
GPU_FEW: tuple[Shape, ...] = (
    *((2048, n, k) for n, k in GPU_LINEARS),
    *((512, 4096, 4096), (8192, 4096, 4096), (2048, 32000, 4096)),
    *((8192, 16, 4096), (8192, 4096, 16), (2048, 8, 2048), (2048, 2048, 8)),
)
GPU_LARGEST: tuple[Shape, ...] = ((2048, 4096, 4096), (8192, 4096, 4096), (8192, 11008, 4096))
CPU_SHAPES: tuple[Shape, ...] = (
    *((m, n, k) for m in (128, 512, 2048) for n, k in ((576, 576), (1536, 576), (2048, 2048))),
    *((512, 8192, 2048), (512, 4096, 4096), (512, 11008, 4096), (2048, 8192, 2048)),
    *((512, 49152, 576), (512, 32000, 2048)),
    *((512, 16, 576), (512, 576, 16), (2048, 16, 2048), (2048, 2048, 16), (2048, 64, 2048)),
    *((576, 576, 512), (2048, 2048, 512)),
)
ANCHORS: dict[str, Shape] = {"cuda": (2048, 4096, 4096), "cpu": (512, 2048, 2048)}
CALLS = {"cuda": 8, "cpu": 4}
"""Runs that one measurement of a long product takes."""


def measure_matmuls(bench: Bench) -> list[MatmulTime]:
    """A table per dtype: fp32 in full precision, and what the device has beside it."""
    wanted = _plan(bench)
    rows: list[MatmulTime] = []
    for number, (dtype, shapes) in enumerate(wanted):
        with bench.part(1 / (len(wanted) - number)):
            rows += _measure_dtype(bench, dtype, shapes)
    return rows


SUSTAINED_SHAPE: Shape = (8192, 4096, 4096)
SUSTAINED_SECONDS = 1.5
"""Of nothing but products, until a card is down to the clock that its power limit allows."""


def measure_sustained(bench: Bench) -> MatmulTime | None:
    """A product of the table once more, without any rest; None on a CPU."""
    m, n, k = SUSTAINED_SHAPE
    if bench.is_cpu or bench.seconds_left < 2 * SUSTAINED_SECONDS:
        return None
    dtype = "bf16" if bench.supports_bf16 else "fp16"
    work = _prepare(bench, dtype, SUSTAINED_SHAPE)
    return MatmulTime(
        dtype=dtype, m=m, n=n, k=k, seconds=time_after_work(work, seconds=SUSTAINED_SECONDS)
    )


def _plan(bench: Bench) -> list[tuple[str, tuple[Shape, ...]]]:
    if bench.is_cpu:
        kinds = [("fp32", CPU_SHAPES)]
        return [*kinds, ("bf16", CPU_SHAPES)] if bench.supports_bf16 else kinds
    whole = (*((m, n, k) for m in GPU_TOKENS for n, k in GPU_LINEARS), *GPU_OTHERS, *LORA_SHAPES)
    usual, other = ("bf16", "fp16") if bench.supports_bf16 else ("fp16", None)
    found = [(usual, whole), ("fp32", GPU_FEW)]
    if other is not None:
        found += [(other, GPU_FEW), ("tf32", GPU_LARGEST)]
    if torch.cuda.get_device_capability(bench.device) >= (8, 9):
        found += [(FP8, GPU_LARGEST), (FP8_EXACT, (*GPU_LARGEST, WEIGHT_GRADIENT))]
    return found


def _measure_dtype(bench: Bench, dtype: str, shapes: tuple[Shape, ...]) -> list[MatmulTime]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        rows = _measure_shapes(bench, dtype, shapes)
    except (RuntimeError, AttributeError, TypeError) as fault:
        if dtype not in FP8_KINDS:  # torch has no public function for fp8 yet
            raise
        bench.skipped.append(f"{dtype} products: {str(fault).splitlines()[0][:200]}")
        return []
    finally:
        torch.set_float32_matmul_precision(before)
    left_out = len(shapes) - len(rows)
    if left_out:
        bench.skipped.append(
            f"{left_out} of {len(shapes)} {dtype} products: no time or memory left"
        )
    return rows


def _measure_shapes(bench: Bench, dtype: str, shapes: tuple[Shape, ...]) -> list[MatmulTime]:
    """One of middling size whatever the time, as all others are told by it; then small to large."""
    anchor = ANCHORS[bench.device.type]
    rows: list[MatmulTime] = []
    for m, n, k in sorted(shapes, key=lambda shape: (shape != anchor, prod(shape))):
        known = max((row.flops_per_second for row in rows), default=None)
        is_late = known is not None and (
            bench.seconds_left < CALLS[bench.device.type] * 2.0 * m * n * k / known
        )
        if is_late or not bench.has_room(4.0 * (m * k + n * k + 2 * m * n)):
            continue
        seconds = bench.try_seconds(partial(_prepare, bench, dtype, (m, n, k)))
        if seconds is not None:
            rows.append(MatmulTime(dtype=dtype, m=m, n=n, k=k, seconds=seconds))
    return rows


def _prepare(bench: Bench, dtype: str, shape: Shape) -> Work:
    m, n, k = shape
    if dtype in FP8_KINDS:
        return _prepare_fp8(bench, shape, is_fast=dtype == FP8)
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    kind = kinds.get(dtype, torch.float32)
    left, right = bench.randn(m, k, dtype=kind), bench.randn(n, k, dtype=kind)
    return partial(functional.linear, left, right)


def _prepare_fp8(bench: Bench, shape: Shape, *, is_fast: bool) -> Work:
    """As training multiplies, `is_fast` forward; casts are not in it."""
    m, n, k = shape
    left, right = (scale_rows(bench.randn(rows, k, dtype=torch.bfloat16)) for rows in (m, n))
    return partial(multiply_rows, left, right, is_fast=is_fast)
