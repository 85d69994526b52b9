"""ZeroEngine: a model under DeepSpeed's ZeRO, with the same protocol as TorchEngine."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, SetupError, UserError
from tightfit.core.settings import Loss, Method, Sharding
from tightfit.core.strategy import Strategy
from tightfit.estimation.state import ZERO3_LIVE_VALUES, ZERO_BUCKET_VALUES
from tightfit.planning.plan import Plan
from tightfit.runtime.attention import register_attention
from tightfit.runtime.libraries import silence_libraries
from tightfit.runtime.load import build_model, finish_load, load_base, read_config, read_model
from tightfit.runtime.staged import prefer_staged
from tightfit.training.distributed import DistContext, init_single_process_group
from tightfit.training.model import build_optimizer, prepare_model
from tightfit.training.preference import build_objective
from tightfit.training.step import Update

# DeepSpeed config: every number that the memory estimate depends on is explicit

_STAGES = {Sharding.ZERO1: 1, Sharding.ZERO2: 2, Sharding.ZERO3: 3}
_PERSISTENT_HIDDEN_SIZES = 10
"""ZeRO-3 does not partition parameters smaller than this many hidden sizes: norms and biases,
which are not worth a message each. The value of transformers' Trainer."""
_SUB_GROUP_VALUES = 1_000_000_000
"""Values per optimizer call of ZeRO-3; DeepSpeed's default."""


def make_zero_config(plan: Plan) -> dict[str, Any]:
    """The config for `deepspeed.initialize`, which gets the optimizer separately.

    Meanings: https://www.deepspeed.ai/docs/config-json/.
    """
    strategy = plan.strategy
    compute, stage = strategy.compute, _STAGES[strategy.sharding]
    clip = None if plan.training is None else plan.training.max_grad_norm
    zero: dict[str, Any] = {
        "reduce_bucket_size": ZERO_BUCKET_VALUES,
        "allgather_bucket_size": ZERO_BUCKET_VALUES,
        "contiguous_gradients": True,
        # Overlap would need a second bucket, which the estimate does not count.
        "overlap_comm": False,
        "reduce_scatter": True,
    }
    if stage == 3:
        zero = make_stage3_fields(plan.model.hidden_size)
    on_host = {"device": "cpu", "pin_memory": not plan.hardware.node.gpu.is_cpu}
    if strategy.offload.moves_optimizer:
        zero["offload_optimizer"] = on_host
    if strategy.offload.moves_params:
        zero["offload_param"] = on_host
    return {
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.grad_accum,
        "gradient_clipping": clip or 0.0,
        # torch's optimizers, offloaded or not, are not on DeepSpeed's list of tested ones.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
        # 16-bit weights and gradients with an fp32 master copy, or fp32 throughout. A step whose
        # gradients are not finite is skipped in every precision.
        "bf16": {"enabled": compute is Dtype.BF16, "check_grad_overflow": True},
        # As torch's GradScaler: starts at 2^16, halved at once, doubled after 2000 steps.
        "fp16": {
            "enabled": compute is Dtype.FP16,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 2000,
            "hysteresis": 1,
            "min_loss_scale": 1,
        },
        "data_types": {"grad_accum_dtype": compute.value},
        "zero_optimization": {"stage": stage, **zero},
    }


def make_stage3_fields(hidden_size: int) -> dict[str, Any]:
    """Buckets of one square matrix: one for gradients, one for prefetching."""
    return {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": hidden_size**2,
        "stage3_max_live_parameters": ZERO3_LIVE_VALUES,
        "stage3_max_reuse_distance": ZERO3_LIVE_VALUES,
        "stage3_param_persistence_threshold": _PERSISTENT_HIDDEN_SIZES * hidden_size,
        "sub_group_size": _SUB_GROUP_VALUES,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
    }


