"""`tightfit serve`: models behind an OpenAI-compatible HTTP API."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tightfit.api.options.engines import engine_request
from tightfit.api.options.serving import DEFAULT_HOST, DEFAULT_PORT
from tightfit.cli.error_report import DEBUG_VARIABLE
from tightfit.cli.flags.serving import ServeFlags
from tightfit.cli.terminal.output import write_err, write_out
from tightfit.core.errors import UsageError
from tightfit.core.packages import require_packages
from tightfit.core.text import sanitize

if TYPE_CHECKING:
    from tightfit.engines.protocol import Engine
    from tightfit.runtime.artefacts import Artefact
    from tightfit.serve.http.app import ApiSettings
    from tightfit.serve.http.server import (
        ApiServer,
        BoundSocket,
        LoadedModel,
        ReadyModel,
        ServerReady,
    )


# How a server that answers presents itself.


def render_ready(ready: ServerReady) -> str:
    """The models, why they run where they run, and two lines to try."""
    lines = [line for model in ready.models for line in _model_lines(model)]
    lines += ["", f"address  {ready.url}"]
    if ready.api_key is not None:
        lines.append(f"key      {ready.api_key}    (shown this once; export TIGHTFIT_API_KEY=KEY)")
    lines += ["", _curl(ready), "", _client(ready), "", "Ctrl-C stops it."]
    return "\n".join(lines) + "\n"


def _model_lines(model: ReadyModel) -> list[str]:
    also = f" (also {', '.join(model.aliases)})" if model.aliases else ""
    return [
        sanitize(f"{model.id}{also}: {model.format} on {model.engine}, {model.device}"),
        sanitize(f"  {model.why}"),
        f"  {model.max_context:,} tokens of prompt and answer, {model.num_slots} answers at once",
    ]


def _curl(ready: ServerReady) -> str:
    body = {"model": ready.models[0].id, "messages": [{"role": "user", "content": "Hello"}]}
    key = ' -H "Authorization: Bearer $TIGHTFIT_API_KEY"' if ready.needs_api_key else ""
    told = shlex.quote(sanitize(json.dumps(body, ensure_ascii=False)))
    return (
        f"curl {ready.base_url}/chat/completions -H 'Content-Type: application/json'{key} -d {told}"
    )


def _client(ready: ServerReady) -> str:
    key = 'os.environ["TIGHTFIT_API_KEY"]' if ready.needs_api_key else '"none"'
    return f'openai.OpenAI(base_url="{ready.base_url}", api_key={key})'


KEY_VARIABLE = "TIGHTFIT_API_KEY"


def serve(flags: ServeFlags) -> None:
    """Bind, load, answer until a signal."""
    require_packages("Serving", "fastapi", "uvicorn", "tokenizers", "jinja2", extra="serve")
    from tightfit.runtime.artefacts import find_artefact
    from tightfit.serve.http.server import (
        DEFAULT_DRAIN_SECONDS,
        ApiServer,
        bind_socket,
        name_models,
    )

    for text in (*flags.targets, *(flags.names or ())):
        if not text.strip():
            raise UsageError("A model's name is empty.", remedy="tightfit serve MODEL --name NAME")
    artefacts = [find_artefact(target) for target in flags.targets]
    names = name_models(artefacts, flags.names or ())
    bound = bind_socket(
        flags.host or DEFAULT_HOST, DEFAULT_PORT if flags.port is None else flags.port
    )
    api_key, made_key = _choose_key(flags.api_key, is_loopback=bound.is_loopback)
    server = ApiServer(
        bound,
        _settings(flags, bound, api_key),
        drain_seconds=DEFAULT_DRAIN_SECONDS if flags.drain is None else flags.drain,
        is_access_logged=flags.access_log,
    )
    if flags.access_log:
        _log_access()
    try:
        _forget_ready(flags)  # of a server that was killed
        server.run(
            _loader(flags, artefacts, names),
            _announcer(flags, server, api_key=api_key, made_key=made_key),
        )
    finally:
        _forget_ready(flags)
    write_err("stopped\n")


def _forget_ready(flags: ServeFlags) -> None:
    """Whoever waits for the file must not find an earlier server's."""
    if flags.ready_file is not None:
        with contextlib.suppress(OSError):
            flags.ready_file.unlink(missing_ok=True)


