"""Prints how far the norm kernels are from plain torch: alone, and inside a model."""

from __future__ import annotations

import copy
import json
from itertools import product
from typing import Any

import torch
from liger_kernel.transformers import monkey_patch
from tiny_models import make_model
from torch import Tensor

from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy, Training
from tightfit.runtime.adapters import add_adapters
from tightfit.runtime.kernels.fused_lora import fuse_lora, fuse_lora_projections
from tightfit.runtime.kernels.fused_projections import FUSED_PROJECTIONS
from tightfit.runtime.kernels.norm_triton import RmsNorm, use_triton_norms

EPSILON = 1e-6
SHAPES = ((19, 96), (40, 128), (3, 2048), (2, 4100))
"""Rows that fill no tile, columns that are no power of two."""


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def plain_norm(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * (weight + offset)


def compare_kernels(kind: torch.dtype, *, in_place: bool) -> dict[str, float]:
    """The worst over shapes, offsets, roundings, frozen and trained weights, spare columns."""
    worst = {"y": 0.0, "x": 0.0, "weight": 0.0, "spare": 0.0}
    cases = product(SHAPES, (0.0, 1.0), (False, True), (False, True), (0, 128))
    for (rows, columns), offset, is_wide, is_trained, num_spare in cases:
        torch.manual_seed(rows)
        x = torch.randn(2, rows, columns).to(kind).requires_grad_()
        weight = torch.randn(columns).to(kind).requires_grad_(is_trained)
        g = torch.randn(2, rows, columns).to(kind)
        norm: Any = RmsNorm
        y = norm.apply(x, weight, EPSILON, offset, is_wide, in_place, num_spare)
        if num_spare:
            width = columns + num_spare
            whole = y.detach().as_strided((2 * rows, width), (width, 1))
            worst["spare"] = max(worst["spare"], float(whole[:, columns:].abs().max()))
        y.backward(g.clone())
        exact = [value.detach().double().requires_grad_() for value in (x, weight)]
        wanted = plain_norm(exact[0], exact[1], offset)
        of_x, of_weight = torch.autograd.grad(wanted, exact, g.double())
        pairs = {"y": (y, wanted), "x": (x.grad, of_x)}
        if is_trained:
            pairs["weight"] = (weight.grad, of_weight)
        for name, (found, right) in pairs.items():
            worst[name] = max(worst[name], distance(found.detach(), right.detach()))
    return worst


def gradients(model: Any) -> dict[str, Tensor]:
    ids = torch.arange(3, 51).reshape(3, 16)
    logits = model(input_ids=ids).logits
    logits.logsumexp(-1).sum().backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **found}


def patch_norms(model: Any) -> int:
    """As `apply_fused_kernels` does it; Liger's other kernels are not for the interpreter."""
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            monkey_patch._patch_rms_norm_module(module, casting_mode="llama")
    return use_triton_norms(model)


def compare_models(family: str, method: Method) -> dict[str, float]:
    torch.manual_seed(0)
    plain = make_model(family)
    if method is Method.LORA:
        strategy = Strategy(lora_rank=4)
        training = Training(model_path="model", learning_rate=1e-4)
        plain = add_adapters(plain, strategy, training).float()
        for name, parameter in plain.named_parameters():
            if "lora_B" in name:
                torch.manual_seed(len(name))
                torch.nn.init.normal_(parameter, std=0.1)
    plain.train()
    quick = copy.deepcopy(plain)
    found = {"norms": patch_norms(quick)}
    if method is Method.LORA:
        fuse_lora(quick)
        found["roomy"] = fuse_lora_projections(quick)
        assert sum(hasattr(m, FUSED_PROJECTIONS) for m in quick.modules()) == found["roomy"]
    wanted, got = gradients(plain), gradients(quick)
    assert wanted.keys() == got.keys()
    worst = max(distance(got[name], value) for name, value in wanted.items())
    return found | {"worst": worst}


def main() -> None:
    found = {
        "fp32": compare_kernels(torch.float32, in_place=False),
        "in_place": compare_kernels(torch.float32, in_place=True),
        "bf16": compare_kernels(torch.bfloat16, in_place=False),
    }
    for family, method in product(("llama", "qwen3"), (Method.LORA, Method.FULL)):
        found[f"{family} {method.value}"] = compare_models(family, method)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
