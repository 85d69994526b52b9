"""Raw rates of one device: matrix products, attention, copies, optimizer passes, launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

# (in, out) of the linear layers of 1B to 8B models, and two vocabularies.
LINEAR_SHAPES = (
    *((960, 2560), (2048, 2048), (2048, 8192), (4096, 4096)),
    *((4096, 11008), (4096, 14336), (4096, 32000), (4096, 128256)),
)
NUM_TOKENS = (128, 512, 2048, 8192)


def median_seconds(work: Callable[[], object], *, repeats: int = 10) -> float:
    """Median device time by events, after three unmeasured runs."""
    for _ in range(3):
        work()
    seconds: list[float] = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(seconds)


def measure_matmuls() -> list[dict[str, Any]]:
    kinds = (("bf16", torch.bfloat16), ("fp16", torch.float16), ("tf32", None), ("fp32", None))
    rows = []
    for kind, dtype in kinds:
        torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
        for tokens in NUM_TOKENS:
            for num_in, num_out in LINEAR_SHAPES:
                left = torch.randn(tokens, num_in, device="cuda").to(dtype or torch.float32)
                right = torch.randn(num_out, num_in, device="cuda").to(left.dtype)
                seconds = median_seconds(partial(functional.linear, left, right), repeats=5)
                flops = 2 * tokens * num_in * num_out
                rows.append(
                    {"dtype": kind, "tokens": tokens, "in": num_in, "out": num_out}
                    | {"seconds": seconds, "flops_per_second": flops / seconds}
                )
    torch.backends.cuda.matmul.allow_tf32 = False
    return rows


def measure_attention() -> list[dict[str, Any]]:
    """Causal SDPA; FLOPs counted for the lower triangle only, backward 2.5 times forward."""
    rows = []
    for batch, heads, length, head_dim in (
        *((4, 32, 1024, 64), (4, 32, 2048, 64), (1, 32, 4096, 64), (4, 32, 1024, 128)),
        *((4, 32, 2048, 128), (1, 32, 4096, 128), (4, 8, 2048, 256)),
    ):
        shape = (batch, heads, length, head_dim)
        q, k, v = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )

        def attend(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def attend_and_back(q: torch.Tensor = q) -> None:
            attend().backward(torch.ones_like(q))

        forward, both = median_seconds(attend), median_seconds(attend_and_back)
        flops = 2 * batch * heads * length * length * head_dim
        rows.append(
            {"shape": shape, "forward_seconds": forward, "forward_backward_seconds": both}
            | {"forward_flops_per_second": flops / forward}
            | {"forward_backward_flops_per_second": 3.5 * flops / both}
        )
    return rows


def measure_copies() -> dict[str, float]:
    num_bytes = 2**30
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(device)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    pageable = torch.ones(num_bytes, dtype=torch.uint8)
    pairs = {
        "host_to_device_pinned": (device, pinned),
        "device_to_host_pinned": (pinned, device),
        "host_to_device_pageable": (device, pageable),
        "device_to_host_pageable": (pageable, device),
    }
    copy_seconds = median_seconds(lambda: other.copy_(device))
    rates = {"device_copy_read_plus_write": 2 * num_bytes / copy_seconds}
    for name, (target, source) in pairs.items():
        copy = partial(target.copy_, source, non_blocking=True)
        seconds = median_seconds(copy, repeats=3)
        rates[name] = num_bytes / seconds
    return {f"{name}_bytes_per_second": rate for name, rate in rates.items()}


def make_adamw(weights: list[torch.Tensor], kind: str) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        weights, lr=1e-5, fused=kind == "fused" or None, foreach=kind == "foreach" or None
    )


def measure_optimizers() -> list[dict[str, Any]]:
    """AdamW over 0.5e9 elements: weight, gradient and moments read, all but gradient written."""
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for kind in ("fused", "foreach"):
            weights = [torch.randn(2**23, device="cuda", dtype=dtype) for _ in range(64)]
            for weight in weights:
                weight.requires_grad_()
                weight.grad = torch.randn_like(weight)
            optimizer = make_adamw(weights, kind)
            seconds = median_seconds(optimizer.step, repeats=5)
            num_elements = 64 * 2**23
            num_bytes = 7 * num_elements * weights[0].element_size()
            rows.append(
                {"optimizer": f"adamw-{kind}", "dtype": str(dtype).removeprefix("torch.")}
                | {"seconds_per_element": seconds / num_elements}
                | {"bytes_per_second": num_bytes / seconds}
            )
            del weights, optimizer, weight
    return rows


def measure_host_adamw() -> dict[str, float]:
    """AdamW on the CPU, as an offloaded optimizer pays it."""
    weights = [torch.randn(2**23, requires_grad=True) for _ in range(16)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    rates = {}
    for kind in ("fused", "foreach"):
        optimizer = make_adamw(weights, kind)
        optimizer.step()
        start = time.perf_counter()
        for _ in range(3):
            optimizer.step()
        seconds = (time.perf_counter() - start) / 3
        rates[f"host_adamw_{kind}_fp32_elements_per_second"] = 16 * 2**23 / seconds
    return rates


def measure_small_kernels() -> dict[str, float]:
    """Host time of one eager op on a tiny tensor: what a job of many small kernels is bound by."""
    tiny = torch.ones(16, device="cuda")
    wide = torch.ones(2**28, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(5000):
        tiny.add_(1.0)
    torch.cuda.synchronize()
    launch = (time.perf_counter() - start) / 5000
    silu = median_seconds(lambda: functional.silu(wide))
    return {
        "eager_op_seconds": launch,
        "elementwise_bytes_per_second": 2 * wide.numel() * 2 / silu,
    }


def measure_dequantize() -> dict[str, float]:
    try:
        from bitsandbytes import functional as bnb
    except ImportError:
        return {}
    weight = torch.randn(4096, 11008, device="cuda", dtype=torch.bfloat16)
    packed, state = bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    seconds = median_seconds(lambda: bnb.dequantize_4bit(packed, state))
    return {"nf4_dequantize_elements_per_second": weight.numel() / seconds}


def measure_rates(*, dry_run: bool) -> dict[str, Any]:
    if dry_run:
        return {"rehearsal": True}
    return {
        "copies": measure_copies(),
        "small_kernels": measure_small_kernels(),
        "optimizers": measure_optimizers(),
        "host_optimizer": measure_host_adamw(),
        "dequantize": measure_dequantize(),
        "attention": measure_attention(),
        "matmuls": measure_matmuls(),
    }
