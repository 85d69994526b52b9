"""Options of chat, generate, farm, serve and compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tightfit.api.options import choices
from tightfit.api.options.choices import complete_model
from tightfit.api.options.common import (
    count_option,
    number_option,
    path_option,
    refuse_empty,
    switch_option,
    text_option,
    word_option,
)
from tightfit.api.options.declare import Argument, Option
from tightfit.api.options.engines import (
    ENGINES,
    CheckFit,
    Context,
    Device,
    EngineName,
    EngineOptions,
    Hosts,
    ModelArgument,
    Parallel,
    PromptOptions,
    SamplingOptions,
    System,
    TemplateSetting,
    Threads,
    Weights,
    natural_option,
)
from tightfit.core.progress import Progress

# A verb's first options are in a class of their own: a dataclass lists the fields of its bases
# before its own, the last base first, and `--help` keeps that order.

CHAT_EXAMPLES = """\b
Examples:
  tightfit chat runs/sql
  tightfit chat model.gguf --system 'Answer in one sentence.' --temperature 0.7
  tightfit chat ./my-model --weights nf4 --once 'What is the capital of Norway?'
  echo 'What is the capital of Norway?' | tightfit chat ./my-model
"""


@dataclass(frozen=True, kw_only=True)
class _ChatTarget:
    model: ModelArgument = field(kw_only=False)
    once: Annotated[
        str | None,
        text_option("--once", "TEXT", "Answer this one message and leave.", example="'Hello'"),
    ] = None
    system: System = None


@dataclass(frozen=True, kw_only=True)
class ChatOptions(SamplingOptions, _ChatTarget):
    """Talk to a model in the terminal.

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves. Where stdin is no terminal,
    each line is a message, and only answers are printed.
    """

    engine: EngineName = None
    device: Device = None
    weights: Weights = None
    context: Context = None
    threads: Threads = None
    hosts: Hosts = None
    settings: TemplateSetting = None
    check: CheckFit = True


# What `tightfit generate` accepts.

GENERATE_EXAMPLES = """\b
Examples:
  tightfit generate runs/sql --prompts questions.txt --out answers.jsonl
  tightfit generate model.gguf --prompts rows.jsonl --n 4 --temperature 0.8 --seed 1
  tightfit generate ./my-model --prompts rows.csv --template-text 'Summarize: {article}' --dry-run
  cat questions.txt | tightfit generate ./my-model --prompts - --out answers.jsonl --json
"""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(EngineOptions, SamplingOptions, PromptOptions):
    """Answer every prompt of a file, once each.

    Prompts: text with one in each line, or JSON, JSON Lines, CSV and Parquet rows in the formats
    that `train` reads; a row's own answer is not sent. Answers stand in the prompts' order, one
    row for each prompt and sample, in a form that `tightfit train` reads.

    A run that was interrupted, even by kill -9, goes on with the same command. Prompts that cannot
    be answered are listed in OUT.failed.jsonl, and the exit code is then 1. At the end: tokens per
    second, latencies, memory, bandwidth and FLOPs against the device's limits, and what held the
    run back.
    """

    model: ModelArgument = field(kw_only=False)
    fresh: Annotated[
        bool,
        switch_option("--fresh", "Begin again: forget earlier answers and replace the output."),
    ] = False
    check: CheckFit = True
    stats: Annotated[
        Path | None,
        path_option("--stats", "Write the statistics there too, as JSON.", example="stats.json"),
    ] = None
    progress: Progress | None = None
    """Called with "answers", the answers so far and all answers."""


# What `tightfit farm` accepts.

RAY = "ray"
MAX_WORKERS = 100_000
MAX_LEASE_SECONDS = 86_400

FARM_EXAMPLES = """\b
Examples:
  tightfit farm ./my-model --prompts questions.txt --partitions all
  tightfit farm runs/sql --prompts rows.jsonl --partitions gpu,cpu --out answers.jsonl
  tightfit farm model.gguf --prompts questions.txt --partitions local --workers 4
  tightfit farm ./my-model --prompts questions.txt --partitions all --dry-run