def start_deepspeed(context: DistContext) -> Any:
    """Import deepspeed, bound to the context's device and torch's process group.

    DeepSpeed must not compile anything: the extension it builds by itself on CPUs serves inference
    only, and a killed build leaves a lock on which every later start hangs.
    """
    # Read at import; by default DeepSpeed takes the GPU even for a plan on the CPU.
    os.environ["DS_ACCELERATOR"] = context.device.type
    try:
        import deepspeed
    except ImportError as error:
        raise SetupError(
            f"The plan uses ZeRO, and DeepSpeed cannot be imported: {error}.",
            remedy="pip install 'tightfit[zero]', or --set sharding=fsdp",
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # torch 2.13 renames collectives that DeepSpeed 0.19 still calls by their old names.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    deepspeed.ops.__compatible_ops__ = {}
    from deepspeed.accelerator import get_accelerator

    name = get_accelerator().device_name()
    if name.partition(":")[0] != context.device.type:  # chosen by an earlier import
        raise SetupError(
            f"DeepSpeed was started for {name} in this process, and the plan runs on "
            f"{context.device.type}.",
            remedy=f"export DS_ACCELERATOR={context.device.type}",
        )
    os.environ.setdefault("LOCAL_RANK", str(context.local_rank))  # required without torchrun too
    if not dist.is_initialized():
        init_single_process_group(context)
    # The process group exists: no MPI discovery.
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed


_STATE_FOLDER = "zero"
"""Inside a checkpoint: DeepSpeed's `tag`."""


class ZeroEngine:
    """DeepSpeed's engine behind the `Engine` protocol; the loop sets learning rate and boundary."""

    is_updating = False  # only used to save alone, which no rank of a sharded run can

    def __init__(
        self, engine: Any, *, strategy: Strategy, context: DistContext, loading: Any
    ) -> None:
        self.module: nn.Module = engine
        self.engine = engine
        self.strategy = strategy
        self.device = context.device
        self.world_size = context.world_size
        self._context = context
        # transformers and peft hold it by a weak reference to know that weights are partitioned.
        self._loading = loading

    @property
    def model(self) -> Any:
        """The transformers or peft model inside."""
        return self.engine.module.model

    @property
    def optimizer(self) -> Any:
        return self.engine.optimizer

    def autocast(self) -> AbstractContextManager[object]:
        """No autocast: all weights are in the compute dtype."""
        return nullcontext()

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(is_last)
        yield

    def backward(self, loss: Tensor) -> None:
        # The loss is already scaled to the step's mean: no division by micro-batches.
        self.engine.backward(loss, scale_wrt_gas=False)

    def update(self, learning_rate: float) -> Update:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        try:
            self.engine.step()
        except Exception as error:
            if "loss scale already at minimum" not in str(error):
                raise
            raise UserError(
                "The gradients overflow fp16 at any scale.",
                remedy="compute in bf16 or fp32, or lower the learning rate: --set compute=fp32",
            ) from error
        is_skipped = bool(self.optimizer.overflow)
        norm = self.engine.get_global_grad_norm()
        grad_norm = float("inf") if is_skipped or norm is None else float(norm)
        return Update(grad_norm=torch.tensor(grad_norm), is_skipped=is_skipped)

    def save_state(self, folder: Path, *, alone: bool = False) -> None:
        """Write trained parameters, master copies, moments and loss scale; each rank its share."""
        assert not alone, "no rank of a sharded run holds the full state"
        self.engine.save_checkpoint(
            str(folder), tag=_STATE_FOLDER, save_latest=False, exclude_frozen_parameters=True
        )

    def load_state(self, folder: Path) -> None:
        inside = folder / _STATE_FOLDER
        num_saved = len(list(inside.glob("*zero_pp_rank_*_optim_states.pt")))
        if num_saved == 0:
            raise _cannot_resume(folder, "it was not written by ZeRO")
        is_partitioned = any(inside.glob("zero_pp_rank_*_model_states.pt"))
        if is_partitioned != self.strategy.sharding.shards_weights:
            raise _cannot_resume(folder, f"its stage of ZeRO is not {self.strategy.sharding.value}")
        if num_saved != self.world_size:
            raise UserError(
                f"The checkpoint {folder} was written by {num_saved} processes, and ZeRO cannot "
                f"split it over {self.world_size}.",
                remedy=f"resume on {num_saved} GPUs, or start a new run with --set sharding=fsdp, "
                "which resumes on any number",
            )
        path, _ = self.engine.load_checkpoint(
            str(folder), tag=_STATE_FOLDER, load_module_strict=False
        )
        if path is None:
            raise _cannot_resume(folder, "DeepSpeed finds nothing to load in it")

    def trained_state(self) -> dict[str, Tensor]:
        """Full tensors on rank 0's CPU, gathered one at a time; on others nothing."""
        is_full = self.strategy.method is Method.FULL
        wanted = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if is_full or parameter.requires_grad
        }
        is_partitioned = self.strategy.sharding.shards_weights
        kept: dict[str, Tensor] = {}
        if is_partitioned:  # finish prefetches, which may still be gathering the next layer
            self.optimizer.checkpoint_event_prologue()
        for name, parameter in wanted.items():
            with _gathered(parameter) if is_partitioned else nullcontext():
                if self._context.is_first:
                    kept[name] = parameter.detach().cpu().clone()
        if is_partitioned:
            self.optimizer.checkpoint_event_epilogue()
        return kept

    def close(self) -> None:
        """Free hooks and buffers, so that another engine can be built."""
        self.engine.destroy()
        if self._loading is not None:
            from transformers.integrations import deepspeed as integration

            unset: Any = integration.unset_hf_deepspeed_config
            unset()


