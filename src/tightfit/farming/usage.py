"""What limited a worker of a farm: the statistics of `generate`, of the answers it gave."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tightfit.core.errors import UserError
from tightfit.core.frozen import Frozen
from tightfit.engines.protocol import Done, EngineInfo
from tightfit.farming.folder import FarmFile
from tightfit.serving.generate.prediction import (
    InferencePrediction,
    PromptLengths,
    predict_inference,
)
from tightfit.serving.generate.run import EngineRun, GenerateJob, RunMeasurements, count_threads
from tightfit.serving.generate.statistics import Arithmetic, MemoryTraffic, sum_run

MAX_TIMINGS = 100_000
"""Answers whose times a worker keeps: the last ones stand for the others."""


class WorkerUsage(Frozen):
    """How busy a worker kept its device; as in the statistics of `generate`."""

    traffic: MemoryTraffic
    arithmetic: Arithmetic
    mean_active: float
    num_slots: int
    bottleneck: str
    sentence: str


def sum_worker(
    farm: FarmFile, info: EngineInfo, timings: Sequence[Done], measured: RunMeasurements
) -> WorkerUsage:
    """Of a worker that is done; measures the device's limits, which the model has left."""
    prediction: InferencePrediction | None = None
    lengths = [timing.num_prompt_tokens for timing in timings]
    with contextlib.suppress(UserError):  # a family whose shapes are not known
        prediction = predict_inference(
            farm.engine.to_request(),
            PromptLengths(mean=sum(lengths) / len(lengths), longest=max(lengths)),
            farm.sampling,
        )
    run = EngineRun(
        info=info,
        timings=timings,
        failures=(),
        measured=measured,
        num_threads=count_threads(farm.engine.threads),
    )
    job = GenerateJob(prompts=(), sampling=farm.sampling, num_samples=farm.num_samples)
    found = sum_run(run, job, prediction, num_earlier=0)
    return WorkerUsage(**{name: getattr(found, name) for name in WorkerUsage.model_fields})
