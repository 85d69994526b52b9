"""Statistics against runs whose passes, tokens and bytes were counted while they were played."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.core.sampling import Sampling
from tightfit.engines.protocol import Done, EngineInfo, FinishReason
from tightfit.estimation.flops import estimate_forward_flops
from tightfit.estimation.inference import estimate_answer_flops, estimate_read_fraction
from tightfit.models.resolve import resolve_model
from tightfit.serving.generate.prediction import InferencePrediction
from tightfit.serving.generate.run import EngineRun, GenerateJob, RunMeasurements
from tightfit.serving.generate.statistics import (
    DeviceCeilings,
    GenerateStatistics,
    percentiles,
    sum_run,
    sum_timeline,
)

PASS_SECONDS = 0.02
KV = 1000.0
WEIGHTS = 5e6


def ended(prompt: int, new: int, submitted: float, first: float, finished: float) -> Done:
    return Done(
        reason=FinishReason.STOP,
        text="",
        num_prompt_tokens=prompt,
        num_new_tokens=new,
        submitted_s=submitted,
        first_token_s=first,
        finished_s=finished,
    )


@dataclass
class Played:
    """A batch engine played step by step, which counts what it does."""

    timings: list[Done]
    num_passes: int
    num_bytes: float


def play(lengths: list[tuple[int, int]], *, num_slots: int) -> Played:
    """Requests (prompt, new tokens) answered `num_slots` at a time, a pass every 20 ms."""
    waiting = list(lengths)
    active: list[list[float]] = []  # prompt, new tokens wanted, tokens made, first token at
    timings: list[Done] = []
    now, num_passes, num_bytes = 0.0, 0, 0.0
    while waiting or active:
        joining = waiting[: num_slots - len(active)]
        if joining:
            del waiting[: len(joining)]
            now += PASS_SECONDS
            num_passes += 1
            num_bytes += WEIGHTS + KV * sum(prompt for prompt, _ in joining)
            active += [[prompt, new, 1, now] for prompt, new in joining]
        else:
            now += PASS_SECONDS
            num_passes += 1
            num_bytes += WEIGHTS + KV * sum(prompt + made for prompt, _, made, _ in active)
            for answer in active:
                answer[2] += 1
        for prompt, new, made, first in [a for a in active if a[2] >= a[1]]:
            active.remove([prompt, new, made, first])
            timings.append(ended(int(prompt), int(made), 0.0, first, now))
    return Played(timings, num_passes, num_bytes)


answers = st.lists(st.tuples(st.integers(1, 200), st.integers(8, 60)), min_size=4, max_size=60)


@given(lengths=answers, num_slots=st.integers(1, 8))
def test_passes_and_bytes_are_found_from_the_times_of_answers(
    lengths: list[tuple[int, int]], num_slots: int
) -> None:
    played = play(lengths, num_slots=num_slots)

    found = sum_timeline(
        played.timings, bytes_per_pass=WEIGHTS, kv_bytes_per_token=KV, num_slots=num_slots
    )

    assert found.num_passes == pytest.approx(played.num_passes, rel=0.05, abs=2)
    assert found.bytes_moved == pytest.approx(played.num_bytes, rel=0.06)
    assert found.seconds == pytest.approx(played.num_passes * PASS_SECONDS)
    assert 1 - 1e-9 <= found.mean_active <= num_slots + 1e-9
    assert found.peak_bytes_per_second >= 0.999 * found.bytes_moved / found.seconds


def test_the_engines_own_count_of_passes_holds() -> None:
    played = play([(10, 30)] * 8, num_slots=2)

    found = sum_timeline(
        played.timings, bytes_per_pass=WEIGHTS, kv_bytes_per_token=0.0, num_slots=2, num_passes=77
    )

    assert found.num_passes == 77
    assert found.bytes_moved == pytest.approx(77 * WEIGHTS)


def test_the_busiest_second_stands_out() -> None:
    """One answer alone for 10 s at 10 passes a second, then eight at 100 for 1 s."""
    slow = ended(1, 101, 0.0, 0.0, 10.0)
    quick = [ended(1, 101, 0.0, 10.0, 11.0)] * 8

    found = sum_timeline([slow, *quick], bytes_per_pass=1e6, kv_bytes_per_token=0.0, num_slots=8)

    assert found.peak_bytes_per_second == pytest.approx(100e6, rel=0.05)
    assert found.bytes_moved == pytest.approx(200e6, rel=0.05)


def test_starving_is_time_with_fewer_requests_than_slots() -> None:
    """A prompt every second, each answered in half of it: one of two slots is ever open."""
    late = [ended(1, 2, float(t), t + 0.1, t + 0.5) for t in range(10)]
    sizes = {"bytes_per_pass": 1, "kv_bytes_per_token": 0}
    assert sum_timeline(late, **sizes, num_slots=2).starved_fraction == pytest.approx(1.0)
    at_once = [ended(1, 2, 0.0, t + 0.1, t + 0.5) for t in range(10)]
    assert sum_timeline(at_once, **sizes, num_slots=2).starved_fraction == 0.0


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_percentiles_are_values_that_so_many_do_not_exceed(values: list[float]) -> None:
    found = percentiles(values)
    for percent, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert value in values
        assert sum(other <= value for other in values) >= math.ceil(percent / 100 * len(values))
        assert sum(other < value for other in values) < math.ceil(percent / 100 * len(values))


def test_an_answers_flops_are_those_of_one_pass_over_all_its_tokens() -> None:
    """With the head only where a token is chosen, and a part that was cached left out."""
    spec = resolve_model("Llama-2-7b")
    whole = estimate_forward_flops(spec, num_sequences=1, seq_len=149)

    found = estimate_answer_flops(spec, num_prompt=100, num_new=50)

    assert found == pytest.approx(whole.linear + whole.attention + whole.head * 50 / 149)
    first = estimate_answer_flops(spec, num_prompt=60, num_new=1)
    head = 2 * spec.hidden_size * spec.vocab_size
    rest = estimate_answer_flops(spec, num_prompt=100, num_new=50, num_cached=60)
    assert first - head + rest == pytest.approx(found)


def test_a_pass_reads_what_its_tokens_need() -> None:
    llama, gemma = resolve_model("Llama-2-7b"), resolve_model("gemma-2-2b")
    embedding = 32000 * 4096
    assert estimate_read_fraction(llama, num_active=1) == pytest.approx(1 - embedding / 6738415616)
    assert estimate_read_fraction(gemma, num_active=1) == 1.0, "a tied embedding is the head"
    mixtral = resolve_model("Mixtral-8x7B")
    one, many = (estimate_read_fraction(mixtral, num_active=n) for n in (1, 64))
    active = (mixtral.num_active_params - mixtral.embedding_params) / mixtral.num_params
    assert one == pytest.approx(active)
    assert many > 0.99 * (1 - mixtral.embedding_params / mixtral.num_params)


def statistics_of(played: Played, *, num_hosts: int = 0, **ceilings: float) -> GenerateStatistics:
    info = EngineInfo(
        engine="transformers",
        version="5",
        why="because",
        model="m",
        format="bf16",
        device="cuda:0",
        max_context=4096,
        num_slots=4,
        num_params=10**9,
        weight_bytes=int(WEIGHTS),
        kv_bytes_per_token=int(KV),
        num_hosts=num_hosts,
    )
    run = EngineRun(
        info=info,
        timings=played.timings,
        failures=[],
        measured=RunMeasurements(load_seconds=2.0, load_disk_bytes=25),
        num_threads=1,
    )
    estimate = SimpleNamespace(peak_bytes=7, components={"kv": 7})
    prediction = SimpleNamespace(
        spec=None, weight_file_bytes=100, estimate=estimate, new_tokens_per_second=9.0
    )
    return sum_run(
        run,
        GenerateJob(prompts=[], sampling=Sampling()),
        cast("InferencePrediction", prediction),
        num_earlier=3,
        ceilings=DeviceCeilings(**ceilings),
    )


def test_with_other_hosts_nothing_here_is_blamed() -> None:
    played = play([(100, 50)] * 400, num_slots=4)
    assert statistics_of(played).bottleneck != "other hosts"
    reported = statistics_of(played, num_hosts=2)
    assert reported.bottleneck == "other hosts"
    assert "2 other hosts, and only this machine was measured" in reported.sentence


def test_the_figures_of_a_run_follow_from_its_answers() -> None:
    played = play([(100, 50)] * 16, num_slots=4)

    reported = statistics_of(played, copy_bytes_per_second=1e9, paper_flops_per_second=1e12)

    seconds = played.num_passes * PASS_SECONDS
    assert (reported.prompt_tokens, reported.new_tokens) == (1600, 800)
    assert reported.rates.new_per_minute == pytest.approx(60 * 800 / seconds)
    assert reported.rates.total_per_second == pytest.approx(2400 / seconds)
    assert reported.traffic.average_fraction == pytest.approx(
        played.num_bytes / seconds / 1e9, rel=0.05
    )
    assert reported.arithmetic.flops == 2 * 10**9 * 2400
    assert reported.arithmetic.fraction == pytest.approx(2e9 * 2400 / seconds / 1e12)
    assert reported.disk.cached_fraction == 0.75
    assert reported.answer_seconds.p50 <= reported.answer_seconds.p99
    assert GenerateStatistics.model_validate_json(reported.model_dump_json()) == reported
