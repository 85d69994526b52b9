"""Greedy answers to many prompts, in batches of like length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightfit.runtime.devices import is_out_of_memory

if TYPE_CHECKING:
    import torch

Watch = Callable[[int, int], None]
"""Told how many are done, and of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """How to answer."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    batch: int = 16


def generate_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    request: GenerateRequest,
    watch: Watch | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt, up to and without the stop token.

    Padding is on the left, so that every prompt ends where its answer begins. A batch
    that runs out of memory is halved and tried again.
    """
    model.eval()
    order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
    answers: list[list[int]] = [[] for _ in prompts]
    size, done = request.batch, 0
    while done < len(order):
        places = order[done : done + size]
        try:
            found = _generate([prompts[place] for place in places], model, request)
        except RuntimeError as fault:
            if size == 1 or not is_out_of_memory(fault):
                raise
            size = (size + 1) // 2
            _free_memory()
            continue
        for place, answer in zip(places, found, strict=True):
            answers[place] = answer
        done += len(places)
        if watch is not None:
            watch(done, len(order))
    return answers


def _generate(
    prompts: Sequence[Sequence[int]], model: Any, request: GenerateRequest
) -> list[list[int]]:
    import torch

    inputs, mask = _pad_left(prompts, request.pad_id, model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=inputs, attention_mask=mask, generation_config=_greedy(model, request)
        )
    # An encoder-decoder's output begins with its own start token instead of the prompt.
    first = 1 if model.config.is_encoder_decoder else inputs.shape[1]
    stops = set(request.stop_ids)
    return [_until_stop(row, stops) for row in output[:, first:].tolist()]


def _greedy(model: Any, request: GenerateRequest) -> Any:
    """Plain greedy search, whatever sampling or penalties the model's own config asks for."""
    import transformers

    own = model.generation_config
    settings: Any = transformers.GenerationConfig
    return settings(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        use_cache=True,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=list(request.stop_ids),
        pad_token_id=request.pad_id,
        bos_token_id=getattr(own, "bos_token_id", None),
        decoder_start_token_id=getattr(own, "decoder_start_token_id", None),
    )


def _pad_left(
    prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    longest = max(map(len, prompts))
    tokens = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _until_stop(tokens: list[int], stops: set[int]) -> list[int]:
    end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def _free_memory() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
