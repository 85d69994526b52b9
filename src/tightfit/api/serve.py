"""`serve`: models behind OpenAI's HTTP API."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.api.call import accepts_keywords
from tightfit.api.options.engines import engine_request
from tightfit.api.options.serving import DEFAULT_HOST, DEFAULT_PORT, ServeOptions
from tightfit.core.errors import UsageError
from tightfit.core.files import write_atomic
from tightfit.core.packages import require_packages
from tightfit.core.text import shorten
from tightfit.engines.open import open_engine
from tightfit.engines.protocol import Engine
from tightfit.runtime.model_files import find_artefact

if TYPE_CHECKING:
    from tightfit.serving.http.app import ApiSettings
    from tightfit.serving.http.server import ApiServer, LoadedModel, ServerReady
    from tightfit.serving.sockets import BoundSocket

KEY_VARIABLE = "TIGHTFIT_API_KEY"


class ServeWatcher:
    """Receives what happens while models are served; a subclass overrides what it shows."""

    def loading(self, model: str) -> None:
        """A model is about to be loaded."""

    def ready(self, ready: ServerReady) -> None:
        """Requests are answered from now on."""

    def message(self, line: str) -> None:
        """Something happened outside of an answer, in one line."""

    def request_failed(self, error: Exception) -> None:
        """A request failed by a bug; its client got status 500."""


@accepts_keywords(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Load models and answer HTTP requests until SIGINT or SIGTERM."""
    prepare_server(options).run()


def prepare_server(options: ServeOptions, watcher: ServeWatcher | None = None) -> ModelServer:
    """Check the options and bind the port; `run` then loads and serves."""
    require_packages("Serving", "fastapi", "uvicorn", "tokenizers", "jinja2", extra="serve")
    return ModelServer(options, watcher or ServeWatcher())


class ModelServer:
    """A server with its port bound. `stop` ends `run` from any thread."""

    def __init__(self, options: ServeOptions, watcher: ServeWatcher) -> None:
        from tightfit.serving.http.server import (
            DEFAULT_DRAIN_SECONDS,
            ApiServer,
            name_models,
        )
        from tightfit.serving.sockets import bind_socket

        self._options = options
        self._watcher = watcher
        self._artefacts = [find_artefact(target) for target in options.targets]
        self._names = name_models(self._artefacts, options.names or ())
        self._adapters = read_adapters(options.adapters or (), self._names)
        self._roots = read_roots(options.adapter_roots or ())
        bound = bind_socket(
            options.host or DEFAULT_HOST, DEFAULT_PORT if options.port is None else options.port
        )
        self._api_key, self._made_key = choose_key(options.api_key, is_loopback=bound.is_loopback)
        self._server: ApiServer = ApiServer(
            bound,
            _settings(options, bound, self._api_key, self._roots, watcher),
            drain_seconds=DEFAULT_DRAIN_SECONDS if options.drain is None else options.drain,
            is_access_logged=options.access_log,
        )

    @property
    def url(self) -> str:
        return self._server.bound.url

    def run(self) -> None:
        """Load the models and serve them until a signal or `stop`."""
        try:
            self._remove_ready_file()  # of a server that was killed
            self._server.run(self._load, self._report_ready)
        finally:
            self._remove_ready_file()

    def stop(self) -> None:
        self._server.stop()

    def _load(self) -> list[LoadedModel]:
        from tightfit.serving.http.adapters import count_file_bytes

        opened: dict[object, Engine] = {}
        loaded: list[LoadedModel] = []
        takes_adapters = bool(self._adapters or self._roots)
        adapter_bytes = sum(count_file_bytes(path) for path in self._adapters.values())
        try:
            for artefact, names in zip(self._artefacts, self._names, strict=True):
                # The same files under two names are loaded once.
                key = (artefact.kind, artefact.path.resolve())
                if key not in opened:
                    self._watcher.loading(artefact.name)
                    request = replace(
                        engine_request(self._options, artefact),
                        takes_adapters=takes_adapters,
                        adapter_bytes=adapter_bytes,
                    )
                    opened[key] = open_engine(request)
                loaded.append((opened[key], names))
            loaded += self._load_adapters(list(opened.values()))
        except BaseException:
            for engine in opened.values():
                engine.close()
            raise
        return loaded

    def _load_adapters(self, bases: list[Engine]) -> list[LoadedModel]:
        from tightfit.serving.http.adapters import choose_base

        chosen: dict[int, list[str]] = {}
        for name, path in self._adapters.items():
            chosen.setdefault(bases.index(choose_base(path, bases)), []).append(name)
        loaded: list[LoadedModel] = []
        for number, names in chosen.items():
            self._watcher.loading(", ".join(names))
            engines = bases[number].add_adapters([self._adapters[name] for name in names])
            loaded += [(engine, (name,)) for engine, name in zip(engines, names, strict=True)]
        return loaded

    def _report_ready(self) -> None:
        from tightfit.serving.http.server import describe_ready

        ready = describe_ready(
            self._server, needs_api_key=self._api_key is not None, made_key=self._made_key
        )
        if self._options.ready_file is not None:
            public = ready.model_copy(update={"api_key": None})
            write_atomic(self._options.ready_file, public.model_dump_json() + "\n")
        self._watcher.ready(ready)

    def _remove_ready_file(self) -> None:
        """A process that waits for the file must not find an earlier server's."""
        if self._options.ready_file is not None:
            with contextlib.suppress(OSError):
                self._options.ready_file.unlink(missing_ok=True)


