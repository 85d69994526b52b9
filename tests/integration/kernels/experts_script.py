"""Prints how far the kernels between the products of experts are from plain torch."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from tightfit.runtime.kernels import experts
from tightfit.runtime.kernels.experts import Layout, sort_by_expert
from tightfit.runtime.kernels.gating import Gating

TOKENS, HIDDEN, INNER, EXPERTS, CHOICES, RANK = 23, 40, 36, 6, 3, 4
"""Tiles are not filled, and one width suits no grouped product."""


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def draw(gating: Gating, kind: torch.dtype) -> list[Tensor | None]:
    """Hidden states, weights of the router, matrices, biases and adapters of the experts."""
    torch.manual_seed(int(gating))
    shapes = (
        (TOKENS, HIDDEN),
        (TOKENS, CHOICES),
        (EXPERTS, HIDDEN, 2 * INNER),
        (EXPERTS, INNER, HIDDEN),
        (EXPERTS, 2 * INNER),
        (EXPERTS, HIDDEN),
        (EXPERTS, HIDDEN, RANK),
        (EXPERTS, RANK, 2 * INNER),
        (EXPERTS, INNER, RANK),
        (EXPERTS, RANK, HIDDEN),
    )
    drawn: list[Tensor | None] = [torch.randn(shape).to(kind) for shape in shapes]
    # Wide enough that some gates are clamped.
    if gating is not Gating.CLAMPED:
        drawn[4:6] = None, None
    return drawn


def run(values: list[Tensor | None], gating: Gating, *, runs_kernels: bool) -> list[Tensor]:
    """The output, and the gradient of every value."""
    vars(experts)["_runs_kernels"] = lambda _: runs_kernels
    leaves = [None if value is None else value.clone().requires_grad_() for value in values]
    torch.manual_seed(9)
    chosen = torch.rand(TOKENS, EXPERTS).topk(CHOICES).indices
    apply: Any = experts._Experts.apply
    layout = Layout(routing=sort_by_expert(chosen, EXPERTS), gating=gating)
    output = apply(*leaves[:6], layout, *leaves[6:])
    output.backward(torch.randn(output.shape).to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def main() -> None:
    report = {}
    for gating in Gating:
        for kind in (torch.float32, torch.bfloat16):
            values = draw(gating, kind)
            # In one dtype, or other values would be clamped.
            found = run(values, gating, runs_kernels=True)
            wanted = run(values, gating, runs_kernels=False)
            pairs = zip(found, wanted, strict=True)
            name = f"{gating.name} {str(kind).removeprefix('torch.')}"
            report[name] = [distance(one, other) for one, other in pairs]
    print(json.dumps(report))


main()
