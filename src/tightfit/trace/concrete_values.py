"""Concrete values of integer and mask tensors in a fake run: shapes and branches depend on them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
_ATTRIBUTE = "_tightfit_value"
_MAX_BYTES = 64 * 2**20
"""Larger masks are not computed; no code reads their values."""
_DATA_DEPENDENT = (_aten.nonzero.default, _aten.masked_select.default, _aten.unique_dim.default)

_WIDENING_PRODUCT = getattr(_aten.addmm, "dtype_out", None)
"""A 16-bit product accumulated in fp32, as Liger's loss does: without a CUDA kernel torch 2.11
mistakes the dtype for the factor. Older versions do not have it."""


class ConcreteValues:
    """Runs operations on fake tensors, and on their real values where they have any.

    A batch's token numbers, labels, masks and positions are small and known. Which tokens
    carry loss, where documents end and whether a mask masks anything decide shapes and
    branches; on fake tensors alone they could not be answered.
    """

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _aten._local_scalar_dense.default:
            return self._read(args[0])
        if func is _aten.index.Tensor and _has_mask(args[1]):
            return self._index(args[0], args[1])
        if func in _DATA_DEPENDENT:
            return self._run_data_dependent(func, args, kwargs)
        if func is _WIDENING_PRODUCT:
            return kwargs["out"]
        result = func(*args, **kwargs)
        if func is _aten.rand.default and not result.dim():
            set_concrete_value(result, _highest_random(result.dtype))
        elif func is _aten.lift_fresh.default:
            _keep_constant(result, args[0])
        elif isinstance(result, torch.Tensor) and _is_integer(result):
            self._follow(result, func, args, kwargs)
        return result

    def _follow(
        self, result: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if result.numel() * result.element_size() > _MAX_BYTES:
            return
        real = self._compute(func, args, kwargs)
        if isinstance(real, torch.Tensor) and real.shape == result.shape:
            setattr(result, _ATTRIBUTE, real)

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation on the values; None where one is missing."""
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(get_concrete_value(leaf) is None for leaf in leaves):
            return None
        if not leaves and "empty" in str(func):
            return None
        real_args, real_kwargs = tree_map(
            lambda x: get_concrete_value(x) if isinstance(x, torch.Tensor) else x, (args, kwargs)
        )
        with _disable_current_modes():
            return func(*real_args, **real_kwargs)

    def _run_data_dependent(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A result whose shape depends on values."""
        real = self._compute(func, args, kwargs)
        if not isinstance(real, torch.Tensor):
            return func(*args, **kwargs)
        fake = torch.empty(real.shape, dtype=real.dtype, device=args[0].device)
        setattr(fake, _ATTRIBUTE, real)
        return fake

    def _index(self, source: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
        """Rows that a mask selects; CUDA converts the mask to positions first."""
        positions: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                positions.append(index)
                continue
            picked = self._run_data_dependent(_aten.nonzero.default, (index,), {})
            positions.extend(picked.unbind(1))
        picked_rows: torch.Tensor = _aten.index.Tensor(source, positions)
        if all(
            position is None or get_concrete_value(position) is not None for position in positions
        ):
            self._follow(picked_rows, _aten.index.Tensor, (source, positions), {})
        return picked_rows

    def _read(self, tensor: torch.Tensor) -> Any:
        """A Python number. Unknown values count as true or one: finite losses, found tokens."""
        real = get_concrete_value(tensor)
        if real is not None:
            with _disable_current_modes():
                return real.item()
        if tensor.dtype is torch.bool:
            return True
        return 1.0 if tensor.is_floating_point() else 1


def _keep_constant(fake: torch.Tensor, given: torch.Tensor) -> None:
    """Constants such as `torch.tensor([3])` are known."""
    real = getattr(fake, "constant", None)
    if real is None and type(given) is torch.Tensor:
        real = given
    if real is not None and _is_integer(real):
        setattr(fake, _ATTRIBUTE, real)


def _highest_random(dtype: torch.dtype) -> torch.Tensor:
    """The value of a single random number. Models with layer drop (OPT, BART) then drop no layer,
    which takes the most memory."""
    with _disable_current_modes():
        return torch.tensor(1.0 - torch.finfo(dtype).eps, dtype=dtype)


def set_concrete_value(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Attach real values to a fake tensor."""
    setattr(fake, _ATTRIBUTE, real)
    return fake


def get_concrete_value(tensor: torch.Tensor) -> torch.Tensor | None:
    value: torch.Tensor | None = getattr(tensor, _ATTRIBUTE, None)
    return value


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype is torch.bool for index in indices)
