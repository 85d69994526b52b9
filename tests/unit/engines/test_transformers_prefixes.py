"""Prompts that begin as earlier ones, against the same prompts computed whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_batches import FAMILIES, ask, generate, make_model, open_batch
from small_models import make_tokenizer
from tightfit.core.sampling import Sampling
from tightfit.data.templates import Prompter
from tightfit.data.tokenizer import load_tokenizer
from tightfit.engines.protocol import Request
from tightfit.engines.transformers.cuda_graphs import SlotRows, supports_slots
from tightfit.engines.transformers.engine import open_rows
from tightfit.engines.transformers.prefixes import KeptPrefixes, as_tokens, reuses_prefixes
from tightfit.engines.transformers.rows import DecoderRows

PLENTY = 1 << 24
SYSTEM = tuple(4 + (37 * place) % 370 for place in range(40))
"""Longer than the test models' windows."""


def follow(seed: int, length: int) -> tuple[int, ...]:
    """A prompt with the common beginning."""
    return (*SYSTEM, *(4 + (seed * 53 + 29 * place) % 370 for place in range(length)))


@pytest.fixture(scope="module")
def prompter(tmp_path_factory: pytest.TempPathFactory) -> Prompter:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Prompter(load_tokenizer(folder))


def check_answers(model: Any, rows: Any, prompter: Prompter, *, overlaps: bool = False) -> None:
    """A system prompt, several answers to one prompt, a chat's next turn, and other prompts."""
    first = [follow(n, 3 + 4 * n) for n in range(4)] + [follow(7, 5)] * 3 + [(9, 8, 7)]
    sampling = Sampling(max_new_tokens=12, ignores_stop_tokens=True)
    model.generation_config.eos_token_id = None  # or generate would end where the answers go on
    cached: list[int] = []
    asked = first
    with open_batch(rows, overlaps=overlaps) as batch:
        prompts = first
        for _ in range(2):
            requests = [Request(prompt=prompt, sampling=sampling) for prompt in prompts]
            collector, _ = ask(batch, prompter, requests)
            collector.wait()
            found = [collector.tokens(n) for n in range(len(prompts))]
            for prompt, answer in zip(prompts, found, strict=True):
                assert answer == generate(model, prompt, sampling, set())
                assert len(answer) == 12
            asked = prompts
            cached = [collector.done(n).num_cached_tokens for n in range(len(prompts))]
            if prompts is first:  # the first one of all has nothing to start from
                assert cached[0] == cached[7] == 0
                assert sum(count >= 40 for count in cached) >= 5
            prompts = [(*p, *a, 5, 6, 7) for p, a in zip(prompts, found, strict=True)]
    # The last turn was kept, but for its last token, whose keys no step had computed.
    assert sum(count >= len(p) - 4 for count, p in zip(cached, asked, strict=True)) >= 4


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("t5", "bart")])
def test_shared_beginnings_leave_answers_as_they_are(family: str, prompter: Prompter) -> None:
    model = make_model(family)
    check_answers(model, DecoderRows(model, most_rows=4, prefix_bytes=PLENTY), prompter)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_shared_beginnings_in_slots(family: str, prompter: Prompter) -> None:
    model = make_model(family)
    assert supports_slots(model)
    rows = SlotRows(model, most_rows=4, prefix_bytes=PLENTY)
    check_answers(model, rows, prompter, overlaps=True)  # as on a GPU: rows ran a step more


def test_logprobs_are_the_same_within_rounding(prompter: Prompter) -> None:
    model = make_model("mistral")
    sampling = Sampling(max_new_tokens=8, ignores_stop_tokens=True, top_logprobs=3)
    request = Request(prompt=follow(3, 9), sampling=sampling)
    found = []
    for prefix_bytes in (0, PLENTY):
        with open_batch(open_rows(model, most_rows=2, prefix_bytes=prefix_bytes)) as batch:
            for _ in range(2):
                collector, _ = ask(batch, prompter, [request])
                collector.wait()
        found.append(collector.done(0))
    whole, reused = found

    assert (whole.num_cached_tokens, reused.num_cached_tokens) == (0, 48)
    assert [one.token for one in whole.logprobs] == [one.token for one in reused.logprobs]
    pairs = zip(whole.logprobs, reused.logprobs, strict=True)
    assert max(abs(one.logprob - other.logprob) for one, other in pairs) < 1e-4


def test_a_failed_prefill_leaves_the_running_rows() -> None:
    """The first of two passes is undone when the second runs out of memory."""
    model = make_model("llama")
    rows: Any = DecoderRows(model, most_rows=4, prefix_bytes=PLENTY)
    sampling = Sampling(max_new_tokens=5)
    expected = generate(model, follow(1, 4), sampling, set())
    with torch.inference_mode():
        chosen = [int(rows.join([follow(1, 4)], 20).logits.argmax())]
        forward = rows._forward
        calls: list[tuple[Any, ...]] = []

        def fail_second(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 KiB.")
            return forward(*arguments)

        rows._forward = fail_second
        with pytest.raises(torch.OutOfMemoryError):
            rows.join([(9, 8, 7), follow(2, 6)], 20)
        rows._forward = forward
        for _ in range(4):
            chosen.append(int(rows.step(torch.tensor(chosen[-1:])).argmax()))

    assert len(calls) == 2
    assert chosen == expected


def test_kept_rows_stay_within_their_memory_and_the_latest_used_stay() -> None:
    rows = {start: torch.full((2, 50, 4), float(start)) for start in range(5)}
    kept = KeptPrefixes(most_bytes=3 * 20 * 64)

    def keep(start: int, length: int) -> None:
        kept.keep(
            [start, *range(100, 99 + length)],
            lambda count: [(rows[start][:, :count], rows[start][:, :count]), None],
            bytes_per_token=64,
        )

    def find(start: int) -> int:
        return kept.find(as_tokens([start, *range(100, 160)])).num_tokens

    for start in range(3):
        keep(start, 20)
    assert [find(start) for start in (1, 2, 0)] == [20, 20, 20]
    keep(3, 20)
    assert (find(1), find(0)) == (0, 20)  # the first of those looked up made room
    keep(0, 30)  # takes the place of its own beginning
    assert (find(0), kept.num_bytes) == (30, 50 * 64)
    keep(4, 61)
    assert find(4) == 0  # larger than all there is
    match = kept.find(as_tokens([3, 100, 101]))
    assert match.num_tokens == 2  # one token is always left to compute
    assert match.read is not None
    (part, nothing) = match.read(2)
    assert nothing is None
    assert part is not None
    assert part[0].shape == (2, 2, 4)
    assert float(part[0].mean()) == 3.0


def test_keys_that_depend_on_the_whole_length_are_not_reused() -> None:
    from transformers import LlamaConfig

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    assert reuses_prefixes(LlamaConfig())
    assert not reuses_prefixes(LlamaConfig(rope_parameters=rope))
