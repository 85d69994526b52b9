"""Peak: the moment of most memory, tensor by tensor. Part of estimates and of traces."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveInt

from tightfit.core.frozen import FiniteFrozen


class PeakTensor(FiniteFrozen):
    """Similar tensors alive at the peak."""

    num_bytes: NonNegativeInt
    """Of all of them together."""
    count: PositiveInt
    category: str
    op: str
    module: str
    """The layer's number replaced by `*`."""
    shape: tuple[int, ...]
    dtype: str


class Peak(FiniteFrozen):
    """The moment at which most memory is allocated, and the tensors alive then."""

    stage: str
    op: str
    module: str
    components: dict[str, int]
    """Category to bytes, summing to the peak."""
    tensors: tuple[PeakTensor, ...]
    """The largest groups, largest first."""
