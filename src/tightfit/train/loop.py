"""The training loop from the last checkpoint to the last step, with its learning-rate schedule,
step timer and divergence check.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DivergedError
from tightfit.core.training import Schedule, Training
from tightfit.hardware.machine import read_peak_memory_bytes
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import StepRecord
from tightfit.runs.run_folder import RunFolder
from tightfit.train.batches import BatchLoader, BatchSampler, StepBatches, StepItems, to_device
from tightfit.train.checkpoint import Progress, write_checkpoint
from tightfit.train.distributed import DistContext
from tightfit.train.evaluation import Evaluation
from tightfit.train.run_logger import RunLogger
from tightfit.train.step import (
    ReducedMetrics,
    StepPlan,
    all_reduce_metrics,
    mix_seed,
    sum_over_ranks,
    train_step,
)

# The learning rate of each step.


def learning_rate_at(step: int, num_steps: int, training: Training) -> float:
    """Rate of `step` (from 0): a linear rise, then down to zero or level.

    As transformers' `get_cosine_schedule_with_warmup` and its linear and constant
    sisters count it, so that runs can be compared: the first step of a warm-up has rate 0.
    """
    num_warmup = math.ceil(training.warmup_fraction * num_steps)
    if step < num_warmup:
        return training.learning_rate * step / num_warmup
    if training.schedule is Schedule.CONSTANT:
        return training.learning_rate
    done = (step - num_warmup) / max(1, num_steps - num_warmup)
    if training.schedule is Schedule.LINEAR:
        return training.learning_rate * max(0.0, 1.0 - done)
    return training.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))


# Telling a run that has gone wrong from one that is merely noisy.

_NUM_RECENT = 20
_MAX_SKIPPED = 25
"""fp16's scale halves with each overflow: after so many in a row it is below a millionth."""
_MAX_RATIO = 3.0


class DivergenceCheck:
    """Sees every step; raises at the first that cannot be trusted."""

    def __init__(self, vocab_size: int, *, is_scaled: bool) -> None:
        self._hopeless = 2 * math.log(vocab_size)
        """Guessing at random costs ln(vocabulary); twice that is worse than knowing nothing."""
        self._is_scaled = is_scaled
        self._losses: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_skipped = 0

    def remember(self, losses: Iterable[float]) -> None:
        """What was usual before a resume: a run that was stopped here is not let through then."""
        self._losses.extend(losses)

    def check(self, step: int, agreed: ReducedMetrics, places: list[str]) -> None:
        """Raise where the step's loss or gradients are not finite, or the loss has exploded."""
        self._num_skipped = self._num_skipped + 1 if agreed.is_skipped else 0
        if not math.isfinite(agreed.loss):
            raise self._stopped(step, f"the loss is {agreed.loss}", places)
        if agreed.is_skipped and not self._is_scaled:
            raise self._stopped(step, "a gradient is not finite", places)
        if self._num_skipped >= _MAX_SKIPPED:
            raise self._stopped(step, f"fp16 overflowed {_MAX_SKIPPED} times in a row", places)
        if self._has_exploded(agreed.loss):
            usual = statistics.median(self._losses)
            raise self._stopped(
                step, f"the loss went from {usual:.2f} to {agreed.loss:.2f}", places
            )
        self._losses.append(agreed.loss)

    def _has_exploded(self, loss: float) -> bool:
        """From the second step on: a rate far too high shows at once, and then looks usual."""
        if not self._losses:
            return False
        return loss > self._hopeless and loss > _MAX_RATIO * statistics.median(self._losses)

    def _stopped(self, step: int, what: str, places: list[str]) -> DivergedError:
        shown = "; ".join(places[:4]) + (f"; and {len(places) - 4} more" if places[4:] else "")
        recent = ", ".join(f"{loss:.3f}" for loss in list(self._losses)[-5:]) or "none"
        return DivergedError(
            f"Stopped at step {step}: {what}. Losses before: {recent}. Rows of the batch: {shown}.",
            remedy="look at those rows, or start again with a lower rate: --lr ... --fresh",
        )


# What each step cost: time, tokens, memory.


class StepTimer:
    """Clock and memory gauge of rank 0."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._process = psutil.Process()
        self._start = time.perf_counter()

    def restart(self) -> None:
        """Time from here on belongs to the next step."""
        self._start = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def record(
        self,
        items: StepItems,
        agreed: ReducedMetrics,
        *,
        rate: float,
        epoch: float,
        wait_seconds: float,
    ) -> StepRecord:
        """The step that just ended; the next one starts now."""
        seconds = time.perf_counter() - self._start
        allocated, reserved, retries = self._read_memory()
        made = StepRecord(
            step=items.step + 1,
            epoch=epoch,
            loss=agreed.loss,
            learning_rate=rate,
            grad_norm=None if agreed.is_skipped else agreed.grad_norm,
            num_tokens=items.num_tokens,
            num_trained_tokens=items.num_trained_tokens,
            seconds=seconds,
            data_wait_seconds=wait_seconds,
            tokens_per_second=items.num_tokens / seconds,
            mfu_fraction=self._estimate_mfu(items.num_tokens, seconds),
            gpu_allocated_bytes=allocated,
            gpu_reserved_bytes=reserved,
            host_bytes=self._process.memory_info().rss,
            num_alloc_retries=retries,
        )
        self.restart()
        return made

    def _read_memory(self) -> tuple[int, int, int]:
        if self._device.type != "cuda":
            peak = read_peak_memory_bytes()
            return peak, peak, 0
        # Asked once, and as it comes: the device has nothing to do meanwhile.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated, reserved = (stats[f"{name}_bytes"]["all"] for name in ("allocated", "reserved"))
        return allocated["peak"], reserved["peak"], stats["num_alloc_retries"]

    def _estimate_mfu(self, num_tokens: int, seconds: float) -> float | None:
        """The plan's FLOPs, in proportion to the tokens that really came."""
        predicted = self._plan.estimate.time
        planned_tokens = predicted.tokens_per_second * predicted.seconds_per_step
        strategy, gpu = self._plan.strategy, self._plan.hardware.node.gpu
        peak = gpu.flops(strategy.compute) * strategy.world_size
        if not planned_tokens or not peak:
            return None
        return predicted.flops_per_step * num_tokens / planned_tokens / seconds / peak


