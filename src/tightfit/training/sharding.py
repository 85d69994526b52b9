"""DDP and FSDP2: replicate or shard a model, and load weights into shards.

Rank 0 reads the files and every rank keeps its shard, so no node holds two copies.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UserError
from tightfit.core.settings import Offload, Sharding
from tightfit.core.strategy import Strategy, Training
from tightfit.estimation.weights import packs_experts
from tightfit.planning.plan import Plan
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.libraries import torch_dtype
from tightfit.runtime.load import (
    load_base,
    load_meta,
    make_quantized_linear,
    mark_quantized,
)
from tightfit.runtime.packed_experts import (
    find_packed,
    hold_codes,
    list_packed,
    pack_meta_experts,
)
from tightfit.runtime.staged import prefer_staged
from tightfit.training.distributed import DistContext, broadcast_object, init_single_process_group
from tightfit.training.model import Objective, prepare_model
from tightfit.training.preference import build_objective

# nf4 weights in shards

QUANTIZED_TOLERANCE = 1e-3
"""Relative to the largest output. The same kernel on the same codes gives the same bits; wrong
codes or scales give errors as large as the outputs."""


def quantize_meta_model(model: Any, names: list[str], strategy: Strategy) -> None:
    """Replace the modules that are 4-bit in rank 0's model by 4-bit ones without values."""
    if not names:
        return
    for name in names:
        model.set_submodule(name, make_quantized_linear(model.get_submodule(name), strategy))
    mark_quantized(model, strategy)


def split_quantized(tensor: Tensor) -> SentTensor:
    """Codes as a plain tensor, and their scales; a plain tensor has no scales."""
    state = getattr(tensor, "quant_state", None)
    plain = tensor.detach()
    if state is None:
        return plain, {}
    return plain.as_subclass(Tensor), state.as_dict(packed=True)


class QuantizedShardCheck:
    """Compares every 4-bit layer's output for one fixed input before and after sharding.

    FSDP2 splits bitsandbytes' parameters and rebuilds them at each use, in ways that differ
    between versions of both libraries.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._expected: dict[tuple[int, str], Tensor] = {}

    def note(self, layer: nn.Module) -> None:
        """Record the outputs of the layer's unsharded matrices."""
        self._expected |= dict(self._outputs(layer))

    def compare(self, layers: list[nn.Module]) -> None:
        """Raise on every rank if any rank's sharded outputs differ from the recorded ones."""
        if not self._expected:
            return
        worst = torch.zeros((), device=self._device)
        for layer in layers:
            gathered: Any = layer
            gathered.unshard()
            for key, output in self._outputs(layer):
                worst = torch.maximum(worst, self._distance(self._expected[key], output))
            gathered.reshard()
        self._expected.clear()
        if dist.is_initialized():
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        # Not `>`: a NaN must be refused too.
        if not float(worst) <= QUANTIZED_TOLERANCE:
            raise UserError(
                f"4-bit weights do not survive sharding with these versions of torch and "
                f"bitsandbytes: outputs are off by {float(worst):.1%}.",
                remedy="--sharding ddp, which keeps them whole, or --weights bf16",
            )

    def _outputs(self, layer: nn.Module) -> Iterator[tuple[tuple[int, str], Tensor]]:
        for matrix in _find_4bit(layer).values():
            yield (id(matrix), ""), self._run(matrix)
        for module, name, packed in list_packed(layer):
            values = packed.unpack(getattr(module, name))
            yield (id(module), name), values.sum(-1, dtype=torch.float32)

    @staticmethod
    def _distance(expected: Tensor, output: Tensor) -> Tensor:
        if dist.is_initialized():
            dist.broadcast(expected, src=0)
        distance: Tensor = (output - expected).abs().max() / expected.abs().max()
        return torch.nan_to_num(distance, nan=float("inf"))

    def _run(self, layer: Any) -> Tensor:
        generator = torch.Generator().manual_seed(layer.in_features)
        x = torch.randn(1, layer.in_features, generator=generator)
        # As in training: bitsandbytes uses another kernel if x needs no gradient.
        x = x.to(self._device, layer.compute_dtype).requires_grad_(True)
        output: Tensor = layer(x).detach().float()
        return output


