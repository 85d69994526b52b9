"""Tiny models of many families, and requests to a batch of them: what each answer was."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tightfit.core.sampling import Sampling
from tightfit.data.templates import Prompter
from tightfit.engines.protocol import Delta, Done, Event, Failed, Listener, Request
from tightfit.engines.transformers.batch import ContinuousBatcher, RunningAnswer
from tightfit.engines.transformers.rows import BatchRows


class Collector:
    """Events of many requests, and a way to wait for all of them."""

    def __init__(self) -> None:
        self.events: dict[int, list[Event]] = {}
        self._ended = threading.Semaphore(0)
        self._num_asked = 0

    def listener(self, number: int, also: Callable[[Event], None] | None = None) -> Listener:
        self.events[number] = []
        self._num_asked += 1

        def listen(event: Event) -> None:
            self.events[number].append(event)
            if also is not None:
                also(event)
            if not isinstance(event, Delta):
                self._ended.release()

        return listen

    def wait(self, seconds: float = 60.0) -> None:
        for _ in range(self._num_asked):
            assert self._ended.acquire(timeout=seconds), self.events
        self._num_asked = 0

    def done(self, number: int) -> Done:
        last = self.events[number][-1]
        if isinstance(last, Failed):
            raise last.error
        assert isinstance(last, Done)
        return last

    def error(self, number: int) -> Exception:
        last = self.events[number][-1]
        assert isinstance(last, Failed), last
        return last.error

    def tokens(self, number: int) -> list[int]:
        deltas = [event for event in self.events[number] if isinstance(event, Delta)]
        return [token for delta in deltas for token in delta.tokens]

    def text(self, number: int) -> str:
        return "".join(event.text for event in self.events[number] if isinstance(event, Delta))


def generate(model: Any, prompt: tuple[int, ...], sampling: Sampling, stops: set[int]) -> list[int]:
    """What transformers' own generate answers to one prompt alone, without the stop token."""
    import torch
    import transformers

    library: Any = transformers
    settings = library.GenerationConfig(
        do_sample=False,
        max_new_tokens=sampling.max_new_tokens,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=sorted(stops) or None,
        pad_token_id=3,
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
    )
    is_pair = model.config.is_encoder_decoder
    given = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            given, attention_mask=torch.ones_like(given), generation_config=settings
        )
    answer: list[int] = output[0, 1 if is_pair else len(prompt) :].tolist()
    end = next((place for place, token in enumerate(answer) if token in stops), len(answer))
    return answer[:end]


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 382,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
_NARROW = {"sliding_window": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", _NARROW),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", _NARROW | {"head_dim": 8}),
    "gemma3": ("Gemma3Text", _NARROW | {"head_dim": 8, "sliding_window_pattern": 2}),
    "gpt_oss": (
        "GptOss",
        _NARROW
        | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    ),
    "phi3": ("Phi3", _NARROW),
    "gpt2": ("GPT2", {"n_inner": 64, "num_key_value_heads": None}),
    "bloom": ("Bloom", {"num_key_value_heads": None}),
    "falcon": ("Falcon", {"alibi": False, "num_key_value_heads": None}),
    "falcon alibi": ("Falcon", {"alibi": True, "num_key_value_heads": None}),
    "t5": ("T5", {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}),
    "bart": (
        "Bart",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "init_std": 0.4,
            "decoder_start_token_id": 0,
            "forced_eos_token_id": None,
        },
    ),
}


def make_model(family: str) -> Any:
    name, changes = FAMILIES[family]
    settings = {key: value for key, value in (SMALL | changes).items() if value is not None}
    if name in ("T5", "Bart"):
        settings = {k: v for k, v in settings.items() if k not in SMALL or k.endswith("token_id")}
        settings["vocab_size"] = 382
    if name == "T5":
        settings |= {"decoder_start_token_id": 3, "initializer_factor": 3.0}
    import transformers

    library: Any = transformers
    config = getattr(library, f"{name}Config")(**settings)
    if name in ("Gemma2", "GptOss"):
        config._attn_implementation = "eager"  # torch's own attention has no softcap and no sinks
    kind = "ForConditionalGeneration" if config.is_encoder_decoder else "ForCausalLM"
    kind = "LMHeadModel" if name == "GPT2" else kind
    library.set_seed(7)
    model = getattr(library, name.removesuffix("Text") + kind)(config)
    model.generation_config.forced_eos_token_id = None
    if name == "GptOss":
        for layer in model.model.layers:
            library.set_seed(8)
            layer.self_attn.sinks.data.normal_(0, 2)
    return model.eval()


def make_prompts(count: int, *, longest: int = 60, seed: int = 1) -> list[tuple[int, ...]]:
    source = random.Random(seed)
    return [
        tuple(source.randrange(4, 380) for _ in range(source.randrange(1, longest)))
        for _ in range(count)
    ]


@contextmanager
def open_batch(
    rows: BatchRows, *, num_slots: int = 4, overlaps: bool = False
) -> Iterator[ContinuousBatcher]:
    batch = ContinuousBatcher(rows, num_slots=num_slots, overlaps=overlaps, prefill_tokens=128)
    try:
        yield batch
    finally:
        batch.close()


def ask(
    batch: ContinuousBatcher, prompter: Prompter, requests: list[Request], **also: Any
) -> tuple[Collector, list[RunningAnswer]]:
    collector = Collector()
    answers = [
        RunningAnswer(request, collector.listener(n, **also), prompter, max_context=512)
        for n, request in enumerate(requests)
    ]
    for answer in answers:
        batch.add(answer)
    return collector, answers
