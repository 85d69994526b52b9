"""Time the casts to fp8 with other tiles than theirs on this machine's GPU.

    python benchmarks/tune_casts.py --out benchmarks/results/h200_cast_tiles.json

For each kernel of `runtime/kernels/fp8_triton.py`: every tile and number of warps on the
matrices of a 7B and a 1B model, in sum, beside those in use; by rows also on matrices side by side,
as gradients of layers that read one norm are. Needs a GPU and triton.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from _provenance import write_result
from measure_fused_kernels import CASTS, count_us, open_bench
from tightfit.runtime.calibrate.bench import Bench
from tightfit.runtime.kernels import fp8_triton

WARPS = (4, 8)
MOST_VALUES = 256
"""That one thread holds: more would leave its registers."""
THREADS = 32
BESIDE = ((8192, (4096, 4096, 4096)), (8192, (11_008, 11_008)),
          (32_768, (2048, 512, 512)), (32_768, (8192, 8192)))  # fmt: skip
"""Tokens, and widths of queries, keys and values, and of gates and what they gate."""

Shapes = tuple[tuple[int, int], ...]
Beside = tuple[tuple[int, tuple[int, ...]], ...]


def list_tiles(rows: tuple[int, ...], columns: tuple[int, ...]) -> Iterator[dict[str, int]]:
    for tile_rows, tile_columns, num_warps in product(rows, columns, WARPS):
        if tile_rows * tile_columns <= MOST_VALUES * THREADS * num_warps:
            yield {"tile_rows": tile_rows, "tile_columns": tile_columns, "num_warps": num_warps}


def list_settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """A cast, and what is set in the module while it is timed; what is in use comes first."""
    for name in ("rows", "beside", "columns", "turned"):
        yield name, {}
    for row_values, warp_values in product((4096, 8192, 16_384), (512, 1024, 2048, 4096)):
        for name in ("rows", "beside"):
            yield name, {"ROW_VALUES": row_values, "VALUES_A_WARP": warp_values}
    for tile in list_tiles((32, 64, 128, 256, 512), (64, 128, 256)):
        yield "columns", {"HIGH_TILE": tile}
    for tile in list_tiles((64, 128, 256), (32, 64, 128)):
        yield "columns", {"TURNED_TILE": tile}
        yield "turned", {"TURNED_TILE": tile}


@contextmanager
def set_in_module(settings: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(fp8_triton, name) for name in settings}
    try:
        for name, value in settings.items():
            setattr(fp8_triton, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(fp8_triton, name, value)


def measure(bench: Bench, shapes: Shapes, beside: Beside) -> list[dict[str, Any]]:
    matrices = [(bench.randn(*shape),) for shape in shapes]
    groups = [tuple(bench.randn(tokens, width) for width in widths) for tokens, widths in beside]
    casts: dict[str, tuple[Callable[..., object], Sequence[tuple[Tensor, ...]]]] = {
        "rows": (fp8_triton.cast_rows, matrices),
        "beside": (fp8_triton.cast_rows, groups),
        "columns": (fp8_triton.cast_columns, matrices),
        "turned": (fp8_triton.turn, [fp8_triton.cast_rows(*x)[:1] for x in matrices]),
    }
    found = []
    for name, settings in list_settings():
        work, operands = casts[name]
        with set_in_module(settings):
            took = [count_us(bench, partial(work, *x)) for x in operands]
        found.append({"cast": name, **settings, "us": took, "sum_us": round(sum(took), 1)})
        print(found[-1], flush=True)
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, by triton's interpreter")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    bench = open_bench(torch.device("cpu") if arguments.tiny else torch.device("cuda", 0))
    shapes: Shapes = ((32, 48),) if arguments.tiny else CASTS
    beside: Beside = ((32, (48, 16)),) if arguments.tiny else BESIDE
    rows = measure(bench, shapes, beside)
    write_result(
        arguments.out,
        "benchmarks/tune_casts.py",
        gpu="none" if arguments.tiny else torch.cuda.get_device_name(),
        torch=torch.__version__,
        shapes=shapes,
        beside=beside,
        tiles=rows,
    )


if __name__ == "__main__":
    main()
