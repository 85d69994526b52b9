"""The engine that training would build, on fake tensors, loaded in the real order of allocation.

Follows `runtime.load.load_base` and `train.model.prepare_model`. Left out: the norms that DoRA
computes when it is attached, and the second copy of a matrix while it is augmented.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Method, Strategy
from tightfit.core.training import DEFAULT_LEARNING_RATES, Training
from tightfit.runtime.attention import choose_attention_name
from tightfit.runtime.kernels.fp8 import FP8, scale_matrix
from tightfit.runtime.kernels.fused_lora import is_augmented
from tightfit.runtime.layers import decoder_layers, is_dequantized
from tightfit.runtime.load import LoadRequest, list_4bit_widths, load_meta, quantize_and_dequantize
from tightfit.trace.recorder import Recorder
from tightfit.trace.recording import GRADIENTS, LOAD_RESERVE, OPTIMIZER, TEMPORARY
from tightfit.training.engine import SyncedGradScaler, TorchEngine
from tightfit.training.model import Objective, prepare_model
from tightfit.training.optimizers import build_optimizer
from tightfit.training.step import Update
from tightfit.training.tracing.fake_kernels import (
    Nf4Values,
    is_quantized_parameter,
    make_quantization_map,
    quantize_meta_fake,
    quantize_on_gpu,
)

_ADAPTER = "lora_"
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
    if has_random_weights:
        loading.load_base(loading.order_random())
    else:
        loading.warm_up()
        loading.load_base(loading.order_read())
    _place_buffers(module, device)
    for width in loading.list_4bit_widths():
        quantize_and_dequantize(width, device)
    loading.cast(loading.base)
    loading.dequantize()
    loading.add_adapters()
    loading.cast(loading.added)
    loading.use_fp8()


def _place_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers that no checkpoint holds are allocated last."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)


class _Loading:
    """Allocates one model's tensors; parameters have the names of the prepared model."""

    def __init__(
        self, module: nn.Module, strategy: Strategy, device: torch.device, recorder: Recorder
    ) -> None:
        self._module = module
        self._device = device
        self._recorder = recorder
        self._plain = LoadRequest.from_strategy(strategy, is_packed=False).plain_dtype
        self._is_raised = strategy.weights.is_quantized and strategy.upcast_unquantized
        self._has_nested = strategy.weights is Dtype.NF4 and strategy.double_quant
        self._final: dict[str, Any] = dict(module.named_parameters())
        self.added = [n for n in self._final if _is_added(n)]
        """Adapters, and trained copies of whole modules."""
        self.base = [n for n in self._final if not _is_added(n)]
        self._homes = _find_homes(module)
        self._nested = strategy.double_quant
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

    def warm_up(self) -> None:
        """`caching_allocator_warmup` of transformers: allocates and frees all weights' bytes."""
        sizes = [self._count_bytes(name) for name in self.base]
        self._recorder.purpose = LOAD_RESERVE
        torch.empty(sum(sizes) // 2, dtype=torch.float16, device=self._device)
        self._recorder.purpose = None

    def order_read(self) -> list[str]:
        """The base's tensors as `convert_and_load_state_dict_in_model` sorts them.

        It reads unquantized ones in four threads, so neighbours may swap.
        """
        return sorted(self.base, key=_sort_key)

    def order_random(self) -> list[str]:
        """Quantized matrices and their biases first, then all others."""
        return sorted(self.base, key=lambda name: not self._is_quantized(_weight_beside(name)))

    def list_4bit_widths(self) -> list[int]:
        """The widths that `check_dequantization` finds before any matrix is dequantized."""
        widths = {self._final[name].shape[1] for name in self._dequantized}
        return sorted(widths | set(list_4bit_widths(self._module)))

    def load_base(self, names: list[str]) -> None:
        if self._has_nested:
            self._recorder.purpose = TEMPORARY  # of the process, not of the model
            make_quantization_map(self._device)
            self._recorder.purpose = None
        for name in names:
            final = self._final[name]
            with self._at(name):
                if name in self._dequantized:
                    self._codes[name] = self._pack(name)
                elif is_quantized_parameter(final):
                    owner = self._module.get_submodule(name.rpartition(".")[0])
                    self._put(name, quantize_on_gpu(final, owner, self._plain, self._device))
                else:
                    self._put_empty(name, self._read_dtype(final))

    def dequantize(self) -> None:
        """`dequantize_base` of the runtime: matrix by matrix, freeing each one's codes."""
        for name in self._dequantized:
            if self._final[name].dtype is FP8:
                continue  # it waits
            with self._at(name):
                values = self._codes.pop(name).dequantize()
                if is_augmented(self._final[name]):
                    self._put_empty(name, values.dtype)
                else:
                    self._put(name, nn.Parameter(values, requires_grad=False))

    def add_adapters(self) -> None:
        """`_move_adapter_to_device_of_base_layer` of peft: in the base's dtype if it is a float."""
        for name in self.added:
            with self._at(name):
                self._put_empty(name, self._added_dtype(name))

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
        codes = self._codes.pop(name, None)
        return self._module.get_parameter(name).detach() if codes is None else codes.dequantize()

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

    def _pack(self, name: str) -> Nf4Values:
        values = torch.empty_like(self._final[name], dtype=self._plain, device=self._device)
        return Nf4Values.of(values, double_quant=self._nested)

    def _is_quantized(self, name: str) -> bool:
        return name in self._dequantized or is_quantized_parameter(self._final.get(name))

    def _read_dtype(self, final: Tensor) -> torch.dtype:
        is_cast_later = self._is_raised or final.dtype is FP8
        return self._plain if is_cast_later else final.dtype

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
        index = next(at for at, part in enumerate(path) if part.startswith(_ADAPTER))
        base: Any = getattr(self._module.get_submodule(".".join(path[:index])), "base_layer", None)
        if base is None:
            return final
        dtype: torch.dtype = getattr(base, "compute_dtype", None) or base.weight.dtype
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


def _weight_beside(name: str) -> str:
    return f"{name.rpartition('.')[0]}.weight"


def _is_added(name: str) -> bool:
    return any(part.startswith(_ADAPTER) or part == _COPY for part in name.split("."))


def _find_homes(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules that hold each parameter; tied ones have several."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                homes.setdefault(id(parameter), []).append((owner, name))
    return homes


def _sort_key(name: str) -> list[tuple[bool, int, str]]:
    """Natural order of dotted names (`dot_natural_key` of transformers)."""
    parts = [part for part in name.split(".") if part not in _WRAPPINGS]
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


# The engine that `train` would build, without values: every tensor is fake.

FAKE_DEVICE = torch.device("cpu")
"""Fake CUDA tensors need a CUDA build of torch; sizes are the same on the CPU."""


def make_training(strategy: Strategy, folder: Path, *, random_weights: bool = False) -> Training:
    method = strategy.method if strategy.method in DEFAULT_LEARNING_RATES else Method.LORA
    return Training(
        model_path=str(folder),
        learning_rate=DEFAULT_LEARNING_RATES[method],
        random_weights=random_weights,
    )


def build_meta_module(
    folder: Path, strategy: Strategy, training: Training, *, has_varlen: bool
) -> Objective:
    """The plan's Objective on the meta device."""
    request = LoadRequest.from_strategy(strategy, is_packed=strategy.packing)
    name = choose_attention_name(strategy, is_packed=strategy.packing, has_varlen=has_varlen)
    model = load_meta(folder, replace(request, attention=name))
    quantize_meta_fake(model, request)
    return Objective.from_strategy(prepare_model(model, strategy, training), strategy)


def build_fake_engine(
    module: Objective, strategy: Strategy, training: Training, recorder: Recorder
) -> TorchEngine:
    """The engine of a single GPU. Call inside the fake mode and the recorder."""
    has_random_weights = training.random_weights
    load_fake_weights(
        module, strategy, FAKE_DEVICE, recorder=recorder, has_random_weights=has_random_weights
    )
    optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
    return TorchEngine(
        module,
        optimizer,
        strategy=strategy,
        device=FAKE_DEVICE,
        max_grad_norm=training.max_grad_norm,
    )


class NeverOverflowScaler(SyncedGradScaler):
    """Reports no overflow: fake gradients have no values, and a skipped update no state."""

    def has_overflowed(self, _optimizer: Optimizer) -> bool:
        return False


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
            engine.scaler = NeverOverflowScaler(
                engine.device.type, enabled=engine.scaler.is_enabled()
            )
        self._recorder = recorder
        self._num_repeated = num_repeated
        self._num_run = 0
        self.module = engine.module
        self.world_size = engine.world_size

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
        self._num_run = 0
        recorder = self._recorder
        recorder.stage = "update"
        recorder.mark(list_local_tensors(p.grad for p in self.module.parameters()), GRADIENTS)
        update: Update = self._engine.update(learning_rate)
        states = self._engine.optimizer.state.values()
        recorder.mark(
            list_local_tensors(value for state in states for value in state.values()), OPTIMIZER
        )
        return update


def list_local_tensors(values: Any) -> list[Tensor]:
    """This rank's tensors among `values`."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