def _find_4bit(module: nn.Module) -> dict[str, nn.Module]:
    """Modules with 4-bit weights. By name: bitsandbytes may not be installed, and peft's wrapper
    has the same class name."""
    return {
        name: part
        for name, part in module.named_modules()
        if type(part).__module__.startswith("bitsandbytes.") and type(part).__name__ == "Linear4bit"
    }


def replicate(module: nn.Module, context: DistContext) -> DistributedDataParallel:
    """Wrap in DDP, after broadcasting the trained parameters.

    Every rank has read the same files; with `init_sync` DDP would send the whole frozen model.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.detach(), src=0)
    on_gpu = context.device.type == "cuda"
    # torch 2.13 renamed the option and warns about the old name.
    known = inspect.signature(DistributedDataParallel).parameters
    is_new = "forward_sync_buffers" in known
    buffers: dict[str, Any] = {"forward_sync_buffers" if is_new else "broadcast_buffers": False}
    return DistributedDataParallel(
        module,
        device_ids=[context.device.index] if on_gpu else None,
        gradient_as_bucket_view=True,
        init_sync=False,
        **buffers,
    )


class Sharder:
    """`fully_shard` with one plan's settings: first each layer, then the rest."""

    def __init__(self, strategy: Strategy, context: DistContext) -> None:
        precision = MixedPrecisionPolicy()
        if strategy.weights is Dtype.FP32 and strategy.compute is not Dtype.FP32:
            # Cast fp32 weights as they are gathered, and reduce in fp32. Other strategies compute
            # in the stored dtype or under autocast.
            precision = MixedPrecisionPolicy(
                param_dtype=torch_dtype(strategy.compute), reduce_dtype=torch_dtype(Dtype.FP32)
            )
        offload = OffloadPolicy()
        if strategy.offload is not Offload.NONE:
            offload = CPUOffloadPolicy(pin_memory=context.device.type == "cuda")
        self._settings: dict[str, Any] = {
            "mesh": make_mesh(strategy, context),
            "mp_policy": precision,
            "offload_policy": offload,
        }
        self._reshards = strategy.sharding is not Sharding.FSDP_GRAD_OP

    def shard_layer(self, layer: nn.Module) -> None:
        fully_shard(layer, reshard_after_forward=self._reshards, **self._settings)

    def shard_rest(self, module: nn.Module) -> None:
        """Shard embeddings, last norm and head; used first and last, they stay gathered."""
        fully_shard(module, reshard_after_forward=False, **self._settings)


