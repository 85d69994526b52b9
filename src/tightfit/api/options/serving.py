"""Options of chat, generate, farm, serve, ui and compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tightfit.api.options.common import Json, model_argument
from tightfit.api.options.engines import (
    AnswerOptions,
    CheckFit,
    EngineOptions,
    Hosts,
    ModelArgument,
    ModelOptions,
    Parallel,
    SamplingOptions,
    System,
    engine_option,
)
from tightfit.core.options import (
    count_option,
    number_option,
    path_option,
    switch_option,
    text_option,
    word_option,
)

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
    once: str | None = text_option("TEXT", "Answer this one message and leave.", example="'Hello'")
    system: System = None


@dataclass(frozen=True, kw_only=True)
class ChatOptions(ModelOptions, SamplingOptions, _ChatTarget):
    """Talk to a model in the terminal.

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves. Where stdin is no terminal,
    each line is a message, and only answers are printed.
    """

    hosts: Hosts = None
    check: CheckFit = True


GENERATE_EXAMPLES = """\b
Examples:
  tightfit generate runs/sql --prompts questions.txt --out answers.jsonl
  tightfit generate model.gguf --prompts rows.jsonl --n 4 --temperature 0.8 --seed 1
  tightfit generate ./my-model --prompts rows.csv --template-text 'Summarize: {article}' --dry-run
  cat questions.txt | tightfit generate ./my-model --prompts - --out answers.jsonl --json
"""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AnswerOptions):
    """Answer every prompt of a file, once each.

    Prompts: text with one in each line, or JSON, JSON Lines, CSV and Parquet rows in the formats
    that `train` reads; a row's own answer is not sent. Answers stand in the prompts' order, one
    row for each prompt and sample, in a form that `tightfit train` reads.

    A run that was interrupted, even by kill -9, goes on with the same command. Prompts that cannot
    be answered are listed in OUT.failed.jsonl, and the exit code is then 1. At the end: tokens per
    second, latencies, memory, bandwidth and FLOPs against the device's limits, and what
    limited the run.
    """

    model: ModelArgument = field(kw_only=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOutput:
    dry_run: bool = switch_option("Show the first prompts as they are sent, and the prediction.")
    as_json: Json = False


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
        model_argument(
            "[MODEL|RUN]", "A run, an adapter, a model folder, a cached hub id or a GGUF file."
        ),
    ] = field(default=None, kw_only=False)
    model_option: str | None = text_option(
        "MODEL|RUN", "The same as an option.", example="runs/sql", name="--model"
    )
    partitions: str | None = text_option(
        "all|NAME,...|local|k8s",
        "Where workers run: Slurm's partitions, this machine, or Kubernetes. [default: local]",
        example="gpu,cpu",
    )
    workers: int | None = count_option(
        "Most workers in each partition. [default: one for each GPU and each CPU node]",
        most=MAX_WORKERS,
        example=8,
    )


@dataclass(frozen=True, kw_only=True)
class FarmOptions(AnswerOptions, _FarmTarget):
    """Answer the prompts of a file on many machines, once each.

    Workers on every partition take prompts from a folder beside the output, which every node must
    see; fast nodes take more. Answers are those of `tightfit generate`, in the prompts' order. A
    worker, a node or this command may die at any moment: its prompts are done by others, and the
    same command goes on. Ctrl-C ends the workers; what was answered is kept.

    Prompts that cannot be answered are listed in OUT.failed.jsonl, and the exit code is then 1.
    """

    engine: str | None = engine_option(
        "What computes; ray: workers run on the Ray cluster of RAY_ADDRESS. [default: auto]", RAY
    )
    lease: float | None = number_option(
        "Seconds of silence after which a worker is taken for dead. [default: 60]",
        most=MAX_LEASE_SECONDS,
        example=60,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmOutput:
    dry_run: bool = switch_option("Show where workers would run and what is expected of them.")
    as_json: Json = False


DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
MAX_SERVE_SECONDS = 10**7
MAX_BODY_MIB = 1024

SERVE_EXAMPLES = """\b
Examples:
  tightfit serve runs/sql
  tightfit serve model.Q4_K_M.gguf --name assistant --parallel 8
  tightfit serve ./base runs/sql --name base --name tuned --port 0 --json
  tightfit serve ./base --adapter sql=runs/sql --adapter chat=runs/chat
  TIGHTFIT_API_KEY=... tightfit serve runs/sql --host 0.0.0.0
