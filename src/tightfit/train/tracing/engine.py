"""The engine that training would build, on fake tensors: every tensor is loaded in the order in
which it comes to the GPU, and none has values.

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
from tightfit.train.engine import SyncedGradScaler, TorchEngine
from tightfit.train.model import Objective, prepare_model
from tightfit.train.optimizers import build_optimizer
from tightfit.train.step import Update
from tightfit.train.tracing.fake_kernels import (
    Nf4Values,
    is_quantized_parameter,
    make_quantization_map,
    quantize_meta_fake,
    quantize_on_gpu,
)

_ADAPTER = "lora_"
_COPY = "modules_to_save"
_WRAPPINGS = ("base_layer", "original_module")
"""Names that peft puts between a module and its weights, which no checkpoint has."""


def load_fake_weights(
    module: nn.Module,
    strategy: Strategy,
    device: torch.device,
    *,
    recorder: Recorder,
    is_drawn: bool = False,
) -> None:
    """Bring a finished model from the meta device to `device`. Call inside the fake mode.

    Values that are read go through transformers' loader; those `is_drawn` as `draw_model` does.
    """
    loading = _Loading(module, strategy, device, recorder)
    if is_drawn:
        loading.place_base(loading.list_drawn())
    else:
        loading.warm_up()
        loading.place_base(loading.list_read())
    _place_buffers(module, device)
    for width in loading.list_4bit_widths():
        quantize_and_dequantize(width, device)
    loading.settle(loading.base)
    loading.unpack()
    loading.add_adapters()
    loading.settle(loading.added)
    loading.use_fp8()


def _place_buffers(module: nn.Module, device: torch.device) -> None:
    """Tables that no checkpoint holds; they are made when everything else is there."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)