"""


@dataclass(frozen=True, kw_only=True)
class _FarmTarget:
    model: Annotated[
        str | None,
        Argument(
            metavar="[MODEL|RUN]",
            help="A run, an adapter, a model folder, a cached hub id or a GGUF file.",
            complete=complete_model,
            read=refuse_empty("MODEL", "runs/sql"),
            show_default=False,
        ),
    ] = field(default=None, kw_only=False)
    model_option: Annotated[
        str | None,
        text_option("--model", "MODEL|RUN", "The same as an option.", example="runs/sql"),
    ] = None
    partitions: Annotated[
        str | None,
        text_option(
            "--partitions",
            "all|NAME,...|local|k8s",
            "Where workers run: Slurm's partitions, this machine, or Kubernetes. [default: local]",
            example="gpu,cpu",
        ),
    ] = None
    workers: Annotated[
        int | None,
        count_option(
            "--workers",
            "Most workers in each partition. [default: one for each GPU and each CPU node]",
            most=MAX_WORKERS,
            example=8,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class FarmOptions(EngineOptions, SamplingOptions, PromptOptions, _FarmTarget):
    """Answer the prompts of a file on many machines, once each.

    Workers on every partition take prompts from a folder beside the output, which every node must
    see; fast nodes take more. Answers are those of `tightfit generate`, in the prompts' order. A
    worker, a node or this command may die at any moment: what it held is done by others, and the
    same command goes on. Ctrl-C ends the workers; what was answered is kept.

    Prompts that cannot be answered are listed in OUT.failed.jsonl, and the exit code is then 1.
    """

    engine: Annotated[
        str | None,
        word_option(
            "--engine",
            (*ENGINES, RAY),
            "What computes; ray: workers run on the Ray cluster of RAY_ADDRESS. [default: auto]",
        ),
    ] = None
    lease: Annotated[
        float | None,
        number_option(
            "--lease",
            "Seconds of silence after which a worker is taken for dead. [default: 60]",
            most=MAX_LEASE_SECONDS,
            example=60,
        ),
    ] = None
    fresh: Annotated[
        bool,
        switch_option("--fresh", "Begin again: forget earlier answers and replace the output."),
    ] = False
    check: CheckFit = True
    stats: Annotated[
        Path | None,
        path_option("--stats", "Write the statistics there too, as JSON.", example="stats.json"),
    ] = None
    progress: Progress | None = None
    """Called with "answers", the answers so far and all answers."""


def read_engine(word: str | None) -> str | None:
    """One of the engines, or `ray`."""
    if word is None:
        return None
    plain = word.strip().lower()
    if plain == "llama":
        return "llama.cpp"
    return choices.read_word(plain, (*ENGINES, RAY), option="--engine")


# What `tightfit serve` accepts.

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
MAX_SERVE_SECONDS = 10**7
MAX_BODY_MIB = 1024

SERVE_EXAMPLES = """\b
Examples:
  tightfit serve runs/sql
  tightfit serve model.Q4_K_M.gguf --name assistant --parallel 8
  tightfit serve ./base runs/sql --name base --name tuned --port 0 --json
  TIGHTFIT_API_KEY=... tightfit serve runs/sql --host 0.0.0.0
