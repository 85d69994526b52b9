"""ZeroEngine: the model under DeepSpeed's ZeRO, behind the same protocol as plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.strategy import Loss, Method, Sharding, Strategy
from tightfit.core.training import Training
from tightfit.planning.plan import Plan
from tightfit.runtime.load import LoadRequest, load_base
from tightfit.runtime.staged import prefer_staged
from tightfit.train.finish import finish_model
from tightfit.train.objective import Objective
from tightfit.train.optimizers import build_optimizer
from tightfit.train.place import Place
from tightfit.train.step import Update
from tightfit.train.zero_config import make_zero_config
from tightfit.train.zero_load import announce_partitioning, load_partitioned, withdraw_partitioning
from tightfit.train.zero_start import start_deepspeed

_STATE_FOLDER = "zero"
"""Inside a checkpoint: DeepSpeed's `tag`."""


class ZeroEngine:
    """DeepSpeed's engine with our step: one loss scale, one schedule, one notion of a step."""

    is_updating = False
    """Never of use: no rank of a sharded run could save alone what is left."""

    def __init__(self, engine: Any, *, strategy: Strategy, place: Place, loading: Any) -> None:
        self.module: nn.Module = engine
        self.engine = engine
        self.strategy = strategy
        self.device = place.device
        self.world_size = place.world_size
        self._place = place
        # transformers and peft ask it whether weights are partitioned, and hold it weakly.
        self._loading = loading

    @property
    def model(self) -> Any:
        """The transformers or peft model inside."""
        return self.engine.module.model

    @property
    def optimizer(self) -> Any:
        return self.engine.optimizer

    def autocast(self) -> AbstractContextManager[object]:
        """Nothing to cast: every module holds weights in the dtype of the arithmetic."""
        return nullcontext()

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(is_last)
        yield

    def backward(self, loss: Tensor) -> None:
        # The loss is a share of the step's mean already: not to be divided by micro-batches.
        self.engine.backward(loss, scale_wrt_gas=False)

    def update(self, learning_rate: float) -> Update:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        try:
            self.engine.step()
        except Exception as fault:
            if "loss scale already at minimum" not in str(fault):
                raise
            raise UserError(
                "The gradients overflow fp16 at any scale.",
                remedy="calculate in bf16 or fp32, or lower the learning rate: --set compute=fp32",
            ) from fault
        is_skipped = bool(self.optimizer.overflow)
        norm = self.engine.get_global_grad_norm()
        told = float("inf") if is_skipped or norm is None else float(norm)
        return Update(grad_norm=torch.tensor(told), is_skipped=is_skipped)

    def save_state(self, folder: Path) -> None:
        """Trained parameters, master copies, moments and loss scale; each rank writes its share."""
        self.engine.save_checkpoint(
            str(folder), tag=_STATE_FOLDER, save_latest=False, exclude_frozen_parameters=True
        )

    def load_state(self, folder: Path) -> None:
        self._check_state(folder)
        path, _ = self.engine.load_checkpoint(
            str(folder), tag=_STATE_FOLDER, load_module_strict=False
        )
        if path is None:
            raise _unreadable(folder, "DeepSpeed finds nothing to load in it")

    def _check_state(self, folder: Path) -> None:
        inside = folder / _STATE_FOLDER
        num_saved = len(list(inside.glob("*zero_pp_rank_*_optim_states.pt")))
        if num_saved == 0:
            raise _unreadable(folder, "it was not written by ZeRO")
        is_partitioned = any(inside.glob("zero_pp_rank_*_model_states.pt"))
        if is_partitioned != self.strategy.sharding.shards_weights:
            raise _unreadable(folder, f"its stage of ZeRO is not {self.strategy.sharding.value}")
        if num_saved != self.world_size:
            raise UserError(
                f"The checkpoint {folder} was written by {num_saved} processes, and ZeRO cannot "
                f"deal it to {self.world_size}.",
                remedy=f"resume on {num_saved} GPUs, or start a new run with --set sharding=fsdp, "
                "which resumes on any number",
            )

    def trained_state(self) -> dict[str, Tensor]:
        """Whole tensors on rank 0's CPU, one parameter gathered at a time; {} elsewhere."""
        is_full = self.strategy.method is Method.FULL
        wanted = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if is_full or parameter.requires_grad
        }
        kept: dict[str, Tensor] = {}
        with self._settled():
            for name, parameter in wanted.items():
                with self._gathered(parameter):
                    if self._place.is_first:
                        kept[name] = parameter.detach().cpu().clone()
        return kept

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """No parameter on its way: ZeRO-3 may still be fetching the next layer's."""
        is_partitioned = self.strategy.sharding.shards_weights
        if is_partitioned:
            self.optimizer.checkpoint_event_prologue()
        yield
        if is_partitioned:
            self.optimizer.checkpoint_event_epilogue()

    def _gathered(self, parameter: nn.Parameter) -> AbstractContextManager[object]:
        if not self.strategy.sharding.shards_weights:
            return nullcontext()
        import deepspeed

        context: AbstractContextManager[object] = deepspeed.zero.GatheredParameters([parameter])
        return context

    def close(self) -> None:
        """Let go of hooks and buffers, so that another engine can take their place."""
        self.engine.destroy()
        if self._loading is not None:
            withdraw_partitioning()


