"""A sharded job as rank 0 of any number sees it, in one process: collectives that move nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.core.strategy import Sharding, Strategy
from tightfit.core.training import Training
from tightfit.estimate.trace.recorder import Recorder
from tightfit.estimate.trace.recording import COMMUNICATION
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.random_weights import place_empty
from tightfit.train.engine import TorchEngine
from tightfit.train.optimizers import build_optimizer
from tightfit.train.place import Place
from tightfit.train.sharding import Sharder
from tightfit.train.tracing.loading import load_fake
from tightfit.train.tracing.replicated import ReplicatedEngine
from tightfit.train.tracing.subject import FAKE_DEVICE
from tightfit.train.zero import as_deepspeed_sees

_SHAPE_RULES = "_propagate_tensor_meta_non_cached"
"""DTensor runs each operation once on whole shapes to learn the result's: nothing a rank holds."""
_TRAFFIC = ("unshard", "wait_for_unshard", "post_backward")
"""What of FSDP2's parameter groups allocates for collectives."""


def strategy_of_ranks(strategy: Strategy) -> Strategy:
    """What the model is built by: DeepSpeed wants one dtype throughout."""
    return as_deepspeed_sees(strategy) if strategy.sharding.is_zero else strategy


@contextmanager
def pretend_ranks(strategy: Strategy) -> Iterator[Place]:
    """Rank 0 of the strategy's world. FSDP2 gets a process group whose collectives do nothing.

    A process has one group at a time: it is left at the end, and DTensor forgets what it had
    worked out for its meshes.
    """
    place = Place(
        rank=0,
        local_rank=0,
        world_size=strategy.world_size,
        local_world_size=strategy.gpus_per_node,
        device=FAKE_DEVICE,
    )
    if strategy.sharding is Sharding.ZERO3:
        from tightfit.train.tracing.zero3 import deepspeed_linear

        with deepspeed_linear():
            yield place
        return
    if not strategy.sharding.is_fsdp:
        yield place
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=place.world_size)
    try:
        yield place
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def build_ranked_engine(
    module: nn.Module, strategy: Strategy, training: Training, *, place: Place, recorder: Recorder
) -> Any:
    """The engine of rank 0 among several. Call inside the fake mode, with the recorder watching."""
    if strategy.sharding.is_zero:
        from tightfit.train.tracing.zero import build_fake_zero

        return build_fake_zero(module, strategy, training, place=place, recorder=recorder)
    settings: dict[str, Any] = {
        "strategy": strategy,
        "device": place.device,
        "world_size": place.world_size,
        "max_grad_norm": training.max_grad_norm,
    }
    if strategy.sharding is Sharding.DDP:
        load_fake(
            module, strategy, place.device, recorder=recorder, is_drawn=training.random_weights
        )
        optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
        return ReplicatedEngine(module, optimizer, recorder=recorder, **settings)
    shard_fake(module, strategy, place)
    optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
    return TorchEngine(module, optimizer, **settings)


def shard_fake(module: nn.Module, strategy: Strategy, place: Place) -> None:
    """As `load_sharded` does: each layer filled, then sharded, then what is left."""
    with _disable_current_modes():
        sharder = Sharder(strategy, place)  # a mesh reads its own numbers
    for layer in decoder_layers(module):
        place_empty(layer, place.device)
        sharder.shard_layer(layer)
    place_empty(module, place.device)
    sharder.shard_rest(module)


@contextmanager
def watch_shards(recorder: Recorder) -> Iterator[None]:
    """Tell `recorder` what FSDP2 does beside operations, and keep DTensor's own sums from it.

    FSDP2 on a mesh of CPUs takes the same steps as on cards, and keeps the same buffers for
    as long: its streams and events are there, and do nothing. The recorder reads from them
    which stream allocates.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    resize: Any = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        recorder.resized(storage)
        return result

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_and_tell))
        stack.enter_context(
            _wrapped(
                ShardingPropagator, _SHAPE_RULES, lambda: _setting(recorder, "is_paused", True)
            )
        )
        for name in _TRAFFIC:
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


def _forget_meshes() -> None:
    """Cached rules hold meshes whose groups are gone."""
    from torch.distributed.tensor import DTensor, debug

    clear: Any = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:  # before torch 2.10 there is the cache in Python alone
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear
    clear()
