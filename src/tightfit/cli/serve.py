"""`tightfit serve`: Answer HTTP requests as OpenAI's API does."""

from __future__ import annotations

import json
import os
import shlex
from typing import TYPE_CHECKING

from tightfit.api.options.serving import ServeOptions, ServeOutput
from tightfit.api.serve import ServeWatcher, prepare_server
from tightfit.cli.terminal.error_report import DEBUG_VARIABLE
from tightfit.cli.terminal.output import write_err, write_out
from tightfit.core.text import sanitize
from tightfit.core.units import render_bytes

if TYPE_CHECKING:
    from tightfit.serving.http.server import ReadyModel, ServerReady


def render_ready(ready: ServerReady) -> str:
    """The models, why they run where they run, and two lines to try."""
    lines = [line for model in ready.models for line in _model_lines(model)]
    lines += ["", f"address  {ready.url}"]
    if ready.api_key is not None:
        lines.append(f"key      {ready.api_key}    (shown this once; export TIGHTFIT_API_KEY=KEY)")
    lines += ["", _curl(ready), "", _client(ready), "", "Ctrl-C stops it."]
    return "\n".join(lines) + "\n"


def _model_lines(model: ReadyModel) -> list[str]:
    over = f" over {model.parent}" if model.parent else ""
    also = f" (also {', '.join(model.aliases)})" if model.aliases else ""
    kept = ""
    if model.prefix_bytes:
        kept = f"; earlier prompts are kept in up to {render_bytes(model.prefix_bytes)}"
    return [
        sanitize(f"{model.id}{also}{over}: {model.format} on {model.engine}, {model.device}"),
        sanitize(f"  {model.why}"),
        f"  {model.max_context:,} tokens of prompt and answer, {model.num_slots} answers at once"
        + kept,
    ]


def _curl(ready: ServerReady) -> str:
    body = {"model": ready.models[0].id, "messages": [{"role": "user", "content": "Hello"}]}
    key = ' -H "Authorization: Bearer $TIGHTFIT_API_KEY"' if ready.needs_api_key else ""
    quoted = shlex.quote(sanitize(json.dumps(body, ensure_ascii=False)))
    return (
        f"curl {ready.base_url}/chat/completions -H 'Content-Type: application/json'{key} "
        f"-d {quoted}"
    )


def _client(ready: ServerReady) -> str:
    key = 'os.environ["TIGHTFIT_API_KEY"]' if ready.needs_api_key else '"none"'
    return f'openai.OpenAI(base_url="{ready.base_url}", api_key={key})'


class _ServeScreen(ServeWatcher):
    """Progress on stderr, and on stdout what to connect to."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def loading(self, model: str) -> None:
        write_err(f"loading {sanitize(model)}\n")

    def ready(self, ready: ServerReady) -> None:
        write_out(ready.model_dump_json() + "\n" if self._as_json else render_ready(ready))

    def message(self, line: str) -> None:
        write_err(f"{line}\n")

    def request_failed(self, error: Exception) -> None:
        if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
            import traceback

            write_err("".join(traceback.format_exception(error)))
        text = sanitize(" ".join(str(error).split())[:300])
        write_err(f"error: a request failed, a bug in tightfit: {type(error).__name__}: {text}\n")


def serve(options: ServeOptions, output: ServeOutput) -> None:
    """Bind, load, answer until a signal."""
    server = prepare_server(options, _ServeScreen(as_json=output.as_json))
    if options.access_log:
        _log_access()
    server.run()
    write_err("stopped\n")


def _log_access() -> None:
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("uvicorn.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