"""


@dataclass(frozen=True, kw_only=True)
class _ServeTarget:
    targets: Annotated[
        list[str],
        Argument(
            metavar="MODEL",
            help="Run folders, adapter folders, model folders, cached hub ids or GGUF files.",
            complete=complete_model,
            show_default=False,
        ),
    ] = field(kw_only=False)
    names: Annotated[
        list[str] | None,
        Option(
            "--name",
            metavar="NAME",
            help="What requests call the model. Repeatable, in the models' order. [default: the "
            "folder's or file's name]",
            show_default=False,
        ),
    ] = None
    host: Annotated[
        str | None,
        text_option(
            "--host",
            "ADDRESS",
            "Where to listen; beyond loopback a token is needed. [default: 127.0.0.1]",
            example="0.0.0.0",
        ),
    ] = None
    port: Annotated[
        int | None,
        natural_option(
            "--port", "0: any free port. [default: 8000]", most=65_535, example=DEFAULT_PORT
        ),
    ] = None
    api_key: Annotated[
        str | None,
        text_option(
            "--api-key",
            "KEY",
            "Bearer token that requests must send. Others on this machine can see it here; "
            "TIGHTFIT_API_KEY hides it. [default: none on loopback, else one is made]",
            example="KEY",
        ),
    ] = None
    cors: Annotated[
        list[str] | None,
        Option(
            "--cors",
            metavar="ORIGIN",
            help="Let pages of this origin call the API from a browser. Repeatable. [default: "
            "none]",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(EngineOptions, _ServeTarget):
    """Answer HTTP requests as OpenAI's API does.

    Listens on this machine alone unless --host says otherwise; then every request needs a
    bearer token. Paths: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics and
    /openapi.json. Nothing is sent anywhere else.

    A signal lets answers end for --drain seconds, then stops them.
    """

    max_queue: Annotated[
        int | None,
        natural_option(
            "--max-queue",
            "Answers that may wait for a slot, for each model; more get 503. [default: 128]",
            most=1_000_000,
            example=128,
        ),
    ] = None
    timeout: Annotated[
        float | None,
        number_option(
            "--timeout",
            "Seconds that an answer may take, its wait included. [default: 600]",
            most=MAX_SERVE_SECONDS,
            example=600,
        ),
    ] = None
    drain: Annotated[
        int | None,
        natural_option(
            "--drain",
            "Seconds that answers have to end after a signal. [default: 30]",
            most=MAX_SERVE_SECONDS,
            example=30,
        ),
    ] = None
    max_body_mib: Annotated[
        int | None,
        count_option(
            "--max-body-mib",
            "Largest request body in MiB. [default: 4]",
            most=MAX_BODY_MIB,
            example=4,
        ),
    ] = None
    ready_file: Annotated[
        Path | None,
        path_option(
            "--ready-file", "File to write when requests are answered.", example="ready.json"
        ),
    ] = None
    access_log: Annotated[
        bool, Option("--access-log", help="One line on stderr for every request.")
    ] = False


# What `tightfit compare` accepts.

MAX_PORT = 65_535

COMPARE_EXAMPLES = """\b
Examples:
  tightfit compare runs/sql                      the base model beside the tuned one
  tightfit compare ./my-model my-model.Q4_K_M.gguf
  tightfit compare runs/sql runs/sql-2 --votes votes.jsonl --port 0
  tightfit compare A B --host 0.0.0.0 --password WORD
"""


@dataclass(frozen=True, kw_only=True)
class _CompareTarget:
    first: Annotated[
        str,
        Argument(
            metavar="A",
            help="A run, an adapter, a model folder, a cached hub id or a GGUF file.",
            complete=complete_model,
            read=refuse_empty("A", "runs/sql"),
            show_default=False,
        ),
    ] = field(kw_only=False)
    second: Annotated[
        str | None,
        Argument(
            metavar="B",
            help="What it is compared with. [default: A is tuned, and its base model is shown "
            "beside it]",
            complete=complete_model,
            read=refuse_empty("B", "model.gguf"),
            show_default=False,
        ),
    ] = field(default=None, kw_only=False)
    votes: Annotated[
        Path | None,
        path_option(
            "--votes",
            "File that votes are added to. [default: votes.jsonl in the run's folder, or here]",
            example="votes.jsonl",
        ),
    ] = None
    one_at_a_time: Annotated[
        bool,
        Option(
            "--one-at-a-time", help="Hold one model in memory at a time; slower, half the memory."
        ),
    ] = False
    host: Annotated[
        str | None,
        text_option(
            "--host",
            "ADDRESS",
            "Address to listen on; other than loopback needs --password. [default: 127.0.0.1]",
            example="0.0.0.0",
        ),
    ] = None
    port: Annotated[
        int | None,
        natural_option(
            "--port",
            "Port to listen on; 0: any that is free. [default: 7860]",
            most=MAX_PORT,
            example=7860,
        ),
    ] = None
    password: Annotated[
        str | None,
        text_option(
            "--password",
            "WORD",
            "Asked for when the page is opened. [default: TIGHTFIT_PASSWORD, or none]",
            example="a-long-word",
        ),
    ] = None
    system: System = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SamplingOptions, _CompareTarget):
    """Open a web page with two models side by side.

    A run alone is compared with its own base model. The page also has a chat with either
    model, a planner and the runs that are here. It fetches nothing from other machines, and
    only this machine can open it unless a host and a password are given.
    """

    engine: EngineName = None
    device: Device = None
    weights: Weights = None
    context: Context = None
    parallel: Parallel = None
    threads: Threads = None
    settings: TemplateSetting = None