def _choose_key(given: str | None, *, is_loopback: bool) -> tuple[str | None, str | None]:
    """The key that is asked for, and the same once more where it was made here."""
    key = given or os.environ.get(KEY_VARIABLE) or None
    if key is None:
        made = None if is_loopback else secrets.token_urlsafe(32)
        return made, made
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            "The API key has characters that an HTTP header cannot carry.",
            remedy=f"{KEY_VARIABLE}=$(openssl rand -hex 24) tightfit serve ...",
        )
    return key, None


def _settings(flags: ServeFlags, bound: BoundSocket, api_key: str | None) -> ApiSettings:
    from tightfit.serve.http.app import (
        DEFAULT_MAX_BODY_BYTES,
        DEFAULT_MAX_QUEUE,
        DEFAULT_TIMEOUT_SECONDS,
        ApiSettings,
    )
    from tightfit.serve.http.server import LOOPBACK_NAMES

    return ApiSettings(
        api_key=api_key,
        host_names=(*LOOPBACK_NAMES, bound.host) if bound.is_loopback else None,
        cors_origins=tuple(origin.strip().rstrip("/") for origin in flags.cors or ()),
        max_queue=DEFAULT_MAX_QUEUE if flags.max_queue is None else flags.max_queue,
        timeout_seconds=flags.timeout or DEFAULT_TIMEOUT_SECONDS,
        max_body_bytes=(flags.max_body_mib or 0) * 2**20 or DEFAULT_MAX_BODY_BYTES,
        report=lambda line: write_err(f"{line}\n"),
        report_error=_report_error,
    )


def _report_error(error: Exception) -> None:
    if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        import traceback

        write_err("".join(traceback.format_exception(error)))
    text = sanitize(" ".join(str(error).split())[:300])
    write_err(f"error: a request failed, a bug in tightfit: {type(error).__name__}: {text}\n")


def _loader(
    flags: ServeFlags, artefacts: Sequence[Artefact], names: Sequence[tuple[str, ...]]
) -> Callable[[], list[LoadedModel]]:
    def load() -> list[LoadedModel]:
        from tightfit.engines.open import open_engine
        from tightfit.serve.http.server import LoadedModel

        opened: dict[object, Engine] = {}
        loaded = []
        try:
            for artefact, called in zip(artefacts, names, strict=True):
                # The same files under two names are loaded once.
                key = (artefact.kind, artefact.path.resolve())
                if key not in opened:
                    write_err(f"loading {sanitize(artefact.name)}\n")
                    opened[key] = open_engine(engine_request(flags, artefact))
                loaded.append(LoadedModel(engine=opened[key], names=called))
        except BaseException:
            for engine in opened.values():
                engine.close()
            raise
        return loaded

    return load


def _announcer(
    flags: ServeFlags, server: ApiServer, *, api_key: str | None, made_key: str | None
) -> Callable[[], None]:
    def announce_ready() -> None:
        from tightfit.core.files import write_atomic
        from tightfit.serve.http.server import describe_ready

        ready = describe_ready(server, needs_api_key=api_key is not None, made_key=made_key)
        if flags.ready_file is not None:
            told = ready.model_copy(update={"api_key": None})
            write_atomic(flags.ready_file, told.model_dump_json() + "\n")
        if flags.as_json:
            write_out(ready.model_dump_json() + "\n")
        else:
            write_out(render_ready(ready))

    return announce_ready


def _log_access() -> None:
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("uvicorn.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
