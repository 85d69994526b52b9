"""One start of a run, top to bottom: open the data, load the model, resume, warm up, then train,
evaluate, log and save until the last step.

Below the loop are its parts: schedule, divergence check, warm-up, step timer, evaluation.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DivergedError, InvalidInputError, NotFoundError
from tightfit.core.settings import Schedule
from tightfit.core.strategy import Strategy, Training
from tightfit.data.token_store import TokenStore
from tightfit.hardware.machine import read_peak_memory_bytes
from tightfit.planning.plan import Plan
from tightfit.runs.metrics import EvalRecord, StepRecord
from tightfit.runs.run_folder import RunFolder
from tightfit.runtime.attention import needs_padding_mask
from tightfit.training.batches import (
    KL_PREFIX,
    Batch,
    BatchLoader,
    BatchMaker,
    BatchSampler,
    StepBatches,
    choose_collate,
    count_divisor,
    count_trained,
    to_device,
    without_loss,
)
from tightfit.training.checkpoint import (
    Progress,
    find_checkpoint,
    list_damaged,
    read_progress,
    write_checkpoint,
)
from tightfit.training.distributed import DistContext, sum_over_ranks
from tightfit.training.engine import TorchEngine, build_engine, evaluating
from tightfit.training.model import find_routing
from tightfit.training.preference import find_preference
from tightfit.training.reference import precompute_reference
from tightfit.training.rewards import describe_rewards
from tightfit.training.run_logger import RunLogger
from tightfit.training.step import (
    ReducedMetrics,
    TrainEngine,
    all_reduce_metrics,
    measure_kl,
    mix_seed,
    train_step,
    with_kl,
)

SECONDS_BETWEEN_CHECKPOINTS = 600.0


class TrainLoop:
    """One start of a run. `step` is the number of optimizer steps done."""

    def __init__(
        self,
        run: RunFolder,
        plan: Plan,
        context: DistContext,
        is_stop_requested: Callable[[], bool],
    ) -> None:
        """Do everything up to the first step, including a warm-up step on the longest batch."""
        assert plan.training is not None
        context = replace(context, context_parallel=plan.strategy.context_parallel)
        self.run, self.plan, self.context = run, plan, context
        self.training = training = plan.training
        self.is_stop_requested = is_stop_requested
        strategy = plan.strategy

        # Data: the rows were encoded before this process started.
        folders = run.read_tokens()
        store = _open_store(folders.train)
        _check_vocabulary(store, plan, training)
        self.sampler = BatchSampler(
            store,
            effective_batch=plan.effective_batch,
            seq_len=strategy.seq_len,
            is_packed=strategy.packing,
            seed=training.seed,
            shuffle=training.shuffle,
        )
        _check_objective(store, strategy)
        self.num_steps = training.max_steps or self.sampler.count_steps(plan.num_epochs)

        # Model and optimizer.
        self.engine: TrainEngine = build_engine(plan, context)
        has_mask = needs_padding_mask(self.engine.model.config)
        collate = choose_collate(store.description, is_packed=strategy.packing, has_mask=has_mask)
        needs_kl = strategy.objective.record.needs_kl
        maker = BatchMaker(store, collate, seed=training.seed, needs_kl=needs_kl)
        self.loader = BatchLoader(
            self.sampler, collate, micro_batch=strategy.micro_batch, context=context, maker=maker
        )
        makers = [(store, maker)]
        self._evaluate: Callable[..., EvalRecord] | None = None
        if folders.eval is not None:
            held_out = _open_store(folders.eval)
            held_out_collate = choose_collate(
                held_out.description, is_packed=False, has_mask=has_mask
            )
            held_out_maker = BatchMaker(
                held_out, held_out_collate, seed=training.seed, needs_kl=needs_kl
            )
            makers.append((held_out, held_out_maker))
            self._evaluate = partial(
                evaluate,
                self.engine,
                held_out,
                held_out_maker,
                micro_batch=strategy.micro_batch,
                context=context,
            )

        # The reference is the model before its first step: before a checkpoint is loaded.
        if strategy.precompute_reference and strategy.objective.record.needs_reference:
            for one, its_maker in makers:
                its_maker.reference = precompute_reference(
                    self.engine, one, its_maker, plan, context
                )

        # Resume from the newest complete checkpoint.
        self.step, damaged = 0, []
        checkpoint = find_checkpoint(run)
        if checkpoint is not None:
            self.engine.load_state(checkpoint)
            self.step = read_progress(checkpoint).step
            damaged = list_damaged(run, after_step=self.step)
        self.saved_step = self.step or -1
        self._saved_at = time.monotonic()

        self.routing = find_routing(self.engine.module)
        self.preference = find_preference(self.engine.module)
        warm_up_step(self.engine, to_device(self.loader.longest(), context), context)
        if self.routing is not None:
            self.routing.take()
        if self.preference is not None:
            self.preference.take()
        self.logger = RunLogger(run, plan, context, num_steps=self.num_steps)
        self.logger.open(step=self.step, damaged=damaged)

    def train(self) -> bool:
        """Train to the last step or until asked to stop; True if all steps are done.

        Either way the last step taken is in a checkpoint.
        """
        timer = StepTimer(self.plan, self.context.device)
        divergence = DivergenceCheck(
            self.plan.model.vocab_size,
            is_scaled=self.plan.strategy.compute is Dtype.FP16,
            # A run that was stopped as diverged is stopped again.
            losses=self.logger.read_losses(self.step),
        )
        # Not if an earlier start evaluated this step; only rank 0 has the records.
        is_evaluated = float(self.logger.has_evaluation(self.step))
        if sum_over_ranks(is_evaluated, device=self.context.device)[0] == 0:
            self._evaluate_if_due()
        self._saved_at = time.monotonic()
        timer.restart()
        for ready in self.loader.steps(self.step, self.num_steps):
            learning_rate = learning_rate_at(self.step, self.num_steps, self.training)
            metrics = self._take_step(ready, learning_rate)
            divergence.check(self.step + 1, metrics, self.sampler.locations(self.step))
            self.step += 1
            epoch = self.step / self.sampler.steps_per_epoch
            self.logger.write(
                timer.record(ready, metrics, learning_rate=learning_rate, epoch=epoch)
            )
            if metrics.must_save and not metrics.must_stop:
                self.save()
                timer.restart()
            if metrics.must_stop and self.step < self.num_steps:
                break  # no evaluation: it may take longer than the time left to save
            if self._evaluate_if_due():
                timer.restart()
        self.save()
        return self.step == self.num_steps

    def _take_step(self, ready: StepBatches, learning_rate: float) -> ReducedMetrics:
        """One optimizer step, and its metrics over all ranks."""
        divisor = ready.items.divisor
        outcome = train_step(
            self.engine,
            [to_device(batch, self.context) for batch in ready.batches],
            divisor=divisor,
            learning_rate=learning_rate,
            seeds=[
                mix_seed(self.training.seed, self.step, number, self.context.rank)
                for number in range(len(ready.batches))
            ],
        )
        every = self.training.save_every
        seconds_since_save = time.monotonic() - self._saved_at
        return all_reduce_metrics(
            outcome,
            divisor=divisor,
            must_stop=self.is_stop_requested(),
            must_save=(self.step + 1) % every == 0
            if every is not None
            else seconds_since_save > SECONDS_BETWEEN_CHECKPOINTS,
            routing=None if self.routing is None else self.routing.take(),
            preference=None if self.preference is None else self.preference.take(),
        )

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

    def _evaluate_if_due(self) -> bool:
        every = self.training.eval_every or self.sampler.steps_per_epoch
        is_due = self.step % every == 0 or self.step == self.num_steps
        if is_due and self._evaluate is not None:
            self.logger.write(self._evaluate(step=self.step))
        return is_due


def _open_store(folder: str) -> TokenStore:
    try:
        return TokenStore(Path(folder))
    except OSError as error:
        raise NotFoundError(
            f"The encoded data of this run is gone: {folder}.",
            remedy="start it again with tightfit train, which encodes it again",
        ) from error


def _check_objective(store: TokenStore, strategy: Strategy) -> None:
    """Refuse data that was encoded for another objective, and what KTO cannot be run with."""
    objective, held = strategy.objective, store.description.example
    if held is not objective.record.example:
        raise InvalidInputError(
            f"The encoded data holds {held.value}s; {objective.value} learns from "
            f"{objective.record.example.value}s.",
            remedy="start the run in a new folder: tightfit train ... --output FOLDER",
        )
    if objective.record.needs_kl and strategy.packing:
        raise InvalidInputError(
            "KTO's mismatched rows cannot be packed.", remedy="--set packing=false"
        )


def _check_vocabulary(store: TokenStore, plan: Plan, training: Training) -> None:
    """Refuse a tokenizer of another model: a token id too high is a device-side assert on GPUs."""
    highest = store.find_highest_token()
    if highest >= plan.model.vocab_size:
        raise InvalidInputError(
            f"The tokenizer in {training.model_path} wrote token {highest:,}; the model has "
            f"{plan.model.vocab_size:,}.",
            remedy="put the model's own tokenizer files there, or enlarge its embeddings",
        )


def learning_rate_at(step: int, num_steps: int, training: Training) -> float:
    """The learning rate of `step` (from 0): linear warm-up, then cosine, linear or constant.

    After the warm-up the rates are those of transformers' `get_cosine_schedule_with_warmup` and its
    siblings. In the warm-up they are one step ahead: theirs begin with a step at rate 0, which
    costs a step and changes nothing.
    """
    num_warmup = math.ceil(training.warmup_fraction * num_steps)
    if step < num_warmup:
        return training.learning_rate * (step + 1) / num_warmup
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

    def __init__(self, vocab_size: int, *, is_scaled: bool, losses: Sequence[float] = ()) -> None:
        # Random guessing costs ln(vocab_size); twice that is worse than an untrained model.
        self._hopeless_loss = 2 * math.log(vocab_size)
        self._is_scaled = is_scaled
        self._losses = deque(losses, maxlen=_NUM_RECENT)
        self._num_skipped = 0

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


def warm_up_step(engine: TrainEngine, batch: Batch, context: DistContext) -> float:
    """Forward and backward on the longest batch, without an update; returns its mean loss.

    What would fail hours into a run fails here. An empty tensor takes the memory of the optimizer
    state, which is allocated only by the first update. Raises if the loss is not finite; an
    out-of-memory error is passed on.
    """
    with engine.autocast():
        if KL_PREFIX + "input_ids" in batch:
            with torch.no_grad():
                kl = measure_kl(engine, [batch], num_examples=len(batch["is_good"]))
            batch = with_kl(batch, kl)
        loss = engine.module(**batch)
    if isinstance(engine, TorchEngine):
        placeholder = torch.empty(
            _missing_state_bytes(engine), dtype=torch.uint8, device=context.device
        )
        engine.backward(loss / max(1, batch["labels"].numel()))
        engine.optimizer.zero_grad(set_to_none=True)
        del placeholder
    num_trained = count_divisor(batch) * context.counts_batch
    loss_sum, count = sum_over_ranks(float(loss.detach()), num_trained, device=context.device)
    mean = loss_sum / max(1.0, count)
    if not math.isfinite(mean):
        raise _not_finite(mean, engine)
    return mean


def _not_finite(loss: float, engine: TrainEngine) -> DivergedError:
    """The error for weights that are not finite, or whose activations overflow the dtype."""
    compute = engine.strategy.compute
    problem = f"The loss of the first batch is {loss}, before the first update"
    broken = next(
        (
            name
            for name, parameter in engine.model.named_parameters()
            # Quantized weights cannot hold an infinity or NaN.
            if parameter.is_floating_point()
            and not torch.isfinite(_local(parameter.detach())).all()
        ),
        None,
    )
    if broken is not None:
        reason = f": the weight {broken} holds values that are not finite."
        remedy = "fetch the model's files again, or use another checkpoint of it"
    elif compute is Dtype.FP32:
        reason = ", though all weights are finite."
        remedy = "check that config.json belongs to these weights"
    else:
        reason = f": its activations overflow {compute.value}."
        remedy = "use a wider format: --set compute=fp32 --set weights=fp32 --fresh"
    return DivergedError(problem + reason, remedy=remedy)


def _missing_state_bytes(engine: TorchEngine) -> int:
    """Bytes that the optimizer's first update will allocate on the device."""
    record = engine.strategy.optimizer.record
    if engine.optimizer.state or engine.strategy.offload.moves_optimizer or record.is_paged:
        return 0
    tensors = [_local(p) for group in engine.optimizer.param_groups for p in group["params"]]
    if record.state_bytes is not None:
        return int(record.state_bytes) * sum(tensor.numel() for tensor in tensors)
    return sum(record.state_values * tensor.element_size() * tensor.numel() for tensor in tensors)


