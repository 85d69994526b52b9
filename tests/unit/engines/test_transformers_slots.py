"""Rows in slots, against transformers' generate on each prompt alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_batches import ask, generate, make_model, make_prompts, open_batch
from small_models import make_tokenizer
from tightfit.core.sampling import Sampling
from tightfit.data.templates import Prompter
from tightfit.data.tokenizer import load_tokenizer
from tightfit.engines.protocol import Request
from tightfit.engines.transformers.cuda_graphs import SlotRows, supports_slots

SLOTTED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "phi3", "gpt2")
OTHERS = ("bloom", "falcon", "t5", "bart")


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

    with open_batch(SlotRows(model, most_rows=4), overlaps=True) as batch:
        collector, _ = ask(batch, prompter, requests)
        collector.wait()

    assert [collector.tokens(n) for n in range(len(requests))] == expected


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


def test_draws_do_not_depend_on_the_next_step_being_launched_early(prompter: Prompter) -> None:
    model = make_model("llama")
    requests = [
        Request(
            prompt=prompt,
            sampling=Sampling(
                max_new_tokens=2 + 5 * (n % 4), temperature=1.0, seed=n, repetition_penalty=1.2
            ),
        )
        for n, prompt in enumerate(make_prompts(9))
    ]
    found = []
    for overlaps in (False, True):
        with open_batch(SlotRows(model, most_rows=3), num_slots=3, overlaps=overlaps) as batch:
            collector, _ = ask(batch, prompter, requests)
            collector.wait()
        found.append([collector.tokens(n) for n in range(len(requests))])
    assert found[0] == found[1]
