"""Let a library take fake CPU tensors for a card's, where it decides by device. Uses torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.estimate.trace.habits_reduce import find_multiprocessors

_CARD = torch.device("cuda", 0)
_FUNCTIONS = (BuiltinFunctionType, FunctionType)
_COMMON_CAPABILITY = (8, 0)
"""For cards that are not NVIDIA's, on which libraries take the same way."""


@contextmanager
def seen_as_card(package: str, capability: tuple[int, int] | None) -> Iterator[None]:
    """In the modules of `package`, a fake tensor's device is a card; they hold fakes of the host.

    A fake tensor that really were a card's would need a torch that is built for it. Modules
    that are imported later are not seen to: import first what is to run.
    """
    lens = _Lens(capability or _COMMON_CAPABILITY)
    with ExitStack() as stack:
        stack.enter_context(patch.object(FakeTensor, "device", _claim_card(lens)))
        for name, module in list(sys.modules.items()):
            if name.startswith(f"{package}.") and getattr(module, "torch", None) is torch:
                stack.enter_context(patch.object(module, "torch", lens))
        yield


@contextmanager
def autocast_of(device_type: str) -> Iterator[None]:
    """Who asks whether autocast is on, and means a card's, is told of `device_type`'s."""
    is_enabled: Any = torch.is_autocast_enabled
    dtype: Any = torch.get_autocast_dtype
    with (
        patch.object(torch, "is_autocast_enabled", lambda *_: is_enabled(device_type)),
        patch.object(torch, "get_autocast_dtype", lambda *_: dtype(device_type)),
    ):
        yield


def _claim_card(lens: _Lens) -> property:
    """For those who look through the lens: what they make with the answer comes by it too."""
    own: Any = vars(FakeTensor)["device"]

    def device(self: Any) -> torch.device:
        if sys._getframe(1).f_globals.get("torch") is lens:
            return _CARD
        known: torch.device = own.fget(self)
        return known

    return property(device, own.fset)


class _Lens:
    """torch as the library sees it: with a card, and what is made there made on the host."""

    def __init__(self, capability: tuple[int, int]) -> None:
        # Gradients of trained norms are summed in as many rows.
        count = find_multiprocessors(capability).count
        properties = SimpleNamespace(multi_processor_count=count)
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            get_device_capability=lambda *_: capability,
            get_device_properties=lambda *_: properties,
            device=lambda *_: nullcontext(),
        )

    def equal(self, _first: Any, _second: Any) -> bool:
        """Asked whether a loss's gradient is one: it is the token's share of a step."""
        return False

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _on_host(value) if isinstance(value, _FUNCTIONS) else value


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == _CARD:
            kwargs["device"] = torch.device("cpu")
        return function(*args, **kwargs)

    return call
