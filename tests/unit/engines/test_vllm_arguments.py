"""vLLM's arguments by its own names, and the engine over a stand-in for its calls."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from small_models import make_tokenizer
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, SetupError, UserError
from tightfit.core.sampling import Sampling
from tightfit.data.templates import Prompter
from tightfit.data.tokenizer import load_tokenizer
from tightfit.engines.open import EngineRequest
from tightfit.engines.protocol import (
    Delta,
    Done,
    EngineInfo,
    Event,
    FinishReason,
    Request,
    answer,
    answer_all,
    stream,
)
from tightfit.engines.vllm import VllmEngine, open_vllm, plan_vllm, sampling_arguments
from tightfit.models.config import read_config
from tightfit.models.spec import ModelSpec
from tightfit.runtime.model_files import Artefact, ArtefactKind

ENGINE_ARGS = {
    "model", "tokenizer", "skip_tokenizer_init", "trust_remote_code", "dtype", "max_model_len",
    "max_num_seqs", "tensor_parallel_size", "enable_prefix_caching", "disable_log_stats", "seed",
    "quantization", "gpu_memory_utilization", "enable_lora", "max_loras", "max_lora_rank",
}  # fmt: skip
"""Fields of vLLM's EngineArgs that we may use. Source: docs.vllm.ai, Engine Arguments."""
SAMPLING_PARAMS = {
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
    "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens",
    "logprobs", "logit_bias", "detokenize", "skip_special_tokens", "output_kind",
}  # fmt: skip
"""Fields of vLLM's SamplingParams. Source: docs.vllm.ai, Sampling Parameters."""


def spec(num_heads: int = 32, num_kv_heads: int = 8) -> ModelSpec:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
    }
    return read_config(config, name="it", source="test")


def asked(kind: ArtefactKind = ArtefactKind.MODEL, **changes: Any) -> EngineRequest:
    path = changes.pop("path", Path("tuned"))
    artefact = Artefact(name="it", kind=kind, path=path, base=Path("base"), tokenizer=path)
    return EngineRequest(artefact=artefact, **changes)


def plan(request: EngineRequest, *, num_gpus: int = 1, model: ModelSpec | None = None) -> Any:
    return plan_vllm(request, model or spec(), num_gpus=num_gpus, context=2048)


def test_every_name_is_one_of_vllms(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 12}', encoding="utf-8")
    for request in (asked(), asked(ArtefactKind.ADAPTER, path=tmp_path)):
        assert set(plan(request).engine) <= ENGINE_ARGS
    arguments = sampling_arguments(Sampling(), num_new_tokens=4, stop_ids=(2,))
    assert set(arguments) - {"grammar"} <= SAMPLING_PARAMS


def test_a_plain_model() -> None:
    made = plan(asked(weights=Dtype.BF16, slots=16, device="cuda"), num_gpus=4)
    assert made.engine["model"] == "tuned"
    assert made.engine["dtype"] == "bfloat16"
    assert made.engine["max_model_len"] == 2048
    assert made.engine["max_num_seqs"] == 16
    assert made.engine["tensor_parallel_size"] == 4
    assert made.engine["trust_remote_code"] is False
    assert made.lora is None
    assert made.visible_devices is None


@pytest.mark.parametrize(
    ("heads", "kv_heads", "gpus", "parallel"),
    [(32, 8, 8, 8), (32, 8, 3, 2), (28, 4, 8, 4), (9, 3, 4, 3), (32, 8, 16, 16), (71, 1, 2, 1)],
)
def test_heads_are_shared_out_evenly(heads: int, kv_heads: int, gpus: int, parallel: int) -> None:
    """vLLM wants heads divisible by the GPUs, and key heads one way or the other."""
    made = plan(asked(device="cuda"), num_gpus=gpus, model=spec(heads, kv_heads))
    assert made.engine["tensor_parallel_size"] == parallel


def test_one_gpu_by_number_is_made_the_only_visible_one() -> None:
    made = plan(asked(device="cuda:2"), num_gpus=4)
    assert made.visible_devices == "2"
    assert made.engine["tensor_parallel_size"] == 1


def test_an_adapter_goes_along_with_its_base(tmp_path: Path) -> None:
    for rank, allowed in ((4, 8), (16, 16), (17, 32), (512, 512)):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}), encoding="utf-8")
        made = plan(asked(ArtefactKind.ADAPTER, path=tmp_path))
        assert made.engine["model"] == "base"
        assert made.engine["enable_lora"] is True
        assert made.engine["max_lora_rank"] == allowed
        assert made.lora == {"lora_name": "tuned", "lora_int_id": 1, "lora_path": str(tmp_path)}
    for text in ('{"r": 1000}', "{}", "not json"):
        (tmp_path / "adapter_config.json").write_text(text, encoding="utf-8")
        with pytest.raises(InvalidInputError):
            plan(asked(ArtefactKind.ADAPTER, path=tmp_path))


def test_a_gptq_folder_says_itself_how_it_is_packed() -> None:
    """Naming `gptq` would keep vLLM from its faster kernels for the same files."""
    assert "quantization" not in plan(asked(ArtefactKind.GPTQ)).engine


def test_sampling_settings() -> None:
    hot = Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=5,
        stop=("x",),
    )
    made = sampling_arguments(hot, num_new_tokens=9, stop_ids=(2, 3))
    assert made["max_tokens"] == 9
    assert (made["temperature"], made["top_p"], made["top_k"], made["min_p"]) == (
        0.7,
        0.9,
        40,
        0.05,
    )
    assert (made["repetition_penalty"], made["seed"]) == (1.1, 5)
    assert made["stop_token_ids"] == [2, 3]
    assert made["detokenize"] is False
    cold = sampling_arguments(
        Sampling(top_p=0.5, top_k=3, ignores_stop_tokens=True), num_new_tokens=1, stop_ids=(2,)
    )
    assert (cold["temperature"], cold["top_p"], cold["top_k"]) == (0.0, 1.0, 0)
    assert (cold["ignore_eos"], cold["stop_token_ids"]) == (True, [])


