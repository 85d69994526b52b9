"""Build a run from its plan: engine, data, checkpoint to resume from, and a warm-up step on the
longest batch.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DivergedError, InvalidInputError, NotFoundError, UserError
from tightfit.core.strategy import Sharding, Strategy
from tightfit.core.training import MEMORY_VARIABLE, Training
from tightfit.data.token_store import TokenStore
from tightfit.planning.plan import Plan
from tightfit.runs.run_folder import RunFolder
from tightfit.runtime.attention import needs_padding_mask
from tightfit.runtime.load import load_base
from tightfit.runtime.staged import prefer_staged
from tightfit.training.batches import (
    IGNORED,
    Batch,
    BatchLoader,
    BatchSampler,
    choose_collate,
    to_device,
)
from tightfit.training.checkpoint import find_checkpoint, list_damaged, read_progress
from tightfit.training.distributed import DistContext, sum_over_ranks
from tightfit.training.engine import TorchEngine
from tightfit.training.loop import Evaluation, TrainLoop
from tightfit.training.model import Objective, make_load_request, prepare_model
from tightfit.training.optimizers import build_optimizer
from tightfit.training.run_logger import RunLogger
from tightfit.training.sharding import load_sharded, replicate
from tightfit.training.step import TrainEngine


def build_loop(
    run: RunFolder,
    plan: Plan,
    training: Training,
    context: DistContext,
    is_stop_requested: Callable[[], bool],
) -> TrainLoop:
    """Do everything up to the first step, including a warm-up step on the longest batch."""
    strategy = plan.strategy
    folders = run.read_tokens()
    store = _open_store(folders.train)
    _check_vocabulary(store, plan, training)
    sampler = BatchSampler(
        store,
        effective_batch=plan.effective_batch,
        seq_len=strategy.seq_len,
        is_packed=strategy.packing,
        seed=training.seed,
        shuffle=training.shuffle,
    )
    num_steps = training.max_steps or sampler.count_steps(plan.num_epochs)
    engine = build_engine(plan, context)
    has_mask = needs_padding_mask(engine.model.config)
    collate = choose_collate(store.description, is_packed=strategy.packing, has_mask=has_mask)
    loader = BatchLoader(sampler, collate, micro_batch=strategy.micro_batch, context=context)
    step, damaged = _resume(run, engine)
    warm_up_step(engine, to_device(loader.longest(), context), context)
    logger = RunLogger(run, plan, context)
    logger.open(step=step, num_steps=num_steps, damaged=damaged)
    return TrainLoop(
        plan=plan,
        training=training,
        run=run,
        context=context,
        engine=engine,
        sampler=sampler,
        loader=loader,
        evaluation=_build_evaluation(folders.eval, plan, context, has_mask=has_mask),
        logger=logger,
        is_stop_requested=is_stop_requested,
        num_steps=num_steps,
        step=step,
        saved_step=step if step else -1,
    )


def apply_memory_limit(device: torch.device) -> None:
    """Cap this process's memory at the limit in the environment, if one is set there."""
    text = os.environ.get(MEMORY_VARIABLE)
    if not text:
        return
    limit = int(text)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _resume(run: RunFolder, engine: TrainEngine) -> tuple[int, list[str]]:
    """Load the newest complete checkpoint; its step, and newer ones that are damaged."""
    folder = find_checkpoint(run)
    if folder is None:
        return 0, []
    engine.load_state(folder)
    step = read_progress(folder).step
    return step, list_damaged(run, after_step=step)


def _check_vocabulary(store: TokenStore, plan: Plan, training: Training) -> None:
    """Refuse a tokenizer of another model: a token id too high is a device-side assert on GPUs."""
    highest = store.find_highest_token()
    if highest >= plan.model.vocab_size:
        raise InvalidInputError(
            f"The tokenizer in {training.model_path} wrote token {highest:,}; the model has "
            f"{plan.model.vocab_size:,}.",
            remedy="put the model's own tokenizer files there, or enlarge its embeddings",
        )


def _build_evaluation(
    folder: str | None, plan: Plan, context: DistContext, *, has_mask: bool
) -> Evaluation | None:
    if folder is None:
        return None
    store = _open_store(folder)
    collate = choose_collate(store.description, is_packed=False, has_mask=has_mask)
    return Evaluation(store, collate, micro_batch=plan.strategy.micro_batch, context=context)


