"""What `tightfit serve` accepts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tightfit.cli.completion import complete_model
from tightfit.cli.flags.engine_options import (
    Context,
    Device,
    Engine_,
    Hosts,
    Parallel,
    Settings,
    Threads,
    Weights,
    natural_option,
)
from tightfit.cli.flags.options import count_option, number_option, path_option, text_option

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
MAX_SECONDS = 10**7
MAX_BODY_MIB = 1024

EXAMPLES = """\b
Examples:
  tightfit serve runs/sql
  tightfit serve model.Q4_K_M.gguf --name assistant --parallel 8
  tightfit serve ./base runs/sql --name base --name tuned --port 0 --json
  TIGHTFIT_API_KEY=... tightfit serve runs/sql --host 0.0.0.0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """Answer HTTP requests as OpenAI's API does.

    Listens on this machine alone unless --host says otherwise; then every request needs a
    bearer token. Paths: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics and
    /openapi.json. Nothing is sent anywhere else.

    A signal lets answers end for --drain seconds, then stops them.
    """

    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="Run folders, adapter folders, model folders, cached hub ids or GGUF files.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ]
    names: Annotated[
        list[str] | None,
        typer.Option(
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
        typer.Option(
            "--cors",
            metavar="ORIGIN",
            help="Let pages of this origin call the API from a browser. Repeatable. [default: "
            "none]",
            show_default=False,
        ),
    ] = None
    engine: Engine_ = None
    device: Device = None
    weights: Weights = None
    context: Context = None
    parallel: Parallel = None
    threads: Threads = None
    hosts: Hosts = None
    settings: Settings = None
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
            most=MAX_SECONDS,
            example=600,
        ),
    ] = None
    drain: Annotated[
        int | None,
        natural_option(
            "--drain",
            "Seconds that answers have to end after a signal. [default: 30]",
            most=MAX_SECONDS,
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
        bool, typer.Option("--access-log", help="One line on stderr for every request.")
    ] = False
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one line of JSON when requests are answered, and nothing else."
        ),
    ] = False
