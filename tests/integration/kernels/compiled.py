"""What a kernel becomes on a card that need not be there. For scripts that run in processes of
their own: triton is told before it is imported that it shall compile, and not interpret."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

del os.environ["TRITON_INTERPRET"]

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_STEPS = re.compile(r"(?:ld|st)\.global\S*")


def list_steps(
    kernel: Any,
    types: Sequence[str],
    fixed: Mapping[str, Any],
    *,
    capability: int,
    num_warps: int,
    is_aligned: bool,
) -> list[str]:
    """How it reads and writes, in the card's own words.

    `is_aligned`: every argument is a multiple of 16, addresses and sizes alike.
    """
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    signature |= dict(zip(kernel.arg_names, types, strict=False))
    attributes = {(place,): [["tt.divisibility", 16]] for place in range(len(types))}
    source = ASTSource(
        kernel, signature, constexprs=dict(fixed), attrs=attributes if is_aligned else None
    )
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options={"num_warps": num_warps})
    return _STEPS.findall(made.asm["ptx"])
