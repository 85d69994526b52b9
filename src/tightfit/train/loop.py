"""The training loop: from the last checkpoint to the last step, top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tightfit.core.dtypes import Dtype
from tightfit.core.training import Training
from tightfit.ledger.run_folder import RunFolder
from tightfit.planning.plan import Plan
from tightfit.train.agreement import agree, sum_over_ranks
from tightfit.train.checkpoint import Progress, write_checkpoint
from tightfit.train.diary import Diary
from tightfit.train.divergence import Watch
from tightfit.train.evaluation import Evaluation
from tightfit.train.feed import Feed
from tightfit.train.loader import Loader, StepBatches, to_device
from tightfit.train.measuring import Meter
from tightfit.train.place import Place
from tightfit.train.schedule import learning_rate_at
from tightfit.train.step import StepPlan, mix_seed, train_step

SECONDS_BETWEEN_CHECKPOINTS = 600.0


@dataclass(slots=True, kw_only=True)
class Loop:
    """One attempt at a run. `step` counts the optimizer steps that are done."""

    plan: Plan
    training: Training
    run: RunFolder
    place: Place
    engine: Any
    feed: Feed
    loader: Loader
    evaluation: Evaluation | None
    diary: Diary
    is_asked_to_stop: Callable[[], bool]
    num_steps: int
    step: int = 0
    saved_step: int = -1
    _saved_at: float = 0.0

    def go(self) -> bool:
        """Train to the end, or until asked to stop; True where all steps are done.

        Either way the last step is in a checkpoint.
        """
        meter = Meter(self.plan, self.place.device)
        watch = Watch(
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

    def _train_one(self, ready: StepBatches, meter: Meter, watch: Watch) -> bool:
        rate = learning_rate_at(self.step, self.num_steps, self.training)
        num_trained = ready.items.num_trained_tokens
        seeds = tuple(
            mix_seed(self.training.seed, self.step, number, self.place.rank)
            for number in range(len(ready.batches))
        )
        batches = [to_device(batch, self.place) for batch in ready.batches]
        numbers = StepPlan(num_trained_tokens=num_trained, learning_rate=rate, seeds=seeds)
        outcome = train_step(self.engine, batches, numbers)
        agreed = agree(
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
