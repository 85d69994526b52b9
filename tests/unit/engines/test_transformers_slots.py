"""Rows in slots, against transformers' generate on each prompt alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_batches import ask, generate, make_model, make_prompts, open_batch
from small_models import make_tokenizer
from tightfit.core.sampling import Sampling
from tightfit.data.templates import Prompter
from tightfit.data.tokenizer import load_tokenizer
from tightfit.engines.protocol import Request
from tightfit.engines.transformers.cuda_graphs import SlotRows, supports_slots
from tightfit.runtime.attention import GROUPED_DECODE

SLOTTED = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "gpt2")
OTHERS = ("bloom", "falcon", "gemma2", "t5", "bart")


@pytest.fixture(scope="module")
def prompter(tmp_path_factory: pytest.TempPathFactory) -> Prompter:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Prompter(load_tokenizer(folder))


@pytest.mark.parametrize("family", SLOTTED)
def test_a_changing_batch_answers_as_each_prompt_alone(family: str, prompter: Prompter) -> None:
    model = make_model(family)
    assert supports_slots(model)
    requests = [
        Request(prompt=prompt, sampling=Sampling(max_new_tokens=3 + 7 * (n % 5)))
        for n, prompt in enumerate(make_prompts(14))
    ]
    stops = set(prompter.stop_ids)
    expected = [generate(model, r.prompt, r.sampling, stops) for r in requests]

    with open_batch(SlotRows(model, most_rows=4)) as batch:
        collector, _ = ask(batch, prompter, requests)
        collector.wait()

    assert [collector.tokens(n) for n in range(len(requests))] == expected
    assert model.config._attn_implementation == GROUPED_DECODE


@pytest.mark.parametrize("family", OTHERS)
def test_families_that_make_their_own_masks_have_none(family: str) -> None:
    assert not supports_slots(make_model(family))


def test_long_rows_move_the_buffers_and_keep_what_they_held(prompter: Prompter) -> None:
    model = make_model("llama")
    lengths = (20, 300, 5, 280)
    requests = [
        Request(
            prompt=tuple(4 + (n * 37 + place * 11) % 370 for place in range(length)),
            sampling=Sampling(max_new_tokens=30, ignores_stop_tokens=True),
        )
        for n, length in enumerate(lengths)
    ]
    expected = [generate(model, r.prompt, r.sampling, set()) for r in requests]
    rows: Any = SlotRows(model, most_rows=2)

    with open_batch(rows, num_slots=2) as batch:
        collector, _ = ask(batch, prompter, requests)
        collector.wait()

    assert [collector.tokens(n) for n in range(4)] == expected
    assert rows._cache.num_columns == 512


def test_folded_heads_attend_as_repeated_ones() -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from tightfit.runtime.attention import grouped_decode_attention

    torch.manual_seed(0)
    query = torch.randn(3, 8, 1, 16)
    key, value = torch.randn(2, 3, 2, 40, 16)
    mask = torch.arange(40)[None, :] <= torch.tensor([5, 20, 39])[:, None]
    module: Any = torch.nn.Module()
    module.num_key_value_groups = 4
    module.is_causal = True
    attend: Any = sdpa_attention_forward

    expected, _ = attend(module, query, key, value, mask[:, None, None], scaling=0.3)
    found, _ = grouped_decode_attention(module, query, key, value, mask[:, None, None], scaling=0.3)

    torch.testing.assert_close(found, expected)
