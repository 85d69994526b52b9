"""Packed documents of families whose own code makes its mask without positions.

transformers' mask functions tell documents apart by `position_ids`, where they are handed any.
gpt-oss, OPT, Falcon, BLOOM and MPT hand them none (transformers 5.22): documents would see each
other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, update_wrapper
from inspect import signature
from typing import Any

from torch import Tensor

_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
_positions: ContextVar[Tensor | None] = ContextVar("positions", default=None)
"""Of the batch that a model is computing."""


def hand_positions_to_masks(model: Any) -> None:
    """Let this model's masks read the positions it is called with; it need not take any itself."""
    backbone = getattr(model, model.base_model_prefix, model)
    for part in {id(one): one for one in (model, backbone)}.values():
        # Of a bound method: a deep copy of the model binds it to the copied part.
        takes_positions = "position_ids" in signature(part.forward).parameters
        run = partial(_run_with_positions, part.forward, takes_positions)
        part.forward = update_wrapper(run, part.forward)
    code = sys.modules[type(model).__module__]
    for name in _MASKS:
        make = getattr(code, name, None)
        if make is not None and not isinstance(make, partial):
            setattr(code, name, partial(_make_mask, make))


def is_packed() -> bool:
    """Whether the model that is running was called with positions."""
    return _positions.get() is not None


def _run_with_positions(
    forward: Callable[..., Any], takes_positions: bool, *args: Any, **kwargs: Any
) -> Any:
    found = kwargs.get("position_ids") if takes_positions else kwargs.pop("position_ids", None)
    token = _positions.set(_positions.get() if found is None else found)
    try:
        return forward(*args, **kwargs)
    finally:
        _positions.reset(token)


def _make_mask(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return make(*args, **({"position_ids": _positions.get()} | kwargs))
