"""Target: the formats a model can be quantized to, and what each one is called on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from tightfit.core.errors import UsageError
from tightfit.core.suggest import did_you_mean


class Family(str, Enum):
    """Which tool makes it."""

    GPTQ = "gptq"
    GGUF = "gguf"
    BITS = "bitsandbytes"


class Target(str, Enum):
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
    def family(self) -> Family:
        if self.value.startswith("gptq"):
            return Family.GPTQ
        return Family.BITS if self in (Target.NF4, Target.INT8) else Family.GGUF

    @property
    def bits(self) -> int:
        """The nominal width; what the file really takes is measured."""
        return int(next(sign for sign in self.value if sign.isdigit()))

    @property
    def takes_importance(self) -> bool:
        """K-quants weigh their rounding errors; Q8_0's codes do not depend on it."""
        return self.family is Family.GGUF and self is not Target.Q8_0

    def file_name(self, model: str) -> str:
        """`model-q4_k_m.gguf`, or the folder `model-gptq-4`."""
        ending = ".gguf" if self.family is Family.GGUF else ""
        return f"{model}-{self.value}{ending}"


ALL = "all"
TARGET_WORDS = (*(target.value for target in Target), ALL)


def read_targets(words: Sequence[str]) -> tuple[Target, ...]:
    """Targets by name, `all` for every one; in the order given, each once."""
    chosen: list[Target] = []
    for word in (part.strip().lower() for text in words for part in text.split(",")):
        if word == ALL:
            chosen += Target
        elif word in TARGET_WORDS:
            chosen.append(Target(word))
        else:
            raise UsageError(
                f"`--to {word[:40]}` is no format that tightfit quantizes to."
                f"{did_you_mean(word, TARGET_WORDS)}",
                remedy=f"--to {'|'.join(TARGET_WORDS)}",
            )
    if not chosen:
        raise UsageError("No format was named.", remedy=f"--to {'|'.join(TARGET_WORDS)}")
    return tuple(dict.fromkeys(chosen))
