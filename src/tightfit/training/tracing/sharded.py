"""Rank 0 of a distributed job in one process: DDP's gradient buckets, FSDP2 over a fake group."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.core.strategy import Sharding, Strategy
from tightfit.core.training import Training
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.load import materialize_empty
from tightfit.trace.recorder import Recorder
from tightfit.trace.recording import COMMUNICATION, GRADIENTS
from tightfit.training.distributed import DistContext
from tightfit.training.engine import TorchEngine
from tightfit.training.optimizers import build_optimizer
from tightfit.training.sharding import Sharder
from tightfit.training.tracing.engine import FAKE_DEVICE, load_fake_weights
from tightfit.training.zero import to_deepspeed_strategy

# DDP on fake tensors: the buckets that hold gradients, as torch's Reducer lays them out.

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""DDP's defaults, `dist._DEFAULT_FIRST_BUCKET_BYTES` and `bucket_cap_mb`."""


class GradientBuckets:
    """DDP's buckets with `gradient_as_bucket_view`, as torch's Reducer lays them out.

    Buckets live for the whole job. A gradient is allocated outside, copied into its view and
    freed; under `no_sync` it stays outside until the last micro-batch. The first step has one
    bucket per dtype; before the second they are rebuilt in the order in which gradients came.
    Source: torch reducer.cpp, `initialize_buckets`, `mark_variable_ready_dense`.
    """

    def __init__(self, parameters: list[Any], recorder: Recorder) -> None:
        self._recorder = recorder
        self._buckets: list[Tensor] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        self._arrived: list[nn.Parameter] = []
        self._is_rebuilt = False
        self.is_exchanging = True
        self._lay_out(parameters, [sys.maxsize])
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take)

    def before_forward(self) -> None:
        if self._arrived and not self._is_rebuilt:
            self._lay_out(self._arrived, [FIRST_BUCKET_BYTES, BUCKET_BYTES])
            self._is_rebuilt = True

    def _lay_out(self, parameters: list[nn.Parameter], limits: list[int]) -> None:
        assign: Any = vars(dist)["_compute_bucket_assignment_by_size"]
        groups, _ = assign(parameters, limits, [False] * len(parameters))
        self._views.clear()
        self._buckets.clear()
        for group in groups:
            members = [parameters[index] for index in group]
            first = members[0]
            bucket: Any = torch.empty(
                sum(p.numel() for p in members), dtype=first.dtype, device=first.device
            )
            self._recorder.hold([bucket], GRADIENTS)
            self._buckets.append(bucket)
            parts = bucket.split([p.numel() for p in members])
            for parameter, part in zip(members, parts, strict=True):
                self._views[parameter] = part.view(parameter.shape)

    def _take(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            return
        if not self.is_exchanging:
            self._recorder.mark([parameter.grad], GRADIENTS)
            return
        if not self._is_rebuilt:
            self._arrived.append(parameter)
        view = self._views[parameter]
        with torch.no_grad():
            view.copy_(parameter.grad)
        parameter.grad = view


class FakeDdpEngine(TorchEngine):
    """TorchEngine over a module whose gradients are views of buckets."""

    def __init__(self, *args: Any, recorder: Recorder, **settings: Any) -> None:
        super().__init__(*args, **settings)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self._buckets = GradientBuckets(trained, recorder)
        self.module.register_forward_pre_hook(self._before_forward)

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        self._buckets.is_exchanging = is_last
        yield

    def _before_forward(self, _module: nn.Module, _args: Any) -> None:
        if torch.is_grad_enabled():
            self._buckets.before_forward()


_SHAPE_PROPAGATION = "_propagate_tensor_meta_non_cached"
"""DTensor runs each operation once on full shapes to infer the result's; not a real allocation."""
_COLLECTIVE_METHODS = ("unshard", "wait_for_unshard", "post_backward")
"""Methods of FSDP2's parameter groups that allocate for collectives."""


def to_engine_strategy(strategy: Strategy) -> Strategy:
    """The strategy that the model is built with: DeepSpeed requires one dtype throughout."""
    return to_deepspeed_strategy(strategy) if strategy.sharding.is_zero else strategy


@contextmanager
def fake_process_group(strategy: Strategy) -> Iterator[DistContext]:
    """Rank 0 of the strategy's world; for FSDP2 a process group whose collectives do nothing.

    It is destroyed at the end, and DTensor's caches, which refer to its meshes, are cleared.
    """
    context = DistContext(
        rank=0,
        local_rank=0,
        world_size=strategy.world_size,
        local_world_size=strategy.gpus_per_node,
        device=FAKE_DEVICE,
    )
    if strategy.sharding is Sharding.ZERO3:
        from tightfit.training.tracing.zero3 import deepspeed_linear

        with deepspeed_linear():
            yield context
        return
    if not strategy.sharding.is_fsdp:
        yield context
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=context.world_size)
    try:
        yield context
    finally:
        dist.destroy_process_group()
        _clear_mesh_caches()


