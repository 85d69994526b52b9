"""The training loop, from the last checkpoint to the last step.

Then its parts: the learning-rate schedule, the divergence check, the step timer, the evaluation.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import psutil
import torch

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DivergedError
from tightfit.core.training import Schedule, Training
from tightfit.data.token_store import TokenStore
from tightfit.hardware.machine import read_peak_memory_bytes
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import EvalRecord, StepRecord
from tightfit.runs.run_folder import RunFolder
from tightfit.training.batches import (
    Batch,
    BatchLoader,
    BatchSampler,
    Collate,
    StepBatches,
    count_trained,
    to_device,
    without_loss,
)
from tightfit.training.checkpoint import Progress, write_checkpoint
from tightfit.training.distributed import DistContext, sum_over_ranks
from tightfit.training.engine import evaluating
from tightfit.training.run_logger import RunLogger
from tightfit.training.step import (
    ReducedMetrics,
    StepPlan,
    TrainEngine,
    all_reduce_metrics,
    mix_seed,
    train_step,
)

SECONDS_BETWEEN_CHECKPOINTS = 600.0


@dataclass(slots=True, kw_only=True)
class TrainLoop:
    """One attempt at a run. `step` is the number of optimizer steps done."""

    plan: Plan
    training: Training
    run: RunFolder
    context: DistContext
    engine: TrainEngine
    sampler: BatchSampler
    loader: BatchLoader
    evaluation: Evaluation | None
    logger: RunLogger
    is_stop_requested: Callable[[], bool]
    num_steps: int
    step: int = 0
    saved_step: int = -1
    _saved_at: float = 0.0

    def train(self) -> bool:
        """Train to the last step or until asked to stop; True if all steps are done.

        Either way the last step taken is in a checkpoint.
        """
        timer = StepTimer(self.plan, self.context.device)
        divergence = DivergenceCheck(
            self.plan.model.vocab_size, is_scaled=self.plan.strategy.compute is Dtype.FP16
        )
        divergence.add_history(self.logger.read_losses(self.step))
        if self._is_eval_due() and not self._is_evaluated():
            self._evaluate()
        self._saved_at = time.monotonic()
        timer.restart()
        for ready in self.loader.steps(self.step, self.num_steps):
            metrics = self._train_one(ready, timer, divergence)
            if metrics.must_save and not metrics.must_stop:
                self.save()
                timer.restart()
            if metrics.must_stop and self.step < self.num_steps:
                break  # no evaluation: it may take longer than the time left to save
            if self._is_eval_due():
                self._evaluate()
                timer.restart()
        self.save()
        return self.step == self.num_steps

    def _train_one(
        self, ready: StepBatches, timer: StepTimer, divergence: DivergenceCheck
    ) -> ReducedMetrics:
        learning_rate = learning_rate_at(self.step, self.num_steps, self.training)
        num_trained = ready.items.num_trained_tokens
        seeds = tuple(
            mix_seed(self.training.seed, self.step, number, self.context.rank)
            for number in range(len(ready.batches))
        )
        batches = [to_device(batch, self.context) for batch in ready.batches]
        outcome = train_step(
            self.engine,
            batches,
            StepPlan(num_trained_tokens=num_trained, learning_rate=learning_rate, seeds=seeds),
        )
        metrics = all_reduce_metrics(
            outcome,
            num_trained_tokens=num_trained,
            must_stop=self.is_stop_requested(),
            must_save=self._is_save_due(),
        )
        divergence.check(self.step + 1, metrics, self.sampler.locations(self.step))
        self.step += 1
        self.logger.write(
            timer.record(
                ready,
                metrics,
                learning_rate=learning_rate,
                epoch=self.step / self.sampler.steps_per_epoch,
            )
        )
        return metrics

    def save(self, *, alone: bool = False) -> None:
        """Write a checkpoint of this step, unless it exists or none are kept.

        `alone`: by this rank only, when the others cannot be reached.
        """
        keep = self.training.keep_checkpoints
        if self.saved_step == self.step or not keep:
            return
        progress = Progress(
            step=self.step,
            num_steps=self.num_steps,
            world_size=self.context.world_size,
            sharding=self.plan.strategy.sharding,
        )
        write_checkpoint(self.run, self.engine, progress, self.context, keep=keep, alone=alone)
        self.saved_step, self._saved_at = self.step, time.monotonic()

    def _is_save_due(self) -> bool:
        every = self.training.save_every
        if every is not None:
            return (self.step + 1) % every == 0
        return time.monotonic() - self._saved_at > SECONDS_BETWEEN_CHECKPOINTS

    def _is_eval_due(self) -> bool:
        every = self.training.eval_every or self.sampler.steps_per_epoch
        return self.step % every == 0 or self.step == self.num_steps

    def _is_evaluated(self) -> bool:
        """Whether an earlier attempt evaluated this step; only rank 0 has the records."""
        found = float(self.logger.has_evaluation(self.step))
        return sum_over_ranks(found, device=self.context.device)[0] > 0

    def _evaluate(self) -> None:
        if self.evaluation is not None:
            self.logger.write(self.evaluation.run(self.engine, self.step))


def learning_rate_at(step: int, num_steps: int, training: Training) -> float:
    """The learning rate of `step` (from 0): linear warm-up, then cosine, linear or constant.

    Counts as transformers' `get_cosine_schedule_with_warmup` and its siblings do, so that runs
    are comparable: the first step of a warm-up has rate 0.
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


