"""llama.cpp in a process of its own, so that a file or a request that crashes it ends nothing else.

One line of JSON is one message. To the process: `LlamaSettings`, then `{id, complete: body}`,
`{cancel: id}`, `{id, logits: tokens}`, `{id, tokenize: text}`. From it: `{opened: facts}` or
`{error}`, then for each id `{id, chunk}` as often as llama.cpp has one, and at last `{id, done}` or
`{id, error}`. Logits go through a file without a name that both have open.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

from tightfit.core.child_process import (
    ChildProcess,
    Message,
    SendMessage,
    bind_command,
    open_output,
    read_messages,
)
from tightfit.core.errors import (
    InvalidInputError,
    SetupError,
    UserError,
    error_from_message,
    error_to_message,
    first_line,
)
from tightfit.core.files import temporary_folder
from tightfit.core.import_path import module_words
from tightfit.core.secrets import without_secrets
from tightfit.engines.llama_devices import (
    add_hosts,
    choose_threads,
    describe_lost_host,
    enable_keepalive,
    list_gpus,
)
from tightfit.engines.protocol import EngineLostError
from tightfit.runtime.llama_cpp import LlamaModel, load_library

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Take = Callable[[dict[str, Any]], bool]
"""Called with each chunk of a stream, by the thread that reads them all; true ends it."""

OPEN_SECONDS = 180.0
OPEN_BYTES_PER_SECOND = 20e6
"""A slow disk's, or a slow network's to other hosts: a file that is still being opened after this
is given up."""
_CONSTANT = frozenset({"created", "id", "model", "object", "system_fingerprint"})
"""Fields of a chunk that say nothing of the answer."""
END_SECONDS = 5.0
"""For a process that was told to end; then it is killed."""
CPU_BATCH_TOKENS = 128
"""Prompt tokens per batch. llama.cpp's 2,048 would block other requests for too long."""
SCORED_POSITIONS = 512
MAX_SOCKET_PATH = 100
"""The kernel allows 108 bytes for a socket's path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSettings:
    """What a process loads, and how."""

    path: str
    context: int
    """Of each slot."""
    slots: int
    device: str
    """`cpu`, `cuda` or `cuda:N`."""
    threads: int | None = None
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFacts:
    """What the process says of what it has loaded."""

    version: str
    num_gpus: int
    stop_ids: tuple[int, ...]
    """llama.cpp's own end tokens: those that `ignore_eos` forbids."""


# This side.


