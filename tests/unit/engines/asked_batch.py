"""Tools for tests that ask an engine or a batch: collect what becomes of requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tightfit.core.sampling import Sampling
from tightfit.engines.protocol import Delta, Done, Event, Failed, Listener


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

    def fault(self, number: int) -> Exception:
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
