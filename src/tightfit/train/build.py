"""Build a run from its plan: engine, data, checkpoint to resume from, and a warm-up step on the
longest batch.
"""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DivergedError, InvalidInputError, NotFoundError, UserError
from tightfit.core.strategy import Optimizer, Sharding, Strategy
from tightfit.core.training import MEMORY_VARIABLE, Training
from tightfit.data.token_store import TokenStore
from tightfit.planning.plan import Plan
from tightfit.runs.run_folder import RunFolder
from tightfit.runtime.attention import needs_padding_mask
from tightfit.runtime.load import load_base
from tightfit.runtime.staged import prefer_staged
from tightfit.train.batches import Batch, BatchLoader, BatchSampler, choose_collate, to_device
from tightfit.train.checkpoint import find_checkpoint, list_damaged, read_progress
from tightfit.train.distributed import DistContext
from tightfit.train.engine import TorchEngine
from tightfit.train.evaluation import Evaluation
from tightfit.train.loop import TrainLoop
from tightfit.train.model import Objective, prepare_model
from tightfit.train.optimizers import build_optimizer
from tightfit.train.run_logger import RunLogger
from tightfit.train.sharding import load_sharded, make_load_request, replicate
from tightfit.train.signals import StopRequest
from tightfit.train.step import sum_over_ranks

# A step on the longest batch before the first real one: what would fail at night fails now.

_STATE_BYTES_PER_VALUE = {
    Optimizer.ADAMW_8BIT: 2,
    Optimizer.ADAMW_PAGED_8BIT: 0,
    Optimizer.ADAFACTOR: 0,
}
"""Optimizer state per trained value, where it is not twice (AdamW) or once (SGD) the value."""


def warm_up_step(engine: Any, batch: Batch, place: DistContext) -> float:
    """Mean loss of the longest batch; gradients are made and dropped, nothing is learnt.

    The optimizer's state, which appears with the first update, is stood in for by
    as much empty memory. Raises where the loss is not finite; out of memory comes
    through as torch raises it.
    """
    with engine.autocast():
        loss = engine.module(**batch)
    if isinstance(engine, TorchEngine):
        stand_in = torch.empty(_missing_state_bytes(engine), dtype=torch.uint8, device=place.device)
        engine.backward(loss / max(1, batch["labels"].numel()))
        engine.optimizer.zero_grad(set_to_none=True)
        del stand_in
    num_trained = int((batch["labels"] != -100).sum())
    loss_sum, count = sum_over_ranks(float(loss.detach()), num_trained, device=place.device)
    mean = loss_sum / max(1.0, count)
    if not math.isfinite(mean):
        raise _not_finite(mean, engine)
    return mean


def _not_finite(loss: float, engine: Any) -> DivergedError:
    """Broken weights, or sound ones whose sums overflow the format."""
    problem = f"The loss of the first batch is {loss}, before anything is learnt"
    broken = _find_non_finite_weight(engine.model)
    if broken is not None:
        return DivergedError(
            f"{problem}: the weight {broken} holds values that are not finite.",
            remedy="fetch the model's files again, or take another checkpoint of it",
        )
    if engine.strategy.compute is Dtype.FP32:
        return DivergedError(
            f"{problem}, though all weights are finite.",
            remedy="check that config.json belongs to these weights",
        )
    return DivergedError(
        f"{problem}: the model's numbers overflow {engine.strategy.compute.value}.",
        remedy="calculate in a wider format: --set compute=fp32 --set weights=fp32 --fresh",
    )


def _find_non_finite_weight(model: nn.Module) -> str | None:
    """The first weight with an infinity or NaN; packed ones have no such values."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not all(
            bool(torch.isfinite(local).all()) for local in _local_tensors([parameter.detach()])
        ):
            return name
    return None


def _missing_state_bytes(engine: TorchEngine) -> int:
    if engine.optimizer.state or engine.strategy.offload.moves_optimizer:
        return 0
    return sum(
        parameter.numel() * _state_bytes(engine.strategy, parameter)
        for group in engine.optimizer.param_groups
        for parameter in _local_tensors(group["params"])
    )


def _local_tensors(parameters: list[Any]) -> list[torch.Tensor]:
    return [p.to_local() if hasattr(p, "to_local") else p for p in parameters]


def _state_bytes(strategy: Strategy, parameter: torch.Tensor) -> int:
    if strategy.optimizer in _STATE_BYTES_PER_VALUE:
        return _STATE_BYTES_PER_VALUE[strategy.optimizer]
    return parameter.element_size() * (1 if strategy.optimizer is Optimizer.SGD_MOMENTUM else 2)


def build_engine(plan: Plan, place: DistContext) -> Any:
    """The engine that the plan's sharding names, ready for its first step."""
    training = _training_of(plan)
    strategy = plan.strategy
    _check_plan(strategy, place)
    if strategy.sharding.is_zero:
        from tightfit.train.zero import build_zero_engine

        return build_zero_engine(plan, place)
    if strategy.sharding.is_fsdp:
        module: Any = load_sharded(plan, training, place)
    else:
        request = make_load_request(strategy, training)
        model = load_base(prefer_staged(Path(training.model_path)), request, place.device)
        module = Objective.from_strategy(prepare_model(model, strategy, training), strategy)
        if strategy.sharding is Sharding.DDP and place.world_size > 1:
            module = replicate(module, place)
    optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
    return TorchEngine(
        module,
        optimizer,
        strategy=strategy,
        device=place.device,
        world_size=place.world_size,
        max_grad_norm=training.max_grad_norm,
    )


