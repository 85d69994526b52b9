"""Peak: what stands in memory at its fullest, tensor by tensor."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PeakTensor(_Frozen):
    """Like tensors that stand at the peak."""

    num_bytes: NonNegativeInt
    """Of all of them."""
    count: PositiveInt
    category: str
    op: str
    module: str
    """The layer's number replaced by `*`."""
    shape: tuple[int, ...]
    dtype: str


class Peak(_Frozen):
    """The instant at which most memory is allocated, and what stands there."""

    stage: str
    op: str
    module: str
    components: dict[str, int]
    """Category to bytes, summing to the peak."""
    tensors: tuple[PeakTensor, ...]
    """The largest groups, largest first."""