def _open_store(folder: str) -> TokenStore:
    try:
        return TokenStore(Path(folder))
    except OSError as error:
        raise NotFoundError(
            f"The encoded data of this run is gone: {folder}.",
            remedy="start it again with tightfit train, which encodes it again",
        ) from error


def build_engine(plan: Plan, context: DistContext) -> TrainEngine:
    """The engine that the plan's sharding names, ready for its first step."""
    training = _training_of(plan)
    strategy = plan.strategy
    _check_plan(strategy, context)
    if strategy.sharding.is_zero:
        from tightfit.training.zero import build_zero_engine

        return build_zero_engine(plan, context)
    if strategy.sharding.is_fsdp:
        module: Any = load_sharded(plan, training, context)
    else:
        request = make_load_request(strategy, training)
        model = load_base(prefer_staged(Path(training.model_path)), request, context.device)
        module = Objective.from_strategy(prepare_model(model, strategy, training), strategy)
        if strategy.sharding is Sharding.DDP and context.world_size > 1:
            module = replicate(module, context)
    optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
    return TorchEngine(
        module,
        optimizer,
        strategy=strategy,
        device=context.device,
        world_size=context.world_size,
        max_grad_norm=training.max_grad_norm,
    )


def _training_of(plan: Plan) -> Training:
    if plan.training is None:
        raise UserError(
            "The plan says what would run, but not on which data.",
            remedy="tightfit train RECIPE.YAML",
        )
    return plan.training


def _check_plan(strategy: Strategy, context: DistContext) -> None:
    """Refuse what would fail later, or silently do something else."""
    if strategy.sharding is Sharding.SINGLE and context.world_size > 1:
        raise UserError(
            f"The plan is for one process, and {context.world_size} were started.",
            remedy="start it with tightfit train, which starts as many as the plan says",
        )
    record = strategy.optimizer.record
    problem = record.fsdp_problem if strategy.sharding.is_fsdp else ""
    problem = record.zero_problem if strategy.sharding.is_zero else problem
    if problem:
        raise UserError(
            f"{problem[0].upper()}{problem[1:]}.",
            remedy="--set optimizer=adamw, or --sharding ddp",
        )


def warm_up_step(engine: TrainEngine, batch: Batch, context: DistContext) -> float:
    """Forward and backward on the longest batch, without an update; returns its mean loss.

    What would fail hours into a run fails here. An empty tensor takes the memory of the optimizer
    state, which is allocated only by the first update. Raises if the loss is not finite; an
    out-of-memory error is passed on.
    """
    with engine.autocast():
        loss = engine.module(**batch)
    if isinstance(engine, TorchEngine):
        placeholder = torch.empty(
            _missing_state_bytes(engine), dtype=torch.uint8, device=context.device
        )
        engine.backward(loss / max(1, batch["labels"].numel()))
        engine.optimizer.zero_grad(set_to_none=True)
        del placeholder
    num_trained = int((batch["labels"] != IGNORED).sum())
    loss_sum, count = sum_over_ranks(float(loss.detach()), num_trained, device=context.device)
    mean = loss_sum / max(1.0, count)
    if not math.isfinite(mean):
        raise _not_finite(mean, engine)
    return mean


def _not_finite(loss: float, engine: TrainEngine) -> DivergedError:
    """The error for weights that are not finite, or whose activations overflow the dtype."""
    problem = f"The loss of the first batch is {loss}, before the first update"
    broken = _find_non_finite_weight(engine.model)
    if broken is not None:
        return DivergedError(
            f"{problem}: the weight {broken} holds values that are not finite.",
            remedy="fetch the model's files again, or use another checkpoint of it",
        )
    if engine.strategy.compute is Dtype.FP32:
        return DivergedError(
            f"{problem}, though all weights are finite.",
            remedy="check that config.json belongs to these weights",
        )
    return DivergedError(
        f"{problem}: its activations overflow {engine.strategy.compute.value}.",
        remedy="use a wider format: --set compute=fp32 --set weights=fp32 --fresh",
    )


def _find_non_finite_weight(model: nn.Module) -> str | None:
    """The first weight with an infinity or NaN; quantized ones cannot hold any."""
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
    record = strategy.optimizer.record
    if record.is_paged:
        return 0
    if record.state_bytes is not None:
        return int(record.state_bytes)
    return record.state_values * parameter.element_size()
