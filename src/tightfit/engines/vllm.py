"""The vLLM engine, where vLLM is installed on a machine with GPUs.

Sources: vllm/engine/arg_utils.py (EngineArgs), vllm/sampling_params.py (SamplingParams),
vllm/lora/request.py (LoRARequest), release 0.32.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, SetupError, UserError
from tightfit.core.sampling import Sampling
from tightfit.data.prompter import Prompter, TextStream
from tightfit.engines.open import VLLM_REMEDY, EngineRequest, open_prompter
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
from tightfit.models.resolve import measure_weights, resolve_model
from tightfit.models.spec import ModelSpec
from tightfit.runtime.artefacts import Artefact, ArtefactKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


DEFAULT_SLOTS = 256
"""vLLM's own `max_num_seqs` on most cards."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What `max_lora_rank` may be."""
_DTYPES = {Dtype.FP32: "float32", Dtype.BF16: "bfloat16", Dtype.FP16: "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPlan:
    """vLLM's arguments, and the adapter that goes with every request."""

    engine: dict[str, Any]
    """Keyword arguments of `AsyncEngineArgs`."""
    lora: dict[str, Any] | None
    """Keyword arguments of `LoRARequest`."""
    visible_devices: str | None
    """For CUDA_VISIBLE_DEVICES: vLLM takes no number of a GPU. None: leave it as it is."""


def plan_vllm(request: EngineRequest, spec: ModelSpec, *, num_gpus: int, context: int) -> VllmPlan:
    """Pure but for an adapter's own config file, which says its rank."""
    artefact = request.artefact
    folder = artefact.base if artefact.kind is ArtefactKind.ADAPTER else artefact.path
    is_one = request.device.startswith("cuda:")
    settings: dict[str, Any] = {
        "model": str(folder),
        # Prompts go in and answers come out as tokens: the same tokenizer for every engine.
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "dtype": "auto" if request.weights is None else _DTYPES[request.weights],
        "max_model_len": context,
        "max_num_seqs": request.slots or DEFAULT_SLOTS,
        "tensor_parallel_size": 1 if is_one else choose_parallel(num_gpus, spec),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    lora = None
    if artefact.kind is ArtefactKind.ADAPTER:
        settings |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": _allowed_rank(artefact),
        }
        lora = {"lora_name": "tuned", "lora_int_id": 1, "lora_path": str(artefact.path)}
    return VllmPlan(
        engine=settings,
        lora=lora,
        visible_devices=request.device.partition(":")[2] if is_one else None,
    )


def choose_parallel(num_gpus: int, spec: ModelSpec) -> int:
    """The most GPUs over which heads and vocabulary can be shared out evenly."""
    return next(
        count
        for count in range(max(1, num_gpus), 0, -1)
        if spec.num_heads % count == 0
        and (spec.num_kv_heads % count == 0 or count % spec.num_kv_heads == 0)
    )


def sampling_arguments(
    sampling: Sampling, *, num_new_tokens: int, stop_ids: tuple[int, ...]
) -> dict[str, Any]:
    """Keyword arguments of `SamplingParams`, but for `output_kind`, which is an enum of vLLM's.

    Stop texts are found by us, from the tokens, as with the other engines.
    """
    is_greedy = sampling.temperature <= 0
    return {
        "max_tokens": num_new_tokens,
        "temperature": max(0.0, sampling.temperature),
        "top_p": 1.0 if is_greedy else sampling.top_p,
        "top_k": 0 if is_greedy else sampling.top_k,
        "min_p": 0.0 if is_greedy else sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignores_stop_tokens,
        "stop_token_ids": [] if sampling.ignores_stop_tokens else list(stop_ids),
        "detokenize": False,
    }


def _allowed_rank(adapter: Artefact) -> int:
    path = adapter.path / "adapter_config.json"
    try:
        rank = int(json.loads(path.read_bytes())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path} does not say the adapter's rank `r`.", remedy="--engine transformers"
        ) from error
    allowed = next((one for one in LORA_RANKS if one >= rank), None)
    if allowed is None:
        raise InvalidInputError(
            f"The adapter has rank {rank}; vLLM takes up to {LORA_RANKS[-1]}.",
            remedy="--engine transformers, or merge it first: tightfit merge",
        )
    return allowed


# One request: vLLM's outputs to events.