def _gathered(parameter: nn.Parameter) -> AbstractContextManager[object]:
    import deepspeed

    context: AbstractContextManager[object] = deepspeed.zero.GatheredParameters([parameter])
    return context


def build_zero_engine(plan: Plan, context: DistContext) -> ZeroEngine:
    """Load as the stage requires, prepare, and call `deepspeed.initialize`."""
    training = plan.training
    assert training is not None, "a plan that runs says what it learns"
    deepspeed = start_deepspeed(context)
    strategy = to_deepspeed_strategy(plan.strategy)
    config = make_zero_config(plan)
    is_zero3, is_quantized = strategy.sharding is Sharding.ZERO3, strategy.weights.is_quantized
    folder = prefer_staged(Path(training.model_path))
    torch.manual_seed(training.seed)  # random weights are the same on every rank
    loading = None
    if is_zero3 and not is_quantized:
        from transformers.integrations import deepspeed as integration

        # As long as this is referenced, transformers and peft partition each parameter as it is
        # created: rank 0 reads a tensor from the mapped file, each rank keeps its part.
        make_config: Any = integration.HfDeepSpeedConfig
        loading = make_config(config)
        base = _load_partitioned(folder, strategy, random_weights=training.random_weights)
    else:
        base = load_base(folder, strategy, context.device, random_weights=training.random_weights)
    model = prepare_model(base, strategy, training)
    objective = build_objective(model, strategy, training)
    if is_zero3 and strategy.loss is Loss.FUSED:
        # The fused loss reads the head's weight without calling the head, whose hook gathers it.
        deepspeed.zero.register_external_parameter(objective, model.get_output_embeddings().weight)
    optimizer = build_optimizer(objective.named_parameters(), strategy.optimizer, training)
    engine, *_ = deepspeed.initialize(
        model=objective, optimizer=optimizer, config=config, dist_init_required=False
    )
    engine.train()
    return ZeroEngine(engine, strategy=plan.strategy, context=context, loading=loading)


def _load_partitioned(folder: Path, strategy: Strategy, *, random_weights: bool) -> Any:
    """The base model in training mode, partitioned. Every rank must load, or the others wait."""
    silence_libraries()
    register_attention()
    config = read_config(folder, strategy)
    if getattr(config, "quantization_config", None) is not None:
        raise InvalidInputError(
            f"{folder} is already quantized, and ZeRO-3 partitions unquantized weights.",
            remedy="name the model it was made from",
        )
    if random_weights:
        model = build_model(config, strategy)
    else:
        model = read_model(folder, config, strategy)
    return finish_load(model, strategy)


def to_deepspeed_strategy(strategy: Strategy) -> Strategy:
    """The strategy with weights and adapters in the compute dtype; DeepSpeed keeps fp32 masters."""
    if strategy.compute.value_bytes != 2:
        return strategy
    weights = strategy.weights if strategy.weights.is_quantized else strategy.compute
    return strategy.model_copy(
        update={"weights": weights, "adapter_dtype": strategy.compute, "autocast": False}
    )


def _cannot_resume(folder: Path, why: str) -> UserError:
    return InvalidInputError(
        f"The checkpoint {folder} cannot be resumed with this plan: {why}.",
        remedy="resume with the plan that wrote it, or start a new run",
    )
