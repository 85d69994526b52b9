"""Prints how the kernel of AdamW reads and writes on two kinds of cards, without any."""

from __future__ import annotations

import json
import os
import re
import tempfile

del os.environ["TRITON_INTERPRET"]

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tightfit.runtime import adamw_kernels

TYPES = ("*i64", "*i32", "*fp32", "*fp32", "i32", *("fp32",) * 5)
KINDS = {"bf16": tl.bfloat16, "fp32": tl.float32}
STEPS = re.compile(r"(?:ld|st)\.global\S*")


def compile_kernel(kind: str, capability: int) -> list[str]:
    kernel = adamw_kernels._update
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    signature |= dict(zip(kernel.arg_names, TYPES, strict=False))
    fixed = {"dtype": KINDS[kind], "tile": adamw_kernels.TILE}
    source = ASTSource(kernel, signature, constexprs=fixed)
    options = {"num_warps": adamw_kernels.NUM_WARPS}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return STEPS.findall(made.asm["ptx"])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        found = {f"{kind} {cc}": compile_kernel(kind, cc) for kind in KINDS for cc in (75, 90)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