_NUM_RECENT = 20
_MAX_SKIPPED = 25
"""fp16's loss scale halves with each overflow: after this many it is below a millionth."""
_MAX_RATIO = 3.0


class DivergenceCheck:
    """Raises at the first step whose loss or gradients show that the run has diverged."""

    def __init__(self, vocab_size: int, *, is_scaled: bool) -> None:
        # Random guessing costs ln(vocab_size); twice that is worse than an untrained model.
        self._hopeless_loss = 2 * math.log(vocab_size)
        self._is_scaled = is_scaled
        self._losses: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_skipped = 0

    def add_history(self, losses: Iterable[float]) -> None:
        """Losses before a resume: a run that was stopped as diverged is stopped again."""
        self._losses.extend(losses)

    def check(self, step: int, metrics: ReducedMetrics, locations: list[str]) -> None:
        """Raise if the step's loss or gradients are not finite, or its loss has exploded.

        `locations`: file and row of the batch's texts, for the message.
        """
        self._num_skipped = self._num_skipped + 1 if metrics.is_skipped else 0
        problem = self._find_problem(metrics)
        if problem:
            shown = "; ".join(locations[:4])
            shown += f"; and {len(locations) - 4} more" if locations[4:] else ""
            recent = ", ".join(f"{loss:.3f}" for loss in list(self._losses)[-5:]) or "none"
            raise DivergedError(
                f"Stopped at step {step}: {problem}. Losses before: {recent}. "
                f"Rows of the batch: {shown}.",
                remedy="look at those rows, or start again with a lower rate: --lr ... --fresh",
            )
        self._losses.append(metrics.loss)

    def _find_problem(self, metrics: ReducedMetrics) -> str:
        if not math.isfinite(metrics.loss):
            return f"the loss is {metrics.loss}"
        if metrics.is_skipped and not self._is_scaled:
            return "a gradient is not finite"
        if self._num_skipped >= _MAX_SKIPPED:
            return f"fp16 overflowed {_MAX_SKIPPED} times in a row"
        # From the second step on: with a rate far too high the third looks normal again.
        usual = statistics.median(self._losses) if self._losses else math.inf
        if metrics.loss > self._hopeless_loss and metrics.loss > _MAX_RATIO * usual:
            return f"the loss went from {usual:.2f} to {metrics.loss:.2f}"
        return ""


