"""GGUF files answered by llama.cpp in this process, several requests at once."""

from __future__ import annotations

import atexit
import contextlib
import queue
import secrets
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.data.prompter import Prompter
from tightfit.engines.context import check_request, choose_context
from tightfit.engines.llama.answer import LlamaAnswer
from tightfit.engines.llama.devices import choose_threads, list_gpus
from tightfit.engines.llama.file import LlamaFile, read_llama_file
from tightfit.engines.llama.rpc_hosts import add_hosts
from tightfit.engines.llama.rpc_silence import notice_silence
from tightfit.engines.open import EngineRequest, open_prompter
from tightfit.engines.protocol import EngineInfo, Listener, Request, Ticket
from tightfit.hardware.machine import read_machine
from tightfit.runtime.ggml import load_library
from tightfit.runtime.llama_model import LlamaModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CPU_SLOTS, GPU_SLOTS = 4, 8
"""Enough that reading the weights is shared, few enough that each answer stays quick."""
CPU_BATCH_TOKENS = 128
"""Of prompts, in one go; a few seconds for a small model, where the default is 2,048."""
SPARE_MEMORY_FRACTION = 0.25
"""Of the free RAM, what slots nobody asked for may take."""
SCORED_POSITIONS = 512
MAX_SOCKET_PATH = 100
"""The kernel allows 108 bytes for a socket's path."""


def open_llama(request: EngineRequest, *, why: str) -> LlamaEngine:
    """Load a GGUF file. `request.device` is decided: `cpu`, `cuda` or `cuda:N`."""
    load_library()  # a missing or broken wheel is told here, with its remedy
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
        notice_silence(request.hosts)
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
        self._under_way: set[LlamaAnswer] = set()
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
            self._under_way.add(answer)
            self._waiting.put(answer)
        return answer

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        if not 0 < len(tokens) <= self._info.max_context:
            raise InvalidInputError(
                f"{len(tokens):,} tokens are to be scored at once; 1 to "
                f"{self._info.max_context:,} can be.",
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
                for answer in self._under_way:
                    answer.cancel()
                for _ in self._workers:
                    self._waiting.put(None)
        with self._scorer_lock:
            if self._scorer is not None:
                self._scorer.close()
                self._scorer = None
        if threading.current_thread() in self._workers:
            return  # a listener closes: its own request is still to be ended, at the latest at exit
        for worker in self._workers:
            worker.join()
        self._server = None
        atexit.unregister(self.close)

    def _work(self) -> None:
        """Answer one request after the other; llama.cpp joins those of all workers in a batch."""
        while (answer := self._waiting.get()) is not None:
            answer.run(self._server)
            with self._lock:
                self._under_way.discard(answer)

    def _open_scorer(self, num_tokens: int) -> LlamaModel:
        """A second view of the same file; its pages are shared with the server's."""
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
            raise UserError(
                f"{self._info.model} was closed and answers no more.", remedy="open it again"
            )


def start_server(settings: Any, path: Path) -> Any:
    """llama.cpp's server without a port: it listens on a socket that is gone at once."""
    import xllamacpp

    home = Path(tempfile.mkdtemp(prefix="tightfit-"))  # only this user may enter
    try:
        socket = home / "llama.sock"
        if len(str(socket).encode()) <= MAX_SOCKET_PATH:
            settings.hostnames = [str(socket)]
        # Where the folder's name is too long, a loopback port remains; nobody knows its key.
        settings.api_keys = [secrets.token_hex(32)]
        return xllamacpp.Server(settings)
    except RuntimeError as fault:
        raise InvalidInputError(
            f"llama.cpp cannot load {path}: the file is damaged, of a kind that this release "
            "does not know, or too large for the memory.",
            remedy="`tightfit models FILE` shows what is in it; make or fetch it again, or try "
            "a smaller --context or --parallel",
        ) from fault
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
        # Others join and cancelled ones leave between two batches: no long prompt may hold them.
        settings.n_batch = settings.n_ubatch = max(CPU_BATCH_TOKENS, slots)
    threads = choose_threads(request.threads)
    settings.cpuparams.n_threads = threads
    settings.cpuparams_batch.n_threads = threads
    settings.n_threads_http = 1
    settings.verbosity = -1
    settings.warmup = False  # reading the stop tokens does that
    settings.cache_ram_mib = 0  # prompts are kept in their slots, not copied to RAM beside them
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
    """As many as pay, within a share of the free memory."""
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
    """llama.cpp's own end tokens: those that it forbids when told to go on. Warms up as well."""
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
