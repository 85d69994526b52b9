"""Run a job's stages on fake tensors under the recorder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from tightfit.core.strategy import Sharding, Strategy
from tightfit.estimate.trace.card_habits import CardHabits
from tightfit.estimate.trace.recorder import Recorder
from tightfit.estimate.trace.recording import INPUTS, WEIGHTS, Recording
from tightfit.estimate.trace.watch import watch_modules
from tightfit.runtime.layers import decoder_layers
from tightfit.train.step import StepPlan, train_step
from tightfit.train.tracing.batch import make_fake_batch, make_real_batch
from tightfit.train.tracing.job import TraceJob
from tightfit.train.tracing.libraries import without_kernels
from tightfit.train.tracing.packed import list_statistics
from tightfit.train.tracing.sharded import (
    build_ranked_engine,
    pretend_ranks,
    strategy_of_ranks,
    watch_shards,
)
from tightfit.train.tracing.stages import run_stages
from tightfit.train.tracing.subject import (
    FAKE_DEVICE,
    StagedEngine,
    UnlikeMicroBatchesError,
    build_fake_engine,
    build_skeleton,
    list_local,
    make_training,
)

NUM_STEPS = 3
"""Optimizer state appears in the first, and the second is like all that follow; but what is cached
of the second shapes the third where memory is scarce."""
FIRST_STEADY = 2
"""The first step that finds the optimizer's state there."""


def record_job(job: TraceJob, config: dict[str, Any]) -> Recording:
    """Every allocation of the job with a model of this `config`, whatever its depth."""
    num_run = count_run(job.strategy)
    with without_kernels(job.strategy, FAKE_DEVICE, job.compute_capability):
        try:
            return _record(job, config, num_run)
        except UnlikeMicroBatchesError:
            return _record(job, config, job.strategy.grad_accum)


def count_run(strategy: Strategy) -> int:
    """Micro-batches of a step that are run: the first, one that stands for those that follow it,
    and the last, with which several ranks exchange their gradients."""
    return min(strategy.grad_accum, 2 if strategy.sharding is Sharding.SINGLE else 3)


def _record(job: TraceJob, config: dict[str, Any], num_run: int) -> Recording:
    """`num_run` micro-batches of a step are run, the others noted like the second."""
    strategy = strategy_of_ranks(job.strategy)
    capability = job.compute_capability
    has_varlen = capability is not None and capability >= (8, 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        training = make_training(strategy, folder, random_weights=job.random_weights)
        module = build_skeleton(folder, strategy, training, has_varlen=has_varlen)
    text = module.model.config.get_text_config()
    recorder = Recorder(CardHabits(job.compute_capability), vocab_size=text.vocab_size)
    real = make_real_batch(job, module.model.config)
    with (
        pretend_ranks(strategy) as place,
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
        watch_shards(recorder),
    ):
        if strategy.sharding is Sharding.SINGLE:
            engine = build_fake_engine(module, strategy, training, recorder)
        else:
            engine = build_ranked_engine(module, strategy, training, place=place, recorder=recorder)
        watch_modules(module, decoder_layers(module), recorder)
        recorder.hold(list_local([*module.parameters(), *module.buffers()]), WEIGHTS)
        recorder.hold(list_statistics(module), WEIGHTS)
        batch = make_fake_batch(real, FAKE_DEVICE)
        recorder.hold(batch.values(), INPUTS)
        staged = StagedEngine(engine, recorder, strategy.grad_accum - num_run)
        plan = StepPlan(
            num_trained_tokens=1,
            learning_rate=training.learning_rate,
            seeds=(0,) * num_run,
        )
        _run_steps(lambda: train_step(staged, [batch] * num_run, plan), recorder)
        run_stages(job, engine, batch, recorder)
    return recorder.finish()


def _run_steps(take_step: Callable[[], object], recorder: Recorder) -> None:
    """`NUM_STEPS` steps; from the second on, one that leaves memory as it was is not run again.

    The second starts with all that stays: then the third does what it did.
    """
    since = recorder.find_place()
    while recorder.step < NUM_STEPS:
        if recorder.step >= FIRST_STEADY and recorder.repeat_step(since):
            continue
        since = recorder.find_place()
        recorder.step += 1
        take_step()