def test_without_vllm_it_says_how_to_get_it() -> None:
    with pytest.raises(SetupError, match="vLLM") as caught:
        open_vllm(asked(), why="")
    assert "environment of its own" in caught.value.remedy


class StandIn:
    """Counts up from the prompt's last token, one at a time, until told to end or 2 comes."""

    def __init__(self) -> None:
        self.num_open = 0
        self.is_stopped = False

    def start(self) -> None:
        asyncio.get_running_loop()  # vLLM wants to be started on its loop

    def stop(self) -> None:
        self.is_stopped = True

    async def generate(
        self, prompt: Sequence[int], arguments: dict[str, Any], number: str
    ) -> AsyncIterator[Any]:
        assert number.startswith("tightfit-")
        self.num_open += 1
        try:
            for step in range(1, arguments["max_tokens"] + 1):
                await asyncio.sleep(0)
                token = prompt[-1] + step if prompt[-1] + step < 300 else 2
                is_end = token in arguments["stop_token_ids"]
                is_last = step == arguments["max_tokens"]
                finish = "stop" if is_end else "length" if is_last else None
                part = SimpleNamespace(token_ids=[token], finish_reason=finish)
                yield SimpleNamespace(outputs=[part], num_cached_tokens=1)
                if finish:
                    return
        finally:
            self.num_open -= 1


@pytest.fixture
def prompter(tmp_path: Path) -> Prompter:
    make_tokenizer(tmp_path)
    return Prompter(load_tokenizer(tmp_path))


def make_engine(library: Any, prompter: Prompter) -> VllmEngine:
    info = EngineInfo(
        engine="vllm", version="0", why="", model="it", format="bf16", device="cuda:0",
        max_context=512, num_slots=4, num_params=1, weight_bytes=1, kv_bytes_per_token=1,
    )  # fmt: skip
    return VllmEngine(library, info=info, prompter=prompter, num_vocabulary=400)


def test_the_engine_answers_stops_and_closes(prompter: Prompter) -> None:
    library = StandIn()
    engine = make_engine(library, prompter)
    done = answer(engine, Request(prompt=(60, 70), sampling=Sampling(max_new_tokens=5)))
    assert done.text == prompter.decode(range(71, 76))
    assert (done.reason, done.num_new_tokens) == (FinishReason.LENGTH, 5)
    assert (done.num_prompt_tokens, done.num_cached_tokens) == (2, 1)

    ended = answer(engine, Request(prompt=(297,), sampling=Sampling(max_new_tokens=50)))
    assert ended.text == prompter.decode([298, 299])
    assert (ended.reason, ended.num_new_tokens) == (FinishReason.STOP, 3)

    whole = prompter.decode(range(41, 61))
    stop = whole[7:9]
    cut = answer(engine, Request(prompt=(40,), sampling=Sampling(max_new_tokens=20, stop=(stop,))))
    assert cut.text == whole[: whole.index(stop)]
    assert cut.reason is FinishReason.STOP

    many = [Request(prompt=(n,), sampling=Sampling(max_new_tokens=7)) for n in range(30, 60)]
    ends = dict(answer_all(engine, many))
    texts = [end.text for _, end in sorted(ends.items()) if isinstance(end, Done)]
    assert texts == [prompter.decode(range(n + 1, n + 8)) for n in range(30, 60)]

    with pytest.raises(UserError, match="logits"):
        engine.logits((5,))
    with pytest.raises(InvalidInputError):
        engine.submit(Request(prompt=(5,) * 512), lambda _: None)
    engine.close()
    engine.close()
    assert library.is_stopped
    assert library.num_open == 0
    with pytest.raises(UserError, match="closed"):
        engine.submit(Request(prompt=(5,)), lambda _: None)


def test_cancelling_and_closing_end_what_runs(prompter: Prompter) -> None:
    class Slow(StandIn):
        async def generate(self, *_: object) -> AsyncIterator[Any]:
            self.num_open += 1
            try:
                while True:
                    part = SimpleNamespace(token_ids=[50], finish_reason=None)
                    yield SimpleNamespace(outputs=[part], num_cached_tokens=None)
                    await asyncio.sleep(0.001)
            finally:
                self.num_open -= 1

    library = Slow()
    engine = make_engine(library, prompter)
    pieces = stream(engine, Request(prompt=(9,)))
    assert isinstance(next(iter(pieces)), Delta)
    pieces.close()  # type: ignore[attr-defined]
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for _ in range(3):
        engine.submit(Request(prompt=(9,)), events.put)
    early = engine.submit(Request(prompt=(9,)), events.put)
    early.cancel()
    engine.close()
    found = [events.get_nowait() for _ in range(events.qsize())]
    ends = [event for event in found if isinstance(event, Done)]
    assert [end.reason for end in ends] == [FinishReason.CANCELLED] * 4
    assert library.num_open == 0


def test_a_failed_start_is_one_sentence(prompter: Prompter) -> None:
    class Broken(StandIn):
        def start(self) -> None:
            raise ValueError("No available memory for the cache blocks.\nTraceback ...")

    with pytest.raises(SetupError, match="No available memory for the cache blocks"):
        make_engine(Broken(), prompter)
