"""Options of every verb that runs a model (engine, device, sampling, prompts), and the requests
made from them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
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
from tightfit.core.sampling import SAMPLING_OPTIONS, Sampling
from tightfit.core.text import shorten

if TYPE_CHECKING:
    from tightfit.core.dtypes import Dtype
    from tightfit.engines.open import EngineRequest
    from tightfit.runtime.artefacts import Artefact


ENGINES = ("auto", "transformers", "llama.cpp", "vllm")
ENGINE_WEIGHTS = ("auto", "fp32", "bf16", "fp16", "nf4", "int8")
MAX_CONTEXT = 16_777_216
MAX_SLOTS = 1024
MAX_THREADS = 512


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


def sampling_option(name: str) -> Any:
    """The command-line option of one field of `Sampling`."""
    option = SAMPLING_OPTIONS[name]
    most, example = int(option.most), int(option.example)
    if option.kind is float:
        return ranged_option(
            option.flag,
            option.help,
            least=option.least,
            most=option.most,
            example=option.example,
        )
    if option.least == 0:
        return natural_option(option.flag, option.help, most=most, example=example)
    return count_option(option.flag, option.help, most=most, example=example)


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


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The fields of `Sampling` as options; one that is not given has the default there."""

    max_new_tokens: Annotated[int | None, sampling_option("max_new_tokens")] = None
    temperature: Annotated[float | None, sampling_option("temperature")] = None
    top_p: Annotated[float | None, sampling_option("top_p")] = None
    top_k: Annotated[int | None, sampling_option("top_k")] = None
    min_p: Annotated[float | None, sampling_option("min_p")] = None
    repetition_penalty: Annotated[float | None, sampling_option("repetition_penalty")] = None
    seed: Annotated[int | None, sampling_option("seed")] = None
    stop: Stop = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which engine runs the model, on what, and how large."""

    engine: EngineName = None
    device: Device = None
    weights: Weights = None
    context: Context = None
    parallel: Parallel = None
    threads: Threads = None
    hosts: Hosts = None
    settings: TemplateSetting = None


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """A file of prompts, what is made of its rows, and where the answers go."""

    prompts: Prompts = None
    out: Out = None
    n: Samples = None
    limit: Limit = None
    column: Column = None
    template: PromptTemplate = None
    template_text: TemplateText = None
    whole: Whole = False
    raw: Raw = False
    system: System = None


def engine_request(options: object, artefact: Artefact) -> EngineRequest:
    """The engine to open for an artefact, by a verb's `EngineOptions` or a part of them."""
    from tightfit.engines.llama_devices import read_hosts
    from tightfit.engines.open import EngineRequest

    _expand_gpu_segments()
    return EngineRequest(
        artefact=artefact,
        engine=_given(options, "engine") or "auto",
        weights=_read_weights(_given(options, "weights")),
        device=_given(options, "device") or "auto",
        context=_given(options, "context"),
        slots=_given(options, "parallel"),
        threads=_given(options, "threads"),
        hosts=read_hosts(_given(options, "hosts")),
        template=read_template(_given(options, "settings") or ()),
    )


def _expand_gpu_segments() -> None:
    """Avoid GPU memory fragmentation by blocks of changing sizes. torch reads it when CUDA starts.

    The older of two names, for the reason given in `clusters/local/workers.py`.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def read_sampling(options: SamplingOptions) -> Sampling:
    """`Sampling` with the options that were given."""
    given = {
        name: value for name in SAMPLING_OPTIONS if (value := getattr(options, name)) is not None
    }
    return Sampling(**given, stop=tuple(options.stop or ()))


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


def _given(options: object, name: str) -> Any:
    """An option's value; None where it was not given or the verb has no such option."""
    return getattr(options, name, None)


def _read_weights(word: str | None) -> Dtype | None:
    from tightfit.core.dtypes import Dtype

    if word is None:
        return None
    known = choices.read_word(word, ENGINE_WEIGHTS, option="--weights")
    return None if known == "auto" else Dtype(known)