def _training_of(plan: Plan) -> Training:
    if plan.training is None:
        raise UserError(
            "The plan says what would run, but not on which data.",
            remedy="tightfit train RECIPE.YAML",
        )
    return plan.training


def _check_plan(strategy: Strategy, place: DistContext) -> None:
    """What would fail later, or quietly do something else."""
    if strategy.sharding is Sharding.SINGLE and place.world_size > 1:
        raise UserError(
            f"The plan is for one process, and {place.world_size} were started.",
            remedy="start it with tightfit train, which starts as many as the plan says",
        )
    if strategy.sharding.is_fsdp and strategy.optimizer is Optimizer.ADAFACTOR:
        raise UserError(
            "torch's Adafactor takes row and column sums, which it cannot do over FSDP's shards.",
            remedy="--set optimizer=adamw, or --sharding ddp",
        )
    if strategy.optimizer_in_backward:
        raise UserError(
            "The optimizer cannot run inside the backward pass yet: gradients are clipped first.",
            remedy="--set optimizer_in_backward=false",
        )


# Putting a run together: data, engine, checkpoint, checks; what the loop then drives.


def build_loop(
    run: RunFolder, plan: Plan, training: Training, place: DistContext, asked: StopRequest
) -> TrainLoop:
    """Everything up to the first step, a rehearsal on the longest batch included."""
    strategy = plan.strategy
    folders = run.read_tokens()
    store = _open_store(folders.train)
    _check_vocabulary(store, plan, training)
    feed = BatchSampler(
        store,
        effective_batch=plan.effective_batch,
        seq_len=strategy.seq_len,
        is_packed=strategy.packing,
        seed=training.seed,
        shuffle=training.shuffle,
    )
    num_steps = training.max_steps or feed.count_steps(plan.num_epochs)
    engine = build_engine(plan, place)
    has_mask = needs_padding_mask(engine.model.config)
    collate = choose_collate(store.description, is_packed=strategy.packing, has_mask=has_mask)
    loader = BatchLoader(feed, collate, micro_batch=strategy.micro_batch, place=place)
    step, damaged = _resume(run, engine)
    warm_up_step(engine, to_device(loader.longest(), place), place)
    diary = RunLogger(run, plan, place)
    diary.open(step=step, num_steps=num_steps, damaged=damaged)
    return TrainLoop(
        plan=plan,
        training=training,
        run=run,
        place=place,
        engine=engine,
        feed=feed,
        loader=loader,
        evaluation=_build_evaluation(folders.eval, plan, place, has_mask=has_mask),
        diary=diary,
        is_asked_to_stop=lambda: asked.is_made,
        num_steps=num_steps,
        step=step,
        saved_step=step if step else -1,
    )


def apply_memory_limit(device: torch.device) -> None:
    """Obey a limit below what the machine has, so that others can use the rest."""
    text = os.environ.get(MEMORY_VARIABLE)
    if not text:
        return
    limit = int(text)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _resume(run: RunFolder, engine: Any) -> tuple[int, list[str]]:
    """Load the newest whole checkpoint; the number of steps it holds, and what was passed over."""
    folder = find_checkpoint(run)
    if folder is None:
        return 0, []
    engine.load_state(folder)
    step = read_progress(folder).step
    return step, list_damaged(run, after_step=step)


def _check_vocabulary(store: TokenStore, plan: Plan, training: Training) -> None:
    """A tokenizer of another model: on a GPU a token too high would end in an assertion."""
    highest = store.find_highest_token()
    if highest >= plan.model.vocab_size:
        raise InvalidInputError(
            f"The tokenizer in {training.model_path} wrote token {highest:,}, and the model knows "
            f"{plan.model.vocab_size:,}.",
            remedy="put the model's own tokenizer files there, or enlarge its embeddings",
        )


def _build_evaluation(
    folder: str | None, plan: Plan, place: DistContext, *, has_mask: bool
) -> Evaluation | None:
    if folder is None:
        return None
    store = _open_store(folder)
    collate = choose_collate(store.description, is_packed=False, has_mask=has_mask)
    return Evaluation(store, collate, micro_batch=plan.strategy.micro_batch, place=place)


def _open_store(folder: str) -> TokenStore:
    try:
        return TokenStore(Path(folder))
    except OSError as fault:
        raise NotFoundError(
            f"The encoded data of this run is gone: {folder}.",
            remedy="start it again with tightfit train, which encodes it anew",
        ) from fault