def read_adapters(texts: Sequence[str], names: Sequence[Sequence[str]]) -> dict[str, Path]:
    """Where each adapter lies, by its name."""
    from tightfit.serving.http.adapters import find_adapter

    taken = {name for each in names for name in each}
    found: dict[str, Path] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise UsageError(
                f"`--adapter {shorten(text)}` names no adapter.", remedy="--adapter NAME=FOLDER"
            )
        if name in taken or name in found:
            raise UsageError(
                f"Two would be called `{shorten(name)}`.", remedy="give each a name of its own"
            )
        found[name] = find_adapter(Path(path).expanduser())
    return found


def read_roots(texts: Sequence[str]) -> tuple[Path, ...]:
    """The folders that adapters may be loaded from."""
    roots = tuple(Path(text).expanduser() for text in texts)
    for root in roots:
        if not root.is_dir():
            raise UsageError(
                f"`--adapter-root {shorten(str(root))}` is no folder.",
                remedy="make it, or name the folder that holds the adapters",
            )
    return roots


def choose_key(given: str | None, *, is_loopback: bool) -> tuple[str | None, str | None]:
    """The key that requests must send, and the same again where it was generated here."""
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


def _settings(
    options: ServeOptions,
    bound: BoundSocket,
    api_key: str | None,
    adapter_roots: tuple[Path, ...],
    watcher: ServeWatcher,
) -> ApiSettings:
    from tightfit.serving.http.app import ApiSettings
    from tightfit.serving.http.limits import ServerLimits
    from tightfit.serving.http.server import LOOPBACK_NAMES

    given = {
        "max_queue": options.max_queue,
        "answer_seconds": options.timeout,
        "max_body_bytes": options.max_body_mib and options.max_body_mib * 2**20,
        "max_connections": options.max_connections,
        "request_seconds": options.request_timeout,
    }
    stated: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return ApiSettings(
        api_key=api_key,
        host_names=(*LOOPBACK_NAMES, bound.host) if bound.is_loopback else None,
        cors_origins=tuple(origin.strip().rstrip("/") for origin in options.cors or ()),
        adapter_roots=adapter_roots,
        limits=ServerLimits(**stated),
        report=watcher.message,
        report_error=watcher.request_failed,
    )
