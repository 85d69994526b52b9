"""Prints how the kernel of AdamW reads and writes on two kinds of cards, without any."""

from __future__ import annotations

import json
import os
import tempfile

import torch
from compiled import list_steps  # before what imports triton

from tightfit.runtime.kernels import adamw_triton

TYPES = ("*i64", "*i32", "*fp32", "*fp32", "i32", *("fp32",) * 5)
KINDS = {"bf16": torch.bfloat16, "fp32": torch.float32}


def compile_kernel(kind: str, capability: int) -> list[str]:
    return list_steps(
        adamw_triton._adamw,
        TYPES,
        {
            "dtype": adamw_triton._WORDS[KINDS[kind]],
            "tile": adamw_triton.TILE,
            "num_tiles": adamw_triton.NUM_TILES,
        },
        capability=capability,
        num_warps=adamw_triton.NUM_WARPS,
        is_aligned=False,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        found = {f"{kind} {cc}": compile_kernel(kind, cc) for kind in KINDS for cc in (75, 90)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