class VllmAnswer:
    """A ticket and the state of its answer."""

    def __init__(self, request: Request, listener: Listener, prompter: Prompter) -> None:
        self.request = request
        self._listener = listener
        self._text = TextStream(prompter, request.sampling.stop)
        self._stop_ids = frozenset(
            () if request.sampling.ignores_stop_tokens else prompter.stop_ids
        )
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._has_ended = False
        self._end: Callable[[], object] | None = None
        self._submitted_s = time.monotonic()
        self._first_token_s: float | None = None
        self._num_new = self._num_cached = 0
        self._pending: list[int] = []

    def bind(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        with self._lock:
            self._end = lambda: loop.call_soon_threadsafe(task.cancel)
            if self._is_cancelled:
                task.cancel()

    def cancel(self) -> None:
        with self._lock, contextlib.suppress(RuntimeError):  # the loop may be gone
            self._is_cancelled = True
            if self._end is not None:
                self._end()

    async def run(self, stream: Any) -> None:
        reason = FinishReason.CANCELLED
        try:
            async with contextlib.aclosing(stream) as outputs:  # leaving early aborts in vLLM
                async for output in outputs:
                    found = self._take(output)
                    if found is not None:
                        reason = found
                        break
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self._emit(Failed(error=error))
            return
        self._finish(reason)

    def end(self) -> None:
        """Called when the task is over: one cancelled before it began has sent no event."""
        if not self._has_ended:
            self._finish(FinishReason.CANCELLED)

    def _finish(self, reason: FinishReason) -> None:
        self._show(self._text.finish())
        self._emit(self._done(reason))

    def _emit(self, event: Event) -> None:
        """An error in a listener must not affect other requests."""
        self._has_ended = self._has_ended or not isinstance(event, Delta)
        with contextlib.suppress(Exception):
            self._listener(event)

    def _take(self, output: Any) -> FinishReason | None:
        part = output.outputs[0]
        tokens = [int(token) for token in part.token_ids]
        self._num_cached = int(getattr(output, "num_cached_tokens", None) or 0)
        if tokens and self._first_token_s is None:
            self._first_token_s = time.monotonic()
        self._num_new += len(tokens)
        shown = [token for token in tokens if token not in self._stop_ids]
        self._pending += shown
        self._show(self._text.push(shown))
        if self._text.is_stopped or part.finish_reason == "stop":
            return FinishReason.STOP
        return FinishReason.LENGTH if part.finish_reason == "length" else None

    def _show(self, text: str) -> None:
        if text:
            tokens, self._pending = tuple(self._pending), []
            self._emit(Delta(text=text, tokens=tokens))

    def _done(self, reason: FinishReason) -> Done:
        now = time.monotonic()
        return Done(
            reason=reason,
            text=self._text.text,
            num_prompt_tokens=len(self.request.prompt),
            num_new_tokens=self._num_new,
            num_cached_tokens=self._num_cached,
            submitted_s=self._submitted_s,
            first_token_s=now if self._first_token_s is None else self._first_token_s,
            finished_s=now,
        )


# The engine.

_KV_VALUE_BYTES = 2


def open_vllm(request: EngineRequest, *, why: str) -> VllmEngine:
    """Start vLLM on the artefact's folder; an adapter goes along with every request."""
    vllm = _import_vllm()
    artefact = request.artefact
    folder = artefact.base or artefact.path
    spec = resolve_model(str(folder))
    context = choose_context(request.context, spec.max_positions)
    plan = plan_vllm(request, spec, num_gpus=_count_gpus(), context=context)
    info = EngineInfo(
        engine="vllm",
        version=str(vllm.__version__),
        why=why,
        model=artefact.name,
        format=_name_format(request),
        device=_name_device(plan),
        max_context=context,
        num_slots=plan.engine["max_num_seqs"],
        num_params=spec.num_params,
        weight_bytes=measure_weights(folder) or 0,
        kv_bytes_per_token=_kv_bytes_per_token(spec),
    )
    return VllmEngine(
        _Vllm(plan), info=info, prompter=open_prompter(request), num_vocabulary=spec.vocab_size
    )


class VllmEngine:
    """vLLM's asynchronous engine on an event loop in a thread of its own."""

    def __init__(
        self, library: Any, *, info: EngineInfo, prompter: Prompter, num_vocabulary: int
    ) -> None:
        self._info = info
        self._prompter = prompter
        self._num_vocabulary = num_vocabulary
        self._library = library
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            self._call(self._library.start)
        except Exception as error:
            self._stop_loop()
            raise SetupError(
                f"vLLM does not start with {info.model}: {_first_line(error)}.",
                remedy="see its messages above; --engine transformers runs without it",
            ) from error

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def prompter(self) -> Prompter:
        return self._prompter

    def submit(self, request: Request, listener: Listener) -> Ticket:
        room = check_request(
            request, max_context=self._info.max_context, num_vocabulary=self._num_vocabulary
        )
        arguments = sampling_arguments(
            request.sampling, num_new_tokens=room, stop_ids=self._prompter.stop_ids
        )
        answer = VllmAnswer(request, listener, self._prompter)
        with self._lock:
            if self._is_closed:
                raise UserError(f"{self._info.model} was closed.", remedy="open it again")
            number = f"tightfit-{next(self._numbers)}"
            self._loop.call_soon_threadsafe(self._begin, answer, number, arguments)
        return answer

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        raise UserError(
            f"vLLM does not compute logits of a text ({len(tokens)} tokens were given).",
            remedy="--engine transformers",
        )

    def tokenize(self, text: str) -> list[int]:
        """vLLM runs without a tokenizer here: this is the artefact's own."""
        return self._prompter.tokenizer.encode(text)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._call(self._library.stop)
        self._stop_loop()

    def _begin(self, answer: VllmAnswer, number: str, arguments: dict[str, Any]) -> None:
        stream = self._library.generate(answer.request.prompt, arguments, number)
        task = self._loop.create_task(answer.run(stream))
        answer.bind(self._loop, task)
        self._tasks.add(task)
        task.add_done_callback(lambda _: answer.end())
        task.add_done_callback(self._tasks.discard)

    async def _end_all(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self, work: Callable[[], None]) -> None:
        """On the loop's thread, because vLLM ties itself to the loop that it starts in."""

        async def run() -> None:
            work()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Vllm:
    """The few calls of vLLM's that are used, in one place."""

    def __init__(self, plan: VllmPlan) -> None:
        self._plan = plan
        self._engine: Any = None
        self._lora: Any = None

    def start(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        with _set_visible_devices(self._plan.visible_devices):
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._plan.engine))
        if self._plan.lora is not None:
            from vllm.lora.request import LoRARequest

            self._lora = LoRARequest(**self._plan.lora)

    def generate(self, prompt: Sequence[int], arguments: dict[str, Any], number: str) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return self._engine.generate(
            {"prompt_token_ids": list(prompt)},
            SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA),
            number,
            lora_request=self._lora,
        )

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


