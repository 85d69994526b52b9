"""Gradients that autograd's engine adds up by itself, told apart as a dispatch mode sees them."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WRAPPERS = ("torch._compile", "torch._dynamo")
"""Modules of torch's that stand between an operation and a dispatch mode."""


def is_engines_own() -> bool:
    """Whether autograd's engine runs this operation itself, not a backward function in Python."""
    # Layers that are recomputed in the backward pass record gradients; the engine does not.
    if torch.is_grad_enabled():
        return False
    frame: Any = sys._getframe(3)  # beyond the dispatch method and its question
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.autograd.graph"


class Uses(NamedTuple):
    """References that C++ holds to a tensor and to its storage; a view shares its base's."""

    tensor: int
    storage: int

    def __le__(self, other: object) -> bool:
        most = cast("Uses", other)
        return self.tensor <= most.tensor and self.storage <= most.storage


def count_uses(tensor: torch.Tensor) -> Uses:
    """0 for the tensor where this torch does not tell."""
    counter: Any = getattr(tensor, "_use_count", None)
    of_storage: Any = torch._C._storage_Use_Count
    return Uses(
        tensor=0 if counter is None else int(counter()),
        storage=int(of_storage(tensor.untyped_storage()._cdata)),
    )


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how often the engine's own gradient is referred to when another meets it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Uses(tensor=0, storage=0)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            self.seen = count_uses(args[0])
        return func(*args, **(kwargs or {}))


def count_owners() -> Uses:
    """References to a gradient that only the engine holds, as seen from a dispatch mode."""
    value = torch.ones(2, requires_grad=True)
    summed = (value * 2 + value * 3).sum()
    with _Counter() as counter:
        summed.backward()  # type: ignore[no-untyped-call]
    seen: Uses = counter.seen
    return seen
