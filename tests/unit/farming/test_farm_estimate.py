"""What is said before a farm starts, held against what a real model then does."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from small_models import make_llama
from tightfit.cli.farm import revise
from tightfit.core.sampling import Sampling
from tightfit.data.formats import Message
from tightfit.engines.open import EngineRequest, open_engine, open_prompter
from tightfit.farming.bounds import Bounds
from tightfit.farming.estimate import (
    EstimateBasis,
    FarmEstimate,
    FarmWorkload,
    NodeTypeEstimate,
    estimate_farm,
    record_farm_rates,
    record_node_rate,
    record_single_engine,
)
from tightfit.farming.statistics import FarmProgress, FarmStatistics, NodeStatistics
from tightfit.farming.worker_pool import (
    NodeType,
    WorkerBackend,
    WorkerGroup,
    make_local_group,
    share_threads,
)
from tightfit.hardware.machine import read_machine
from tightfit.runs.store import MOST_KEPT, read_rates
from tightfit.runtime.model_files import find_artefact
from tightfit.serving.generate.journal import open_journal
from tightfit.serving.generate.prediction import (
    InferencePrediction,
    measure_prompts,
    predict_inference,
    share_cores,
)
from tightfit.serving.generate.prompts import Prompt
from tightfit.serving.generate.run import GenerateJob, describe_settings, run_engine

MACHINE = "tightfit.serving.generate.prediction.read_busy_threads"
HERE = make_local_group(num_gpus=0, num_workers=1, gpu=None)
SLURM = WorkerGroup(
    name="cpu",
    kind=WorkerBackend.SLURM,
    num_workers=1,
    types=(NodeType(name="CPU", gpu=None, num_workers=1, num_cores=1),),
)
AMOUNT = FarmWorkload(num_answers=1000, num_new_tokens=16_000)
JOB = GenerateJob(
    prompts=[
        Prompt(index=n, place=f"line {n}", messages=(Message("user", "how many singers"),))
        for n in range(64)
    ],
    sampling=Sampling(max_new_tokens=32, temperature=0.8, seed=5),
)


@pytest.fixture(autouse=True)
def _own_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_LEDGER", str(tmp_path / "home" / "ledger.sqlite"))


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other program wants the cores, whatever runs beside the tests."""
    monkeypatch.setattr(MACHINE, lambda _: 0.0)


@pytest.fixture(scope="module")
def request_here(tmp_path_factory: pytest.TempPathFactory) -> EngineRequest:
    folder = tmp_path_factory.mktemp("model")
    make_llama(folder)
    return EngineRequest(artefact=find_artefact(str(folder)), device="cpu")


@pytest.fixture(scope="module")
def prediction(request_here: EngineRequest) -> InferencePrediction:
    lengths = measure_prompts(JOB.prompts, open_prompter(request_here), is_raw=False)
    found = predict_inference(request_here, lengths, JOB.sampling)
    assert found is not None
    return found


def only(estimate: FarmEstimate) -> NodeTypeEstimate:
    (kind,) = estimate.types
    return kind


def rate_of(estimate: FarmEstimate) -> Bounds:
    assert estimate.new_tokens_per_second is not None
    return estimate.new_tokens_per_second


def test_a_tiny_model_is_as_slow_as_its_host(
    request_here: EngineRequest, prediction: InferencePrediction, tmp_path: Path
) -> None:
    """By CPU time, which other work on the machine does not stretch as it does the clock's."""
    out = tmp_path / "answers.jsonl"
    with open_journal(out, describe_settings(request_here, JOB), seed=5) as journal:
        began = time.process_time()
        load = open_engine(request_here)
        load.close()
        loading = time.process_time() - began
        began = time.process_time()
        run = run_engine(request_here, JOB, journal)
        took = time.process_time() - began - min(loading, run.measured.load_seconds)
        journal.finish(is_complete=True)
    num_new = sum(timing.num_new_tokens for timing in run.timings)
    reached = num_new / took

    amount = FarmWorkload(num_answers=64, num_new_tokens=num_new)
    reported = rate_of(estimate_farm([HERE], prediction, amount))

    assert prediction.estimate.new_tokens_per_second > 10 * reached, "data sheets know no host"
    assert reported.low / 2 <= reached <= 2 * reported.high


