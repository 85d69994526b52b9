"""Number formats: what a stored value costs."""

from __future__ import annotations

from enum import Enum
from functools import cached_property


class Dtype(str, Enum):
    """A format for stored weights, adapters or arithmetic."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    NF4 = "nf4"
    GPTQ4 = "gptq4"

    @cached_property
    def is_quantized(self) -> bool:
        """Stored packed; arithmetic happens in another dtype, and the weight takes no gradient."""
        return self in (Dtype.INT8, Dtype.NF4, Dtype.GPTQ4)

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of one unpacked value. Quantized formats have none: see `estimation/weights.py`."""
        if self.is_quantized:
            raise ValueError(f"{self.value} values are packed")
        return 4 if self is Dtype.FP32 else 2
