"""AdamW's update: torch's fused one, and our kernel where it does the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tightfit.hardware.calibration import KERNEL, TORCH, OptimizerTime
from tightfit.runtime.adamw import KernelAdamW
from tightfit.runtime.calibrate.bench import Bench, Work

NUM_TENSORS = {"cuda": (16, 2**22), "cpu": (8, 2**20)}
"""How many, and how large each."""
TRIED_SIZES = (4096, 1031, 65_537, 1)
"""Whole tiles of the kernel and parts of one."""
NUM_TRIED_STEPS = 3
RATE = 1e-3
FACTOR = 0.5
"""What gradients are clipped to in the trial."""
ROUNDINGS = 4
"""In which two correct updates may differ."""


def measure_optimizers(bench: Bench) -> list[OptimizerTime]:
    """With weights, gradients and state in one dtype."""
    kinds = {"fp32": torch.float32}
    if bench.supports_bf16:
        kinds["bf16"] = torch.bfloat16
    rows = [_measure(bench, name, dtype, TORCH) for name, dtype in kinds.items()]
    if not bench.is_cpu:
        rows += [
            _measure(bench, name, dtype, KERNEL)
            for name, dtype in kinds.items()
            if _is_fit_for_use(bench, name, dtype)
        ]
    return [row for row in rows if row is not None]


def _measure(
    bench: Bench, name: str, dtype: torch.dtype, by: Literal["torch", "kernel"]
) -> OptimizerTime | None:
    count, size = NUM_TENSORS[bench.device.type]
    fits = bench.seconds_left > 0 and bench.has_room(20.0 * count * size)
    make = partial(_prepare, bench, dtype, by)
    seconds = bench.try_seconds(make) if fits else None
    if seconds is None:
        bench.skipped.append(f"AdamW in {name}: no time or memory left")
        return None
    return OptimizerTime(dtype=name, num_params=count * size, seconds=seconds, by=by)


def _prepare(bench: Bench, dtype: torch.dtype, by: str) -> Work:
    count, size = NUM_TENSORS[bench.device.type]
    weights = [nn.Parameter(bench.randn(size, dtype=dtype)) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    if by == TORCH:
        step: Callable[[], object] = AdamW(weights, lr=1e-5, fused=True).step
        return step
    ours = KernelAdamW([{"params": weights}], lr=1e-5)
    factor = torch.ones((), device=bench.device)

    def clip_and_step() -> None:
        ours.scale_next(factor)
        ours.step()

    return clip_and_step


def _is_fit_for_use(bench: Bench, name: str, dtype: torch.dtype) -> bool:
    """Whether the kernel can be compiled here, and updates as torch does."""
    if find_spec("triton") is None:
        bench.skipped.append(f"the AdamW kernel in {name}: triton is not installed")
        return False
    try:
        is_alike = updates_alike(bench.device, dtype)
    except Exception as fault:  # compilers fail in ways of their own
        first = (str(fault).splitlines() or [""])[0]
        bench.skipped.append(f"the AdamW kernel in {name}: {type(fault).__name__}: {first}")
        return False
    if not is_alike:
        bench.skipped.append(f"the AdamW kernel in {name}: its update is not torch's")
    return is_alike


def updates_alike(device: torch.device, dtype: torch.dtype) -> bool:
    """A few clipped steps by either and in fp64, from the same weights: the kernel's weights and
    moments are nowhere further from fp64's than torch's are, but for rounding."""
    drawn = [(1e-2 * torch.randn(size, device=device)).to(dtype) for size in TRIED_SIZES]
    ours, theirs = ([nn.Parameter(x.clone()) for x in drawn] for _ in range(2))
    exact = [nn.Parameter(x.double()) for x in drawn]
    kernel, fused = KernelAdamW([{"params": ours}], lr=RATE), AdamW(theirs, lr=RATE, fused=True)
    slow = AdamW(exact, lr=RATE, foreach=False)
    factor = torch.tensor(FACTOR, device=device)
    for _ in range(NUM_TRIED_STEPS):
        for mine, other, right in zip(ours, theirs, exact, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = FACTOR * mine.grad
            right.grad = other.grad.double()
        kernel.scale_next(factor)
        kernel.step()
        fused.step()
        slow.step()
    return all(
        _is_as_near(mine, other, right, right.abs() + NUM_TRIED_STEPS * RATE)
        and _are_moments_as_near(kernel.state[mine], fused.state[other], slow.state[right])
        for mine, other, right in zip(ours, theirs, exact, strict=True)
    )


def _is_as_near(mine: Tensor, other: Tensor, exact: Tensor, rounded: Tensor) -> bool:
    """`rounded`: the size of what is rounded. Of weights, they and updates, which are as large as
    the rate."""
    room = ROUNDINGS * torch.finfo(other.dtype).eps * rounded
    return bool(((mine - exact).abs() <= (other - exact).abs() + room).all())


def _are_moments_as_near(*states: dict[str, Tensor]) -> bool:
    """Of moments, terms are rounded: what they add up to may be all but zero."""
    for name in ("exp_avg", "exp_avg_sq"):
        mine, other, exact = (state[name] for state in states)
        if not _is_as_near(mine, other, exact, exact.abs().amax()):
            return False
    return True
