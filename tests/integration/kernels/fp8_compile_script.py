"""Prints what the casts to fp8 become on two kinds of cards, none of which is needed for it."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

from compiled import list_steps  # before what imports triton

from tightfit.runtime.kernels import fp8_triton

NARROW, WIDE, SCALES, LARGEST, BYTES = "*fp8e4nv", "*bf16", "*fp32", "*i32", "*u8"
SIZES = ("i32", "i32", "i32")
ROW_SIZES = ("i32", *SIZES, *SIZES)
ABSENT = ("constexpr", "constexpr")
ONE: dict[str, Any] = {"tile_rows": 1, "x_tile": 4096, "y_tile": 0, "z_tile": 0, "num_warps": 4}
ONE |= {"y": None, "z": None}
THREE = {"tile_rows": 1, "x_tile": 2048, "y_tile": 512, "z_tile": 512, "num_warps": 4}
KERNELS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "_cast_rows": ((NARROW, SCALES, WIDE, *ABSENT, *ROW_SIZES), ONE),
    "_cast_rows beside": ((NARROW, SCALES, WIDE, WIDE, WIDE, *ROW_SIZES), THREE),
    "_find_largest": ((LARGEST, WIDE, *SIZES), fp8_triton.HIGH_TILE),
    "_cast_turned": ((NARROW, SCALES, LARGEST, WIDE, *SIZES, "i32"), fp8_triton.TURNED_TILE),
    "_turn": ((BYTES, BYTES, *SIZES), fp8_triton.TURNED_TILE),
}


def compile_kernel(name: str, capability: int) -> list[str]:
    types, tile = KERNELS[name]
    return list_steps(
        getattr(fp8_triton, name.split(maxsplit=1)[0]),
        types,
        {key: size for key, size in tile.items() if key != "num_warps"},
        capability=capability,
        num_warps=tile["num_warps"],
        is_aligned=True,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        found = {f"{name} {cc}": compile_kernel(name, cc) for name in KERNELS for cc in (89, 90)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
