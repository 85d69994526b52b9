"""Weights into shards: one rank reads them, every rank keeps its part, no node holds two copies."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tightfit.core.strategy import Strategy
from tightfit.core.training import Training
from tightfit.planning.plan import Plan
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.load import LoadRequest, load_base, load_meta
from tightfit.runtime.staged import prefer_staged
from tightfit.train.finish import finish_model
from tightfit.train.objective import Objective
from tightfit.train.packed_shards import (
    PackedCheck,
    list_packed,
    pack_skeleton,
    rebuild_packed,
    split_packed,
)
from tightfit.train.place import Place
from tightfit.train.sharding import Sharder

_Shape = tuple[tuple[int, ...], torch.dtype]


def make_request(strategy: Strategy, training: Training) -> LoadRequest:
    """How the base model is loaded; weights that are drawn are the same on every rank."""
    torch.manual_seed(training.seed)
    return LoadRequest.from_strategy(
        strategy, is_packed=strategy.packing, random_weights=training.random_weights
    )


def load_sharded(plan: Plan, training: Training, place: Place) -> Objective:
    """The plan's Objective, sharded by FSDP2.

    Rank 0 reads the model into host memory; all ranks build it without values.
    Layer by layer rank 0 sends the values and drops its own, and each rank keeps its
    shard: a device holds its shards and one whole layer, then the embeddings.
    """
    strategy = plan.strategy
    request = make_request(strategy, training)
    folder = prefer_staged(Path(training.model_path))
    whole = load_base(folder, request, torch.device("cpu")) if place.is_first else None
    packed_names = _tell_all(None if whole is None else list_packed(whole))
    skeleton = load_meta(folder, request)
    pack_skeleton(skeleton, packed_names, request)
    source = None
    if whole is not None:
        finished = finish_model(whole, strategy, training)
        source = _take_tensors(Objective.from_strategy(finished, strategy))
        whole = None
    module = Objective.from_strategy(finish_model(skeleton, strategy, training), strategy)
    _fill_and_shard(module, Filler(module, source, place.device), Sharder(strategy, place))
    return module


def _fill_and_shard(module: Objective, filler: Filler, sharder: Sharder) -> None:
    check = PackedCheck(filler.device)
    layers = decoder_layers(module)
    for layer in layers:
        filler.fill(layer)
        check.note(layer)
        sharder.shard_layer(layer)
    filler.fill(module)
    sharder.shard_rest(module)
    check.compare(layers)


@dataclass(slots=True, kw_only=True)
class _Sent:
    """One parameter or buffer as it travels: its values and, if packed, its statistics."""

    values: Tensor
    statistics: dict[str, Tensor]

    def describe(self) -> tuple[_Shape, dict[str, _Shape]]:
        return _shape(self.values), {key: _shape(part) for key, part in self.statistics.items()}


class Filler:
    """Gives a model without values those of rank 0, part by part."""

    def __init__(
        self, module: nn.Module, source: dict[str, _Sent] | None, device: torch.device
    ) -> None:
        self.device = device
        self._source = source
        self._layout: dict[str, tuple[_Shape, dict[str, _Shape]]] = _tell_all(
            None if source is None else {name: sent.describe() for name, sent in source.items()}
        )
        self._names = {id(tensor): name for name, tensor in _named_tensors(module)}
        self._homes: dict[int, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for own in (owner._parameters, owner._buffers):
                for name, tensor in own.items():
                    if tensor is not None:
                        self._homes.setdefault(id(tensor), []).append((owner, name))

    def fill(self, part: nn.Module) -> None:
        """All of `part` that is still without values; a tied tensor everywhere at once."""
        for _, empty in list(_named_tensors(part)):
            if not empty.is_meta:
                continue
            homes = self._homes[id(empty)]
            values, statistics = self._receive(self._names[id(empty)])
            filled: Tensor
            if statistics:
                filled = rebuild_packed(values, statistics, homes[0][0])
            elif isinstance(empty, nn.Parameter):
                filled = nn.Parameter(values, requires_grad=empty.requires_grad)
            else:
                filled = values
            for owner, name in homes:
                own = owner._buffers if name in owner._buffers else owner._parameters
                own[name] = filled  # type: ignore[assignment]

    def _receive(self, name: str) -> tuple[Tensor, dict[str, Tensor]]:
        sent = None if self._source is None else self._source.pop(name)
        shape, statistics = self._layout[name]
        values = self._broadcast(None if sent is None else sent.values, shape)
        parts = {
            key: self._broadcast(None if sent is None else sent.statistics[key], part)
            for key, part in statistics.items()
        }
        return values, parts

    def _broadcast(self, tensor: Tensor | None, shape: _Shape) -> Tensor:
        if tensor is None:
            tensor = torch.empty(shape[0], dtype=shape[1], device=self.device)
        tensor = tensor.to(self.device).contiguous()
        if dist.is_initialized():
            dist.broadcast(tensor, src=0)
        return tensor


def _take_tensors(module: nn.Module) -> dict[str, _Sent]:
    """All tensors by name, so that each can be dropped when it is sent; the module is used up."""
    taken = {}
    for name, tensor in _named_tensors(module):
        values, statistics = split_packed(tensor)
        taken[name] = _Sent(values=values, statistics=statistics)
    for owner in module.modules():
        owner._parameters.clear()
        owner._buffers.clear()
    gc.collect()
    return taken


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, tied ones once."""
    return [*module.named_parameters(), *module.named_buffers()]


def _shape(tensor: Tensor) -> _Shape:
    return tuple(tensor.shape), tensor.dtype


def _tell_all(word: Any) -> Any:
    """Rank 0's object on every rank."""
    if not dist.is_initialized():
        return word
    words = [word]
    dist.broadcast_object_list(words, src=0)
    return words[0]
