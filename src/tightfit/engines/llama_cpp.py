"""The llama.cpp engine: GGUF files in this process, several requests at once."""

from __future__ import annotations

import atexit
import contextlib
import queue
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.sampling import Sampling
from tightfit.data.prompter import Prompter
from tightfit.engines.llama_devices import add_hosts, choose_threads, enable_keepalive, list_gpus
from tightfit.engines.open import EngineRequest, open_prompter
from tightfit.engines.protocol import (
    Delta,
    Done,
    EngineInfo,
    Event,
    Failed,
    FinishReason,
    Listener,
    Request,
    Ticket,
    check_request,
    choose_context,
)
from tightfit.hardware.machine import read_machine
from tightfit.models.gguf import GgufHeader, LongArray, read_gguf_header
from tightfit.runtime.llama_cpp import LlamaModel, load_library

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


KV_VALUE_BYTES = 2
"""llama.cpp keeps keys and values in fp16 by default."""
_NOT_PARAMETERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaFile:
    """Facts of one GGUF file, or of all parts where it is split."""

    path: Path
    format: str
    """`F16`, `Q4_K_M`, ... as llama.cpp names it."""
    num_params: int
    weight_bytes: int
    kv_bytes_per_token: int
    """Over all layers. Layers with a sliding window keep less of a long text."""
    context: int | None
    """The model's context length."""
    num_vocabulary: int


def read_llama_file(path: Path) -> LlamaFile:
    """Read the header, and those of the other parts where the file is the first of several."""
    first = read_gguf_header(path)
    headers = [first, *(read_gguf_header(part) for part in _other_parts(path, first))]
    tensors = [tensor for header in headers for tensor in header.tensors]
    return LlamaFile(
        path=path,
        format=_read_format(first),
        num_params=sum(t.num_elements for t in tensors if t.name not in _NOT_PARAMETERS),
        weight_bytes=sum(_tensor_bytes(t.shape, t.type_id) for t in tensors),
        kv_bytes_per_token=_kv_bytes_per_token(first),
        context=_read_int(first, "context_length"),
        num_vocabulary=_num_vocabulary(first, [t.shape for t in tensors if _is_embedding(t.name)]),
    )


def _other_parts(path: Path, header: GgufHeader) -> list[Path]:
    """Parts are named NAME-00001-of-00003.gguf; llama.cpp is given the first and finds the rest."""
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or count < 2 or "-00001-of-" not in path.name:
        return []
    head, _, tail = path.name.partition("-00001-of-")
    parts = [path.with_name(f"{head}-{n:05d}-of-{tail}") for n in range(2, min(count, 999) + 1)]
    return [part for part in parts if part.is_file()]


def _read_format(header: GgufHeader) -> str:
    from gguf import LlamaFileType

    stated = header.metadata.get("general.file_type")
    try:
        name = LlamaFileType(stated).name  # type: ignore[arg-type]
    except ValueError:
        return "GGUF"
    return name.removeprefix("ALL_").removeprefix("MOSTLY_")


def _tensor_bytes(shape: tuple[int, ...], type_id: int) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        values, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    except (ValueError, KeyError):  # a type that the gguf package does not know yet
        values, num_bytes = 1, 1
    return prod(shape) // values * num_bytes


def _kv_bytes_per_token(header: GgufHeader) -> int:
    """Keys and values of every layer; a number per layer where the file gives one per layer."""
    num_layers = _read_int(header, "block_count") or 0
    num_heads = _per_layer(header, "attention.head_count", num_layers)
    kv_heads = _per_layer(header, "attention.head_count_kv", num_layers) or num_heads
    width = (_read_int(header, "embedding_length") or 0) // max(1, max(num_heads, default=1))
    key = _read_int(header, "attention.key_length") or width
    value = _read_int(header, "attention.value_length") or width
    return KV_VALUE_BYTES * sum(kv_heads) * (key + value)


def _per_layer(header: GgufHeader, key: str, num_layers: int) -> list[int]:
    stated = header.metadata.get(f"{header.metadata.get('general.architecture')}.{key}")
    if isinstance(stated, tuple):
        return [int(one) for one in stated]
    return [stated] * num_layers if isinstance(stated, int) else []


