"""Rows that come and go in one batch, against transformers' generate on each prompt alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_batches import FAMILIES, Collector, ask, generate, make_model, make_prompts, open_batch
from small_models import make_tokenizer
from tightfit.core.errors import DoesNotFitError, InvalidInputError
from tightfit.core.sampling import Sampling
from tightfit.data.templates import Prompter
from tightfit.data.tokenizer import load_tokenizer
from tightfit.engines.protocol import Event, FinishReason, Request
from tightfit.engines.transformers.batch import (
    RunningAnswer,
    choose_tokens,
    draw_uniform,
)
from tightfit.engines.transformers.engine import kv_bytes_per_token, open_rows
from tightfit.engines.transformers.rows import Joined


@pytest.fixture(scope="module")
def prompter(tmp_path_factory: pytest.TempPathFactory) -> Prompter:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Prompter(load_tokenizer(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changing_batch_answers_as_each_prompt_alone(family: str, prompter: Prompter) -> None:
    model = make_model(family)
    prompts = make_prompts(14)
    requests = [
        Request(prompt=prompt, sampling=Sampling(max_new_tokens=3 + 7 * (n % 5)))
        for n, prompt in enumerate(prompts)
    ]
    stops = set(prompter.stop_ids)
    expected = [generate(model, r.prompt, r.sampling, stops) for r in requests]

    with open_batch(open_rows(model, most_rows=4)) as batch:
        collector, _ = ask(batch, prompter, requests)
        collector.wait()

    found = [collector.tokens(n) for n in range(len(requests))]
    assert found == expected
    # Greedy answers of a random model can fall into a rut; these must tell prompts apart.
    assert len({tuple(answer) for answer in found}) > 8
    assert [collector.done(n).num_prompt_tokens for n in range(14)] == [len(p) for p in prompts]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("t5", "bart")])
def test_bytes_of_a_token_are_those_that_the_cache_holds(family: str) -> None:
    model = make_model(family)
    with torch.inference_mode():
        kept = model(input_ids=torch.arange(4, 14)[None], use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers)

    assert kv_bytes_per_token(model) * 10 == held


def test_repetition_penalty_is_transformers_own(prompter: Prompter) -> None:
    model = make_model("llama")
    requests = [
        Request(
            prompt=prompt,
            sampling=Sampling(max_new_tokens=20, repetition_penalty=1.0 + 0.4 * (n % 3)),
        )
        for n, prompt in enumerate(make_prompts(6))
    ]
    stops = set(prompter.stop_ids)
    expected = [generate(model, r.prompt, r.sampling, stops) for r in requests]

    with open_batch(open_rows(model, most_rows=4)) as batch:
        collector, _ = ask(batch, prompter, requests)
        collector.wait()

    assert [collector.tokens(n) for n in range(6)] == expected


def test_a_seed_gives_the_same_answer_whatever_is_beside_it(prompter: Prompter) -> None:
    model = make_model("llama")
    prompt = make_prompts(1)[0]
    sampling = Sampling(max_new_tokens=30, temperature=1.2, top_p=0.9, top_k=50, seed=11)
    wanted = Request(prompt=prompt, sampling=sampling)
    others = [
        Request(prompt=other, sampling=Sampling(max_new_tokens=9, temperature=0.7))
        for other in make_prompts(9, seed=5)
    ]
    with open_batch(open_rows(model, most_rows=4)) as batch:
        alone, _ = ask(batch, prompter, [wanted])
        alone.wait()
        crowd, _ = ask(batch, prompter, [*others[:5], wanted, *others[5:]])
        crowd.wait()
        differently, _ = ask(
            batch,
            prompter,
            [
                Request(prompt=prompt, sampling=Sampling(max_new_tokens=30, temperature=1.2))
                for _ in range(4)
            ],
        )
        differently.wait()

    assert alone.tokens(0) == crowd.tokens(5)
    assert len({tuple(differently.tokens(n)) for n in range(4)}) == 4


def test_filters_leave_what_transformers_leaves() -> None:
    """Every token that can be drawn, found by many uniform numbers, against its warpers."""
    from transformers.generation import logits_process

    process: Any = logits_process
    torch.manual_seed(2)
    logits = torch.randn(1, 60) * 3
    for sampling in (
        Sampling(temperature=0.7, top_k=9),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
    ):
        warped = process.TemperatureLogitsWarper(sampling.temperature)(None, logits)
        if sampling.top_k:
            warped = process.TopKLogitsWarper(sampling.top_k)(None, warped)
        if sampling.top_p < 1:
            warped = process.TopPLogitsWarper(sampling.top_p)(None, warped)
        if sampling.min_p:
            warped = process.MinPLogitsWarper(sampling.min_p)(None, warped)
        chances = torch.softmax(warped[0], dim=-1)
        count = 20_000
        uniforms = [draw_uniform(3, number) for number in range(count)]
        drawn = choose_tokens(logits.expand(count, -1), [sampling] * count, uniforms)
        shares = torch.bincount(drawn, minlength=60) / count

        assert set(drawn.tolist()) <= set(chances.nonzero()[:, 0].tolist())
        assert float((shares - chances).abs().max()) < 0.015


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    drawn = torch.tensor([[draw_uniform(seed, n) for n in range(200)] for seed in range(200)])
    # 40 000 uniform numbers: the standard error of their mean is 0.0014.
    assert abs(float(drawn.mean()) - 0.5) < 0.007
    assert abs(float((drawn < 0.1).float().mean()) - 0.1) < 0.007
    centred = drawn - 0.5
    neighbours = float((centred[:, 1:] * centred[:, :-1]).mean() / centred.square().mean())
    seeds = float((centred[1:] * centred[:-1]).mean() / centred.square().mean())
    assert max(abs(neighbours), abs(seeds)) < 0.025


class Stingy:
    """Rows on a device that holds only so many tokens."""

    def __init__(self, rows: Any, *, most_tokens: int) -> None:
        self.starts_together = rows.starts_together
        self._rows = rows
        self._most_tokens = most_tokens
        self.lengths: list[int] = []
        self.num_refusals = 0
        self.widest = 0

    def warm_up(self) -> None:
        self._rows.warm_up()

    def _check(self, lengths: list[int]) -> None:
        if len(lengths) * max(lengths) > self._most_tokens:
            self.num_refusals += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 KiB.")

    def join(self, prompts: Any, most_new: int) -> Joined:
        lengths = [*self.lengths, *map(len, prompts)]
        self._check(lengths)
        self.lengths = lengths
        self.widest = max(self.widest, len(lengths))
        joined: Joined = self._rows.join(prompts, most_new)
        return joined

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        lengths = [length + 1 for length in self.lengths]
        self._check(lengths)
        self.lengths = lengths
        logits: torch.Tensor = self._rows.step(tokens)
        return logits

    def drop(self, row: int, tokens: Any = ()) -> None:
        last = self.lengths.pop()
        if row < len(self.lengths):
            self.lengths[row] = last
        self._rows.drop(row, tokens)

    def forget_prefixes(self) -> None:
        self._rows.forget_prefixes()


def test_out_of_memory_makes_the_batch_smaller_and_answers_all(prompter: Prompter) -> None:
    model = make_model("llama")
    requests = [
        Request(prompt=prompt, sampling=Sampling(max_new_tokens=40))
        for prompt in make_prompts(12, longest=40)
    ]
    stops = set(prompter.stop_ids)
    expected = [generate(model, r.prompt, r.sampling, stops) for r in requests]
    rows = Stingy(open_rows(model, most_rows=8), most_tokens=250)

    with open_batch(rows, num_slots=8) as batch:
        collector, _ = ask(batch, prompter, requests)
        collector.wait()

    assert [collector.tokens(n) for n in range(12)] == expected
    assert rows.num_refusals > 2
    assert rows.widest > 2


def test_a_request_too_large_for_the_device_fails_alone(prompter: Prompter) -> None:
    model = make_model("llama")
    rows = Stingy(open_rows(model, most_rows=4), most_tokens=50)
    small = Request(prompt=(5, 6, 7), sampling=Sampling(max_new_tokens=4))
    large = Request(prompt=tuple(range(4, 64)), sampling=Sampling(max_new_tokens=4))
    growing = Request(prompt=(9, 8), sampling=Sampling(max_new_tokens=90, ignores_stop_tokens=True))

    with open_batch(rows) as batch:
        collector, _ = ask(batch, prompter, [small, large, growing, small])
        collector.wait()

    assert isinstance(collector.error(1), DoesNotFitError)
    assert isinstance(collector.error(2), DoesNotFitError)
    assert collector.done(0).num_new_tokens == collector.done(3).num_new_tokens <= 4


def test_other_errors_reach_the_listener_and_the_batch_goes_on(prompter: Prompter) -> None:
    model = make_model("llama")

    class Invalid(Stingy):
        def _check(self, lengths: list[int]) -> None:
            if 40 in lengths:
                raise RuntimeError("a kernel has failed")

    rows = Invalid(open_rows(model, most_rows=4), most_tokens=0)
    bad = Request(prompt=tuple(range(4, 44)))
    good = Request(prompt=(4, 5, 6), sampling=Sampling(max_new_tokens=3))
    with open_batch(rows) as batch:
        collector, _ = ask(batch, prompter, [bad])
        collector.wait()
        after, _ = ask(batch, prompter, [good])
        after.wait()

    assert "a kernel has failed" in str(collector.error(0))
    assert after.done(0).num_new_tokens <= 3


def test_scores_that_are_no_numbers_are_named(prompter: Prompter) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with open_batch(open_rows(model, most_rows=2)) as batch:
        collector, _ = ask(batch, prompter, [Request(prompt=(4, 5, 6))])
        collector.wait()

    error = collector.error(0)
    assert isinstance(error, InvalidInputError)
    assert "NaN" in error.problem


def test_cancelling_ends_one_answer_and_leaves_the_others(prompter: Prompter) -> None:
    model = make_model("llama")
    sampling = Sampling(max_new_tokens=60, ignores_stop_tokens=True)
    requests = [Request(prompt=p, sampling=sampling) for p in make_prompts(6)]
    answers: list[RunningAnswer] = []

    def cancel_second(event: Event) -> None:
        del event
        if len(answers[1].tokens) == 5:
            answers[1].cancel()

    with open_batch(open_rows(model, most_rows=3), num_slots=3) as batch:
        collector = Collector()
        answers.extend(
            RunningAnswer(r, collector.listener(n, cancel_second), prompter, max_context=512)
            for n, r in enumerate(requests)
        )
        answers[4].cancel()
        for answer in answers:
            batch.add(answer)
        collector.wait()

    reasons = [collector.done(n).reason for n in range(6)]
    stopped = {n for n, reason in enumerate(reasons) if reason is FinishReason.CANCELLED}
    assert stopped == {1, 4}
    assert collector.done(1).num_new_tokens in (5, 6)
    assert collector.done(4).num_new_tokens == 0
    assert all(collector.done(n).num_new_tokens == 60 for n in (0, 2, 3, 5))


def test_a_listener_that_raises_loses_only_its_own_answer(prompter: Prompter) -> None:
    model = make_model("llama")
    sampling = Sampling(max_new_tokens=20, ignores_stop_tokens=True)

    def leave(event: Event) -> None:
        raise ConnectionError(f"gone before {type(event).__name__}")

    with open_batch(open_rows(model, most_rows=3)) as batch:
        collector = Collector()
        gone = RunningAnswer(
            Request(prompt=(4, 5), sampling=sampling), leave, prompter, max_context=512
        )
        stays = RunningAnswer(
            Request(prompt=(4, 5), sampling=sampling),
            collector.listener(0),
            prompter,
            max_context=512,
        )
        batch.add(gone)
        batch.add(stays)
        collector.wait()

    assert gone.is_over
    assert len(gone.tokens) < 20
    assert collector.done(0).num_new_tokens == 20


def test_closing_ends_what_runs_and_what_waits(prompter: Prompter) -> None:
    model = make_model("llama")
    sampling = Sampling(max_new_tokens=400, ignores_stop_tokens=True)
    requests = [Request(prompt=p, sampling=sampling) for p in make_prompts(6)]
    with open_batch(open_rows(model, most_rows=2), num_slots=2) as batch:
        collector, _ = ask(batch, prompter, requests)
    collector.wait(1.0)

    assert {collector.done(n).reason for n in range(6)} == {FinishReason.CANCELLED}


def test_steps_write_in_place() -> None:
    """A step must not copy the whole cache: the buffers stay where they are."""
    rows: Any = open_rows(make_model("llama"), most_rows=2)
    with torch.inference_mode():
        rows.join([[5, 6, 7], [8, 9]], 100)
        places = set()
        for _ in range(60):
            rows.step(torch.tensor([4, 4]))
            places.add(rows._cache.layers[0].keys.data_ptr())

    assert len(places) <= 2
    assert rows._cache.span.width == 63
