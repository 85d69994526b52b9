"""DDP and FSDP2: replicate or shard a model, and load weights into shards. Rank 0 reads the
files, every rank keeps its part, no node holds two copies.
"""

from __future__ import annotations

import gc
import inspect
from dataclasses import dataclass
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
from tightfit.core.strategy import Offload, Sharding, Strategy
from tightfit.core.training import Training
from tightfit.planning.plan import Plan
from tightfit.runtime.devices import torch_dtype
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.load import LoadRequest, bitsandbytes_config, load_base, load_meta
from tightfit.runtime.staged import prefer_staged
from tightfit.train.distributed import DistContext, broadcast_object, init_single_process_group
from tightfit.train.model import Objective, prepare_model

# nf4 weights in shards: how they travel, and the check that they compute what they did whole.

QUANTIZED_TOLERANCE = 1e-3
"""Of the largest output. The same kernel on the same codes gives the same bits; wrong codes or
scales are off by the size of the outputs themselves."""


def list_4bit_modules(model: nn.Module) -> list[str]:
    """Names of the modules whose weights are packed in 4 bits."""
    return [name for name, module in model.named_modules() if _is_4bit(module)]


def quantize_meta_model(model: Any, names: list[str], request: LoadRequest) -> None:
    """Put packed modules without values where rank 0's model has packed ones."""
    if not names:
        return
    from bitsandbytes.nn import modules

    linear_4bit: Any = modules.Linear4bit
    packing = bitsandbytes_config(request)
    for name in names:
        plain = model.get_submodule(name)
        packed = linear_4bit(
            plain.in_features,
            plain.out_features,
            plain.bias is not None,
            packing.bnb_4bit_compute_dtype,
            compress_statistics=packing.bnb_4bit_use_double_quant,
            quant_type=packing.bnb_4bit_quant_type,
            quant_storage=packing.bnb_4bit_quant_storage,
            device=torch.device("meta"),
        )
        packed.bias = plain.bias
        packed.requires_grad_(False)
        _keep_codes(packed)
        model.set_submodule(name, packed)
    model.is_loaded_in_4bit = True
    model.is_quantized = True
    model.quantization_method = packing.quant_method
    model.config.quantization_config = packing


def split_quantized(tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes as plain values, and the scales beside them; of a plain tensor itself and nothing."""
    state = getattr(tensor, "quant_state", None)
    plain = tensor.detach()
    if state is None:
        return plain, {}
    return plain.as_subclass(Tensor), state.as_dict(packed=True)


def rebuild_quantized(codes: Tensor, statistics: dict[str, Tensor], owner: nn.Module) -> Tensor:
    """bitsandbytes' parameter again; `owner` remembers the scales when sharding drops them."""
    from bitsandbytes.nn import modules

    params_4bit: Any = modules.Params4bit
    rebuilt: Tensor = params_4bit.from_prequantized(
        codes, statistics, requires_grad=False, device=codes.device, module=owner
    )
    return rebuilt


class QuantizedShardCheck:
    """One fixed input through every packed matrix, before it is sharded and after.

    Sharding takes bitsandbytes' parameters apart and puts them together again at each
    use, in ways that differ with versions of both libraries.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wanted: dict[int, Tensor] = {}

    def note(self, layer: nn.Module) -> None:
        """Keep what the whole matrices of `layer` answer."""
        for packed in _list_4bit(layer):
            self._wanted[id(packed)] = self._answer(packed)

    def compare(self, layers: list[nn.Module]) -> None:
        """Raise on every rank where a sharded matrix answers anything else on any of them."""
        if not self._wanted:
            return
        worst = torch.zeros((), device=self._device)
        for layer in layers:
            gathered: Any = layer
            gathered.unshard()
            for packed in _list_4bit(layer):
                worst = torch.maximum(worst, self._distance(packed))
            gathered.reshard()
        self._wanted.clear()
        if dist.is_initialized():
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        # Written so that a nan is refused too.
        if not float(worst) <= QUANTIZED_TOLERANCE:
            raise UserError(
                f"4-bit weights do not survive sharding with these versions of torch and "
                f"bitsandbytes: outputs are off by {float(worst):.1%}.",
                remedy="--sharding ddp, which keeps them whole, or --weights bf16",
            )

    def _distance(self, packed: nn.Module) -> Tensor:
        wanted = self._wanted[id(packed)]
        if dist.is_initialized():
            dist.broadcast(wanted, src=0)
        answer = self._answer(packed)
        distance: Tensor = (answer - wanted).abs().max() / wanted.abs().max()
        return torch.nan_to_num(distance, nan=float("inf"))

    def _answer(self, packed: Any) -> Tensor:
        generator = torch.Generator().manual_seed(packed.in_features)
        question = torch.randn(1, packed.in_features, generator=generator)
        # With a gradient wanted, as in training: bitsandbytes has another kernel without.
        question = question.to(self._device, packed.compute_dtype).requires_grad_(True)
        answer: Tensor = packed(question).detach().float()
        return answer


def _list_4bit(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if _is_4bit(part)]


def _is_4bit(module: nn.Module) -> bool:
    # By name: most jobs have no bitsandbytes. peft's wrapper of the same name has no codes itself.
    is_bitsandbytes = type(module).__module__.startswith("bitsandbytes.")
    return is_bitsandbytes and type(module).__name__ == "Linear4bit"


def _keep_codes(packed: Any) -> None:
    """As `runtime/load.py` does: bitsandbytes may not repack codes for the CPU."""
    if hasattr(packed, "support_avx512bf16_for_cpu"):
        packed.support_avx512bf16_for_cpu = False


def replicate(module: nn.Module, context: DistContext) -> DistributedDataParallel:
    """A copy on every rank, gradients averaged.

    Every rank has read the same files, so only what was drawn is sent: DDP by
    itself would send the whole frozen model.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.detach(), src=0)
    on_gpu = context.device.type == "cuda"
    buffers: dict[str, Any] = {_buffer_option(): False}
    return DistributedDataParallel(
        module,
        device_ids=[context.device.index] if on_gpu else None,
        gradient_as_bucket_view=True,
        init_sync=False,
        **buffers,
    )


