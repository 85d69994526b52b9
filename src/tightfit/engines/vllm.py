"""The vLLM engine, where vLLM is installed on a machine with GPUs.

Sources: vllm/engine/arg_utils.py (EngineArgs), vllm/sampling_params.py (SamplingParams),
vllm/lora/request.py (LoRARequest), release 0.32.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import InvalidInputError, SetupError, UserError, first_line
from tightfit.core.reading import read_json_file
from tightfit.core.sampling import Sampling
from tightfit.data.grammar import read_grammar, write_gbnf
from tightfit.data.templates import Prompter, TextStream
from tightfit.engines.open import VLLM_REMEDY, EngineRequest, open_prompter, read_gptq_bits
from tightfit.engines.protocol import (
    BaseAnswer,
    BaseEngine,
    EngineInfo,
    FinishReason,
    Listener,
    Request,
    Ticket,
    TokenLogprob,
    choose_context,
    name_gpus,
)
from tightfit.models.resolve import measure_weights
from tightfit.models.spec import ModelSpec
from tightfit.runtime.model_files import Artefact, ArtefactKind, read_compressed_format
from tightfit.runtime.resolve import resolve_model

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


DEFAULT_SLOTS = 256
"""vLLM's own `max_num_seqs` on most cards."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What `max_lora_rank` may be."""


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
        "dtype": "auto" if request.weights is None else request.weights.torch_name,
        "max_model_len": context,
        "max_num_seqs": request.slots or DEFAULT_SLOTS,
        "tensor_parallel_size": 1 if is_one else choose_parallel(num_gpus, spec),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
    }
    lora = None
    if artefact.kind is ArtefactKind.ADAPTER:
        rank = _allowed_rank(artefact)
        settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
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
    """Keyword arguments of `SamplingParams`, but for those that have types of vLLM's own.

    `output_kind` is added where it is called, and `grammar` becomes `structured_outputs`.

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
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "logprobs": sampling.top_logprobs,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignores_stop_tokens,
        "stop_token_ids": [] if sampling.ignores_stop_tokens else list(stop_ids),
        "detokenize": False,
        "grammar": None if sampling.grammar is None else write_gbnf(read_grammar(sampling.grammar)),
    }


def _allowed_rank(adapter: Artefact) -> int:
    path = adapter.path / "adapter_config.json"
    try:
        rank = int(read_json_file(path)["r"])
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


class VllmAnswer(BaseAnswer[TextStream]):
    """An answer whose tokens come from a task on vLLM's event loop."""

    def __init__(self, request: Request, listener: Listener, prompter: Prompter) -> None:
        text = TextStream(prompter, request.sampling.stop, request.kept_control)
        super().__init__(request, listener, prompter.stop_ids, text)
        self._lock = threading.Lock()
        self._end_task: Callable[[], object] | None = None

    def bind(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        with self._lock:
            self._end_task = lambda: loop.call_soon_threadsafe(task.cancel)
            if self.is_cancelled:
                task.cancel()

    def cancel(self) -> None:
        with self._lock, contextlib.suppress(RuntimeError):  # the loop may be gone
            self.is_cancelled = True
            if self._end_task is not None:
                self._end_task()

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
            self.fail(error)
        self.end(reason)

    def _take(self, output: Any) -> FinishReason | None:
        part = output.outputs[0]
        tokens = [int(token) for token in part.token_ids]
        self.num_cached_tokens = int(getattr(output, "num_cached_tokens", None) or 0)
        if tokens:
            self.mark_first_token()
        self.num_new_tokens += len(tokens)
        shown = [token for token in tokens if token not in self.stop_ids]
        count = self.request.sampling.top_logprobs
        logprobs = [] if count is None else read_logprobs(tokens, part.logprobs or (), count)
        self.show(self.text.push(shown), shown, logprobs[: len(shown)])
        if self.text.is_stopped or part.finish_reason == "stop":
            return FinishReason.STOP
        return FinishReason.LENGTH if part.finish_reason == "length" else None


def read_logprobs(
    tokens: Sequence[int], reported: Sequence[Mapping[int, Any]], count: int
) -> list[TokenLogprob]:
    """vLLM's entries: for each token a mapping of the likeliest and itself."""
    found = []
    for token, entries in zip(tokens, reported, strict=False):
        ranked = sorted(entries.items(), key=lambda entry: -entry[1].logprob)[:count]
        found.append(
            TokenLogprob(
                token=token,
                logprob=float(entries[token].logprob),
                top=tuple((int(one), float(entry.logprob)) for one, entry in ranked),
            )
        )
    return found


# The engine.

_KV_VALUE_BYTES = 2


def open_vllm(request: EngineRequest, *, why: str) -> VllmEngine:
    """Start vLLM on the artefact's folder; an adapter goes along with every request."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    try:
        import torch
        import vllm
    except ImportError as error:
        raise SetupError(
            f"vLLM cannot be used here: {first_line(error)}.", remedy=VLLM_REMEDY
        ) from error
    artefact = request.artefact
    folder = artefact.base or artefact.path
    spec = resolve_model(str(folder))
    context = choose_context(request.context, spec.max_positions)
    plan = plan_vllm(request, spec, num_gpus=torch.cuda.device_count(), context=context)
    device = name_gpus(plan.engine["tensor_parallel_size"])
    if plan.visible_devices is not None:
        device = f"cuda:{plan.visible_devices}"
    weights = "bf16" if request.weights is None else request.weights.value
    if artefact.kind is ArtefactKind.GPTQ:
        weights = f"gptq-{read_gptq_bits(artefact)}"
    elif artefact.kind is ArtefactKind.COMPRESSED:
        weights = read_compressed_format(artefact.path)
    layers = sum(b.num_layers for b in spec.blocks if b.kind == "decoder" and b.attends)
    info = EngineInfo(
        engine="vllm",
        version=str(vllm.__version__),
        why=why,
        model=artefact.name,
        format=weights,
        device=device,
        max_context=context,
        num_slots=plan.engine["max_num_seqs"],
        num_params=spec.num_params,
        weight_bytes=measure_weights(folder) or 0,
        kv_bytes_per_token=2 * layers * spec.num_kv_heads * spec.head_dim * _KV_VALUE_BYTES,
    )
    return VllmEngine(
        _Vllm(plan), info=info, prompter=open_prompter(request), num_vocabulary=spec.vocab_size
    )


class VllmEngine(BaseEngine):
    """vLLM's asynchronous engine on an event loop in a thread of its own."""

    def __init__(
        self, library: Any, *, info: EngineInfo, prompter: Prompter, num_vocabulary: int
    ) -> None:
        super().__init__(info, prompter, num_vocabulary=num_vocabulary)
        self._library = library
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            self._call(self._library.start)
        except Exception as error:
            self._stop_loop()
            raise SetupError(
                f"vLLM does not start with {info.model}: {first_line(error)}.",
                remedy="see its messages above; --engine transformers runs without it",
            ) from error

    def submit(self, request: Request, listener: Listener) -> Ticket:
        arguments = sampling_arguments(
            request.sampling,
            num_new_tokens=self._check_request(request),
            stop_ids=self.prompter.stop_ids,
        )
        answer = VllmAnswer(request, listener, self.prompter)
        with self._lock:
            self._check_open()
            number = f"tightfit-{next(self._numbers)}"
            self._loop.call_soon_threadsafe(self._begin, answer, number, arguments)
        return answer

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        raise UserError(
            f"vLLM does not compute logits of a text ({len(tokens)} tokens were given).",
            remedy="--engine transformers",
        )

    def close(self) -> None:
        if not self._set_closed():
            return
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result()
        self._call(self._library.stop)
        self._stop_loop()

    def _begin(self, answer: VllmAnswer, number: str, arguments: dict[str, Any]) -> None:
        stream = self._library.generate(answer.request.prompt, arguments, number)
        task = self._loop.create_task(answer.run(stream))
        answer.bind(self._loop, task)
        self._tasks.add(task)
        # One cancelled before it began has sent no event.
        task.add_done_callback(lambda _: answer.end(FinishReason.CANCELLED))
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
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        grammar = arguments["grammar"]
        arguments = {name: value for name, value in arguments.items() if name != "grammar"}
        if grammar is not None:
            arguments["structured_outputs"] = StructuredOutputsParams(grammar=grammar)
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
