"""torch's AdamW, with a Triton kernel for parameters that are plain GPU tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

_MOMENTS = ("exp_avg", "exp_avg_sq")
SKIP_UPDATE = -1.0
"""A gradient factor that makes the kernel skip the update."""
_ALIGNMENT = 16
"""Bytes of one load of the kernel; addresses must be multiples of it."""


class TritonAdamW(AdamW):
    """State, groups, arithmetic and checkpoints are those of torch's fused AdamW.

    Gradients can be scaled as they are read, which saves a pass over memory; their values after
    the step are undefined.
    """

    grad_scale: Tensor | None = None
    """The attribute that torch's fused kernel divides gradients by."""
    found_inf: Tensor | None = None
    """The attribute that makes torch's fused kernel skip the update if it is 1."""

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, lr=lr, fused=True)
        self._factor: Tensor | None = None
        self._has_triton = find_spec("triton") is not None

    def scale_next(self, factor: Tensor) -> None:
        """Multiply the gradients of the next step by `factor`."""
        self._factor = factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ValueError("gradients are there before the step")
        factor, self._factor = self._factor, None
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self._has_triton and all(map(_suits_kernel, trained)):
            self._run_kernel(factor)
            return None
        self.grad_scale = None if factor is None else factor.reciprocal()
        try:
            return super().step()
        finally:
            self.grad_scale = None

    def _run_kernel(self, factor: Tensor | None) -> None:
        from tightfit.runtime.kernels.adamw_triton import Rule, update_all

        for group in self.param_groups:
            rule = Rule(
                rate=float(group["lr"]),
                decay=group["weight_decay"],
                betas=group["betas"],
                epsilon=group["eps"],
            )
            for weights in _by_kind(group["params"]):
                states = [self._find_state(weight) for weight in weights]
                counts: list[Tensor] = [state["step"] for state in states]
                torch._foreach_add_(counts, 1.0 if self.found_inf is None else 1.0 - self.found_inf)
                moments = [[state[name] for state in states] for name in _MOMENTS]
                gradients: list[Any] = [weight.grad for weight in weights]
                by = weights[0].new_ones((), dtype=torch.float32) if factor is None else factor
                if self.found_inf is not None:
                    by = by.masked_fill(self.found_inf > 0, SKIP_UPDATE)
                update_all((weights, gradients, *moments), torch.stack(counts), rule, by)

    def _find_state(self, weight: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state |= {name: torch.zeros_like(weight) for name in _MOMENTS}
        return state


def _suits_kernel(weight: Tensor) -> bool:
    """Plain CUDA tensors only, not DTensors; views of DDP buckets may be misaligned."""
    gradient = weight.grad
    return (
        weight.is_cuda
        and type(gradient) is Tensor
        and gradient.dtype == weight.dtype
        and all(x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0 for x in (weight, gradient))
    )


def _by_kind(weights: list[Tensor]) -> Iterable[list[Tensor]]:
    """Weights with a gradient, grouped by device and dtype."""
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for weight in weights:
        if weight.grad is not None:
            kinds[weight.device, weight.dtype].append(weight)
    return kinds.values()
