"""Prints how far the kernel of AdamW is from torch's, over a few steps of tensors of all sizes."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tightfit.runtime.calibrate.kernels import updates_alike
from tightfit.runtime.kernels import adamw
from tightfit.runtime.kernels.adamw import TritonAdamW
from tightfit.runtime.kernels.adamw_triton import NUM_TILES, TILE, Rule, update_all

SPAN = TILE * NUM_TILES
"""Of one program."""
SIZES = (5, TILE, SPAN - 1, SPAN, 2 * SPAN + TILE + 7)
RATE, FACTOR, NUM_STEPS = 1e-2, 0.5, 4
RULE = Rule(rate=RATE, decay=0.1, betas=(0.9, 0.999), epsilon=1e-8)


def draw_groups() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(size)) for size in SIZES]
    return [
        {"params": weights[:3], "weight_decay": 0.1},
        {"params": weights[3:], "weight_decay": 0.0},
    ]


def draw_gradients(groups: list[dict[str, Any]], step: int) -> None:
    torch.manual_seed(step + 1)
    for number, weight in enumerate(weight for group in groups for weight in group["params"]):
        # One comes late: its count of steps is another.
        weight.grad = torch.randn_like(weight) if step or number else None


def compare_optimizers() -> dict[str, float]:
    """The worst relative distance of weights and of moments."""
    plain, groups = draw_groups(), draw_groups()
    theirs, ours = AdamW(plain, lr=RATE, fused=True), TritonAdamW(groups, lr=RATE)
    for step in range(NUM_STEPS):
        for one in (plain, groups):
            draw_gradients(one, step)
        for group in plain:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad *= FACTOR
        theirs.step()
        with torch.no_grad():
            ours._run_kernel(torch.tensor(FACTOR))
    worst = {"weight": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0, "step": 0.0}
    for own, other in zip(groups, plain, strict=True):
        for found, wanted in zip(own["params"], other["params"], strict=True):
            pairs = {"weight": (found, wanted)}
            states = ours.state[found], theirs.state[wanted]
            pairs |= {name: (states[0][name], states[1][name]) for name in states[1]}
            for name, (mine, right) in pairs.items():
                worst[name] = max(worst[name], distance(mine, right))
    return worst


def compare_bf16() -> dict[str, bool]:
    """One step against the same in fp32. The interpreter cuts digits off; a card rounds."""
    torch.manual_seed(0)
    weight, gradient, first, second = (torch.randn(2 * TILE + 3).bfloat16() for _ in range(4))
    second = second.square()
    wide = [x.float() for x in (weight, gradient, first, second)]
    steps, by = torch.tensor([3.0]), torch.tensor(FACTOR)
    for one in ((weight, gradient, first, second), wide):
        update_all([[x] for x in one], steps, RULE, by)
    names = ("weight", "gradient", "exp_avg", "exp_avg_sq")
    narrow = (weight, gradient, first, second)
    return {
        name: bool((mine.float() == cut(right)).all())
        for name, mine, right in zip(names, narrow, wide, strict=True)
    }


def skip_a_step() -> bool:
    """Whether a step over gradients that are no numbers, between two others, leaves no trace."""
    left: list[list[Tensor]] = []
    for steps in ((1, None, 2), (1, 2)):
        groups = draw_groups()
        ours = TritonAdamW(groups, lr=RATE)
        for step in steps:
            draw_gradients(groups, step or 9)
            ours.found_inf = torch.tensor(float(step is None))
            with torch.no_grad():
                ours._run_kernel(torch.tensor(FACTOR if step else float("nan")))
        weights = [weight for group in groups for weight in group["params"]]
        left.append([*weights, *(x for weight in weights for x in ours.state[weight].values())])
    return all(torch.equal(x, y) for x, y in zip(*left, strict=True))


def passes_trial() -> bool:
    """Whether calibration would take it, were this a card."""
    adamw._suits_kernel = lambda _weight: True  # type: ignore[assignment]
    torch.manual_seed(0)
    return all(updates_alike(torch.device("cpu"), x) for x in (torch.float32, torch.bfloat16))


def cut(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -65536).view(torch.float32)


def distance(found: Tensor, wanted: Tensor) -> float:
    difference = (found.double() - wanted.double()).norm()
    return float(difference / wanted.double().norm())


if __name__ == "__main__":
    found = {"fp32": compare_optimizers(), "bf16": compare_bf16(), "skips": skip_a_step()}
    print(json.dumps(found | {"passes": passes_trial()}))
