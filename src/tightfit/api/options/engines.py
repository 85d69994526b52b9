"""Options of every verb that runs a model (engine, device, sampling, prompts), and the requests
made from them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tightfit.api.options import choices
from tightfit.api.options.choices import complete_model
from tightfit.api.options.common import (
    count_option,
    path_option,
    refuse_empty,
    switch_option,
    text_option,
    word_option,
)
from tightfit.api.options.declare import Argument, Option
from tightfit.core.errors import UsageError
from tightfit.core.text import shorten

if TYPE_CHECKING:
    from tightfit.core.dtypes import Dtype
    from tightfit.core.sampling import Sampling
    from tightfit.engines.open import EngineRequest
    from tightfit.runtime.artefacts import Artefact


ENGINES = ("auto", "transformers", "llama.cpp", "vllm")
ENGINE_WEIGHTS = ("auto", "fp32", "bf16", "fp16", "nf4", "int8")
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

    return Option(name, help=help, metavar="X", read=read, show_default=False)


def natural_option(name: str, help: str, *, most: int, example: int) -> Any:
    """An option that takes a whole number from 0."""

    def read(value: str | None) -> int | None:
        if value is None:
            return None
        if str(value).strip() == "0":
            return 0
        return choices.read_whole(value, name, most, example)

    return Option(name, help=help, metavar="N", read=read, show_default=False)


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


ModelArgument = Annotated[
    str,
    Argument(
        metavar="MODEL|RUN",
        help="A run, an adapter, a model folder, a cached hub id or a GGUF file.",
        complete=complete_model,
        read=refuse_empty("MODEL", "runs/sql"),
        show_default=False,
    ),
]
CheckFit = Annotated[
    bool,
    Option(
        "--check/--no-check",
        help="Refuse to load what is predicted not to fit.",
        show_default=True,
    ),
]
EngineName = Annotated[
    str | None,
    Option(
        "--engine",
        help="What computes. [default: auto: llama.cpp for GGUF, transformers otherwise, vllm "
        "where installed on a GPU]",
        metavar="|".join(ENGINES),
        complete=choices.offer(ENGINES),
        read=_read_engine,
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    Option(
        "--device",
        help="Where it computes; cuda means every GPU. [default: auto]",
        metavar="auto|cpu|cuda|cuda:N",
        complete=choices.offer(("auto", "cpu", "cuda", "cuda:0")),
        read=_read_device,
        show_default=False,
    ),
]
Weights = Annotated[
    str | None,
    word_option(
        "--weights",
        ENGINE_WEIGHTS,
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
    Option(
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
TemplateSetting = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="template=NAME|FILE",
        help="Another chat template than the model's own.",
        show_default=False,
    ),
]


# Options of the verbs that answer a file of prompts, each written once.

MAX_PROMPTS = 10**9
MAX_SAMPLES = 65_536

Prompts = Annotated[
    str | None,
    text_option("--prompts", "FILE|-", "Prompts; - is stdin.", example="prompts.jsonl"),
]
Out = Annotated[
    Path | None,
    path_option(
        "--out",
        "Answers, as JSON Lines. [default: PROMPTS.answers.jsonl in this folder]",
        example="answers.jsonl",
    ),
]
Samples = Annotated[
    int | None,
    count_option("--n", "Answers to each prompt. [default: 1]", most=MAX_SAMPLES, example=4),
]
Limit = Annotated[
    int | None,
    count_option("--limit", "Only the first N prompts.", most=MAX_PROMPTS, example=100),
]
Column = Annotated[
    str | None,
    text_option("--column", "NAME", "The rows' column that is the prompt.", example="question"),
]
PromptTemplate = Annotated[
    Path | None,
    path_option(
        "--template", "Text with {column} in it, filled from each row.", example="prompt.txt"
    ),
]
TemplateText = Annotated[
    str | None,
    text_option(
        "--template-text", "TEXT", "The same, written here.", example="'Summarize: {article}'"
    ),
]
Whole = Annotated[
    bool, switch_option("--whole", "A text file is one prompt, not one in each line.")
]
Raw = Annotated[
    bool, switch_option("--raw", "Continue the text as it is, without a chat template.")
]


# From the flags that `api/options/engines.py` declares to what engines take.


def engine_request(flags: object, artefact: Artefact) -> EngineRequest:
    """What the flags say of engine, device and size. Fields that a verb does not have: not said.

    Fields: `engine`, `device`, `weights`, `context`, `parallel`, `threads`, `hosts`, `settings`.
    """
    from tightfit.engines.llama_devices import read_hosts
    from tightfit.engines.open import EngineRequest

    _let_segments_grow()
    return EngineRequest(
        artefact=artefact,
        engine=_said(flags, "engine") or "auto",
        weights=_read_weights(_said(flags, "weights")),
        device=_said(flags, "device") or "auto",
        context=_said(flags, "context"),
        slots=_said(flags, "parallel"),
        threads=_said(flags, "threads"),
        hosts=read_hosts(_said(flags, "hosts")),
        template=read_template(_said(flags, "settings") or ()),
    )


def _let_segments_grow() -> None:
    """Spare a GPU the gaps between blocks of changing sizes. Read by torch when CUDA starts.

    The older of two names, for the reason told in `clusters/local/workers.py`.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def sampling(flags: object) -> Sampling:
    """What the flags say of choosing tokens; the rest as `Sampling` has it.

    Fields: `max_new_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`,
    `seed`, `stop`.
    """
    from tightfit.core.sampling import Sampling

    names = (
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "seed",
    )
    stated = {name: value for name in names if (value := _said(flags, name)) is not None}
    return Sampling(**stated, stop=tuple(_said(flags, "stop") or ()))


def read_template(settings: Sequence[str]) -> str | None:
    """The template of `--set template=NAME|FILE`, the only thing that can be set here."""
    template = None
    for text in settings:
        key, _, value = text.partition("=")
        if key.strip() != "template" or not value.strip():
            raise UsageError(
                f"`--set {shorten(text)}`: only the template can be set here.",
                remedy="--set template=NAME or a Jinja file",
            )
        template = value.strip()
    return template


def _said(flags: object, name: str) -> Any:
    """A flag's value; None where it was not given or the verb has no such flag."""
    return getattr(flags, name, None)


def _read_weights(word: str | None) -> Dtype | None:
    from tightfit.core.dtypes import Dtype

    if word is None:
        return None
    known = choices.read_word(word, ENGINE_WEIGHTS, option="--weights")
    return None if known == "auto" else Dtype(known)
