"""The llama.cpp engine: GGUF files in a process of their own, several requests at once."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError
from tightfit.core.sampling import Sampling
from tightfit.data.grammar import read_grammar, write_gbnf
from tightfit.data.templates import Prompter, StopTextFilter
from tightfit.data.tokenizer import OVERLONG_STARTS
from tightfit.engines.llama_process import LlamaProcess, LlamaSettings
from tightfit.engines.open import EngineRequest, open_prompter
from tightfit.engines.protocol import (
    BaseAnswer,
    BaseEngine,
    EngineInfo,
    FinishReason,
    Listener,
    Request,
    Ticket,
    TokenLogprob,
    check_tokens,
    choose_context,
    name_gpus,
)
from tightfit.hardware.machine import read_machine
from tightfit.models.gguf import NOT_PARAMETERS, GgufHeader, LongArray, read_gguf_header

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


KV_VALUE_BYTES = 2
"""llama.cpp keeps keys and values in fp16 by default."""


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
    from gguf import LlamaFileType

    first = read_gguf_header(path)
    headers, count = [first], first.metadata.get("split.count", 1)
    # Parts are named NAME-00001-of-00003.gguf; llama.cpp is given the first and finds the rest.
    head, split, tail = path.name.partition("-00001-of-")
    if split and isinstance(count, int):
        names = (f"{head}-{number:05d}-of-{tail}" for number in range(2, min(count, 999) + 1))
        parts = (path.with_name(name) for name in names)
        headers += [read_gguf_header(part) for part in parts if part.is_file()]
    tensors = [tensor for header in headers for tensor in header.tensors]
    try:
        file_type = LlamaFileType(first.metadata.get("general.file_type")).name  # type: ignore[arg-type]
    except ValueError:
        file_type = "GGUF"
    embedding = next((t.shape for t in tensors if t.name == "token_embd.weight"), ())
    tokens = first.metadata.get("tokenizer.ggml.tokens")
    num_tokens = tokens.length if isinstance(tokens, LongArray) else None
    return LlamaFile(
        path=path,
        format=file_type.removeprefix("ALL_").removeprefix("MOSTLY_"),
        num_params=sum(t.num_elements for t in tensors if t.name not in NOT_PARAMETERS),
        weight_bytes=sum(t.num_bytes for t in tensors),
        kv_bytes_per_token=_kv_bytes_per_token(first),
        context=_read_int(first, "context_length"),
        num_vocabulary=embedding[1]
        if len(embedding) == 2
        else num_tokens or _read_int(first, "vocab_size") or 0,
    )


def _kv_bytes_per_token(header: GgufHeader) -> int:
    """Keys and values of every layer; a number per layer where the file gives one per layer."""
    num_layers = _read_int(header, "block_count") or 0

    def per_layer(key: str) -> list[int]:
        stated = _read(header, key)
        if isinstance(stated, tuple):
            return [int(one) for one in stated]
        return [stated] * num_layers if isinstance(stated, int) else []

    num_heads = per_layer("attention.head_count")
    kv_heads = per_layer("attention.head_count_kv") or num_heads
    width = (_read_int(header, "embedding_length") or 0) // max(1, max(num_heads, default=1))
    key = _read_int(header, "attention.key_length") or width
    value = _read_int(header, "attention.value_length") or width
    return KV_VALUE_BYTES * sum(kv_heads) * (key + value)


def _read(header: GgufHeader, key: str) -> object:
    return header.metadata.get(f"{header.metadata.get('general.architecture')}.{key}")


def _read_int(header: GgufHeader, key: str) -> int | None:
    stated = _read(header, key)
    return stated if isinstance(stated, int) and stated > 0 else None


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
    body: dict[str, Any] = {
        "prompt": list(prompt),
        "max_tokens": num_new_tokens,
        "samplers": _choose_samplers(sampling),
        "temperature": max(0.0, sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": len(prompt) + num_new_tokens,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": [list(pair) for pair in sampling.logit_bias],
        "seed": RANDOM_SEED if sampling.seed is None else sampling.seed % RANDOM_SEED,
        "ignore_eos": sampling.ignores_stop_tokens,
        "cache_prompt": True,
        "stream": True,
        "verbose": True,
        "return_tokens": True,
        "return_progress": True,
    }
    if sampling.top_logprobs is not None:
        # It takes 0 for none at all; one likeliest token too many costs nothing.
        body["logprobs"] = max(1, sampling.top_logprobs)
    if sampling.grammar is not None:
        body["grammar"] = write_gbnf(read_grammar(sampling.grammar))
    return body


def _choose_samplers(sampling: Sampling) -> list[str]:
    """Samplers that have an effect. At temperature 0 one token is left: none may follow."""
    is_penalized = sampling.repetition_penalty != 1.0 or sampling.counts_tokens
    chosen = ["penalties"] if is_penalized else []
    chosen.append("temperature")
    if sampling.temperature > 0:
        chosen += ["top_k"] * (sampling.top_k > 0)
        chosen += ["top_p"] * (sampling.top_p < 1)
        chosen += ["min_p"] * (sampling.min_p > 0)
    return chosen


# One request: llama.cpp's chunks to events.


class LlamaAnswer(BaseAnswer[StopTextFilter]):
    """An answer that one worker thread reads from llama.cpp.

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
        stop_ids: Sequence[int],
        max_new_tokens: int,
        forbidden: Sequence[int] = (),
    ) -> None:
        super().__init__(request, listener, stop_ids, StopTextFilter(request.sampling.stop))
        self._prompter = prompter
        self._max_new_tokens = max_new_tokens
        self._forbidden = forbidden
        self._reason: FinishReason | None = None

    def run(self, process: LlamaProcess) -> None:
        """Block until the answer has ended and the listener was called."""
        body = make_completion_body(
            self.request.prompt, self.request.sampling, num_new_tokens=self._max_new_tokens
        )
        # Control tokens have no text unless they are named here.
        token_name = self._prompter.tokenizer.token_name
        body["preserved_tokens"] = [token_name(token) for token in self.request.kept_control]
        # It holds an answer to a grammar by code points, and reads those of too many bytes too.
        body["logit_bias"] += [[token, False] for token in self._forbidden]
        try:
            if not self.is_cancelled:
                process.handle_completions(body, self._take)
        except Exception as error:  # whatever is raised belongs to this answer
            self.fail(error)
        if self._reason is None and self.is_cancelled:
            self._reason = FinishReason.CANCELLED
        if self._reason is None:
            self.fail(RuntimeError("llama.cpp ended an answer without a reason"))
        else:
            self.end(self._reason)

    def _take(self, chunk: dict[str, Any]) -> bool:
        """One chunk of the stream. True ends it."""
        try:
            return self._read(chunk)
        except Exception as error:
            self.fail(error)
            return True

    def _read(self, chunk: dict[str, Any]) -> bool:
        if "error" in chunk:
            raise _as_error(chunk["error"])
        if self.is_cancelled:
            return True
        progress = chunk.get("prompt_progress")
        if progress is not None:  # a progress report carries no token
            self.num_cached_tokens = int(progress.get("cache", 0))
            return False
        choice, state = chunk["choices"][0], chunk["__verbose"]
        tokens: list[int] = state["tokens"]
        num_hidden = int(state["tokens_predicted"]) - self.num_new_tokens - len(tokens)
        self.num_new_tokens = int(state["tokens_predicted"])
        if choice["finish_reason"] is not None:
            is_stop = choice["finish_reason"] == "stop"
            self._reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
            return False
        text: str = choice["text"]
        # SentencePiece puts a space before a first word, which tokenizers drop.
        if (
            self.mark_first_token()
            and text.startswith(" ")
            and not self._prompter.decode(tokens).startswith(" ")
        ):
            text = text[1:]
        is_end = any(token in self.stop_ids for token in tokens)
        if not is_end:
            logprobs = read_logprobs(choice.get("logprobs"), self.request.sampling.top_logprobs)
            named = self._name_tokens(tokens, text, num_hidden)
            self.show(self.text.push(text), named, logprobs)
        if is_end or self.text.is_stopped:
            self._reason = FinishReason.STOP
        return self._reason is not None

    def _name_tokens(self, tokens: list[int], text: str, num_hidden: int) -> list[int]:
        if num_hidden <= 0:
            return tokens
        guess = self._prompter.tokenizer.encode(text)
        fits = len(guess) == num_hidden + len(tokens) and guess[-1:] == tokens[-1:]
        return guess if fits else tokens