def build_zero_engine(plan: Plan, place: Place) -> ZeroEngine:
    """Load as the stage asks, finish, and hand all to `deepspeed.initialize`."""
    training = plan.training
    if training is None:
        raise UserError(
            "The plan says what would run, but not on which data.",
            remedy="tightfit train RECIPE.YAML",
        )
    deepspeed = start_deepspeed(place)
    strategy = as_deepspeed_sees(plan.strategy)
    config = make_zero_config(plan)
    loading = announce_partitioning(config) if _is_partitioned_at_once(strategy) else None
    model = finish_model(_load(strategy, training, place), strategy, training)
    objective = Objective.from_strategy(model, strategy)
    if strategy.sharding is Sharding.ZERO3 and strategy.loss is Loss.FUSED:
        # The fused loss reads the head's weight without calling the head, which is what gathers.
        deepspeed.zero.register_external_parameter(objective, model.get_output_embeddings().weight)
    optimizer = build_optimizer(objective.named_parameters(), strategy.optimizer, training)
    engine, *_ = deepspeed.initialize(
        model=objective, optimizer=optimizer, config=config, dist_init_required=False
    )
    engine.train()
    return ZeroEngine(engine, strategy=plan.strategy, place=place, loading=loading)


def as_deepspeed_sees(strategy: Strategy) -> Strategy:
    """Weights and adapters in the dtype of the arithmetic; fp32 lives in the master copy."""
    if strategy.compute.value_bytes != 2:
        return strategy
    weights = strategy.weights if strategy.weights.is_quantized else strategy.compute
    return strategy.model_copy(
        update={"weights": weights, "adapter_dtype": strategy.compute, "autocast": False}
    )


def _is_partitioned_at_once(strategy: Strategy) -> bool:
    """ZeRO-3 splits each parameter as it is made. Packed weights are split after loading."""
    return strategy.sharding is Sharding.ZERO3 and not strategy.weights.is_quantized


def _load(strategy: Strategy, training: Training, place: Place) -> Any:
    # Weights that are drawn must be the same on every rank.
    torch.manual_seed(training.seed)
    request = LoadRequest.from_strategy(
        strategy, is_packed=strategy.packing, random_weights=training.random_weights
    )
    folder = prefer_staged(Path(training.model_path))
    if _is_partitioned_at_once(strategy):
        return load_partitioned(folder, request)
    if strategy.weights.is_quantized and strategy.sharding is Sharding.ZERO3:
        # Codes travel between ranks as values of the dtype that everything else has.
        request = replace(request, quant_storage=strategy.compute)
    return load_base(folder, request, place.device)


def _unreadable(folder: Path, why: str) -> UserError:
    return InvalidInputError(
        f"The checkpoint {folder} cannot be resumed with this plan: {why}.",
        remedy="resume with the plan that wrote it, or start a new run",
    )