def _buffer_option() -> str:
    """torch 2.13 renamed it and warns of the old name."""
    known = inspect.signature(DistributedDataParallel).parameters
    return "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"


class Sharder:
    """`fully_shard` with one plan's settings: first each layer, then what is left."""

    def __init__(self, strategy: Strategy, context: DistContext) -> None:
        self._settings: dict[str, Any] = {
            "mesh": make_mesh(strategy, context),
            "mp_policy": choose_precision(strategy),
            "offload_policy": choose_offload(strategy, context),
        }
        self._reshards = strategy.sharding is not Sharding.FSDP_GRAD_OP

    def shard_layer(self, layer: nn.Module) -> None:
        fully_shard(layer, reshard_after_forward=self._reshards, **self._settings)

    def shard_rest(self, module: nn.Module) -> None:
        """Embeddings, last norm and head; used first and last, they stay gathered in between."""
        fully_shard(module, reshard_after_forward=False, **self._settings)


def make_mesh(strategy: Strategy, context: DistContext) -> DeviceMesh:
    """All ranks in a row; for hybrid sharding a row of shards per node."""
    kind = context.device.type
    if not dist.is_initialized():
        init_single_process_group(context)
    if strategy.sharding is Sharding.FSDP_HYBRID:
        shape = (context.num_nodes, context.local_world_size)
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(kind, (context.world_size,), mesh_dim_names=("shard",))


def choose_precision(strategy: Strategy) -> MixedPrecisionPolicy:
    """fp32 weights with 16-bit arithmetic are cast as they are gathered, and reduced in fp32.

    Everything else computes in the dtype it is stored in, or under autocast.
    """
    is_mixed = strategy.weights is Dtype.FP32 and strategy.compute is not Dtype.FP32
    if not is_mixed:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(strategy.compute), reduce_dtype=torch_dtype(Dtype.FP32)
    )


def choose_offload(strategy: Strategy, context: DistContext) -> OffloadPolicy:
    if strategy.offload is Offload.NONE:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=context.device.type == "cuda")


# Weights into shards: one rank reads them, every rank keeps its part, no node holds two copies.

_Shape = tuple[tuple[int, ...], torch.dtype]


def make_load_request(strategy: Strategy, training: Training) -> LoadRequest:
    """How the base model is loaded; weights that are drawn are the same on every rank."""
    torch.manual_seed(training.seed)
    return LoadRequest.from_strategy(
        strategy, is_packed=strategy.packing, random_weights=training.random_weights
    )


def load_sharded(plan: Plan, training: Training, context: DistContext) -> Objective:
    """The plan's Objective, sharded by FSDP2.

    Rank 0 reads the model into host memory; all ranks build it without values.
    Layer by layer rank 0 sends the values and drops its own, and each rank keeps its
    shard: a device holds its shards and one whole layer, then the embeddings.
    """
    strategy = plan.strategy
    request = make_load_request(strategy, training)
    folder = prefer_staged(Path(training.model_path))
    whole = load_base(folder, request, torch.device("cpu")) if context.is_first else None
    packed_names = broadcast_object(None if whole is None else list_4bit_modules(whole))
    skeleton = load_meta(folder, request)
    quantize_meta_model(skeleton, packed_names, request)
    source = None
    if whole is not None:
        finished = prepare_model(whole, strategy, training)
        source = _take_tensors(Objective.from_strategy(finished, strategy))
        whole = None
    module = Objective.from_strategy(prepare_model(skeleton, strategy, training), strategy)
    _fill_and_shard(
        module, WeightReceiver(module, source, context.device), Sharder(strategy, context)
    )
    return module


def _fill_and_shard(module: Objective, filler: WeightReceiver, sharder: Sharder) -> None:
    check = QuantizedShardCheck(filler.device)
    layers = decoder_layers(module)
    for layer in layers:
        filler.fill(layer)
        check.note(layer)
        sharder.shard_layer(layer)
    filler.fill(module)
    sharder.shard_rest(module)
    check.compare(layers)


@dataclass(slots=True, kw_only=True)
class _SentTensor:
    """One parameter or buffer as it travels: its values and, if packed, its statistics."""

    values: Tensor
    statistics: dict[str, Tensor]

    def describe(self) -> tuple[_Shape, dict[str, _Shape]]:
        return _shape(self.values), {key: _shape(part) for key, part in self.statistics.items()}


class WeightReceiver:
    """Gives a model without values those of rank 0, part by part."""

    def __init__(
        self, module: nn.Module, source: dict[str, _SentTensor] | None, device: torch.device
    ) -> None:
        self.device = device
        self._source = source
        self._layout: dict[str, tuple[_Shape, dict[str, _Shape]]] = broadcast_object(
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
                filled = rebuild_quantized(values, statistics, homes[0][0])
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


def _take_tensors(module: nn.Module) -> dict[str, _SentTensor]:
    """All tensors by name, so that each can be dropped when it is sent; the module is used up."""
    taken = {}
    for name, tensor in _named_tensors(module):
        values, statistics = split_quantized(tensor)
        taken[name] = _SentTensor(values=values, statistics=statistics)
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