@contextlib.contextmanager
def _set_visible_devices(devices: str | None) -> Iterator[None]:
    """CUDA_VISIBLE_DEVICES for the processes that vLLM starts."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None:
        names = before.split(",") if before else []
        at = int(devices)
        os.environ["CUDA_VISIBLE_DEVICES"] = names[at] if at < len(names) else devices
    try:
        yield
    finally:
        if devices is not None and before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        elif before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _import_vllm() -> Any:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    try:
        import vllm
    except ImportError as error:
        raise SetupError(
            f"vLLM cannot be used here: {_first_line(error)}.", remedy=VLLM_REMEDY
        ) from error
    return vllm


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _name_device(plan: VllmPlan) -> str:
    if plan.visible_devices is not None:
        return f"cuda:{plan.visible_devices}"
    count = int(plan.engine["tensor_parallel_size"])
    return "cuda:0" if count == 1 else f"cuda:0-{count - 1}"


def _name_format(request: EngineRequest) -> str:
    from tightfit.engines.open import read_gptq_bits

    artefact: Artefact = request.artefact
    if artefact.kind is ArtefactKind.GPTQ:
        return f"gptq-{read_gptq_bits(artefact)}"
    return "bf16" if request.weights is None else request.weights.value


def _kv_bytes_per_token(spec: ModelSpec) -> int:
    layers = sum(block.num_layers for block in spec.blocks if block.kind == "decoder")
    return 2 * layers * spec.num_kv_heads * spec.head_dim * _KV_VALUE_BYTES


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")[:300]
