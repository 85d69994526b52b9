"""Number formats: what a stored value costs. Also the base of words that have a record."""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class RecordEnum(str, Enum):
    """Words of a setting, each with a record of what the program knows of it: `NAME = (word,
    record)`. A subclass states the record's type."""

    record: Any

    def __new__(cls, name: str, record: Any = None) -> Self:
        # No record: type checkers take `Optimizer("adamw")`, which looks a member up, for a call.
        member = str.__new__(cls, name)
        member._value_ = name
        member.record = record
        return member


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

    @property
    def torch_name(self) -> str:
        """As torch and config.json name it."""
        return _TORCH_NAMES[self]

    @property
    def gguf_name(self) -> str:
        """As GGUF and safetensors files name it, in lower case."""
        return self.value.replace("fp", "f")


_TORCH_NAMES = {Dtype.FP32: "float32", Dtype.BF16: "bfloat16", Dtype.FP16: "float16"}
PLAIN_DTYPES = tuple(_TORCH_NAMES)
"""Those of unpacked values."""
_BY_NAME = {
    name: dtype
    for dtype in PLAIN_DTYPES
    for name in (dtype.value, dtype.torch_name, dtype.gguf_name)
}


def find_plain_dtype(name: str) -> Dtype | None:
    """By any of its names: `fp16`, `float16`, `torch.float16`, `F16`."""
    return _BY_NAME.get(name.lower().removeprefix("torch."))


MXFP4 = "mxfp4"
"""transformers' name of the packed format that gpt-oss is published in. Not trained in: loading
unpacks it."""