def make_mesh(strategy: Strategy, context: DistContext) -> DeviceMesh:
    """A 1-D mesh of all ranks; for hybrid sharding nodes (replicated) by ranks (sharded)."""
    kind = context.device.type
    if not dist.is_initialized():
        init_single_process_group(context)
    if strategy.sharding is Sharding.FSDP_HYBRID:
        shape = (context.world_size // context.local_world_size, context.local_world_size)
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(kind, (context.world_size,), mesh_dim_names=("shard",))


# Loading into shards

_Shape = tuple[tuple[int, ...], torch.dtype]
SentTensor = tuple[Tensor, dict[str, Tensor]]
"""A parameter's or buffer's values and, if it is quantized, its scales."""


def load_sharded(plan: Plan, training: Training, context: DistContext) -> Objective:
    """The plan's Objective, sharded by FSDP2.

    Rank 0 reads the model into host memory; all ranks build it on the meta device. Layer by layer
    rank 0 broadcasts its values and frees them, and each rank keeps its shard: a device never
    holds more than its shards and one whole layer (then the embeddings).
    """
    strategy = plan.strategy
    folder = prefer_staged(Path(training.model_path))
    torch.manual_seed(training.seed)
    whole = None
    if context.is_first:
        whole = load_base(
            folder, strategy, torch.device("cpu"), random_weights=training.random_weights
        )
    quantized_names = broadcast_object(None if whole is None else list(_find_4bit(whole)))
    meta_model = load_meta(folder, strategy)
    quantize_meta_model(meta_model, quantized_names, strategy)
    if packs_experts(strategy):
        pack_meta_experts(meta_model)
    source = None
    if whole is not None:
        prepared = prepare_model(whole, strategy, training)
        source = _take_tensors(build_objective(prepared, strategy, training))
        whole = None
    module = build_objective(prepare_model(meta_model, strategy, training), strategy, training)
    receiver, sharder = WeightReceiver(module, source, context.device), Sharder(strategy, context)
    check = QuantizedShardCheck(context.device)
    layers = decoder_layers(module)
    for layer in layers:
        receiver.fill(layer)
        check.note(layer)
        sharder.shard_layer(layer)
    receiver.fill(module)
    sharder.shard_rest(module)
    check.compare(layers)
    return module


def _describe(sent: SentTensor) -> tuple[_Shape, dict[str, _Shape]]:
    values, scales = sent
    shapes = {key: (tuple(part.shape), part.dtype) for key, part in scales.items()}
    return (tuple(values.shape), values.dtype), shapes


class WeightReceiver:
    """Fills a meta-device model with rank 0's values, part by part."""

    def __init__(
        self, module: nn.Module, source: dict[str, SentTensor] | None, device: torch.device
    ) -> None:
        self.device = device
        self._source = source
        self._layout: dict[str, tuple[_Shape, dict[str, _Shape]]] = broadcast_object(
            None if source is None else {name: _describe(sent) for name, sent in source.items()}
        )
        self._names = {id(tensor): name for name, tensor in _named_tensors(module)}
        self._homes: dict[int, list[tuple[nn.Module, str]]] = {}
        for owner in module.modules():
            for own in (owner._parameters, owner._buffers):
                for name, tensor in own.items():
                    if tensor is not None:
                        self._homes.setdefault(id(tensor), []).append((owner, name))

    def fill(self, part: nn.Module) -> None:
        """Fill every tensor of `part` still on the meta device; a tied one in all its places."""
        for _, empty in list(_named_tensors(part)):
            if not empty.is_meta:
                continue
            homes = self._homes[id(empty)]
            name = self._names[id(empty)]
            sent: SentTensor | tuple[None, dict[str, Tensor]] = (None, {})
            if self._source is not None:
                sent = self._source.pop(name)
            whole, scales = sent
            shape, shapes = self._layout[name]
            values = self._broadcast(whole, shape)
            statistics = {
                key: self._broadcast(scales.get(key), part) for key, part in shapes.items()
            }
            filled: Tensor
            if statistics:
                from bitsandbytes.nn import modules

                params_4bit: Any = modules.Params4bit
                # The owner keeps the scales, which FSDP drops.
                owner, own_name = homes[0]
                packed = find_packed(owner, own_name)
                filled = params_4bit.from_prequantized(
                    values,
                    statistics,
                    requires_grad=False,
                    device=self.device,
                    module=owner if packed is None else None,
                )
                if packed is not None:
                    hold_codes(owner, own_name, filled, packed.shape)
            elif isinstance(empty, nn.Parameter):
                filled = nn.Parameter(values, requires_grad=empty.requires_grad)
            else:
                filled = values
            for owner, name in homes:
                own = owner._buffers if name in owner._buffers else owner._parameters
                own[name] = filled  # type: ignore[assignment]

    def _broadcast(self, tensor: Tensor | None, shape: _Shape) -> Tensor:
        if tensor is None:
            tensor = torch.empty(shape[0], dtype=shape[1], device=self.device)
        tensor = tensor.to(self.device).contiguous()
        if dist.is_initialized():
            dist.broadcast(tensor, src=0)
        return tensor


def _take_tensors(module: nn.Module) -> dict[str, SentTensor]:
    """Move all tensors out of the module, so that each can be freed when it is sent."""
    taken = {name: split_quantized(tensor) for name, tensor in _named_tensors(module)}
    for owner in module.modules():
        owner._parameters.clear()
        owner._buffers.clear()
    gc.collect()
    return taken


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers; tied ones once."""
    return [*module.named_parameters(), *module.named_buffers()]