class StepTimer:
    """Measures each step's time, throughput and peak memory on this rank."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._process = psutil.Process()
        self._start = time.perf_counter()

    def restart(self) -> None:
        """Start measuring the next step now."""
        self._start = time.perf_counter()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def record(
        self, ready: StepBatches, metrics: ReducedMetrics, *, learning_rate: float, epoch: float
    ) -> StepRecord:
        """The record of the step that just ended; the next one starts now."""
        items = ready.items
        seconds = time.perf_counter() - self._start
        allocated, reserved, retries = self._read_memory()
        record = StepRecord(
            step=items.step + 1,
            epoch=epoch,
            loss=metrics.loss,
            learning_rate=learning_rate,
            grad_norm=None if metrics.is_skipped else metrics.grad_norm,
            num_tokens=items.num_tokens,
            num_trained_tokens=items.num_trained_tokens,
            seconds=seconds,
            data_wait_seconds=ready.wait_seconds,
            tokens_per_second=items.num_tokens / seconds,
            mfu_fraction=self._estimate_mfu(items.num_tokens, seconds),
            gpu_allocated_bytes=allocated,
            gpu_reserved_bytes=reserved,
            host_bytes=self._process.memory_info().rss,
            num_alloc_retries=retries,
        )
        self.restart()
        return record

    def _read_memory(self) -> tuple[int, int, int]:
        if self._device.type != "cuda":
            peak = read_peak_memory_bytes()
            return peak, peak, 0
        # One call instead of four (`max_memory_allocated`, ...): the GPU idles meanwhile.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated, reserved = (stats[f"{name}_bytes"]["all"] for name in ("allocated", "reserved"))
        return allocated["peak"], reserved["peak"], stats["num_alloc_retries"]

    def _estimate_mfu(self, num_tokens: int, seconds: float) -> float | None:
        """Model FLOPs utilization: the plan's FLOPs scaled to the tokens actually trained."""
        predicted = self._plan.estimate.time
        planned_tokens = predicted.tokens_per_second * predicted.seconds_per_step
        strategy, gpu = self._plan.strategy, self._plan.hardware.node.gpu
        peak = gpu.flops(strategy.compute) * strategy.world_size
        if not planned_tokens or not peak:
            return None
        return predicted.flops_per_step * num_tokens / planned_tokens / seconds / peak


_MAX_LOSS = 80.0
"""Keeps perplexity, its exponential, a finite and readable JSON number."""


class Evaluation:
    """Loss on the held-out rows: one pass, split over all ranks in batches of similar length."""

    def __init__(
        self, store: TokenStore, collate: Collate, *, micro_batch: int, context: DistContext
    ) -> None:
        self._store = store
        self._collate = collate
        self._micro_batch = micro_batch
        self._context = context
        self._is_encoder_decoder = store.description.is_encoder_decoder

    def run(self, engine: TrainEngine, step: int) -> EvalRecord:
        """Mean loss per trained token after `step` steps; all ranks together."""
        start = time.perf_counter()
        loss_sum, num_trained = 0.0, 0
        with evaluating(engine):
            for batch in self._batches():
                num_trained += count_trained(batch, is_encoder_decoder=self._is_encoder_decoder)
                loss_sum += float(engine.module(**to_device(batch, self._context)))
        total, count = sum_over_ranks(loss_sum, num_trained, device=self._context.device)
        loss = total / max(1.0, count)
        return EvalRecord(
            step=step,
            loss=loss,
            perplexity=math.exp(min(loss, _MAX_LOSS)),
            num_trained_tokens=int(count),
            seconds=time.perf_counter() - start,
        )

    def _batches(self) -> Iterator[Batch]:
        """This rank's batches. All ranks yield equally many: surplus ones carry no loss."""
        order = sorted(range(len(self._store)), key=lambda row: -int(self._store.lengths[row]))
        size = self._micro_batch
        chunks = [order[at : at + size] for at in range(0, len(order), size)]
        num_rounds = -(-len(chunks) // self._context.world_size)
        for turn in range(num_rounds):
            at = turn * self._context.world_size + self._context.rank
            chunk = chunks[min(at, len(chunks) - 1)]
            batch = self._collate([[self._store.row(row)] for row in chunk])
            yield batch if at < len(chunks) else without_loss(batch)
