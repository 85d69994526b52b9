"""Export formats: one record each, with everything the program knows about it.

The quantizer, forecasts, `verify`, the CLI's words and the plot read the record. A new format is a
record here, a writer (see `export/quantize/job.py`) and a test. Loads no library: `--help` uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tightfit.core.errors import UsageError
from tightfit.core.text import did_you_mean
from tightfit.export.quantize.gptq_worker import AUTO_ROUND, GPTQMODEL


class StepKind(str, Enum):
    """How an artefact was made from its reference, which decides how far it may be from it."""

    EXACT = "exact"
    """The same values: a merged adapter, a copied folder. Only the rounding of the dtype."""
    FORMAT = "format"
    """Another file format or 16-bit dtype, unquantized."""
    Q8 = "8-bit"
    FP8 = "fp8"
    """Weights and activations."""
    INT8 = "int8"
    """bitsandbytes' LLM.int8, which also rounds activations."""
    Q6 = "6-bit"
    Q5 = "5-bit"
    Q4 = "4-bit"
    """GGUF's Q4 and IQ4 formats."""
    GPTQ4 = "gptq-4"
    """4-bit integers in groups, in any layout."""
    FP4 = "fp4"
    """4-bit floats, of weights and activations."""
    NF4 = "nf4"
    Q3 = "3-bit"
    Q2 = "2-bit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """An artefact beyond these fails. None: the figure is reported only."""

    top1: float | None = None
    """Smallest share of positions with the same most likely token."""
    kl: float | None = None
    """Largest mean KL divergence in nats per token."""
    perplexity: float | None = None
    """Largest rise of perplexity, as a fraction."""
    usual_perplexity: float | None = None
    """What such a step usually costs; above it there is a warning."""


LIMITS: dict[StepKind, Limits] = {
    StepKind.EXACT: Limits(top1=0.999, kl=1e-3, perplexity=0.005),
    StepKind.FORMAT: Limits(top1=0.995, kl=1e-3, perplexity=0.005),
    StepKind.Q8: Limits(top1=0.95, kl=0.01, perplexity=0.01),
    StepKind.FP8: Limits(),
    StepKind.INT8: Limits(top1=0.90, kl=0.05, perplexity=0.03),
    StepKind.Q6: Limits(top1=0.93, kl=0.02, perplexity=0.02),
    StepKind.Q5: Limits(top1=0.90, kl=0.05, perplexity=0.04),
    StepKind.Q4: Limits(top1=0.80, kl=0.15, perplexity=0.10, usual_perplexity=0.06),
    StepKind.GPTQ4: Limits(top1=0.70, kl=0.30, perplexity=0.25, usual_perplexity=0.15),
    StepKind.NF4: Limits(top1=0.60, kl=0.40, perplexity=0.40, usual_perplexity=0.30),
    StepKind.FP4: Limits(),
    StepKind.Q3: Limits(),
    StepKind.Q2: Limits(),
}
"""Set from SmolLM2-135M, whose small matrices suffer more than larger models': Q8_0 96.6% and
0.004, Q4_K_M 88.9% and +7% (with importance 92% and +4%), GPTQ-4 +12 to +18%, nf4 +29%, int8 +2%,
each against fp32 on four windows of 512 tokens. fp8 and fp4 were not measured there: what they
cost is reported, and rejects nothing. w4a16 has the limits of gptq-4, measured in GPTQ's layout."""


class CalibrationUse(Enum):
    """Whether a format is made with calibration text."""

    NEVER = "never"
    OPTIONAL = "optional"
    """Better with it: `--no-importance` leaves it out."""
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """One format that a model can be quantized to."""

    name: str
    """As `--to`, file names and saved summaries spell it."""
    writer: str
    """`module:class` of its `FormatWriter`, imported when it is used."""
    bits: int
    """Nominal bits per weight; what the files take is measured."""
    step: StepKind
    """The limits that `verify` applies."""
    engine_name: str
    """How engines name the format of a loaded artefact."""
    suffix: str = ""
    """`.gguf`: the result is one file with this ending. Empty: a folder."""
    calibration: CalibrationUse = CalibrationUse.NEVER
    reads_gguf: bool = False
    """Can be made from a GGUF file, not only from a Hugging Face folder."""
    takes_encoder_decoder: bool = False
    colour: str = "#777777"
    """In the plot of size against perplexity."""
    ggml_type: str = ""
    """GGUF: the type of most tensors."""
    tuning_steps: int = 0
    """Made by auto-round: default tuning steps per layer."""
    takes_tuning: bool = True
    """Made by auto-round: whether a number of steps can be stated."""
    scheme: str = ""
    """compressed-tensors: the name in the worker's `SCHEMES`."""
    group_size: int = 0
    """Made by auto-round: values per scale, -1 for a whole row. 0: what divides every row."""
    group_bits: float = 0.0
    """Of the scale and the zero point of one group."""

    @property
    def is_file(self) -> bool:
        return bool(self.suffix)

    def file_name(self, model: str) -> str:
        """`model-q4_k_m.gguf`, or the folder `model-gptq-4`."""
        return f"{model}-{self.name}{self.suffix}"


_REGISTRY: dict[str, ExportFormat] = {}
ALL_FORMATS = "all"


def register_format(record: ExportFormat) -> ExportFormat:
    """Make a format known to every command."""
    if record.name in _REGISTRY or record.name == ALL_FORMATS:
        raise ValueError(f"the format {record.name} is registered already")
    _REGISTRY[record.name] = record
    return record


