"""Running the HTTP API: model names, the bound socket, loading, and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import uvicorn

from tightfit.core.errors import UsageError
from tightfit.core.frozen import Frozen
from tightfit.engines.protocol import Engine
from tightfit.runtime.model_files import Artefact, ArtefactKind
from tightfit.serving.http.app import ApiSettings, make_api_app
from tightfit.serving.http.connections import make_config
from tightfit.serving.http.limits import reserve_connections
from tightfit.serving.http.metrics import Metrics
from tightfit.serving.http.registry import (
    ModelRegistry,
    ServedModel,
    ServerPhase,
    shutting_down_error,
)
from tightfit.serving.sockets import BoundSocket


def name_models(
    artefacts: Sequence[Artefact], aliases: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Names for each artefact, its id first. A name that would mean two of them means none."""
    if len(aliases) > len(artefacts):
        raise UsageError(
            f"There are {len(aliases)} names for {len(artefacts)} models.",
            remedy="one --name for each model, in the same order",
        )
    given = [*aliases, *([None] * (len(artefacts) - len(aliases)))]
    all_names = [
        tuple(dict.fromkeys(filter(None, (alias, _own_name(artefact), _hub_id(artefact)))))
        for alias, artefact in zip(given, artefacts, strict=True)
    ]
    ids = [names[0] for names in all_names]
    for name, count in Counter(ids).items():
        if count > 1:
            raise UsageError(
                f"{count} of the models would be called `{name}`.",
                remedy="--name ONE --name OTHER, in the order of the models",
            )
    uses = Counter(name for names in all_names for name in names)
    return tuple(
        (names[0], *(n for n in names[1:] if uses[n] == 1 and n not in ids)) for names in all_names
    )


def _own_name(artefact: Artefact) -> str:
    if artefact.run is not None:
        return artefact.run.path.resolve().name
    if artefact.kind is ArtefactKind.GGUF:
        return artefact.path.stem
    folder = Path(artefact.name).expanduser()
    return folder.resolve().name if folder.is_dir() else Path(artefact.name).name


def _hub_id(artefact: Artefact) -> str | None:
    """The name that the user typed; None for a path, which clients need not see."""
    return None if Path(artefact.name).expanduser().exists() else artefact.name


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
DEFAULT_DRAIN_SECONDS = 30.0
CLOSING_SECONDS = 5.0
"""After the answers were stopped, for their last events to be sent."""


LoadedModel = tuple[Engine, tuple[str, ...]]
"""An engine and every name that requests may call it by; the first is its id."""