SECONDS_BETWEEN_CHECKPOINTS = 600.0


@dataclass(slots=True, kw_only=True)
class TrainLoop:
    """One attempt at a run. `step` counts the optimizer steps that are done."""

    plan: Plan
    training: Training
    run: RunFolder
    place: DistContext
    engine: Any
    feed: BatchSampler
    loader: BatchLoader
    evaluation: Evaluation | None
    diary: RunLogger
    is_asked_to_stop: Callable[[], bool]
    num_steps: int
    step: int = 0
    saved_step: int = -1
    _saved_at: float = 0.0

    def go(self) -> bool:
        """Train to the end, or until asked to stop; True where all steps are done.

        Either way the last step is in a checkpoint.
        """
        meter = StepTimer(self.plan, self.place.device)
        watch = DivergenceCheck(
            self.plan.model.vocab_size, is_scaled=self.plan.strategy.compute is Dtype.FP16
        )
        watch.remember(self.diary.read_losses(self.step))
        if self._is_eval_due() and not self._is_evaluated():
            self._evaluate()
        self._saved_at = time.monotonic()
        meter.restart()
        for ready in self.loader.steps(self.step, self.num_steps):
            must_stop = self._train_one(ready, meter, watch)
            if must_stop and self.step < self.num_steps:
                break  # an evaluation may outlast the time that is left to save
            if self._is_eval_due():
                self._evaluate()
                meter.restart()
        self.save()
        return self.step == self.num_steps

    def _train_one(self, ready: StepBatches, meter: StepTimer, watch: DivergenceCheck) -> bool:
        rate = learning_rate_at(self.step, self.num_steps, self.training)
        num_trained = ready.items.num_trained_tokens
        seeds = tuple(
            mix_seed(self.training.seed, self.step, number, self.place.rank)
            for number in range(len(ready.batches))
        )
        batches = [to_device(batch, self.place) for batch in ready.batches]
        numbers = StepPlan(num_trained_tokens=num_trained, learning_rate=rate, seeds=seeds)
        outcome = train_step(self.engine, batches, numbers)
        agreed = all_reduce_metrics(
            outcome,
            num_trained_tokens=num_trained,
            must_stop=self.is_asked_to_stop(),
            must_save=self._is_save_due(),
        )
        watch.check(self.step + 1, agreed, self.feed.places(self.step))
        self.step += 1
        epoch = self.step / self.feed.steps_per_epoch
        self.diary.write(
            meter.record(
                ready.items, agreed, rate=rate, epoch=epoch, wait_seconds=ready.wait_seconds
            )
        )
        if agreed.must_save and not agreed.must_stop:
            self.save()
            meter.restart()
        return agreed.must_stop

    def save(self) -> None:
        """A checkpoint of this step, if it is not there already."""
        if self.saved_step == self.step or not self.training.keep_checkpoints:
            return
        write_checkpoint(
            self.run, self.engine, self._progress(), self.place, keep=self.training.keep_checkpoints
        )
        self.saved_step, self._saved_at = self.step, time.monotonic()

    def save_alone(self) -> None:
        """The same by this rank alone, when the others cannot be reached."""
        if not self.training.keep_checkpoints:
            return
        write_checkpoint(
            self.run,
            self.engine,
            self._progress(),
            self.place,
            keep=self.training.keep_checkpoints,
            alone=True,
        )
        self.saved_step = self.step

    def _progress(self) -> Progress:
        return Progress(
            step=self.step,
            num_steps=self.num_steps,
            world_size=self.place.world_size,
            sharding=self.plan.strategy.sharding,
        )

    def _is_save_due(self) -> bool:
        every = self.training.save_every
        if every is not None:
            return (self.step + 1) % every == 0
        return time.monotonic() - self._saved_at > SECONDS_BETWEEN_CHECKPOINTS

    def _is_eval_due(self) -> bool:
        every = self.training.eval_every or self.feed.steps_per_epoch
        return self.step % every == 0 or self.step == self.num_steps

    def _is_evaluated(self) -> bool:
        """Whether the attempt before this one came to it; rank 0 has the records."""
        found = float(self.diary.has_evaluation(self.step))
        return sum_over_ranks(found, device=self.place.device)[0] > 0

    def _evaluate(self) -> None:
        if self.evaluation is not None:
            self.diary.write(self.evaluation.run(self.engine, self.step))
