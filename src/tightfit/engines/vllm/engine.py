"""vLLM behind the engine protocol, where it is installed on a GPU machine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import EnvironmentFaultError, UserError
from tightfit.data.prompter import Prompter
from tightfit.engines.choose import VLLM_REMEDY
from tightfit.engines.context import check_request, choose_context
from tightfit.engines.open import EngineRequest, open_prompter
from tightfit.engines.protocol import EngineInfo, Listener, Request, Ticket
from tightfit.engines.vllm.answer import VllmAnswer
from tightfit.engines.vllm.arguments import VllmPlan, plan_vllm, sampling_arguments
from tightfit.models.resolve import measure_weights, resolve_model
from tightfit.runtime.artefacts import Artefact, ArtefactKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tightfit.models.spec import ModelSpec

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
        except Exception as fault:
            self._stop_loop()
            raise EnvironmentFaultError(
                f"vLLM does not start with {info.model}: {_first_line(fault)}.",
                remedy="see its messages above; --engine transformers runs without it",
            ) from fault

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
                raise UserError(
                    f"{self._info.model} was closed and answers no more.", remedy="open it again"
                )
            number = f"tightfit-{next(self._numbers)}"
            self._loop.call_soon_threadsafe(self._begin, answer, number, arguments)
        return answer

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        raise UserError(
            f"vLLM does not give the scores of a text ({len(tokens)} tokens were to be scored).",
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

        with _visible(self._plan.visible_devices):
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
def _visible(devices: str | None) -> Iterator[None]:
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
    except ImportError as fault:
        raise EnvironmentFaultError(
            f"vLLM cannot be used here: {_first_line(fault)}.", remedy=VLLM_REMEDY
        ) from fault
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
    from tightfit.engines.installed import read_gptq_bits

    artefact: Artefact = request.artefact
    if artefact.kind is ArtefactKind.GPTQ:
        return f"gptq-{read_gptq_bits(artefact)}"
    return "bf16" if request.weights is None else request.weights.value


def _kv_bytes_per_token(spec: ModelSpec) -> int:
    layers = sum(block.num_layers for block in spec.blocks if block.kind == "decoder")
    return 2 * layers * spec.num_kv_heads * spec.head_dim * _KV_VALUE_BYTES


def _first_line(fault: BaseException) -> str:
    lines = str(fault).strip().splitlines() or [type(fault).__name__]
    return lines[0].rstrip(".")[:300]