class ApiServer:
    """One server: `run` blocks until a signal or `stop`."""

    def __init__(
        self,
        bound: BoundSocket,
        settings: ApiSettings,
        *,
        drain_seconds: float = DEFAULT_DRAIN_SECONDS,
        is_access_logged: bool = False,
    ) -> None:
        self.bound = bound
        self.registry = ModelRegistry(Metrics())
        self._settings = settings
        self._error: BaseException | None = None
        self._engines: list[Engine] = []
        limits = settings.limits
        fitting = reserve_connections(limits.max_connections)
        if fitting < limits.max_connections:
            settings.report(f"open files are limited here: at most {fitting:,} connections")
        config = make_config(
            make_api_app(self.registry, settings),
            replace(limits, max_connections=fitting),
            lifespan="off",
            access_log=is_access_logged,
            timeout_graceful_shutdown=int(drain_seconds + CLOSING_SECONDS) + 1,
        )
        self._server = _DrainingServer(config, self.registry, drain_seconds, settings.report)

    def run(
        self,
        load: Callable[[], Sequence[LoadedModel]],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Listen, load in a thread of its own, answer; an error of `load` is raised here.

        `on_ready` is called once everything is loaded.
        """
        try:
            asyncio.run(self._run(load, on_ready))
        finally:
            self.bound.socket.close()
            for model in self.registry.models:
                model.close()
            for engine in dict.fromkeys(self._engines):
                engine.close()
        if self._error is not None:
            raise self._error
        if not self.registry.models:  # a signal came before they were loaded
            raise KeyboardInterrupt

    def stop(self) -> None:
        """End as a signal would. Any thread."""
        self._server.should_exit = True

    async def _run(
        self, load: Callable[[], Sequence[LoadedModel]], on_ready: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()

        def work() -> None:
            loaded: Sequence[LoadedModel] = ()
            error: BaseException | None = None
            try:
                loaded = load()
                self._engines.extend(engine for engine, _ in loaded)
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # interrupted, and the loop is gone
                loop.call_soon_threadsafe(self._open, loaded, error, on_ready)

        # A daemon: an interrupt must not wait for a large model to be read to its end.
        threading.Thread(target=work, name="tightfit-load", daemon=True).start()
        await self._server.serve(sockets=[self.bound.socket])

    def _open(
        self,
        loaded: Sequence[LoadedModel],
        error: BaseException | None,
        on_ready: Callable[[], None],
    ) -> None:
        """Answer from now on, or end with the error of loading."""
        try:
            if error is not None:
                raise error
            metrics, max_queue = self.registry.metrics, self._settings.limits.max_queue
            self.registry.open(
                [
                    ServedModel(engine, names, max_queue=max_queue, metrics=metrics)
                    for engine, names in loaded
                ]
            )
            on_ready()
        except BaseException as raised:
            self._error = raised
            self.stop()


class _DrainingServer(uvicorn.Server):
    """uvicorn that lets answers end, for a while, and then stops them in an orderly way."""

    def __init__(
        self,
        config: uvicorn.Config,
        registry: ModelRegistry,
        drain_seconds: float,
        report: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self._registry = registry
        self._drain_seconds = drain_seconds
        self._report = report
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again: the engines are still to be closed."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._loop = asyncio.get_running_loop()
        kept = {sig: signal.signal(sig, self._on_signal) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in kept.items():
                signal.signal(sig, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.should_exit and self._loop is not None:  # asked twice: at once
            self._drain_seconds = 0.0
            self._loop.call_soon_threadsafe(self._stop_answers)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._registry.phase = ServerPhase.STOPPING
        num_owed = sum(model.num_owed for model in self._registry.models)
        if num_owed:
            self._report(f"stopping: {num_owed} answers have {self._drain_seconds:g} s to end")
        timer = asyncio.get_running_loop().call_later(self._drain_seconds, self._stop_answers)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _stop_answers(self) -> None:
        self._registry.stop_jobs(shutting_down_error)


# What a script reads of a server that is ready.


class ReadyModel(Frozen):
    """One loaded model."""

    id: str
    aliases: tuple[str, ...]
    engine: str
    why: str
    format: str
    device: str
    max_context: int
    num_slots: int


class ServerReady(Frozen):
    """The address and the models. A key only where it was generated here."""

    url: str
    base_url: str
    """For OpenAI's clients."""
    host: str
    port: int
    pid: int
    needs_api_key: bool
    api_key: str | None = None
    models: tuple[ReadyModel, ...]


def describe_ready(server: ApiServer, *, needs_api_key: bool, made_key: str | None) -> ServerReady:
    """The address and models of a server that is ready."""
    bound = server.bound
    models = []
    for model in server.registry.models:
        info = model.engine.info
        models.append(
            ReadyModel(
                id=model.id,
                aliases=model.names[1:],
                engine=info.engine,
                why=info.why,
                format=info.format,
                device=info.device,
                max_context=info.max_context,
                num_slots=info.num_slots,
            )
        )
    return ServerReady(
        url=bound.url,
        base_url=f"{bound.url}/v1",
        host=bound.address,
        port=bound.port,
        pid=os.getpid(),
        needs_api_key=needs_api_key,
        api_key=made_key,
        models=tuple(models),
    )
