"""The engine that training would build, on fake tensors, as rank 0: weights loaded in the real
order of allocation, DDP's gradient buckets, FSDP2 over a fake process group.

Follows `runtime.load.load_base` and `training.model.prepare_model`. Left out: the norms that DoRA
computes when it is attached, and the second copy of a matrix while it is augmented.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.core.dtypes import Dtype
from tightfit.core.settings import Sharding
from tightfit.core.strategy import Strategy, Training, default_learning_rate
from tightfit.runtime.adapters import NEW_ROWS
from tightfit.runtime.kernels.fp8 import FP8, scale_matrix
from tightfit.runtime.kernels.fused_projections import is_augmented
from tightfit.runtime.layers import decoder_layers, is_dequantized
from tightfit.runtime.load import (
    list_4bit_widths,
    load_meta,
    materialize_empty,
    plain_dtype,
    quantize_and_dequantize,
)
from tightfit.runtime.packed_experts import find_packed
from tightfit.trace.recorder import Recorder
from tightfit.trace.recording import COMMUNICATION, GRADIENTS, LOAD_RESERVE, OPTIMIZER, TEMPORARY
from tightfit.training import recompute
from tightfit.training.distributed import DistContext
from tightfit.training.engine import TorchEngine
from tightfit.training.model import Objective, build_optimizer, prepare_model
from tightfit.training.preference import build_objective, find_preference
from tightfit.training.sharding import Sharder
from tightfit.training.step import Update
from tightfit.training.tracing.fake_kernels import (
    Nf4Values,
    dequantize_nf4,
    is_quantized_parameter,
    make_quantization_map,
    quantize_meta_fake,
    quantize_nf4,
    quantize_on_gpu,
)

_ADAPTERS = ("lora_", NEW_ROWS)
_REFERENCE = "reference."
_COPY = "modules_to_save"
_WRAPPINGS = ("base_layer", "original_module")
"""Names that peft adds between a module and its weights, which checkpoints do not have."""


def load_fake_weights(
    module: nn.Module,
    strategy: Strategy,
    device: torch.device,
    *,
    recorder: Recorder,
    has_random_weights: bool = False,
) -> None:
    """Move a prepared model from the meta device to `device`. Call inside the fake mode.

    In the order of transformers' loader, or of `make_random_model` if `has_random_weights`.
    """
    loading = _Loading(module, strategy, device, recorder)
    loading.load_base(has_random_weights=has_random_weights)
    # Buffers that no checkpoint holds are allocated last.
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)
    for width in loading.list_4bit_widths():
        quantize_and_dequantize(width, device)
    loading.cast(loading.base)
    loading.dequantize()
    loading.add_adapters()
    loading.cast(loading.added)
    loading.use_fp8()
    loading.copy_base()


class _Loading:
    """Allocates one model's tensors; parameters have the names of the prepared model."""

    def __init__(
        self, module: nn.Module, strategy: Strategy, device: torch.device, recorder: Recorder
    ) -> None:
        self._module = module
        self._strategy = strategy
        self._device = device
        self._recorder = recorder
        self._plain = plain_dtype(strategy)
        self._final: dict[str, Any] = dict(module.named_parameters())
        self.added = [n for n in self._final if _is_added(n)]
        """Adapters, and trained copies of whole modules."""
        self.copied = [n for n in self._final if n.startswith(_REFERENCE)]
        """Full tuning's frozen copy of the base."""
        self.base = [n for n in self._final if not (_is_added(n) or n.startswith(_REFERENCE))]
        self._homes: dict[int, list[tuple[nn.Module, str]]] = {}
        """The modules that hold each parameter; tied ones have several."""
        for owner in module.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None:
                    self._homes.setdefault(id(parameter), []).append((owner, name))
        self._codes: dict[str, Nf4Values] = {}
        """The codes of matrices that are yet to be dequantized."""
        self._dequantized = [
            f"{name}.weight" for name, part in module.named_modules() if is_dequantized(part)
        ]
        self._layers = {
            id(parameter): number
            for number, layer in enumerate(decoder_layers(module))
            for parameter in layer.parameters()
        }

    def list_4bit_widths(self) -> list[int]:
        """The widths that `check_dequantization` finds before any matrix is dequantized."""
        widths = {self._final[name].shape[1] for name in self._dequantized}
        return sorted(widths | set(list_4bit_widths(self._module)))

    def load_base(self, *, has_random_weights: bool) -> None:
        """As `make_random_model`: quantized matrices and their biases first, then all others. Else
        as `convert_and_load_state_dict_in_model` of transformers, which reads unquantized tensors
        in four threads, so neighbours may swap."""
        if has_random_weights:
            names = sorted(self.base, key=lambda name: not self._is_quantized_layer(name))
        else:
            # `caching_allocator_warmup` of transformers allocates and frees all weights' bytes.
            num_bytes = sum(self._count_bytes(name) for name in self.base)
            with self._recorder.setting("purpose", LOAD_RESERVE):
                torch.empty(num_bytes // 2, dtype=torch.float16, device=self._device)
            names = sorted(self.base, key=_sort_key)
        if self._strategy.weights is Dtype.NF4 and self._strategy.double_quant:
            # A table of the process, not of the model.
            with self._recorder.setting("purpose", TEMPORARY):
                make_quantization_map(self._device)
        for name in names:
            final = self._final[name]
            with self._at(name):
                if name in self._dequantized:
                    values = torch.empty_like(final, dtype=self._plain, device=self._device)
                    double_quant = self._strategy.double_quant
                    self._codes[name] = quantize_nf4(values, double_quant=double_quant)
                    del values  # before the next matrix is read
                elif is_quantized_parameter(final):
                    path, _, own = name.rpartition(".")
                    owner = self._module.get_submodule(path)
                    self._put(name, quantize_on_gpu(final, owner, own, self._plain, self._device))
                else:
                    self._put_empty(name, self._read_dtype(final))

    def dequantize(self) -> None:
        """`dequantize_base` of the runtime: matrix by matrix, freeing each one's codes."""
        for name in self._dequantized:
            if self._final[name].dtype is FP8:
                continue  # it waits
            with self._at(name):
                values = dequantize_nf4(self._codes.pop(name))
                if is_augmented(self._final[name]):
                    self._put_empty(name, values.dtype)
                else:
                    self._put(name, nn.Parameter(values, requires_grad=False))

    def add_adapters(self) -> None:
        """`_move_adapter_to_device_of_base_layer` of peft: in the base's dtype if it is a float."""
        for name in self.added:
            with self._at(name):
                self._put_empty(name, self._added_dtype(name))

    def copy_base(self) -> None:
        """As `PreferenceObjective` copies the prepared model."""
        for name in self.copied:
            with self._at(name):
                self._put_empty(name, self._final[name].dtype)

    def cast(self, names: list[str]) -> None:
        """Cast tensors whose planned dtype is another than the loaded one, one by one."""
        for name in names:
            final = self._final[name]
            if final.dtype is FP8:
                continue  # `use_fp8` casts it
            now: Tensor = self._module.get_parameter(name)
            if now.dtype != final.dtype:
                with self._at(name):
                    values = now.detach().to(final.dtype)
                    self._put(name, nn.Parameter(values, final.requires_grad))

    def use_fp8(self) -> None:
        """`use_fp8` of the runtime, from the last matrix to the first."""
        for name in reversed(self.base):
            if self._final[name].dtype is FP8:
                with self._at(name):
                    values, _ = scale_matrix(self._take_matrix(name))
                    self._put(name, nn.Parameter(values, requires_grad=False))

    def _take_matrix(self, name: str) -> Tensor:
        """The matrix; its codes are freed when this returns."""
        codes = self._codes.pop(name, None)
        return self._module.get_parameter(name).detach() if codes is None else dequantize_nf4(codes)

    def _put_empty(self, name: str, dtype: torch.dtype) -> None:
        """With its augmented columns, though training adds them later."""
        final = self._final[name]
        if is_augmented(final):
            wide = torch.empty(len(final), final.stride(0), dtype=dtype, device=self._device)
            values = wide[:, : final.shape[1]]
        else:
            values = torch.empty_like(final, dtype=dtype, device=self._device)
        self._put(name, nn.Parameter(values, final.requires_grad))

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        for owner, own in self._homes[id(self._final[name])]:
            owner._parameters[own] = parameter

    def _is_quantized_layer(self, name: str) -> bool:
        """Whether the matrix of this parameter's layer is quantized when it is loaded."""
        weight = f"{name.rpartition('.')[0]}.weight"
        return weight in self._dequantized or is_quantized_parameter(self._final.get(weight))

    def _read_dtype(self, final: Tensor) -> torch.dtype:
        strategy = self._strategy
        is_raised = strategy.weights.is_quantized and strategy.upcast_unquantized
        return self._plain if is_raised or final.dtype is FP8 else final.dtype

    def _count_bytes(self, name: str) -> int:
        """As transformers counts: codes without their scales."""
        final = self._final[name]
        if name in self._dequantized:
            return -(-int(final.numel()) // 2)
        dtype = final.dtype if is_quantized_parameter(final) else self._read_dtype(final)
        size: int = final.numel() * dtype.itemsize
        return size

    def _added_dtype(self, name: str) -> torch.dtype:
        """An adapter's dtype before the cast: its base's, unless that is an integer type."""
        final: torch.dtype = self._final[name].dtype
        path = name.split(".")
        if _COPY in path:
            return self._plain
        index = next(at for at, part in enumerate(path) if part.startswith(_ADAPTERS))
        adapted: Any = self._module.get_submodule(".".join(path[:index]))
        base = getattr(adapted, "base_layer", None)
        if base is None:
            return final
        # Experts are a bare parameter of their module, under a name of its own.
        owner, parameter = adapted.get_base_layer(), getattr(adapted, "parameter_name", "weight")
        if find_packed(owner, parameter) is not None:
            return self._plain
        values = getattr(owner, parameter)
        dtype: torch.dtype = getattr(base, "compute_dtype", None) or values.dtype
        return dtype if dtype.is_floating_point else torch.float32

    @contextmanager
    def _at(self, name: str) -> Iterator[None]:
        recorder = self._recorder
        recorder.layer = self._layers.get(id(self._final[name]))
        recorder.module_names.append(name.rpartition(".")[0])
        try:
            yield
        finally:
            recorder.module_names.pop()
            recorder.layer = None


def _is_added(name: str) -> bool:
    parts = name.split(".")
    return any(part.startswith(_ADAPTERS) or part == _COPY for part in parts)


def _sort_key(name: str) -> list[tuple[bool, int, str]]:
    """Natural order of dotted names (`dot_natural_key` of transformers)."""
    parts = [part for part in name.split(".") if part not in _WRAPPINGS]
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


# The engine that `train` would build, without values: every tensor is fake.

FAKE_DEVICE = torch.device("cpu")
"""Fake CUDA tensors need a CUDA build of torch; sizes are the same on the CPU."""


def make_training(strategy: Strategy, folder: Path, *, random_weights: bool = False) -> Training:
    return Training(
        model_path=str(folder),
        learning_rate=default_learning_rate(strategy.method, strategy.optimizer),
        random_weights=random_weights,
    )


def build_meta_module(
    folder: Path, strategy: Strategy, training: Training, *, has_varlen: bool
) -> Objective:
    """The plan's Objective on the meta device."""
    model = load_meta(folder, strategy, has_varlen=has_varlen)
    quantize_meta_fake(model, strategy)
    with patch.object(recompute, "HostCopies", NoCopies):
        prepared = prepare_model(model, strategy, training)
    return build_objective(prepared, strategy, training)


class NoCopies(recompute.HostCopies):
    """What is copied to the host takes no memory of the GPU; what comes back does."""

    def write(self, index: int, hidden: Tensor) -> None:
        self._shapes[index] = hidden.shape, hidden.dtype, hidden.device

    def read(self, index: int) -> Tensor:
        shape, dtype, device = self._shapes[index]
        return torch.empty(shape, dtype=dtype, device=device)

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self._shapes: dict[int, tuple[torch.Size, torch.dtype, torch.device]] = {}


class MicroBatchesDifferError(Exception):
    """The micro-batch that represents others does not leave memory as it found it."""


class RecordedEngine:
    """An engine that sets the recorder's stage as the step proceeds.

    `num_repeated` micro-batches of a step are not run but recorded as copies of the second; the
    first is different, as it starts without gradients.
    """

    def __init__(self, engine: Any, recorder: Recorder, num_repeated: int = 0) -> None:
        self._engine: Any = engine
        if isinstance(engine, TorchEngine):
            # Fake gradients have no values, and a skipped update would have no state.
            scaler: Any = engine.scaler
            scaler.has_overflowed = lambda _optimizer: False
        self._recorder = recorder
        self._num_repeated = num_repeated
        self._num_run = 0
        self.module = engine.module
        self.world_size = engine.world_size
        self._preference = find_preference(engine.module)
        self._pass_began = recorder.position()
        self._num_forward_only = 0
        if self._preference is not None:
            self.module.register_forward_pre_hook(self._before_pass, prepend=True)
            self.module.register_forward_hook(self._after_pass)

    def _before_pass(self, *_: Any) -> None:
        self._pass_began = self._recorder.position()

    def _after_pass(self, *_: Any) -> None:
        """Of KTO's passes without gradients, those of micro-batches that are not run follow."""
        if torch.is_grad_enabled() or self._recorder.stage != "forward":
            return
        self._num_forward_only += 1
        if self._num_forward_only == 1 and self._num_repeated:
            notes = self._recorder.notes
            if not notes.repeat(self._pass_began.operation, self._num_repeated):
                raise MicroBatchesDifferError

    def autocast(self) -> AbstractContextManager[object]:
        self._recorder.stage = "forward"
        inside: AbstractContextManager[object] = self._engine.autocast()
        return inside

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        since = self._recorder.position()
        with self._engine.accumulate(is_last=is_last):
            yield
        self._num_run += 1
        if self._preference is not None:
            self._preference.take()  # else each micro-batch would free the sums before it
        if (
            self._num_run == 2
            and self._num_repeated
            and not self._recorder.repeat_micro_batch(since, self._num_repeated)
        ):
            raise MicroBatchesDifferError

    def backward(self, loss: Tensor) -> None:
        self._recorder.stage = "backward"
        self._engine.backward(loss)
        self._recorder.layer = None

    def update(self, learning_rate: float) -> Update:
        self._num_run = self._num_forward_only = 0
        recorder = self._recorder
        recorder.stage = "update"
        recorder.mark(list_local_tensors(p.grad for p in self.module.parameters()), GRADIENTS)
        update: Update = self._engine.update(learning_rate)
        mark_optimizer_state(self._engine.optimizer, recorder)
        return update


def mark_optimizer_state(optimizer: Any, recorder: Recorder) -> None:
    values = (value for state in optimizer.state.values() for value in state.values())
    recorder.mark(list_local_tensors(values), OPTIMIZER)


def list_local_tensors(values: Any) -> list[Tensor]:
    """This rank's tensors among `values`."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


# Rank 0 of a distributed job in one process

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""DDP's defaults, `dist._DEFAULT_FIRST_BUCKET_BYTES` and `bucket_cap_mb`."""


class FakeDdpEngine(TorchEngine):
    """Gradients are views of DDP's buckets, as torch's Reducer lays them out.

    Buckets live for the whole job. A gradient is allocated outside, copied into its view and
    freed; under `no_sync` it stays outside until the last micro-batch. The first step has one
    bucket per dtype; before the second they are rebuilt in the order in which gradients came.
    Source: torch reducer.cpp, `initialize_buckets`, `mark_variable_ready_dense`.
    """

    def __init__(self, *args: Any, recorder: Recorder, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._recorder = recorder
        self._buckets: list[Tensor] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        self._arrived: list[nn.Parameter] = []
        self._is_rebuilt = False
        self._is_exchanging = True
        parameters: list[Any] = [p for p in self.module.parameters() if p.requires_grad]
        self._lay_out(parameters, [sys.maxsize])
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take)
        self.module.register_forward_pre_hook(self._before_forward)

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        self._is_exchanging = is_last
        yield

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and self._arrived and not self._is_rebuilt:
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
        if not self._is_exchanging:
            self._recorder.mark([parameter.grad], GRADIENTS)
            return
        if not self._is_rebuilt:
            self._arrived.append(parameter)
        view = self._views[parameter]
        with torch.no_grad():
            view.copy_(parameter.grad)
        parameter.grad = view


_SHAPE_PROPAGATION = "_propagate_tensor_meta_non_cached"
"""DTensor runs each operation once on full shapes to infer the result's; not a real allocation."""
_COLLECTIVE_METHODS = ("unshard", "wait_for_unshard", "post_backward")
"""Methods of FSDP2's parameter groups that allocate for collectives."""


_LIKE_DDP = {"sharding": Sharding.DDP}


@contextmanager
def fake_process_group(strategy: Strategy) -> Iterator[DistContext]:
    """Rank 0 of the strategy's world; for FSDP2, and for ranks that share rows, a process group
    whose collectives do nothing.

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
        from tightfit.training.tracing.zero import deepspeed_linear

        with deepspeed_linear(), fake_process_group(strategy.model_copy(update=_LIKE_DDP)):
            yield context
        return
    if not strategy.sharding.is_fsdp and strategy.context_parallel == 1:
        yield context
        return
    from torch.distributed.tensor import DTensor, debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=context.world_size)
    try:
        yield context
    finally:
        dist.destroy_process_group()
        # Cached sharding rules hold meshes of destroyed groups.
        clear: Any = getattr(debug, "_clear_sharding_prop_cache", None)
        if clear is None:  # before torch 2.10 there is only the Python cache
            clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear
        clear()


def build_fake_engine(
    module: nn.Module,
    strategy: Strategy,
    training: Training,
    *,
    context: DistContext,
    recorder: Recorder,
) -> Any:
    """The engine of rank 0 that `train` would build. Call inside the fake mode and the recorder."""
    if strategy.sharding is Sharding.ZERO3:
        from tightfit.training.tracing.zero import FakeZero3Engine

        return FakeZero3Engine(
            module, training, strategy=strategy, context=context, recorder=recorder
        )
    if strategy.sharding.is_fsdp:
        shard_fake(module, strategy, context)
    else:
        load_fake_weights(
            module,
            strategy,
            context.device,
            recorder=recorder,
            has_random_weights=training.random_weights,
        )
    optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
    if strategy.sharding.is_zero:
        from tightfit.training.tracing.zero import FakeZeroEngine

        return FakeZeroEngine(
            module, optimizer, strategy=strategy, context=context, recorder=recorder
        )
    settings: dict[str, Any] = {
        "strategy": strategy,
        "device": context.device,
        "world_size": context.world_size,
        "max_grad_norm": training.max_grad_norm,
    }
    if strategy.sharding is Sharding.DDP:
        return FakeDdpEngine(module, optimizer, recorder=recorder, **settings)
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
                lambda: recorder.setting("is_paused", True),
            )
        )
        for name in _COLLECTIVE_METHODS:
            stack.enter_context(
                _wrapped(FSDPParamGroup, name, lambda: recorder.setting("purpose", COMMUNICATION))
            )
        yield


def _wrapped(owner: type, name: str, make_context: Callable[[], Any]) -> Any:
    inner: Any = getattr(owner, name)

    def inside(*args: Any, **kwargs: Any) -> Any:
        with make_context():
            return inner(*args, **kwargs)

    return patch.object(owner, name, inside)