"""


@dataclass(frozen=True, kw_only=True)
class _ServeTarget:
    targets: Annotated[
        list[str],
        model_argument(
            "MODEL",
            "Run folders, adapter folders, model folders, cached hub ids or GGUF files.",
            example="",
        ),
    ] = field(kw_only=False)
    names: list[str] | None = text_option(
        "NAME",
        "What requests call the model. Repeatable, in the models' order. [default: the "
        "folder's or file's name]",
        example="NAME",
        name="--name",
    )
    host: str | None = text_option(
        "ADDRESS",
        "Where to listen; beyond loopback a token is needed. [default: 127.0.0.1]",
        example="0.0.0.0",
    )
    port: int | None = count_option(
        "0: any free port. [default: 8000]", most=65_535, example=DEFAULT_PORT, least=0
    )
    api_key: str | None = text_option(
        "KEY",
        "Bearer token that requests must send. Others on this machine can see it here; "
        "TIGHTFIT_API_KEY hides it. [default: none on loopback, else one is made]",
        example="KEY",
    )
    cors: list[str] | None = text_option(
        "ORIGIN",
        "Let pages of this origin call the API from a browser. Repeatable. [default: none]",
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(EngineOptions, _ServeTarget):
    """Answer HTTP requests as OpenAI's API does.

    Listens on this machine alone unless --host says otherwise; then every request needs a
    bearer token. Paths: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages,
    /v1/embeddings, /v1/models, /health, /metrics and /openapi.json. Nothing is sent anywhere else.

    A signal lets answers end for --drain seconds, then stops them.
    """

    adapters: list[str] | None = text_option(
        "NAME=PATH",
        "Serve a LoRA adapter over the model under this name: a run, an adapter's folder, or for "
        "llama.cpp its GGUF file. Repeatable; all share the model's weights.",
        example="sql=runs/sql",
        name="--adapter",
    )
    adapter_roots: list[str] | None = text_option(
        "FOLDER",
        "Let requests load adapters that lie below this folder, and drop them. Repeatable. "
        "[default: none]",
        example="adapters",
        name="--adapter-root",
    )
    pooling: str | None = word_option(
        ("mean", "last"),
        "Hidden states that are a text's embedding: the mean of all, or the last token's. "
        "[default: what the model's files state, else mean]",
    )
    max_queue: int | None = count_option(
        "Answers that may wait for a slot, for each model; more get 503. [default: 128]",
        most=1_000_000,
        example=128,
        least=0,
    )
    timeout: float | None = number_option(
        "Seconds that an answer may take, its wait included. [default: 600]",
        most=MAX_SERVE_SECONDS,
        example=600,
    )
    request_timeout: float | None = number_option(
        "Seconds that a client has to send a whole request. [default: 60]",
        most=MAX_SERVE_SECONDS,
        example=60,
    )
    drain: int | None = count_option(
        "Seconds that answers have to end after a signal. [default: 30]",
        most=MAX_SERVE_SECONDS,
        example=30,
        least=0,
    )
    max_body_mib: int | None = count_option(
        "Largest request body in MiB. [default: 4]", most=MAX_BODY_MIB, example=4
    )
    max_connections: int | None = count_option(
        "Connections open at once; one more closes the one whose client has been silent longest. "
        "[default: 1000]",
        most=100_000,
        example=1000,
    )
    ready_file: Path | None = path_option(
        "File to write when requests are answered.", example="ready.json"
    )
    access_log: bool = switch_option("One line on stderr for every request.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOutput:
    as_json: bool = switch_option(
        "Print one line of JSON when requests are answered, and nothing else.", name="--json"
    )


MAX_PORT = 65_535


@dataclass(frozen=True, kw_only=True)
class _PagePlace:
    host: str | None = text_option(
        "ADDRESS",
        "Address to listen on; other than loopback needs --password. [default: 127.0.0.1]",
        example="0.0.0.0",
    )
    port: int | None = count_option(
        "Port to listen on; 0: any that is free. [default: 7860]",
        most=MAX_PORT,
        example=7860,
        least=0,
    )
    password: str | None = text_option(
        "WORD",
        "Asked for when the page is opened. [default: TIGHTFIT_PASSWORD, or none]",
        example="a-long-word",
    )
    votes: Path | None = path_option(
        "File that votes are added to. [default: votes.jsonl in the run's folder, or here]",
        example="votes.jsonl",
    )
    one_at_a_time: bool = switch_option(
        "Hold one model in memory at a time; slower, half the memory."
    )
    system: System = None


@dataclass(frozen=True, kw_only=True)
class PageOptions(ModelOptions, SamplingOptions, _PagePlace):
    """What `ui` and `compare` share: where the page is, and how its models answer."""

    parallel: Parallel = None


UI_EXAMPLES = """\b
Examples:
  tightfit ui
  tightfit ui --runs experiments --port 0
  tightfit ui --model runs/sql --model ./my-model
  ssh -L 7860:localhost:7860 LOGIN-NODE tightfit ui     then open http://localhost:7860
  tightfit ui --host 0.0.0.0 --password WORD
"""


@dataclass(frozen=True, kw_only=True)
class _UiTarget:
    models: list[str] | None = text_option(
        "MODEL",
        "Load this run, adapter, model folder, cached hub id or GGUF file to talk to. Twice: two "
        "side by side. [default: none; the page can load them]",
        example="runs/sql",
        name="--model",
    )
    runs: Path | None = path_option(
        "Folder of runs to show. [default: runs]", example="runs", metavar="FOLDER"
    )


@dataclass(frozen=True, kw_only=True)
class UiOptions(PageOptions, _UiTarget):
    """Open a web page: plans while you type, data, runs, chat.

    Plan: what fits, how fast and why, for a model and hardware. Data: which words of a file are
    learnt. Runs: curves, memory and predictions, while a run goes on. Chat and compare: with the
    models that are named here or loaded in the page.

    The page fetches nothing from other machines. Only this machine can open it unless a host and
    a password are given, and then it reads no paths that are typed into it. Where the machine has
    other users, give a password.
    """


COMPARE_EXAMPLES = """\b
Examples:
  tightfit compare runs/sql                      the base model beside the tuned one
  tightfit compare ./my-model my-model.Q4_K_M.gguf
  tightfit compare runs/sql runs/sql-2 --votes votes.jsonl --port 0
  tightfit compare A B --host 0.0.0.0 --password WORD
"""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(PageOptions):
    """Open a web page with two models side by side.

    A run alone is compared with its own base model. The page is that of `tightfit ui`, opened
    where the two models stand beside each other.
    """

    first: Annotated[
        str,
        model_argument("A", "A run, an adapter, a model folder, a cached hub id or a GGUF file."),
    ] = field(kw_only=False)
    second: Annotated[
        str | None,
        model_argument(
            "B",
            "What it is compared with. [default: A is tuned, and its base model is shown "
            "beside it]",
            example="model.gguf",
        ),
    ] = field(default=None, kw_only=False)