def _read_int(header: GgufHeader, key: str) -> int | None:
    stated = header.metadata.get(f"{header.metadata.get('general.architecture')}.{key}")
    return stated if isinstance(stated, int) and stated > 0 else None


def _is_embedding(name: str) -> bool:
    return name == "token_embd.weight"


def _num_vocabulary(header: GgufHeader, embeddings: list[tuple[int, ...]]) -> int:
    if embeddings and len(embeddings[0]) == 2:
        return embeddings[0][1]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return tokens.length if isinstance(tokens, LongArray) else _read_int(header, "vocab_size") or 0


# Sampling as fields of a completion request.

RANDOM_SEED = 2**32 - 1
"""llama.cpp draws a seed of its own for this one."""


def make_completion_body(
    prompt: Sequence[int], sampling: Sampling, *, num_new_tokens: int
) -> dict[str, Any]:
    """One request. Only the samplers named here run, in the order transformers has them.

    llama.cpp's own defaults would cut at top-k 40, top-p 0.95 and min-p 0.05.
    `verbose` puts token ids into the stream; `return_progress` says what was cached.
    """
    return {
        "prompt": list(prompt),
        "max_tokens": num_new_tokens,
        "samplers": choose_samplers(sampling),
        "temperature": max(0.0, sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": len(prompt) + num_new_tokens,
        "seed": RANDOM_SEED if sampling.seed is None else sampling.seed % RANDOM_SEED,
        "ignore_eos": sampling.ignores_stop_tokens,
        "cache_prompt": True,
        "stream": True,
        "verbose": True,
        "return_tokens": True,
        "return_progress": True,
    }


def choose_samplers(sampling: Sampling) -> list[str]:
    """Samplers that have an effect. At temperature 0 one token is left: none may follow."""
    chosen = [] if sampling.repetition_penalty == 1.0 else ["penalties"]
    chosen.append("temperature")
    if sampling.temperature <= 0:
        return chosen
    if sampling.top_k > 0:
        chosen.append("top_k")
    if sampling.top_p < 1:
        chosen.append("top_p")
    if sampling.min_p > 0:
        chosen.append("min_p")
    return chosen


# Stop texts in a stream of text.


class StopTextFilter:
    """Holds back text that may be the beginning of a stop text.

    As `data.prompter.TextStream` does for tokens, for an engine that streams text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._pieces: list[str] = []
        self._held = ""
        """Received and not shown yet."""
        self.is_stopped = False

    @property
    def text(self) -> str:
        """Everything received, cut at a stop text."""
        return "".join(self._pieces) + self._held

    def push(self, text: str) -> str:
        """The text that can be shown now."""
        if self.is_stopped:
            return ""
        held = self._held + text
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._held = held[: min(found)]
            return self.finish()
        count = self._count_held(held)
        self._held = held[len(held) - count :]
        return self._show(held[: len(held) - count])

    def finish(self) -> str:
        """The text that was held back, at the end of the stream."""
        held, self._held = self._held, ""
        return self._show(held)

    def _show(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _count_held(self, text: str) -> int:
        """Characters at the end that may begin a stop text."""
        for count in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0


# One request: llama.cpp's chunks to events.


class LlamaAnswer:
    """A ticket and the state of its answer.

    llama.cpp sends nothing for a token that ends inside a character, and names only the token
    that completes it. So the text is llama.cpp's own, tokens are counted by its count, and the
    tokens in between are those that our tokenizer makes of the same text, where it fits.
    """

    def __init__(
        self,
        request: Request,
        listener: Listener,
        *,
        prompter: Prompter,
        stop_ids: frozenset[int],
        num_new_tokens: int,
    ) -> None:
        self._request = request
        self._listener = listener
        self._stops_at = frozenset() if request.sampling.ignores_stop_tokens else stop_ids
        self._num_allowed = num_new_tokens
        self._prompter = prompter
        self._text = StopTextFilter(request.sampling.stop)
        self._cancelled = threading.Event()
        self._submitted_s = time.monotonic()
        self._first_token_s: float | None = None
        self._num_new = 0
        self._num_cached = 0
        self._pending: list[int] = []
        """Tokens whose text could not be shown yet."""
        self._reason: FinishReason | None = None
        self._error: Exception | None = None

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self, server: Any) -> None:
        """Block until the answer has ended and the listener was called."""
        body = make_completion_body(
            self._request.prompt, self._request.sampling, num_new_tokens=self._num_allowed
        )
        try:
            if not self._cancelled.is_set():
                server.handle_completions(body, self._take)
        except Exception as error:  # whatever the binding raises belongs to this answer
            self._error = self._error or error
        self._emit(self._end())

    def _take(self, chunk: dict[str, Any]) -> bool:
        """One chunk of the stream. True ends it; an exception would be lost in the binding."""
        try:
            return self._read(chunk)
        except Exception as error:
            self._error = error
            return True

    def _read(self, chunk: dict[str, Any]) -> bool:
        if "error" in chunk:
            self._error = _as_error(chunk["error"])
            return True
        if self._cancelled.is_set():
            return True
        progress = chunk.get("prompt_progress")
        if progress is not None:  # a progress report carries no token
            self._num_cached = int(progress.get("cache", 0))
            return False
        choice, state = chunk["choices"][0], chunk["__verbose"]
        num_hidden = int(state["tokens_predicted"]) - self._num_new - len(state["tokens"])
        self._num_new = int(state["tokens_predicted"])
        if choice["finish_reason"] is not None:
            is_stop = choice["finish_reason"] == "stop"
            self._reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
            return False
        return self._add(state["tokens"], choice["text"], num_hidden)

    def _add(self, tokens: list[int], text: str, num_hidden: int) -> bool:
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()
            text = self._begin(tokens, text)
        is_end = any(token in self._stops_at for token in tokens)
        if not is_end:
            self._pending += self._name_tokens(tokens, text, num_hidden)
            self._show(self._text.push(text))
        if is_end or self._text.is_stopped:
            self._reason = FinishReason.STOP
        return self._reason is not None

    def _begin(self, tokens: list[int], text: str) -> str:
        """Drop the space that SentencePiece puts before a first word, as tokenizers do."""
        has_space = text.startswith(" ") and not self._prompter.decode(tokens).startswith(" ")
        return text[1:] if has_space else text

    def _name_tokens(self, tokens: list[int], text: str, num_hidden: int) -> list[int]:
        if num_hidden <= 0:
            return tokens
        guess = self._prompter.tokenizer.encode(text)
        fits = len(guess) == num_hidden + len(tokens) and guess[-1:] == tokens[-1:]
        return guess if fits else tokens

    def _show(self, text: str) -> None:
        if text:
            tokens, self._pending = tuple(self._pending), []
            self._emit(Delta(text=text, tokens=tokens))

    def _end(self) -> Event:
        if self._error is not None:
            return Failed(error=self._error)
        reason = self._reason
        if reason is None and self._cancelled.is_set():
            reason = FinishReason.CANCELLED
        if reason is None:
            return Failed(error=RuntimeError("llama.cpp ended an answer without a reason"))
        self._show(self._text.finish())
        now = time.monotonic()
        return Done(
            reason=reason,
            text=self._text.text,
            num_prompt_tokens=len(self._request.prompt),
            num_new_tokens=self._num_new,
            num_cached_tokens=self._num_cached,
            submitted_s=self._submitted_s,
            first_token_s=now if self._first_token_s is None else self._first_token_s,
            finished_s=now,
        )

    def _emit(self, event: Event) -> None:
        """An error in a listener ends its own request only."""
        try:
            self._listener(event)
        except Exception as error:
            self._error = error
            self._cancelled.set()


def _as_error(error: dict[str, Any]) -> Exception:
    message = str(error.get("message", "no reason given")).strip().rstrip(".")
    if int(error.get("code", 500)) < 500:
        return InvalidInputError(
            f"llama.cpp refuses the request: {message}.", remedy="change the prompt or its settings"
        )
    return RuntimeError(f"llama.cpp: {message}")


# The engine.

CPU_SLOTS, GPU_SLOTS = 4, 8
"""Enough to share the reading of weights, few enough for quick answers."""
CPU_BATCH_TOKENS = 128
"""Prompt tokens per batch. llama.cpp's 2,048 would block other requests for too long."""
SPARE_MEMORY_FRACTION = 0.25
"""Of the free RAM: what automatically chosen slots may take."""
SCORED_POSITIONS = 512
MAX_SOCKET_PATH = 100
"""The kernel allows 108 bytes for a socket's path."""


def open_llama(request: EngineRequest, *, why: str) -> LlamaEngine:
    """Load a GGUF file. `request.device` is decided: `cpu`, `cuda` or `cuda:N`."""
    load_library()  # raises for a missing or broken wheel
    file = read_llama_file(request.artefact.path)
    context = choose_context(request.context, file.context)
    is_gpu = request.device != "cpu" or bool(request.hosts)
    slots = request.slots or _choose_slots(file, context, is_gpu=is_gpu)
    prompter = open_prompter(request)
    add_hosts(request.hosts)
    settings = _make_settings(request, context=context, slots=slots)
    info = EngineInfo(
        engine="llama.cpp",
        version=_version(),
        why=why,
        model=request.artefact.name,
        format=file.format,
        device=_name_device(request.device),
        max_context=context,
        num_slots=slots,
        num_params=file.num_params,
        weight_bytes=file.weight_bytes,
        kv_bytes_per_token=file.kv_bytes_per_token,
        num_hosts=len(request.hosts),
    )
    server = start_server(settings, file.path)
    if request.hosts:
        enable_keepalive(request.hosts)
    return LlamaEngine(server, info=info, prompter=prompter, file=file)


class LlamaEngine:
    """One GGUF file in memory, with as many worker threads as llama.cpp has slots."""

    def __init__(
        self, server: Any, *, info: EngineInfo, prompter: Prompter, file: LlamaFile
    ) -> None:
        self._server = server
        self._info = info
        self._prompter = prompter
        self._file = file
        self._stop_ids = frozenset(prompter.stop_ids) | _probe_stop_ids(server)
        self._waiting: queue.SimpleQueue[LlamaAnswer | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._running: set[LlamaAnswer] = set()
        self._scorer: LlamaModel | None = None
        self._scorer_positions = 0
        self._scorer_lock = threading.Lock()
        self._workers = [
            threading.Thread(target=self._work, name=f"llama-{number}", daemon=True)
            for number in range(info.num_slots)
        ]
        for worker in self._workers:
            worker.start()
        atexit.register(self.close)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def prompter(self) -> Prompter:
        return self._prompter

    def submit(self, request: Request, listener: Listener) -> Ticket:
        num_new_tokens = check_request(
            request,
            max_context=self._info.max_context,
            num_vocabulary=self._file.num_vocabulary,
        )
        answer = LlamaAnswer(
            request,
            listener,
            prompter=self._prompter,
            stop_ids=self._stop_ids,
            num_new_tokens=num_new_tokens,
        )
        with self._lock:
            self._check_open()
            self._running.add(answer)
            self._waiting.put(answer)
        return answer

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        if not 0 < len(tokens) <= self._info.max_context:
            raise InvalidInputError(
                f"{len(tokens):,} tokens were given to score; 1 to "
                f"{self._info.max_context:,} are possible.",
                remedy="score the text in pieces, or allow more: --context N",
            )
        with self._scorer_lock:
            return self._open_scorer(len(tokens)).logits(tokens)

    def tokenize(self, text: str) -> list[int]:
        with self._scorer_lock:
            return self._open_scorer(1).tokenize(text)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for answer in self._running:
                    answer.cancel()
                for _ in self._workers:
                    self._waiting.put(None)
        with self._scorer_lock:
            if self._scorer is not None:
                self._scorer.close()
                self._scorer = None
        if threading.current_thread() in self._workers:
            return  # called by a listener: a worker cannot join itself
        for worker in self._workers:
            worker.join()
        self._server = None
        atexit.unregister(self.close)

    def _work(self) -> None:
        """Answer one request after another; llama.cpp batches those of all workers."""
        while (answer := self._waiting.get()) is not None:
            answer.run(self._server)
            with self._lock:
                self._running.discard(answer)

    def _open_scorer(self, num_tokens: int) -> LlamaModel:
        """A second model of the same file; its mapped pages are shared with the server's."""
        with self._lock:
            self._check_open()
        if self._scorer is None or num_tokens > self._scorer_positions:
            positions = max(SCORED_POSITIONS, num_tokens)
            if self._scorer is not None:
                self._scorer.close()
                self._scorer = None
            threads = choose_threads(None)
            self._scorer = LlamaModel(self._file.path, num_positions=positions, num_threads=threads)
            self._scorer_positions = positions
        return self._scorer

    def _check_open(self) -> None:
        if self._is_closed:
            raise UserError(f"{self._info.model} was closed.", remedy="open it again")


def start_server(settings: Any, path: Path) -> Any:
    """llama.cpp's server without a port: its socket is deleted at once."""
    import xllamacpp

    home = Path(tempfile.mkdtemp(prefix="tightfit-"))  # only this user may enter
    try:
        socket = home / "llama.sock"
        if len(str(socket).encode()) <= MAX_SOCKET_PATH:
            settings.hostnames = [str(socket)]
        # Where the path is too long, it uses a loopback port, protected by a random key.
        settings.api_keys = [secrets.token_hex(32)]
        return xllamacpp.Server(settings)
    except RuntimeError as error:
        raise InvalidInputError(
            f"llama.cpp cannot load {path}: the file is damaged, of a kind that this release "
            "does not support, or too large for the memory.",
            remedy="`tightfit models FILE` shows what is in it; make or fetch it again, or try "
            "a smaller --context or --parallel",
        ) from error
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _make_settings(request: EngineRequest, *, context: int, slots: int) -> Any:
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(request.artefact.path)
    settings.n_ctx = context * slots  # llama.cpp divides it by the slots
    settings.n_parallel = slots
    settings.kv_unified = False
    if request.device == "cpu" or not list_gpus():
        # Requests join and are cancelled between two batches: a long prompt must not delay them.
        settings.n_batch = settings.n_ubatch = max(CPU_BATCH_TOKENS, slots)
    threads = choose_threads(request.threads)
    settings.cpuparams.n_threads = threads
    settings.cpuparams_batch.n_threads = threads
    settings.n_threads_http = 1
    settings.verbosity = -1
    settings.warmup = False  # probing the stop tokens warms up
    settings.cache_ram_mib = 0  # prompts stay in their slots; no second copy in RAM
    settings.cache_idle_slots = False
    settings.endpoint_slots = False
    settings.ui = False
    if request.device == "cpu" and not request.hosts:
        settings.n_gpu_layers = 0
    number = request.device.partition(":")[2]
    if number:
        settings.main_gpu = int(number)
        settings.split_mode = xllamacpp.llama_split_mode.LLAMA_SPLIT_MODE_NONE
    return settings


def _choose_slots(file: LlamaFile, context: int, *, is_gpu: bool) -> int:
    """As many as are worthwhile, within a share of the free memory."""
    most = GPU_SLOTS if is_gpu else CPU_SLOTS
    room = read_machine().available_memory_bytes * SPARE_MEMORY_FRACTION
    return max(1, min(most, int(room // max(1, file.kv_bytes_per_token * context))))


def _name_device(device: str) -> str:
    """`cuda` as the numbers of the GPUs it means."""
    if device != "cuda":
        return device
    num_gpus = len(list_gpus())
    return "cuda:0" if num_gpus <= 1 else f"cuda:0-{num_gpus - 1}"


def _probe_stop_ids(server: Any) -> frozenset[int]:
    """llama.cpp's own end tokens: those that `ignore_eos` forbids. Also warms up."""
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
        return frozenset(int(entry["token"]) for entry in settings["logit_bias"])
    return frozenset()


def _version() -> str:
    import xllamacpp

    return str(xllamacpp.__version__)