class _Loading:
    """One model on its way; parameters are known by the names they have at its end."""

    def __init__(
        self, module: nn.Module, strategy: Strategy, device: torch.device, recorder: Recorder
    ) -> None:
        self._module = module
        self._device = device
        self._recorder = recorder
        self._plain = LoadRequest.from_strategy(strategy, is_packed=False).plain_dtype
        self._is_raised = strategy.weights.is_quantized and strategy.upcast_unquantized
        self._has_nested = strategy.weights is Dtype.NF4 and strategy.double_quant
        self._wanted: dict[str, Any] = dict(module.named_parameters())
        self.added = [n for n in self._wanted if _is_added(n)]
        """Adapters, and copies of modules that train whole."""
        self.base = [n for n in self._wanted if not _is_added(n)]
        self._homes = _find_homes(module)
        self._nested = strategy.double_quant
        self._codes: dict[str, Nf4Values] = {}
        """Of matrices that will be unpacked, while they are still packed."""
        self._unpacked = [
            f"{name}.weight" for name, part in module.named_modules() if is_dequantized(part)
        ]
        self._layers = {
            id(parameter): number
            for number, layer in enumerate(decoder_layers(module))
            for parameter in layer.parameters()
        }

    def warm_up(self) -> None:
        """`caching_allocator_warmup` of transformers takes all weights' bytes, and frees them."""
        sizes = [self._count_bytes(name) for name in self.base]
        self._recorder.purpose = LOAD_RESERVE
        torch.empty(sum(sizes) // 2, dtype=torch.float16, device=self._device)
        self._recorder.purpose = None

    def list_read(self) -> list[str]:
        """The base's tensors by name, as `convert_and_load_state_dict_in_model` sorts them.

        It reads unpacked ones in four threads, so that neighbours may change places.
        """
        return sorted(self.base, key=_sort_key)

    def list_drawn(self) -> list[str]:
        """Packed matrices with their biases first, then all others."""
        return sorted(self.base, key=lambda name: not self._comes_packed(_weight_beside(name)))

    def list_4bit_widths(self) -> list[int]:
        """As `check_unpacking` finds them before anything is unpacked."""
        widths = {self._wanted[name].shape[1] for name in self._unpacked}
        return sorted(widths | set(list_4bit_widths(self._module)))

    def place_base(self, names: list[str]) -> None:
        if self._has_nested:
            self._recorder.purpose = TEMPORARY  # the process's, not the model's
            make_quantization_map(self._device)
            self._recorder.purpose = None
        for name in names:
            wanted = self._wanted[name]
            with self._at(name):
                if name in self._unpacked:
                    self._codes[name] = self._pack(name)
                elif is_quantized_parameter(wanted):
                    owner = self._module.get_submodule(name.rpartition(".")[0])
                    self._put(name, quantize_on_gpu(wanted, owner, self._plain, self._device))
                else:
                    self._put_empty(name, self._read_dtype(wanted))

    def unpack(self) -> None:
        """`unpack_base` of the runtime: matrix by matrix, each one's codes gone before the next."""
        for name in self._unpacked:
            if self._wanted[name].dtype is FP8:
                continue  # it waits
            with self._at(name):
                values = self._codes.pop(name).unpack()
                if is_augmented(self._wanted[name]):
                    self._put_empty(name, values.dtype)
                else:
                    self._put(name, nn.Parameter(values, requires_grad=False))

    def add_adapters(self) -> None:
        """`_move_adapter_to_device_of_base_layer` of peft: in the base's dtype, if it has one."""
        for name in self.added:
            with self._at(name):
                self._put_empty(name, self._added_dtype(name))

    def settle(self, names: list[str]) -> None:
        """Cast what the plan has in another dtype than it came in, one after the other."""
        for name in names:
            wanted = self._wanted[name]
            if wanted.dtype is FP8:
                continue  # its turn comes last
            now: Tensor = self._module.get_parameter(name)
            if now.dtype != wanted.dtype:
                with self._at(name):
                    values = now.detach().to(wanted.dtype)
                    self._put(name, nn.Parameter(values, wanted.requires_grad))

    def use_fp8(self) -> None:
        """`use_fp8` of the runtime, from the last matrix to the first."""
        for name in reversed(self.base):
            if self._wanted[name].dtype is FP8:
                with self._at(name):
                    values, _ = scale_matrix(self._take_matrix(name))
                    self._put(name, nn.Parameter(values, requires_grad=False))

    def _take_matrix(self, name: str) -> Tensor:
        codes = self._codes.pop(name, None)
        return self._module.get_parameter(name).detach() if codes is None else codes.unpack()

    def _put_empty(self, name: str, dtype: torch.dtype) -> None:
        """With the spare columns it ends with, though it gets them once it is there."""
        wanted = self._wanted[name]
        if is_augmented(wanted):
            wide = torch.empty(len(wanted), wanted.stride(0), dtype=dtype, device=self._device)
            values = wide[:, : wanted.shape[1]]
        else:
            values = torch.empty_like(wanted, dtype=dtype, device=self._device)
        self._put(name, nn.Parameter(values, wanted.requires_grad))

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        for owner, own in self._homes[id(self._wanted[name])]:
            owner._parameters[own] = parameter

    def _pack(self, name: str) -> Nf4Values:
        values = torch.empty_like(self._wanted[name], dtype=self._plain, device=self._device)
        return Nf4Values.of(values, double_quant=self._nested)

    def _comes_packed(self, name: str) -> bool:
        return name in self._unpacked or is_quantized_parameter(self._wanted.get(name))

    def _read_dtype(self, wanted: Tensor) -> torch.dtype:
        is_cast_later = self._is_raised or wanted.dtype is FP8
        return self._plain if is_cast_later else wanted.dtype

    def _count_bytes(self, name: str) -> int:
        """As transformers counts: codes without what stands beside them."""
        wanted = self._wanted[name]
        if name in self._unpacked:
            return -(-int(wanted.numel()) // 2)
        dtype = wanted.dtype if is_quantized_parameter(wanted) else self._read_dtype(wanted)
        size: int = wanted.numel() * dtype.itemsize
        return size

    def _added_dtype(self, name: str) -> torch.dtype:
        """Of an adapter before it is cast: its base's, where that is no integer."""
        wanted: torch.dtype = self._wanted[name].dtype
        path = name.split(".")
        if _COPY in path:
            return self._plain
        index = next(at for at, part in enumerate(path) if part.startswith(_ADAPTER))
        base: Any = getattr(self._module.get_submodule(".".join(path[:index])), "base_layer", None)
        if base is None:
            return wanted
        dtype: torch.dtype = getattr(base, "compute_dtype", None) or base.weight.dtype
        return dtype if dtype.is_floating_point else torch.float32

    @contextmanager
    def _at(self, name: str) -> Iterator[None]:
        recorder = self._recorder
        recorder.layer = self._layers.get(id(self._wanted[name]))
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
    """Where each parameter is; tied ones are in several places."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                homes.setdefault(id(parameter), []).append((owner, name))
    return homes


def _sort_key(name: str) -> list[tuple[bool, int, str]]:
    """Numbers by their size, words by the alphabet (`dot_natural_key` of transformers)."""
    parts = [part for part in name.split(".") if part not in _WRAPPINGS]
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


# The engine that `train` would build, without values: every tensor is fake.

FAKE_DEVICE = torch.device("cpu")
"""Fake tensors of a card need a torch built for it; the sizes are the same."""


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
    """The plan's Objective with every tensor on the meta device."""
    request = LoadRequest.from_strategy(strategy, is_packed=strategy.packing)
    name = choose_attention_name(strategy, is_packed=strategy.packing, has_varlen=has_varlen)
    model = load_meta(folder, replace(request, attention=name))
    quantize_meta_fake(model, request)
    return Objective.from_strategy(prepare_model(model, strategy, training), strategy)


def build_fake_engine(
    module: Objective, strategy: Strategy, training: Training, recorder: Recorder
) -> TorchEngine:
    """The engine of one card. Call inside the fake mode, with the recorder watching."""
    is_drawn = training.random_weights
    load_fake_weights(module, strategy, FAKE_DEVICE, recorder=recorder, is_drawn=is_drawn)
    optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
    return TorchEngine(
        module,
        optimizer,
        strategy=strategy,
        device=FAKE_DEVICE,
        max_grad_norm=training.max_grad_norm,
    )


class NeverOverflowScaler(SyncedGradScaler):
    """Fake gradients have no values, and an update that is skipped makes no optimizer state."""

    def has_overflowed(self, _optimizer: Optimizer) -> bool:
        return False


class MicroBatchesDifferError(Exception):
    """A micro-batch that was to stand for others leaves something else than it found."""


class RecordedEngine:
    """An engine that tells the recorder which part of the step is running.

    `num_repeated` micro-batches of a step are not run: they are noted as the second was. The
    first finds no gradients yet.
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