def list_formats() -> tuple[ExportFormat, ...]:
    return tuple(_REGISTRY.values())


def format_words() -> tuple[str, ...]:
    """What `--to` accepts."""
    return (*_REGISTRY, ALL_FORMATS)


def find_format(name: str) -> ExportFormat:
    """The format of this name; raises `UsageError` with the nearest names."""
    found = _REGISTRY.get(name)
    if found is None:
        words = format_words()
        raise UsageError(
            f"`--to {name[:40]}` is no format that tightfit quantizes to."
            f"{did_you_mean(name, words)}",
            remedy=f"--to {'|'.join(words)}",
        )
    return found


def read_formats(words: str | Sequence[str]) -> tuple[ExportFormat, ...]:
    """Formats by name, `all` for every one; in the order given, each once."""
    chosen: list[ExportFormat] = []
    texts = [words] if isinstance(words, str) else words
    for word in (part.strip().lower() for text in texts for part in text.split(",")):
        chosen += list_formats() if word == ALL_FORMATS else [find_format(word)]
    if not chosen:
        raise UsageError("No format was named.", remedy=f"--to {'|'.join(format_words())}")
    return tuple(dict.fromkeys(chosen))


def _gptq(bits: int, step: StepKind, *, tuning_steps: int) -> ExportFormat:
    record = ExportFormat(
        name=f"gptq-{bits}",
        writer="tightfit.export.quantize.gptq:GptqWriter",
        bits=bits,
        step=step,
        engine_name=f"gptq-{bits}",
        calibration=CalibrationUse.ALWAYS,
        colour="#c1512e",
        tuning_steps=tuning_steps,
        group_bits=20.0,
    )
    return register_format(record)


def _compressed(name: str, bits: int, step: StepKind, **more: Any) -> ExportFormat:
    record = ExportFormat(
        name=name,
        writer="tightfit.export.quantize.gptq:GptqWriter",
        bits=bits,
        step=step,
        engine_name=name,
        scheme=name,
        colour="#7a4fa3",
        **{"calibration": CalibrationUse.ALWAYS, **more},
    )
    return register_format(record)


def _gguf(name: str, ggml_type: str, step: StepKind) -> ExportFormat:
    # Q8_0's codes do not depend on the importance of inputs; K-quants weigh their rounding errors.
    is_weighed = ggml_type.endswith("_K")
    record = ExportFormat(
        name=name,
        writer="tightfit.export.quantize.gguf:GgufWriter",
        bits=int(name[1]),
        step=step,
        engine_name=name.upper(),
        suffix=".gguf",
        calibration=CalibrationUse.OPTIONAL if is_weighed else CalibrationUse.NEVER,
        reads_gguf=True,
        colour="#1b6ca8",
        ggml_type=ggml_type,
    )
    return register_format(record)


def _bitsandbytes(name: str, bits: int, step: StepKind) -> ExportFormat:
    record = ExportFormat(
        name=name,
        writer="tightfit.export.quantize.bitsandbytes:BitsandbytesWriter",
        bits=bits,
        step=step,
        engine_name=name,
        takes_encoder_decoder=True,
        colour="#4c8c4a",
    )
    return register_format(record)


# Tuning steps: rounding alone is near enough at 8 bits; at 4 bits a few steps take SmolLM2-135M
# from 16% to 14.6% over the original's perplexity.
GPTQ_8 = _gptq(8, StepKind.Q8, tuning_steps=0)
GPTQ_4 = _gptq(4, StepKind.GPTQ4, tuning_steps=20)
GPTQ_3 = _gptq(3, StepKind.Q3, tuning_steps=50)
GPTQ_2 = _gptq(2, StepKind.Q2, tuning_steps=50)
FP8 = _compressed(
    "fp8",
    8,
    StepKind.FP8,
    # The scales of inputs are found while the model runs.
    calibration=CalibrationUse.NEVER,
    takes_tuning=False,
    group_size=-1,
    group_bits=32.0,
)
W4A16 = _compressed("w4a16", 4, StepKind.GPTQ4, tuning_steps=20, group_bits=16.0)
MXFP4 = _compressed("mxfp4", 4, StepKind.FP4, group_size=32, group_bits=8.0)
NVFP4 = _compressed("nvfp4", 4, StepKind.FP4, group_size=16, group_bits=8.0)
Q8_0 = _gguf("q8_0", "Q8_0", StepKind.Q8)
Q6_K = _gguf("q6_k", "Q6_K", StepKind.Q6)
Q5_K_M = _gguf("q5_k_m", "Q5_K", StepKind.Q5)
Q4_K_M = _gguf("q4_k_m", "Q4_K", StepKind.Q4)
Q3_K_M = _gguf("q3_k_m", "Q3_K", StepKind.Q3)
Q2_K = _gguf("q2_k", "Q2_K", StepKind.Q2)
NF4 = _bitsandbytes("nf4", 4, StepKind.NF4)
INT8 = _bitsandbytes("int8", 8, StepKind.INT8)

CONVERT_FORMATS = ("gguf", "hf", "gguf-lora")
"""What `tightfit convert` writes. `gguf-lora`: of an adapter, for llama.cpp to load beside its
base."""
CONVERT_DTYPES = ("f16", "bf16", "f32")
GPTQ_TOOLS = (AUTO_ROUND, GPTQMODEL)
"""Libraries that can make GPTQ formats; the first is the default."""
