"""KernelAdamW where its kernel cannot run: torch's AdamW, with gradients scaled on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from tightfit.runtime.kernels.adamw import TritonAdamW

SHAPES = ((17, 5), (300,), (64, 64))
RATE, FACTOR = 1e-2, 0.25


def draw_groups() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    matrix, vector, other = (nn.Parameter(torch.randn(shape)) for shape in SHAPES)
    return [
        {"params": [matrix, other], "weight_decay": 0.1},
        {"params": [vector], "weight_decay": 0.0},
    ]


def list_weights(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    return [weight for group in groups for weight in group["params"]]


def draw_gradients(groups: list[dict[str, Any]], *, seed: int, factor: float = 1.0) -> None:
    torch.manual_seed(seed)
    for weight in list_weights(groups):
        weight.grad = torch.randn_like(weight) * factor


def pair() -> Iterator[tuple[list[dict[str, Any]], Any]]:
    plain, groups = draw_groups(), draw_groups()
    yield plain, AdamW(plain, lr=RATE, fused=True)
    yield groups, TritonAdamW(groups, lr=RATE)


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for found, wanted in zip(list_weights(one), list_weights(other), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_scaled_gradients_are_those_that_were_multiplied() -> None:
    (plain, theirs), (groups, ours) = pair()
    for step in range(3):
        draw_gradients(plain, seed=step, factor=FACTOR)
        draw_gradients(groups, seed=step)
        ours.scale_next(torch.tensor(FACTOR))
        theirs.step()
        ours.step()

    assert_same(groups, plain)


def test_a_factor_is_for_one_step() -> None:
    (plain, theirs), (groups, ours) = pair()
    ours.scale_next(torch.tensor(FACTOR))
    for step in range(2):
        draw_gradients(plain, seed=step, factor=1.0 if step else FACTOR)
        draw_gradients(groups, seed=step)
        theirs.step()
        ours.step()

    assert_same(groups, plain)


def test_either_goes_on_from_a_checkpoint_of_the_other() -> None:
    (plain, theirs), (groups, ours) = pair()
    for one, optimizer in ((plain, theirs), (groups, ours)):
        draw_gradients(one, seed=0)
        optimizer.step()
    saved = theirs.state_dict(), ours.state_dict()
    ours.load_state_dict(saved[0])
    theirs.load_state_dict(saved[1])
    for one, optimizer in ((plain, theirs), (groups, ours)):
        draw_gradients(one, seed=1)
        optimizer.step()

    assert_same(groups, plain)
    assert {int(state["step"]) for state in ours.state.values()} == {2}
