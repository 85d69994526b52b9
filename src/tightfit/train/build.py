"""From a plan to an engine: load, finish, wrap, and give it an optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tightfit.core.errors import UserError
from tightfit.core.strategy import Optimizer, Sharding, Strategy
from tightfit.core.training import Training
from tightfit.planning.plan import Plan
from tightfit.runtime.load import load_base
from tightfit.runtime.staged import prefer_staged
from tightfit.train.engine import TorchEngine
from tightfit.train.finish import finish_model
from tightfit.train.objective import Objective
from tightfit.train.optimizers import build_optimizer
from tightfit.train.place import Place
from tightfit.train.sharding import replicate
from tightfit.train.weights import load_sharded, make_request


def build_engine(plan: Plan, place: Place) -> Any:
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
        request = make_request(strategy, training)
        model = load_base(prefer_staged(Path(training.model_path)), request, place.device)
        module = Objective.from_strategy(finish_model(model, strategy, training), strategy)
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


def _check_plan(strategy: Strategy, place: Place) -> None:
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