def build_distributed_engine(
    module: nn.Module,
    strategy: Strategy,
    training: Training,
    *,
    context: DistContext,
    recorder: Recorder,
) -> Any:
    """The engine of rank 0 among several. Call inside the fake mode and the recorder."""
    if strategy.sharding.is_zero:
        from tightfit.training.tracing.zero import build_fake_zero

        return build_fake_zero(module, strategy, training, context=context, recorder=recorder)
    settings: dict[str, Any] = {
        "strategy": strategy,
        "device": context.device,
        "world_size": context.world_size,
        "max_grad_norm": training.max_grad_norm,
    }
    if strategy.sharding is Sharding.DDP:
        load_fake_weights(
            module,
            strategy,
            context.device,
            recorder=recorder,
            has_random_weights=training.random_weights,
        )
        optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
        return FakeDdpEngine(module, optimizer, recorder=recorder, **settings)
    shard_fake(module, strategy, context)
    optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
    return TorchEngine(module, optimizer, **settings)


def shard_fake(module: nn.Module, strategy: Strategy, context: DistContext) -> None:
    """As `load_sharded`: allocate and shard each layer, then the rest."""
    with _disable_current_modes():
        sharder = Sharder(strategy, context)  # a mesh reads its own values
    for layer in decoder_layers(module):
        materialize_empty(layer, context.device)
        sharder.shard_layer(layer)
    materialize_empty(module, context.device)
    sharder.shard_rest(module)


@contextmanager
def record_fsdp(recorder: Recorder) -> Iterator[None]:
    """Record what FSDP2 does outside of operations, and hide DTensor's shape propagation.

    On a CPU mesh FSDP2 takes the same steps as on GPUs and keeps buffers for the same time; its
    streams and events do nothing, but tell the recorder which stream allocates.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    resize: Any = torch.UntypedStorage.resize_

    def resize_and_record(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        recorder.resized(storage)
        return result

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_and_record))
        stack.enter_context(
            _wrapped(
                ShardingPropagator,
                _SHAPE_PROPAGATION,
                lambda: _setting(recorder, "is_paused", True),
            )
        )
        for name in _COLLECTIVE_METHODS:
            stack.enter_context(
                _wrapped(FSDPParamGroup, name, lambda: _setting(recorder, "purpose", COMMUNICATION))
            )
        yield


def _wrapped(owner: type, name: str, make_context: Callable[[], Any]) -> Any:
    inner: Any = getattr(owner, name)

    def inside(*args: Any, **kwargs: Any) -> Any:
        with make_context():
            return inner(*args, **kwargs)

    return patch.object(owner, name, inside)


@contextmanager
def _setting(recorder: Recorder, name: str, value: Any) -> Iterator[None]:
    before = getattr(recorder, name)
    setattr(recorder, name, value)
    try:
        yield
    finally:
        setattr(recorder, name, before)


def _clear_mesh_caches() -> None:
    """Clear cached sharding rules: they hold meshes of destroyed groups."""
    from torch.distributed.tensor import DTensor, debug

    clear: Any = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:  # before torch 2.10 there is only the Python cache
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear
    clear()