def read_logprobs(reported: Any, count: int | None) -> list[TokenLogprob]:
    """llama.cpp's entries for one chunk, with as many of the likeliest tokens as asked for."""
    if reported is None or count is None:
        return []
    return [
        TokenLogprob(
            token=int(entry["id"]),
            logprob=float(entry["logprob"]),
            top=tuple((int(t["id"]), float(t["logprob"])) for t in entry["top_logprobs"][:count]),
        )
        for entry in reported["content"]
    ]


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
SPARE_MEMORY_FRACTION = 0.25
"""Of the free RAM: what automatically chosen slots may take."""


def open_llama(request: EngineRequest, *, why: str) -> LlamaEngine:
    """Load a GGUF file. `request.device` is decided: `cpu`, `cuda` or `cuda:N`."""
    file = read_llama_file(request.artefact.path)
    context = choose_context(request.context, file.context)
    is_gpu = request.device != "cpu" or bool(request.hosts)
    # As many as are worthwhile, within a share of the free memory.
    room = read_machine().available_memory_bytes * SPARE_MEMORY_FRACTION
    most = int(room // max(1, file.kv_bytes_per_token * context))
    slots = request.slots or max(1, min(GPU_SLOTS if is_gpu else CPU_SLOTS, most))
    prompter = open_prompter(request)
    process = LlamaProcess(
        LlamaSettings(
            path=str(file.path),
            context=context,
            slots=slots,
            device=request.device,
            threads=request.threads,
            hosts=request.hosts,
        )
    )
    info = EngineInfo(
        engine="llama.cpp",
        version=process.facts.version,
        why=why,
        model=request.artefact.name,
        format=file.format,
        device=name_gpus(process.facts.num_gpus) if request.device == "cuda" else request.device,
        max_context=context,
        num_slots=slots,
        num_params=file.num_params,
        weight_bytes=file.weight_bytes,
        kv_bytes_per_token=file.kv_bytes_per_token,
        num_hosts=len(request.hosts),
    )
    return LlamaEngine(process, info=info, prompter=prompter, file=file)


class LlamaEngine(BaseEngine):
    """One GGUF file in a process, with as many worker threads as llama.cpp has slots."""

    def __init__(
        self, process: LlamaProcess, *, info: EngineInfo, prompter: Prompter, file: LlamaFile
    ) -> None:
        super().__init__(info, prompter, num_vocabulary=file.num_vocabulary)
        self.process = process
        self._stop_ids = (*prompter.stop_ids, *process.facts.stop_ids)
        self._waiting: queue.SimpleQueue[LlamaAnswer | None] = queue.SimpleQueue()
        self._running: set[LlamaAnswer] = set()
        self._workers = [
            threading.Thread(target=self._work, name=f"llama-{number}", daemon=True)
            for number in range(info.num_slots)
        ]
        for worker in self._workers:
            worker.start()
        atexit.register(self.close)

    def submit(self, request: Request, listener: Listener) -> Ticket:
        answer = LlamaAnswer(
            request,
            listener,
            prompter=self.prompter,
            stop_ids=self._stop_ids,
            max_new_tokens=self._check_request(request),
            forbidden=self._overlong_starts if request.sampling.grammar is not None else (),
        )
        with self._lock:
            self._check_open()
            self._running.add(answer)
            self._waiting.put(answer)
        return answer

    @cached_property
    def _overlong_starts(self) -> tuple[int, ...]:
        return self.prompter.tokenizer.find_lone_bytes(OVERLONG_STARTS)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        if not 0 < len(tokens) <= self.info.max_context:
            raise InvalidInputError(
                f"{len(tokens):,} tokens were given to score; 1 to "
                f"{self.info.max_context:,} are possible.",
                remedy="score the text in pieces, or allow more: --context N",
            )
        check_tokens(tokens, self.num_vocabulary)
        with self._lock:
            self._check_open()
        return self.process.logits(tokens)

    def tokenize(self, text: str) -> list[int]:
        with self._lock:
            self._check_open()
        return self.process.tokenize(text)

    def close(self) -> None:
        if self._set_closed():
            with self._lock:
                for answer in self._running:
                    answer.cancel()
            for _ in self._workers:
                self._waiting.put(None)
        if threading.current_thread() in self._workers or self.process.is_reader():
            return  # called by a listener: a thread cannot join itself
        for worker in self._workers:
            worker.join()
        self.process.close()
        atexit.unregister(self.close)

    def _work(self) -> None:
        """Answer one request after another; llama.cpp batches those of all workers."""
        while (answer := self._waiting.get()) is not None:
            answer.run(self.process)
            with self._lock:
                self._running.discard(answer)
