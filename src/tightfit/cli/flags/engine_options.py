"""Options of every verb that asks a model: which engine, on what, and how tokens are chosen."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tightfit.cli import choices
from tightfit.cli.completion import complete_model
from tightfit.cli.flags.options import count_option, refuse_empty, text_option, word_option
from tightfit.core.errors import UsageError

ENGINES = ("auto", "transformers", "llama.cpp", "vllm")
WEIGHTS = ("auto", "fp32", "bf16", "fp16", "nf4", "int8")
MAX_CONTEXT = 16_777_216
MAX_SLOTS = 1024
MAX_THREADS = 512
MAX_NEW_TOKENS = 1_048_576
MAX_SEED = 2**32 - 2
"""llama.cpp's seeds are 32 bits, the last of which means `any`."""
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 10.0


def ranged_option(name: str, help: str, *, least: float, most: float, example: float) -> Any:
    """An option that takes a number from `least` to `most`, both included."""

    def read(value: str | None) -> float | None:
        if value is None:
            return None
        typed = str(value).strip()
        try:
            number = float(typed)
        except ValueError:
            number = float("nan")
        if not least <= number <= most:
            raise UsageError(
                f"`{name} {typed[:40]}` is not a number from {least:g} to {most:g}.",
                remedy=f"{name} {example:g}",
            )
        return number

    return typer.Option(name, help=help, metavar="X", callback=read, show_default=False)


def natural_option(name: str, help: str, *, most: int, example: int) -> Any:
    """An option that takes a whole number from 0."""

    def read(value: str | None) -> int | None:
        if value is None:
            return None
        if str(value).strip() == "0":
            return 0
        return choices.read_whole(value, name, most, example)

    return typer.Option(name, help=help, metavar="N", callback=read, show_default=False)


def _read_engine(value: str | None) -> str | None:
    if value is None:
        return None
    if not value.strip():
        raise choices.empty_value("--engine", "|".join(ENGINES))
    word = value.strip().lower()
    return "llama.cpp" if word == "llama" else choices.read_word(word, ENGINES, option="--engine")


def _read_device(value: str | None) -> str | None:
    if value is None:
        return None
    word = value.strip().lower()
    number = word.removeprefix("cuda:")
    is_numbered = word.startswith("cuda:") and number.isascii() and number.isdigit()
    if word in ("auto", "cpu", "cuda") or (is_numbered and len(number) <= 3):
        return word
    raise UsageError(
        f"`--device {word[:40]}` is not known.", remedy="--device auto|cpu|cuda|cuda:N"
    )


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RUN",
        help="A run, an adapter, a model folder, a cached hub id or a GGUF file.",
        autocompletion=complete_model,
        callback=refuse_empty("MODEL", "runs/sql"),
        show_default=False,
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check/--no-check",
        help="Refuse to load what is predicted not to fit.",
        show_default=True,
    ),
]
Engine_ = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="What computes. [default: auto: llama.cpp for GGUF, transformers otherwise, vllm "
        "where installed on a GPU]",
        metavar="|".join(ENGINES),
        autocompletion=choices.offer(ENGINES),
        callback=_read_engine,
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Where it computes; cuda means every GPU. [default: auto]",
        metavar="auto|cpu|cuda|cuda:N",
        autocompletion=choices.offer(("auto", "cpu", "cuda", "cuda:0")),
        callback=_read_device,
        show_default=False,
    ),
]
Weights = Annotated[
    str | None,
    word_option(
        "--weights",
        WEIGHTS,
        "How the weights lie in memory; not for GGUF. [default: auto: what suits the device]",
    ),
]
Context = Annotated[
    int | None,
    count_option(
        "--context",
        "Most tokens of prompt and answer together. [default: the model's own, at most 4096]",
        most=MAX_CONTEXT,
        example=4096,
    ),
]
Parallel = Annotated[
    int | None,
    count_option(
        "--parallel",
        "Requests computed at once. [default: the engine's choice]",
        most=MAX_SLOTS,
        example=4,
    ),
]
Threads = Annotated[
    int | None,
    count_option(
        "--threads",
        "CPU threads of llama.cpp. [default: physical cores, or OMP_NUM_THREADS]",
        most=MAX_THREADS,
        example=4,
    ),
]
Hosts = Annotated[
    str | None,
    text_option(
        "--hosts",
        "HOST:PORT,...",
        "Other hosts that run llama.cpp's rpc-server; private network only.",
        example="node1:50052,node2:50052",
    ),
]
Temperature = Annotated[
    float | None,
    ranged_option(
        "--temperature",
        "0: always the likeliest token; 1: as the model says.",
        least=0,
        most=MAX_TEMPERATURE,
        example=0.7,
    ),
]
TopP = Annotated[
    float | None,
    ranged_option(
        "--top-p",
        "Draw from the likeliest tokens that make up this share. [default: 1]",
        least=1e-6,
        most=1,
        example=0.9,
    ),
]
TopK = Annotated[
    int | None,
    natural_option(
        "--top-k",
        "Draw from the K likeliest tokens; 0: from all. [default: 0]",
        most=MAX_NEW_TOKENS,
        example=40,
    ),
]
MinP = Annotated[
    float | None,
    ranged_option(
        "--min-p",
        "Leave out tokens less likely than this share of the likeliest. [default: 0]",
        least=0,
        most=1,
        example=0.05,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    ranged_option(
        "--repetition-penalty",
        "Above 1: tokens that were there already become less likely. [default: 1]",
        least=0.01,
        most=MAX_PENALTY,
        example=1.1,
    ),
]
MaxNewTokens = Annotated[
    int | None,
    count_option(
        "--max-new-tokens", "Longest answer. [default: 512]", most=MAX_NEW_TOKENS, example=256
    ),
]
Seed = Annotated[
    int | None,
    natural_option(
        "--seed",
        "The same seed gives the same answer. [default: another answer every time]",
        most=MAX_SEED,
        example=42,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="Text that ends an answer and is not part of it. Repeatable.",
        show_default=False,
    ),
]
System = Annotated[
    str | None,
    text_option("--system", "TEXT", "System prompt before the first message.", example="Be brief."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="template=NAME|FILE",
        help="Another chat template than the model's own.",
        show_default=False,
    ),
]
