"""Prints where the casts to fp8 differ from those in torch's own steps.

The interpreter rounds to fp8 otherwise than cards do: kernels write fp32 here, which torch rounds.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from tightfit.runtime.kernels import fp8_triton
from tightfit.runtime.kernels.fp8 import FP8, Scaled, scale_rows

SHAPES = ((1, 16), (37, 96), (130, 272), (3, 4112), (300, 64), (258, 80))
"""Tiles that are not filled, several tiles, and columns that are no power of two."""


def draw(shape: tuple[int, int]) -> Tensor:
    """Rows and columns of very different size, one of each of zeros."""
    torch.manual_seed(shape[0])
    rows, columns = (2.0 ** (6 * torch.randn(n)) for n in shape)
    x = torch.randn(shape) * rows[:, None] * columns
    x[-1] *= shape[0] == 1
    x[:, 3] = 0
    return x.to(torch.bfloat16)


def is_same(found: Scaled, wanted: Scaled) -> bool:
    """Bit for bit, where there is anything finite."""
    finite = wanted[1].isfinite()[:, 0]
    values = found[0].to(FP8).view(torch.uint8)[finite]
    is_equal = torch.equal(values, wanted[0].view(torch.uint8)[finite])
    return is_equal and torch.equal(found[1], wanted[1])


def compare(x: Tensor) -> dict[str, bool]:
    narrow, _ = scale_rows(x)
    turned = fp8_triton.turn(narrow)
    beside = (x, x.flip(0)[:, : x.shape[1] // 2], 4 * x)
    stacked = (x, 8 * x[: len(x) // 2 + 1], -x)
    as_one, on_top = torch.cat(beside, dim=1), torch.cat(stacked)
    wide = {"dtype": torch.float32}
    return {
        "rows": is_same(fp8_triton.cast_rows(x, **wide), scale_rows(x)),
        "rows beside": is_same(fp8_triton.cast_rows(*beside, **wide), scale_rows(as_one)),
        "columns": is_same(fp8_triton.cast_columns(x, **wide), scale_rows(x.t())),
        "columns beside": is_same(fp8_triton.cast_columns(*beside, **wide), scale_rows(as_one.t())),
        "columns stacked": is_same(
            fp8_triton.cast_stacked_columns(*stacked, **wide), scale_rows(on_top.t())
        ),
        "turned": torch.equal(turned.view(torch.uint8), narrow.view(torch.uint8).t()),
    }


def main() -> None:
    found = {f"{shape}": compare(draw(shape)) for shape in SHAPES}
    found["apart"] = compare(draw((40, 96))[:, :64])
    lost = draw((40, 96))
    lost[3, 5], lost[7, 9], lost[8, 10] = float("inf"), float("nan"), -float("inf")
    found["lost"] = compare(lost)
    ends = torch.finfo(torch.bfloat16)  # the interpreter reads what is smaller otherwise
    sizes = 1 + torch.rand(33, 48)
    found["tiny"] = compare((ends.tiny * sizes).to(torch.bfloat16))
    found["huge"] = compare((-ends.max / sizes).to(torch.bfloat16))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