def _local(tensor: Any) -> torch.Tensor:
    """This rank's shard, or the tensor itself."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


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
            router_loss=metrics.router_loss,
            expert_load_max=metrics.expert_load_max,
            idle_experts_fraction=metrics.idle_experts_fraction,
            preference=metrics.preference,
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


def evaluate(
    engine: TrainEngine,
    store: TokenStore,
    maker: BatchMaker,
    *,
    step: int,
    micro_batch: int,
    context: DistContext,
) -> EvalRecord:
    """Mean loss per trained token, or pair, of the held-out rows after `step` steps; all ranks
    together."""
    start = time.perf_counter()
    size = store.description.rows_per_example
    # Batches of similar length. All ranks run equally many: surplus ones carry no loss.
    lengths = store.example_lengths
    order = sorted(range(0, len(store), size), key=lambda row: -int(lengths[row]))
    chunks = [order[at : at + micro_batch] for at in range(0, len(order), micro_batch)]
    nll_weight = None
    if size > 1:
        nll_weight = len(order) / max(1, int(store.num_trained[0::size].sum()))
    preference = find_preference(engine.module)
    is_encoder_decoder = store.description.is_encoder_decoder

    def read_batches() -> Iterator[Batch]:
        for first in range(0, len(chunks), context.num_batch_ranks):
            at = first + context.batch_rank
            chunk = chunks[min(at, len(chunks) - 1)]
            batch = maker.make([(row,) for row in chunk], nll_weight=nll_weight)
            yield to_device(batch if at < len(chunks) else without_loss(batch), context)

    loss_sum, num_trained, divisor = 0.0, 0, 0
    with evaluating(engine):
        kl = None
        if maker.needs_kl:
            kl = measure_kl(engine, read_batches(), num_examples=len(order))
        for batch in read_batches():
            if context.counts_batch:
                num_trained += count_trained(batch, is_encoder_decoder=is_encoder_decoder)
                divisor += count_divisor(batch, is_encoder_decoder=is_encoder_decoder)
            scored = batch if kl is None else with_kl(batch, kl)
            loss_sum += float(engine.module(**scored))
    sums = [] if preference is None else preference.take().tolist()
    total, count, trained, *rewards = sum_over_ranks(
        loss_sum, divisor, num_trained, *sums, device=context.device
    )
    loss = total / max(1.0, count)
    return EvalRecord(
        step=step,
        loss=loss,
        perplexity=math.exp(min(loss, _MAX_LOSS)) if preference is None else None,
        num_trained_tokens=int(trained),
        seconds=time.perf_counter() - start,
        preference=describe_rewards(rewards) if rewards else None,
    )
