"""Measure our fused kernels and their peers' on this machine's GPU.

    python benchmarks/measure_fused_kernels.py --out benchmarks/results/h200_fused_kernels.json

`norms`: RMS norm forward and backward by Liger, by torch and by `runtime/kernels/norm_triton.py`,
with a frozen weight and a trained one. `products`: a LoRA layer's two products apart, and as one of
`runtime/kernels/fused_lora.py` with so many columns more. `updates`: AdamW with clipping, torch's
passes and `runtime/kernels/adamw.py`'s one, and how far apart their weights are after it.
`losses`: Liger's fused head and loss, forward and backward, by the width of its slices.
`casts`: to fp8 by rows and by columns, and fp8 turned. Needs a GPU, triton and liger-kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from _provenance import write_result
from tightfit.runtime.calibrate.bench import Bench
from tightfit.runtime.kernels.adamw import TritonAdamW

EPSILON = 1e-6
NORM_SHAPES = ((8192, 4096), (32768, 2048), (8192, 2048), (262_144, 128))
"""Tokens by width of 7B and 1B models, and heads of one with norms over heads."""
PRODUCT_SHAPES = ((8192, 4096, 4096), (8192, 4096, 11008))
"""Tokens, inputs, outputs."""
RANK = 16
RATE = 1e-3
SPARE = (16, 64, 128)
UPDATES = ((16, 4096 * 11008), (448, 16 * 4096))
"""Tensors, and values of each: matrices of a 7B model, and its adapters."""

LOSSES = ((8192, 4096, 128_256), (8192, 4096, 32_000), (32_768, 2048, 128_256))
"""Tokens, width and words of Llama 3 8B, Llama 2 7B and Llama 3.2 1B."""
SLICE_FACTORS = (1, 2, 4, 8)
CASTS = ((8192, 4096), (8192, 11_008), (11_008, 4096), (32_768, 2048), (32_768, 8192))
"""Inputs, gradients and weights of 7B and 1B models."""


def list_norms() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    from tightfit.runtime.kernels.norm_triton import RmsNorm

    liger: Any = LigerRMSNormFunction
    ours: Any = RmsNorm
    return {
        "liger": lambda x, w: liger.apply(x, w, EPSILON, 0.0, "llama", False, None),
        "torch": lambda x, w: functional.rms_norm(x, w.shape, w, EPSILON),
        "tightfit": lambda x, w: ours.apply(x, w, EPSILON, 0.0, False, False, 0),
    }


def measure_norms(bench: Bench) -> list[dict[str, Any]]:
    found = []
    for num_rows, width in NORM_SHAPES:
        num_bytes = 2 * num_rows * width
        for is_trained in (False, True):
            x = bench.randn(num_rows, width).requires_grad_()
            weight = bench.randn(width).requires_grad_(is_trained)
            g = bench.randn(num_rows, width)
            wanted = [x, weight] if is_trained else [x]
            for name, norm in list_norms().items():
                forward = bench.seconds(partial(norm, x, weight))
                y = norm(x, weight)
                backward = bench.seconds(
                    partial(torch.autograd.grad, y, wanted, g, retain_graph=True)
                )
                found.append(
                    {
                        "by": name,
                        "shape": [num_rows, width],
                        "is_trained": is_trained,
                        "forward_us": round(1e6 * forward, 1),
                        "backward_us": round(1e6 * backward, 1),
                        "backward_tb_per_second": round(3 * num_bytes / backward / 1e12, 2),
                    }
                )
    return found


def measure_products(bench: Bench) -> list[dict[str, Any]]:
    found = []
    for tokens, inputs, outputs in PRODUCT_SHAPES:
        x, weight = bench.randn(tokens, inputs), bench.randn(outputs, inputs)
        h, b = bench.randn(tokens, RANK), bench.randn(outputs, RANK)
        y = x @ weight.t()
        row: dict[str, Any] = {
            "tokens": tokens,
            "inputs": inputs,
            "outputs": outputs,
            "product_us": count_us(bench, partial(torch.mm, x, weight.t())),
            "added_us": count_us(bench, partial(y.addmm_, h, b.t(), alpha=2.0)),
        }
        for num_spare in SPARE:
            wide, matrix = (bench.randn(n, inputs + num_spare) for n in (tokens, outputs))
            row[f"wider_by_{num_spare}_us"] = count_us(bench, partial(torch.mm, wide, matrix.t()))
        found.append(row)
    return found


def measure_updates(bench: Bench) -> list[dict[str, Any]]:
    found = []
    factor = torch.tensor(0.5, device=bench.device)
    for dtype, (count, size) in product((torch.bfloat16, torch.float32), UPDATES):
        drawn = [bench.randn(size, dtype=dtype) for _ in range(count)]
        ours, theirs = ([nn.Parameter(x.clone()) for x in drawn] for _ in range(2))
        for weights in (ours, theirs):
            torch.manual_seed(0)
            for weight in weights:
                weight.grad = torch.randn_like(weight)
        mine = TritonAdamW([{"params": ours}], lr=RATE)
        torchs = AdamW(theirs, lr=RATE, fused=True)

        def update(mine: TritonAdamW = mine) -> None:
            mine.scale_next(factor)
            mine.step()

        def clip_and_update(weights: list[Any] = theirs, torchs: AdamW = torchs) -> None:
            torch._foreach_mul_([weight.grad for weight in weights], factor)
            torchs.step()

        update()
        clip_and_update()
        apart = max(
            float((x - y).detach().float().abs().max()) for x, y in zip(ours, theirs, strict=True)
        )
        row: dict[str, Any] = {
            "dtype": str(dtype).removeprefix("torch."),
            "tensors": count,
            "values": size,
        }
        row |= {"largest_difference": apart, "of_rate": apart / RATE}
        for name, work in (("tightfit", update), ("torch", clip_and_update)):
            row[f"{name}_us"] = count_us(bench, work)
        moved = 7 * drawn[0].element_size() * count * size
        row["tb_per_second"] = round(moved / row["tightfit_us"] / 1e6, 2)
        found.append(row)
    return found


def measure_losses(bench: Bench) -> list[dict[str, Any]]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    found = []
    for (tokens, width, words), is_trained in product(LOSSES, (False, True)):
        x = bench.randn(tokens, width).requires_grad_()
        head = (0.02 * bench.randn(words, width)).requires_grad_(is_trained)
        targets = torch.randint(words, (tokens,), device=bench.device)

        def both(factor: int, x: Tensor = x, head: Tensor = head, to: Tensor = targets) -> None:
            x.grad = head.grad = None
            loss = liger_fused_linear_cross_entropy(x, head, to, chunk_mem_const=factor)
            loss.backward()

        row: dict[str, Any] = {"tokens": tokens, "width": width, "words": words}
        row["is_trained"] = is_trained
        row |= {f"factor_{n}_us": count_us(bench, partial(both, n)) for n in SLICE_FACTORS}
        found.append(row)
    return found


def measure_casts(bench: Bench) -> list[dict[str, Any]]:
    """Bytes are those that a value cannot do without: by columns it is read twice."""
    from tightfit.runtime.kernels import fp8_triton

    found = []
    for num_rows, width in CASTS:
        x = bench.randn(num_rows, width)
        narrow, _ = fp8_triton.cast_rows(x)
        ways: dict[str, tuple[int, Callable[[], object]]] = {
            "rows": (3, partial(fp8_triton.cast_rows, x)),
            "columns": (5, partial(fp8_triton.cast_columns, x)),
            "turned": (2, partial(fp8_triton.turn, narrow)),
        }
        row: dict[str, Any] = {"shape": [num_rows, width]}
        for name, (value_bytes, work) in ways.items():
            took = row[f"{name}_us"] = count_us(bench, work)
            row[f"{name}_tb_per_second"] = round(value_bytes * x.numel() / took / 1e6, 2)
        found.append(row)
    return found


def open_bench(device: torch.device) -> Bench:
    return Bench(device=device, dtype=torch.bfloat16, supports_bf16=True, deadline=float("inf"))


def count_us(bench: Bench, work: Callable[[], object]) -> float:
    return round(1e6 * bench.seconds(work), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    bench = open_bench(torch.device("cuda", 0))
    norms, products = measure_norms(bench), measure_products(bench)
    updates, losses = measure_updates(bench), measure_losses(bench)
    casts = measure_casts(bench)
    for row in norms + products + updates + losses + casts:
        print(row)
    write_result(
        arguments.out,
        "benchmarks/measure_fused_kernels.py",
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        norms=norms,
        products=products,
        updates=updates,
        losses=losses,
        casts=casts,
    )


if __name__ == "__main__":
    main()