def test_cores_that_others_want_slow_everything_down(
    prediction: InferencePrediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cores that nine threads wanted: 610 tokens a second with one thread of ours, 66 with two
    (measured with a model of 2 layers, eight answers at a time)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone = estimate_farm([HERE], prediction, AMOUNT)
    cores = read_machine().num_usable_cores
    monkeypatch.setattr(MACHINE, lambda _: 4.5 * cores)
    job = replace(prediction, job=replace(prediction.job, num_slots=8))

    one = replace(job, share=share_cores(1)).new_tokens_per_second
    two = replace(job, share=share_cores(2)).new_tokens_per_second
    crowded = estimate_farm([HERE], prediction, AMOUNT)

    if cores == 2:
        assert 0.5 * 610 < one < 2 * 610
        assert 0.5 * 66 < two < 2 * 66
    assert 4 * two < one
    assert rate_of(crowded).high < 0.3 * rate_of(alone).high
    assert crowded.start_seconds is not None
    assert alone.start_seconds is not None
    assert crowded.start_seconds.high > 2 * alone.start_seconds.high


def test_what_others_do_here_says_nothing_of_another_machine(
    prediction: InferencePrediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rate_of(estimate_farm([SLURM], prediction, AMOUNT))
    monkeypatch.setattr(MACHINE, lambda _: 100.0)

    assert rate_of(estimate_farm([SLURM], prediction, AMOUNT)) == before


def test_workers_of_one_machine_share_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = read_machine().num_usable_cores
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    assert share_threads(HERE) is None, "one worker has them all"
    assert share_threads(replace(HERE, num_workers=cores)) == (1 if cores > 1 else None)
    assert share_threads(replace(HERE, num_workers=9 * cores)) == 1
    assert share_threads(replace(SLURM, num_workers=2)) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert share_threads(replace(HERE, num_workers=2)) is None, "as the user says"


def test_starting_is_counted_and_every_figure_is_a_range(prediction: InferencePrediction) -> None:
    reported = estimate_farm([HERE], prediction, AMOUNT)

    assert reported.basis is EstimateBasis.PREDICTED
    assert reported.start_seconds is not None
    assert reported.seconds is not None
    answering = rate_of(reported).seconds_for(AMOUNT.num_new_tokens)
    assert reported.seconds.low == pytest.approx(reported.start_seconds.low + answering.low)
    assert reported.seconds.high == pytest.approx(reported.start_seconds.high + answering.high)
    assert 0 < reported.seconds.low < reported.seconds.high


def test_workers_share_the_cores_of_this_machine(prediction: InferencePrediction) -> None:
    def rate(count: int) -> float:
        place = make_local_group(num_gpus=0, num_workers=count, gpu=None)
        return rate_of(estimate_farm([place], prediction, AMOUNT)).high

    cores = read_machine().num_usable_cores

    assert rate(64 * cores) <= 1.01 * cores * rate(1)


def test_few_answers_do_not_fill_the_slots(prediction: InferencePrediction) -> None:
    few = replace(AMOUNT, num_answers=1)

    assert rate_of(estimate_farm([HERE], prediction, few)).high < (
        0.5 * rate_of(estimate_farm([HERE], prediction, AMOUNT)).high
    )


def test_earlier_runs_are_believed_where_they_were(prediction: InferencePrediction) -> None:
    guess = only(estimate_farm([HERE], prediction, AMOUNT))
    assert guess.predicted_tokens_per_second is not None
    slow = guess.predicted_tokens_per_second / 10
    record_single_engine(prediction, replace(AMOUNT, num_new_tokens=100_000), rate=slow)

    reported = estimate_farm([HERE], prediction, AMOUNT)

    assert reported.basis is EstimateBasis.MEASURED
    assert rate_of(reported).low < slow < rate_of(reported).high < 2 * slow
    elsewhere = estimate_farm([SLURM], prediction, AMOUNT)
    assert elsewhere.basis is EstimateBasis.PREDICTED, "another CPU is another device"
    both = estimate_farm([HERE, SLURM], prediction, AMOUNT)
    assert both.basis is EstimateBasis.MIXED


def test_a_start_that_was_measured_is_expected_again(prediction: InferencePrediction) -> None:
    guess = only(estimate_farm([HERE], prediction, AMOUNT))
    record_node_rate(guess, num_new=5000, rate=100.0, start_seconds=100.0)

    reported = only(estimate_farm([HERE], prediction, AMOUNT))

    assert reported.start_seconds is not None
    assert reported.start_seconds.low < 100 < reported.start_seconds.high


def test_short_runs_are_not_kept_and_long_memories_are_cut(prediction: InferencePrediction) -> None:
    guess = only(estimate_farm([HERE], prediction, AMOUNT))
    assert guess.work is not None
    record_node_rate(guess, num_new=10, rate=1.0)
    record_node_rate(guess, num_new=10_000, rate=100_000.0)
    assert read_rates(guess.work) == ()
    for _ in range(MOST_KEPT + 3):
        record_node_rate(guess, num_new=5000, rate=100.0)
    assert len(read_rates(guess.work)) == MOST_KEPT


def made_statistics(*, num_workers: int, num_lost: int) -> FarmStatistics:
    node = NodeStatistics(
        partition="local",
        node="here",
        device="cpu",
        num_workers=num_workers,
        num_chunks=10,
        num_answers=100,
        share=1.0,
        num_prompt_tokens=1000,
        num_new_tokens=3000,
        new_tokens_per_second=300.0,
        answers_per_second=10.0,
        load_seconds=8.0,
        busy_seconds=10.0,
        idle_seconds=0.0,
        taken_over={},
        num_discarded=0,
        num_lost_workers=num_lost,
    )
    return FarmStatistics(
        model="m",
        num_prompts=100,
        num_answers=100,
        num_failed=0,
        num_prompt_tokens=1000,
        num_new_tokens=3000,
        seconds=10.0,
        new_tokens_per_second=300.0,
        total_tokens_per_second=400.0,
        answers_per_second=10.0,
        num_chunks=10,
        prompts_per_chunk=10,
        num_workers=num_workers,
        released={},
        num_discarded=0,
        nodes=(node,),
    )


def test_a_farm_whose_workers_all_lived_is_remembered(prediction: InferencePrediction) -> None:
    estimate = estimate_farm([HERE], prediction, AMOUNT)
    work = only(estimate).work
    assert work is not None
    record_farm_rates(estimate, made_statistics(num_workers=1, num_lost=1))
    record_farm_rates(estimate, made_statistics(num_workers=2, num_lost=0))
    assert read_rates(work) == (), "what died, or was started again, says nothing of the next"

    record_farm_rates(estimate, made_statistics(num_workers=1, num_lost=0))

    (kept,) = read_rates(work)
    assert kept.new_tokens_per_second == 300.0
    assert kept.start_seconds is not None
    assert kept.start_seconds > 8.0


def test_the_first_chunks_revise_time_and_cost(prediction: InferencePrediction) -> None:
    estimate = estimate_farm([HERE], prediction, AMOUNT)
    kind = replace(only(estimate), usd_per_hour=36.0)
    estimate = replace(estimate, types=(kind,), seconds=Bounds(10.0, 20.0))
    progress = FarmProgress(
        num_chunks=100,
        num_done=10,
        nodes=(),
        new_tokens_per_second=50.0,
        seconds=100.0,
        seconds_left=Bounds(800.0, 1100.0),
        is_finished=False,
    )

    said = revise(progress, estimate, num_chunks=10)

    assert said is not None
    assert "measured by the first 10 chunks: 15 min to 20 min in all" in said
    assert "instead of 10 s to 20 s" in said
    assert "$9.00 to $12.00" in said
    assert revise(replace(progress, seconds_left=None), estimate, num_chunks=0) is None