class LlamaProcess:
    """One GGUF file in a process. After a crash the next call starts another one.

    Its methods block, raise `EngineLostError` if the process ends meanwhile, and may be called from
    any thread.
    """

    def __init__(self, settings: LlamaSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._scoring = threading.Lock()
        self._is_closed = False
        self._life = _Life(settings)
        self.facts = self._life.facts

    @property
    def pid(self) -> int:
        return self._life.pid

    def handle_completions(self, body: dict[str, Any], take: Take) -> None:
        """As `xllamacpp.Server` has it: returns when the stream has ended."""
        self._alive().ask({"complete": body}, take)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Scores of every next token after each of `tokens`."""
        import numpy as np

        with self._scoring:
            life = self._alive()
            num_columns = int(life.ask({"logits": list(tokens)}))
            count = len(tokens) * num_columns
            life.scores.seek(0)
            found = np.fromfile(life.scores, dtype=np.float32, count=count)
            life.scores.truncate(0)
        return found.reshape(len(tokens), num_columns)

    def tokenize(self, text: str) -> list[int]:
        with self._scoring:
            return [int(token) for token in self._alive().ask({"tokenize": text})]

    def close(self) -> None:
        """End the process. Safe to call twice."""
        with self._lock:
            self._is_closed = True
        self._life.end()

    def is_reader(self) -> bool:
        """Whether this is the thread that calls `Take`, which cannot wait for its own end."""
        return self._life.is_reader()

    def _alive(self) -> _Life:
        with self._lock:
            if self._life.error is not None and not self._is_closed:
                self._life.end()
                try:
                    self._life = _Life(self._settings)
                except UserError as error:
                    raise EngineLostError(error.problem, remedy=error.remedy) from error
            return self._life


def _drop(_: dict[str, Any]) -> bool:
    """Takes what comes after the end."""
    return False


class _Life:
    """A process from its start to its end."""

    def __init__(self, settings: LlamaSettings) -> None:
        self._settings = settings
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Take, SimpleQueue[Message | None]]] = {}
        """By question: what takes its chunks, and where its reply is waited for."""
        self._opened: SimpleQueue[Message | UserError] = SimpleQueue()
        self._is_ending = False
        self._child: ChildProcess | None = None
        self.error: UserError | None = None
        """Why it ended by itself; None while it runs."""
        self.scores = _open_nameless()
        # The kernel ends the process together with the thread that started it: this one stays.
        self._thread = threading.Thread(target=self._run, name="llama-process", daemon=True)
        self._thread.start()
        first = self._opened.get()
        if isinstance(first, UserError) or "error" in first:
            self.end()
            raise first if isinstance(first, UserError) else error_from_message(first["error"])
        facts = first["opened"]
        self.facts = LlamaFacts(**{**facts, "stop_ids": tuple(facts["stop_ids"])})

    def ask(self, question: Message, take: Take = _drop) -> Any:
        """The reply to one question, after its chunks."""
        number, replies = next(self._numbers), SimpleQueue[Message | None]()
        with self._lock:
            if self.error is not None:
                raise self.error
            self._open[number] = (take, replies)
        assert self._child is not None
        self._child.send({"id": number, **question})  # if it is gone, `_run` notices too
        reply = replies.get()
        if reply is None:
            assert self.error is not None
            raise self.error
        if "error" in reply:
            raise error_from_message(reply["error"])
        return reply["done"]

    def is_reader(self) -> bool:
        return threading.current_thread() is self._thread

    def end(self) -> None:
        self._is_ending = True
        if self._child is not None:
            self._child.end(seconds=END_SECONDS)
        self._thread.join()
        self.scores.close()

    def _run(self) -> None:
        """Start the process and pass its messages on until it ends."""
        number, path = self.scores.fileno(), Path(self._settings.path)
        words = module_words("tightfit.engines.llama_process", str(number))
        try:
            child = self._child = ChildProcess(
                bind_command([sys.executable, *words]),
                # No secret for native code that reads a stranger's file; a backtrace would start a
                # debugger.
                env=without_secrets(os.environ) | {"GGML_NO_BACKTRACE": "1"},
                limit_seconds=OPEN_SECONDS + path.stat().st_size / OPEN_BYTES_PER_SECOND,
                inherited=(number,),
            )
        except OSError as error:
            self._opened.put(
                SetupError(
                    f"The process for llama.cpp cannot be started: {first_line(error)}.",
                    remedy="free some memory or processes, then the same command again",
                )
            )
            return
        self.pid = child.pid
        child.send(asdict(self._settings))
        messages = iter(child)
        first = next(messages, None)
        if first is None:
            self._opened.put(self._explain_opening(child))
            return
        child.lift_limit()
        self._opened.put(first)
        try:
            for message in messages:
                self._pass_on(message, child)
        except (LookupError, TypeError, ValueError):  # not of our making: it is no longer itself
            child.end(seconds=0.0)
        reason = self._explain_end(child)
        with self._lock:
            self.error = reason
            waiting = list(self._open.values())
        for _, replies in waiting:
            replies.put(None)

    def _pass_on(self, message: Message, child: ChildProcess) -> None:
        number = message["id"]
        if "chunk" not in message:
            with self._lock:
                _, replies = self._open.pop(number)
            replies.put(message)
        elif self._open[number][0](message["chunk"]):
            self._open[number] = (_drop, self._open[number][1])
            child.send({"cancel": number})

    def _explain_opening(self, child: ChildProcess) -> UserError:
        """It ended before it had loaded the file."""
        path, code = self._settings.path, child.wait(END_SECONDS)
        if self._settings.hosts:
            return describe_lost_host(self._settings.hosts)
        if code == -signal.SIGKILL and not child.is_late:  # which says nothing of the file
            return SetupError(
                f"The process that opens {path} was killed, as the system does where memory runs "
                "out.",
                remedy="free some memory, or try a smaller --context or --parallel",
            )
        ending = "does not come to an end" if child.is_late else "crashes"
        return InvalidInputError(
            f"llama.cpp {ending} on {path}: the file is damaged, or of a kind that this release "
            "does not support.",
            remedy="make or fetch it again; `tightfit models FILE` shows what is in it",
        )

    def _explain_end(self, child: ChildProcess) -> UserError:
        code = child.wait(END_SECONDS)
        if self._is_ending:
            return EngineLostError("llama.cpp was closed.", remedy="start the command again")
        if self._settings.hosts:
            lost = describe_lost_host(self._settings.hosts)
            return EngineLostError(lost.problem, remedy=lost.remedy)
        if code == -signal.SIGKILL:
            return EngineLostError(
                "llama.cpp's process was killed, as the system does where memory runs out.",
                remedy="free some memory, or try a smaller --context or --parallel, then again",
            )
        name = signal.Signals(-code).name if code is not None and code < 0 else f"exit {code}"
        last = child.last_line
        return EngineLostError(
            f"llama.cpp crashed ({name}) on {Path(self._settings.path).name}"
            + (f": {last}" if last else "."),
            remedy="send it again, which loads the file anew; if it crashes each time, leave out "
            "what was sent last, or make or fetch the file again",
        )


def _open_nameless() -> IO[bytes]:
    """In memory where the system can."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("tightfit-logits"), "w+b")
    return tempfile.TemporaryFile()


# The process's side.


def main() -> int:
    """Load what the first message names, and answer until stdin closes."""
    send, messages = open_output(), read_messages()
    scores = os.fdopen(int(sys.argv[1]), "r+b")
    if os.environ.get("TIGHTFIT_DEBUG", "0") in ("", "0"):  # a crash would write all of its memory
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    first = next(messages, None)
    if first is None:
        return 0
    try:
        worker = _Worker(LlamaSettings(**{**first, "hosts": tuple(first["hosts"])}), send, scores)
        send({"opened": asdict(worker.facts)})
    except Exception as error:
        send({"error": error_to_message(error)})
        return 1
    for message in messages:
        worker.take(message)
    os._exit(0)  # without waiting for what is being computed


class _Worker:
    """llama.cpp's server and, once it is asked for, a second model that scores."""

    def __init__(self, settings: LlamaSettings, send: SendMessage, scores: IO[bytes]) -> None:
        import xllamacpp

        load_library()  # drops llama.cpp's log
        add_hosts(settings.hosts)
        self._settings, self._send, self._scores = settings, send, scores
        self._server = _start_server(_make_parameters(settings), settings.path)
        if settings.hosts:
            enable_keepalive(settings.hosts)
        self._cancelled: set[int] = set()
        self._scorer: LlamaModel | None = None
        self._scorer_positions = 0
        self.facts = LlamaFacts(
            version=str(xllamacpp.__version__),
            num_gpus=len(list_gpus()),
            stop_ids=_probe_stop_ids(self._server),
        )

    def take(self, message: Message) -> None:
        """Begin what is asked; each question has a thread, so that none delays another."""
        if "cancel" in message:
            self._cancelled.add(message["cancel"])
        else:
            threading.Thread(target=self._answer, args=(message,), daemon=True).start()

    def _answer(self, message: Message) -> None:
        number = message["id"]
        try:
            done: object = None
            if "complete" in message:
                self._complete(number, message["complete"])
            elif "logits" in message:
                done = self._score(message["logits"])
            else:
                done = self._open_scorer(1).tokenize(message["tokenize"])
            self._send({"id": number, "done": done})
        except Exception as error:
            self._send({"id": number, "error": error_to_message(error)})
        finally:
            self._cancelled.discard(number)

    def _complete(self, number: int, body: dict[str, Any]) -> None:
        def pass_on(chunk: dict[str, Any]) -> bool:
            self._send({"id": number, "chunk": {k: chunk[k] for k in chunk if k not in _CONSTANT}})
            return number in self._cancelled

        self._server.handle_completions(body, pass_on)

    def _score(self, tokens: Sequence[int]) -> int:
        """Write the logits; returns how many each position has."""
        found = self._open_scorer(len(tokens)).logits(tokens)
        self._scores.seek(0)
        self._scores.write(found.tobytes())
        self._scores.flush()
        return int(found.shape[1])

    def _open_scorer(self, num_tokens: int) -> LlamaModel:
        """A second model of the same file; its mapped pages are shared with the server's.

        Asked by one thread at a time.
        """
        if self._scorer is None or num_tokens > self._scorer_positions:
            positions = max(SCORED_POSITIONS, num_tokens)
            if self._scorer is not None:
                self._scorer.close()
                self._scorer = None
            self._scorer = LlamaModel(
                Path(self._settings.path), num_positions=positions, num_threads=choose_threads(None)
            )
            self._scorer_positions = positions
        return self._scorer


def _start_server(parameters: Any, path: str) -> Any:
    """llama.cpp's server without a port: its socket is deleted at once."""
    import xllamacpp

    try:
        with temporary_folder() as home:
            socket = home / "llama.sock"
            if len(str(socket).encode()) <= MAX_SOCKET_PATH:
                parameters.hostnames = [str(socket)]
            # Where the path is too long, it uses a loopback port, protected by a random key.
            parameters.api_keys = [secrets.token_hex(32)]
            return xllamacpp.Server(parameters)
    except RuntimeError as error:
        raise InvalidInputError(
            f"llama.cpp cannot load {path}: the file is damaged, of a kind that this release "
            "does not support, or too large for the memory.",
            remedy="`tightfit models FILE` shows what is in it; make or fetch it again, or try "
            "a smaller --context or --parallel",
        ) from error


def _make_parameters(settings: LlamaSettings) -> Any:
    import xllamacpp

    made = xllamacpp.CommonParams()
    made.model.path = settings.path
    made.n_ctx = settings.context * settings.slots  # llama.cpp divides it by the slots
    made.n_parallel = settings.slots
    made.kv_unified = False
    if settings.device == "cpu" or not list_gpus():
        # Requests join and are cancelled between two batches: a long prompt must not delay them.
        made.n_batch = made.n_ubatch = max(CPU_BATCH_TOKENS, settings.slots)
    threads = choose_threads(settings.threads)
    made.cpuparams.n_threads = threads
    made.cpuparams_batch.n_threads = threads
    made.n_threads_http = 1
    made.verbosity = -1
    made.warmup = False  # probing the stop tokens warms up
    made.cache_ram_mib = 0  # prompts stay in their slots; no second copy in RAM
    made.cache_idle_slots = False
    made.endpoint_slots = False
    made.ui = False
    # Prompts come as tokens: llama.cpp need not run the model's own template, which has no limits.
    made.chat_template, made.use_jinja = "chatml", False
    if settings.device == "cpu" and not settings.hosts:
        made.n_gpu_layers = 0
    number = settings.device.partition(":")[2]
    if number:
        made.main_gpu = int(number)
        made.split_mode = xllamacpp.llama_split_mode.LLAMA_SPLIT_MODE_NONE
    return made


def _probe_stop_ids(server: Any) -> tuple[int, ...]:
    """llama.cpp's own end tokens, in order. Also warms up."""
    chunks: list[dict[str, Any]] = []
    body = {
        "prompt": [0],
        "max_tokens": 1,
        "ignore_eos": True,
        "stream": True,
        "verbose": True,
        "cache_prompt": False,
    }
    server.handle_completions(body, chunks.append)
    with contextlib.suppress(KeyError, IndexError, TypeError):
        settings = chunks[-1]["__verbose"]["generation_settings"]
        return tuple(sorted({int(entry["token"]) for entry in settings["logit_bias"]}))
    return ()


if __name__ == "__main__":
    sys.exit(main())
