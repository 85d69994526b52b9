"""One run of `generate`: load, answer, let go, and measure all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tightfit.engines.open import EngineRequest, open_engine
from tightfit.engines.protocol import EngineInfo
from tightfit.serving.generate.job import GenerateJob, GenerateOutcome, OnAnswer, generate_answers
from tightfit.serving.generate.journal import Journal
from tightfit.serving.generate.measure import RunMeter, count_threads, probe_ceilings
from tightfit.serving.generate.prediction import InferencePrediction
from tightfit.serving.generate.statistics import (
    DeviceCeilings,
    GenerateStatistics,
    RunFacts,
    RunMeasurements,
    compute_statistics,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """What a run did and what it took."""

    info: EngineInfo
    outcome: GenerateOutcome
    measured: RunMeasurements
    num_threads: int


def run_engine(
    request: EngineRequest,
    job: GenerateJob,
    journal: Journal,
    watch: OnAnswer | None = None,
    *,
    announce: Callable[[EngineInfo], None] | None = None,
) -> EngineRun:
    """Load the model, answer what the journal has not, and let the model go."""
    with RunMeter() as meter:
        engine = open_engine(request)
        try:
            meter.mark("loaded")
            if announce is not None:
                announce(engine.info)
            outcome = generate_answers(engine, job, journal, watch)
            meter.mark("answered")
            info = engine.info
            num_threads = count_threads(request.threads)
            measured = meter.measure(device=info.device, num_threads=num_threads)
            if request.device == "cpu":  # asked for, so no mistake
                measured = replace(measured, idle_gpu=None)
            counted = getattr(engine, "num_passes", None)
            measured = replace(measured, num_passes=counted)
        finally:
            engine.close()
    return EngineRun(info=info, outcome=outcome, measured=measured, num_threads=num_threads)


def sum_run(
    run: EngineRun, job: GenerateJob, prediction: InferencePrediction | None, *, num_earlier: int
) -> GenerateStatistics:
    """The run's statistics. Measures the device's limits, now that the model has left it."""
    measured = run.measured
    ceilings = DeviceCeilings()
    if prediction is not None:
        measured = replace(measured, weight_file_bytes=prediction.weight_file_bytes)
        ceilings = probe_ceilings(
            prediction.gpu,
            run.info.device,
            prediction.job.compute,
            num_threads=run.num_threads,
        )
    return compute_statistics(
        RunFacts(
            info=run.info,
            spec=None if prediction is None else prediction.spec,
            timings=run.outcome.timings,
            num_prompts=len(job.prompts),
            num_samples=job.num_samples,
            num_earlier=num_earlier,
            num_failed=len(run.outcome.failures),
            measured=measured,
            ceilings=ceilings,
            prediction=None if prediction is None else prediction.estimate,
        )
    )
