"""Options of every verb that runs a model (engine, device, sampling, prompts), and the requests
made from them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tightfit.api.options.common import model_argument
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UsageError
from tightfit.core.options import (
    Option,
    count_option,
    number_option,
    offer,
    path_option,
    switch_option,
    text_option,
    word_option,
)
from tightfit.core.progress import Progress
from tightfit.core.sampling import SAMPLING_OPTIONS, Sampling
from tightfit.core.text import shorten
from tightfit.engines.open import ENGINE_WEIGHTS, ENGINES

if TYPE_CHECKING:
    from tightfit.engines.open import EngineRequest
    from tightfit.runtime.model_files import Artefact

MAX_CONTEXT = 16_777_216
MAX_SLOTS = 1024
MAX_THREADS = 512
MAX_PROMPTS = 10**9
MAX_SAMPLES = 65_536


def engine_option(help: str, *more: str) -> Any:
    """`--engine` with the engines, and more words."""
    return word_option((*ENGINES, *more), help, aliases={"llama": "llama.cpp"})


def sampling_option(name: str) -> Any:
    """The command-line option of one field of `Sampling`."""
    option = SAMPLING_OPTIONS[name]
    if option.kind is float:
        return number_option(
            option.help, least=option.least, most=option.most, example=option.example
        )
    least, most, example = int(option.least), int(option.most), int(option.example)
    return count_option(option.help, least=least, most=most, example=example)


def _read_device(typed: str, option: Option) -> str:
    word = typed.strip().lower()
    number = word.removeprefix("cuda:")
    is_numbered = word.startswith("cuda:") and number.isascii() and number.isdigit()
    if word in ("auto", "cpu", "cuda") or (is_numbered and len(number) <= 3):
        return word
    raise option.refuse(typed, "is not known.")


ModelArgument = Annotated[
    str,
    model_argument(
        "MODEL|RUN", "A run, an adapter, a model folder, a cached hub id or a GGUF file."
    ),
]
CheckFit = Annotated[
    bool,
    switch_option("Refuse to load what is predicted not to fit.", has_off=True, show_default=True),
]
Device = Annotated[
    str | None,
    text_option(
        "auto|cpu|cuda|cuda:N",
        "Where it computes; cuda means every GPU. [default: auto]",
        example="auto|cpu|cuda|cuda:N",
        parse=_read_device,
        complete=offer(("auto", "cpu", "cuda", "cuda:0")),
    ),
]
Threads = Annotated[
    int | None,
    count_option(
        "CPU threads of llama.cpp. [default: physical cores, or OMP_NUM_THREADS]",
        most=MAX_THREADS,
        example=4,
    ),
]
Hosts = Annotated[
    str | None,
    text_option(
        "HOST:PORT,...",
        "Other hosts that run llama.cpp's rpc-server; private network only.",
        example="node1:50052,node2:50052",
    ),
]
Parallel = Annotated[
    int | None,
    count_option(
        "Requests computed at once. [default: the engine's choice]", most=MAX_SLOTS, example=4
    ),
]
System = Annotated[
    str | None,
    text_option("TEXT", "System prompt before the first message.", example="Be brief."),
]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The fields of `Sampling` as options; one that is not given has the default there."""

    max_new_tokens: int | None = sampling_option("max_new_tokens")
    temperature: float | None = sampling_option("temperature")
    top_p: float | None = sampling_option("top_p")
    top_k: int | None = sampling_option("top_k")
    min_p: float | None = sampling_option("min_p")
    repetition_penalty: float | None = sampling_option("repetition_penalty")
    presence_penalty: float | None = sampling_option("presence_penalty")
    frequency_penalty: float | None = sampling_option("frequency_penalty")
    seed: int | None = sampling_option("seed")
    stop: list[str] | None = text_option(
        "TEXT", "Text that ends an answer and is not part of it. Repeatable."
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which engine runs the model, and on what."""

    engine: str | None = engine_option(
        "What computes. [default: auto: llama.cpp for GGUF, transformers otherwise, vllm where "
        "installed on a GPU]"
    )
    device: Device = None
    weights: str | None = word_option(
        ENGINE_WEIGHTS,
        "How the weights lie in memory; not for GGUF. [default: auto: what suits the device]",
    )
    context: int | None = count_option(
        "Most tokens of prompt and answer together. [default: the model's own, at most 4096]",
        most=MAX_CONTEXT,
        example=4096,
    )
    threads: Threads = None
    settings: list[str] | None = text_option(
        "template=NAME|FILE", "Another chat template than the model's own.", name="--set"
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelOptions):
    """The same for many requests."""

    parallel: Parallel = None
    hosts: Hosts = None


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """A file of prompts, what is made of its rows, and where the answers go."""

    prompts: str | None = text_option("FILE|-", "Prompts; - is stdin.", example="prompts.jsonl")
    out: Path | None = path_option(
        "Answers, as JSON Lines. [default: PROMPTS.answers.jsonl in this folder]",
        example="answers.jsonl",
    )
    n: int | None = count_option(
        "Answers to each prompt. [default: 1]", most=MAX_SAMPLES, example=4
    )
    limit: int | None = count_option("Only the first N prompts.", most=MAX_PROMPTS, example=100)
    column: str | None = text_option(
        "NAME", "The rows' column that is the prompt.", example="question"
    )
    template: Path | None = path_option(
        "Text with {column} in it, filled from each row.", example="prompt.txt"
    )
    template_text: str | None = text_option(
        "TEXT", "The same, written here.", example="'Summarize: {article}'"
    )
    whole: bool = switch_option("A text file is one prompt, not one in each line.")
    raw: bool = switch_option("Continue the text as it is, without a chat template.")
    system: System = None


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(EngineOptions, SamplingOptions, PromptOptions):
    """What generate and farm have in common."""

    fresh: bool = switch_option("Begin again: forget earlier answers and replace the output.")
    check: CheckFit = True
    stats: Path | None = path_option(
        "Write the statistics there too, as JSON.", example="stats.json"
    )
    progress: Progress | None = None
    """Called with "answers", the answers so far and all answers."""


def engine_request(options: ModelOptions, artefact: Artefact) -> EngineRequest:
    """The engine to open for an artefact, by a verb's options."""
    from tightfit.engines.llama_devices import read_hosts
    from tightfit.engines.open import EngineRequest

    # Avoids GPU memory fragmentation by blocks of changing sizes. torch reads it when CUDA starts.
    # The older of two names, for the reason given in `clusters/local/workers.py`.
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    weights = options.weights or "auto"
    return EngineRequest(
        artefact=artefact,
        engine=options.engine or "auto",
        weights=None if weights == "auto" else Dtype(weights),
        device=options.device or "auto",
        context=options.context,
        slots=getattr(options, "parallel", None),  # not every verb has these two
        threads=options.threads,
        hosts=read_hosts(getattr(options, "hosts", None)),
        template=read_template(options.settings or ()),
        pooling=getattr(options, "pooling", None),
    )


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
