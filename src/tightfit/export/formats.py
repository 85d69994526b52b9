"""The formats that a model can be quantized to, and what each is called on disk."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from tightfit.core.errors import UsageError
from tightfit.core.suggest import did_you_mean


class FormatFamily(str, Enum):
    """Which tool makes it."""

    GPTQ = "gptq"
    GGUF = "gguf"
    BITS = "bitsandbytes"


class ExportFormat(str, Enum):
    """One width of one format."""

    GPTQ_8 = "gptq-8"
    GPTQ_4 = "gptq-4"
    GPTQ_3 = "gptq-3"
    GPTQ_2 = "gptq-2"
    Q8_0 = "q8_0"
    Q6_K = "q6_k"
    Q5_K_M = "q5_k_m"
    Q4_K_M = "q4_k_m"
    Q3_K_M = "q3_k_m"
    Q2_K = "q2_k"
    NF4 = "nf4"
    INT8 = "int8"

    @property
    def family(self) -> FormatFamily:
        if self.value.startswith("gptq"):
            return FormatFamily.GPTQ
        return (
            FormatFamily.BITS
            if self in (ExportFormat.NF4, ExportFormat.INT8)
            else FormatFamily.GGUF
        )

    @property
    def bits(self) -> int:
        """The nominal width; what the file really takes is measured."""
        return int(next(sign for sign in self.value if sign.isdigit()))

    @property
    def takes_importance(self) -> bool:
        """K-quants weigh their rounding errors; Q8_0's codes do not depend on it."""
        return self.family is FormatFamily.GGUF and self is not ExportFormat.Q8_0

    def file_name(self, model: str) -> str:
        """`model-q4_k_m.gguf`, or the folder `model-gptq-4`."""
        ending = ".gguf" if self.family is FormatFamily.GGUF else ""
        return f"{model}-{self.value}{ending}"


ALL_FORMATS = "all"
FORMAT_NAMES = (*(target.value for target in ExportFormat), ALL_FORMATS)


def read_formats(words: Sequence[str]) -> tuple[ExportFormat, ...]:
    """Targets by name, `all` for every one; in the order given, each once."""
    chosen: list[ExportFormat] = []
    for word in (part.strip().lower() for text in words for part in text.split(",")):
        if word == ALL_FORMATS:
            chosen += ExportFormat
        elif word in FORMAT_NAMES:
            chosen.append(ExportFormat(word))
        else:
            raise UsageError(
                f"`--to {word[:40]}` is no format that tightfit quantizes to."
                f"{did_you_mean(word, FORMAT_NAMES)}",
                remedy=f"--to {'|'.join(FORMAT_NAMES)}",
            )
    if not chosen:
        raise UsageError("No format was named.", remedy=f"--to {'|'.join(FORMAT_NAMES)}")
    return tuple(dict.fromkeys(chosen))
