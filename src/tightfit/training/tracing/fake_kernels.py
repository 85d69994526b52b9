"""bitsandbytes, Liger and fp8 casts on fake tensors: they allocate, and launch no kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.core.errors import SetupError
from tightfit.core.strategy import Strategy
from tightfit.estimation.weights import packs_experts
from tightfit.planning.plan import BITSANDBYTES
from tightfit.runtime import flex_attention, window_attention
from tightfit.runtime.kernels import experts, fp8
from tightfit.runtime.libraries import silence_libraries
from tightfit.runtime.load import (
    list_quantizable,
    make_quantized_linear,
    mark_quantized,
    nf4_options,
    plain_dtype,
    quantized_parameter,
)
from tightfit.runtime.packed_experts import (
    find_packed,
    hold_codes,
    list_packable,
    list_packed,
    quantize,
    to_rows,
)
from tightfit.trace.compiled_layers import CompiledLayers, import_compiler
from tightfit.trace.kernel_stubs import (
    liger_without_kernels,
    redirect_autocast,
    triton_without_kernels,
)
from tightfit.trace.kernel_workspace import count_outliers

_META = torch.device("meta")
_PAGED_NUMEL = 1e5
"""bitsandbytes' `Optimizer8bit.get_state_buffer` pages the state of larger parameters."""

_FAKE_CLASSES = {name: type(name, (FakeTensor,), {}) for name in ("Params4bit", "Int8Params")}
"""peft recognizes quantized weights by class name, which fake tensors must carry."""


def quantize_meta_fake(model: Any, strategy: Strategy) -> None:
    """Quantize a model on the meta device as loading would have."""
    if not strategy.weights.is_quantized:
        return
    for name, linear in list_quantizable(model):
        new = make_quantized_linear(linear, strategy)
        shape = (new.out_features, new.in_features)
        values = torch.empty(shape, dtype=plain_dtype(strategy), device=_META)
        new.weight = quantized_parameter(values, new, strategy)._quantize(_META)
        model.set_submodule(name, new.requires_grad_(False))
    if packs_experts(strategy):
        for _, module, name in list_packable(model):
            values = torch.empty_like(module.get_parameter(name), dtype=plain_dtype(strategy))
            codes = quantize(values, nf4_options(strategy))
            hold_codes(module, name, codes, tuple(values.shape))
    mark_quantized(model, strategy)
    model.train()


def _bitsandbytes() -> Any:
    from bitsandbytes import functional

    return functional  # not annotated


def quantize_on_gpu(
    weight: Any, owner: nn.Module, name: str, dtype: torch.dtype, device: torch.device
) -> Any:
    """Load a weight to `device` and quantize it there, as loading does.

    As `_quantize` of bitsandbytes' parameters, which cannot be made of fake tensors. For int8 the
    values go back to the host first, and stay allocated meanwhile.
    Source: `Bnb4bitQuantize` and `Bnb8bitQuantize` of transformers. Inside the fake mode.
    """
    bnb = _bitsandbytes()
    if type(weight).__name__ == "Int8Params":
        values = torch.empty(weight.shape, dtype=dtype, device=device)
        again = torch.empty_like(values, dtype=torch.float16)
        codes, scales, _ = bnb.int8_vectorwise_quant(again)
        placed = _wrap_fake(codes, weight)
        placed.CB, placed.SCB = codes, scales
        return placed
    state = weight.quant_state
    packed = find_packed(owner, name)
    shape = state.shape if packed is None else packed.shape
    values = torch.empty(shape, dtype=state.dtype, device=device)
    codes, made = bnb.quantize_4bit(
        values if packed is None else to_rows(values),
        blocksize=weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
    )
    placed = _wrap_fake(codes, weight)
    placed.quant_state = made
    if packed is None:
        named: Any = owner
        named.quant_state = made
    else:
        hold_codes(owner, name, placed, packed.shape)
    return placed


Nf4Values = tuple[Tensor, Any]
"""nf4 codes of a matrix that will be dequantized, and their state."""


def quantize_nf4(values: Tensor, *, double_quant: bool) -> Nf4Values:
    """As `Params4bit` quantizes them. Inside the fake mode."""
    quantized: Nf4Values = _bitsandbytes().quantize_4bit(
        values, compress_statistics=double_quant, quant_type="nf4", quant_storage=torch.uint8
    )
    return quantized


def dequantize_nf4(quantized: Nf4Values) -> Tensor:
    values: Tensor = _bitsandbytes().dequantize_4bit(*quantized)
    return values


def make_quantization_map(device: torch.device) -> None:
    """Allocate bitsandbytes' table for double quantization, once per process.

    The one used on the meta device is on another device.
    """
    bnb = _bitsandbytes()
    bnb.name2qmap["dynamic"] = bnb.create_dynamic_map().to(device)


def list_quantization_state(model: nn.Module) -> list[Tensor]:
    """Scales and tables of quantized weights, which are neither parameters nor buffers."""
    found: list[Tensor] = []
    for module in model.modules():
        weight: Any = module._parameters.get("weight")
        if getattr(weight, "SCB", None) is not None:
            found.append(weight.SCB)
        state = getattr(weight, "quant_state", None)
        if state is None and weight is not None:
            state = getattr(module, "quant_state", None)  # its weight is sharded
        found += _list_state(state)
    for _, _, packed in list_packed(model):
        found += _list_state(packed.state)
    return found


def _list_state(state: Any) -> list[Tensor]:
    found: list[Tensor] = []
    while state is not None:
        found.extend(t for t in (state.absmax, state.code, state.offset) if t is not None)
        state = state.state2
    return found


def is_quantized_parameter(parameter: Tensor | None) -> bool:
    return type(parameter).__name__ in _FAKE_CLASSES


@contextmanager
def bitsandbytes_without_kernels() -> Iterator[None]:
    """Make bitsandbytes take its CUDA path, without reading values.

    Its kernels are custom operations with fake versions; patched are its choices by device type
    and the tables that it computes.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise SetupError(
            "Tracing this plan runs bitsandbytes' own code, which cannot be imported here.",
            remedy="pip install bitsandbytes (no GPU needed), or leave --trace out",
        ) from error
    from bitsandbytes import functional
    from bitsandbytes.autograd import _functions
    from bitsandbytes.nn import Params4bit, modules
    from bitsandbytes.optim.optimizer import Optimizer8bit

    make_map: Any = functional.create_dynamic_map

    def make_fake_map(*args: Any, **kwargs: Any) -> Tensor:
        with _disable_current_modes():
            real: Tensor = make_map(*args, **kwargs)
        return torch.empty(real.shape, dtype=real.dtype)

    def restore_quant_state(module: Any) -> None:
        # Gathered shards have lost their scales; bitsandbytes' own fix cannot wrap fake tensors.
        if getattr(module.weight, "quant_state", None) is None:
            module.weight.quant_state = module.quant_state

    deepcopy: Any = Params4bit.__deepcopy__

    def copy_in_place(self: Tensor, memo: Any) -> Any:
        # A copy starts from an empty tensor, which must be on the original's device.
        with torch.device(self.device):
            return deepcopy(self, memo)

    outliers = _Outliers()

    def matmul(a: Tensor, b: Tensor, out: Any = None, state: Any = None, **rest: Any) -> Tensor:
        outliers.expect(a)
        product: Tensor = _functions.MatMul8bitLt.apply(a, b, out, rest.get("bias"), state)
        return product

    with (
        patch.object(functional, "create_dynamic_map", make_fake_map),
        patch.dict(functional.name2qmap, clear=True),
        patch.object(bitsandbytes, "matmul", matmul),
        patch.object(Optimizer8bit, "get_state_buffer", _make_state_buffer),
        patch.object(modules, "fix_4bit_weight_quant_state_from_module", restore_quant_state),
        patch.object(Params4bit, "__deepcopy__", copy_in_place),
        patch.object(torch.library, "get_ctx", lambda: outliers),
    ):
        yield


class _Outliers:
    """Gives the fake int8 product the number of outlier columns of its activation."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    def expect(self, activation: Tensor) -> None:
        """The fakes ask for the columns' indices, then for the columns counted as int64."""
        columns = count_outliers(activation)
        num_rows = activation.numel() // activation.shape[-1]
        kept_bytes = num_rows * columns * activation.element_size()
        self._sizes = [columns, kept_bytes // torch.int64.itemsize]

    def new_dynamic_size(self, **_limits: int) -> int:
        return self._sizes.pop(0) if self._sizes else 0


def _make_state_buffer(self: Any, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """As bitsandbytes does for CUDA tensors; paged state is host memory."""
    if not self.is_paged or p.numel() < _PAGED_NUMEL:
        return torch.zeros_like(p, dtype=dtype)
    fake: Any = p
    with _disable_current_modes(), fake.fake_mode:
        return torch.empty_like(p, dtype=dtype)


def _wrap_fake(values: Tensor, weight: Any) -> Any:
    """Fake codes in place of `weight`, with all its attributes."""
    placed: Any = nn.Parameter(values, requires_grad=False)
    placed.__class__ = _FAKE_CLASSES[type(weight).__name__]
    for name, value in vars(weight).items():
        setattr(placed, name, value)
    return placed


# Flex attention: operations with the memory of its compiled kernels


@torch.library.custom_op("tightfit::flex_attention", mutates_args=())
def _flex(query: Tensor, key: Tensor, value: Tensor, window: int) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("it stands for the kernel in traces")


@_flex.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, _window: int) -> tuple[Tensor, Tensor]:
    rows, heads, tokens, _ = query.shape
    output = query.new_empty(rows, tokens, heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty(rows, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("tightfit::flex_attention_backward", mutates_args=())
def _flex_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raise NotImplementedError("it stands for the kernel in traces")


@_flex_backward.register_fake
def _(
    _gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, _window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = query.new_empty(query.shape[:3], dtype=torch.float32)
    return (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), sums)


class _FakeFlex(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, window: int
    ) -> tuple[Tensor, Tensor]:
        output, sums = torch.ops.tightfit.flex_attention(query, key, value, window)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.window = window
        return output, sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        tensors = (gradients[0], *ctx.saved_tensors[:3])
        found = torch.ops.tightfit.flex_attention_backward(*tensors, ctx.window)
        return (*found[:3], None)


class _FakeScale(torch.autograd.Function):
    """One compiled kernel each way."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
        ctx.save_for_backward(output, sums, sinks)
        return torch.empty_like(output)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors)


@contextmanager
def fake_flex_attention() -> Iterator[None]:
    """Flex attention is an operation that allocates what its kernels do."""
    run: Any = _FakeFlex.apply

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, *_: Any) -> Any:
        return run(query, key, value, min(mask.window or query.shape[2], query.shape[2]))

    def make_mask(*_: Any, local_size: int | None = None, **__: Any) -> Any:
        return SimpleNamespace(window=local_size)

    with (
        patch.object(flex_attention, "_compiled", lambda: (attend, _FakeScale.apply)),
        patch.object(flex_attention, "_attend", attend),
        patch.object(flex_attention, "_make_mask", make_mask),
    ):
        yield


# Which libraries a job runs whose kernels are left out of a trace.


@contextmanager
def without_kernels(
    strategy: Strategy, device: torch.device, capability: tuple[int, int] | None
) -> Iterator[None]:
    """Wraps a trace of `strategy` on fake tensors of `device`."""
    silence_libraries()  # before the imports that print
    if strategy.compile:
        import_compiler()
    with ExitStack() as stack:
        stack.enter_context(redirect_autocast(device.type))
        if BITSANDBYTES.is_wanted(strategy):
            stack.enter_context(bitsandbytes_without_kernels())
        if strategy.fused_kernels or strategy.uses_liger_loss:
            stack.enter_context(liger_without_kernels(capability))
        # Kernels are chosen as on a GPU, though fake tensors claim to be on the CPU: they allocate
        # as they would, and each launch is recorded.
        stack.enter_context(triton_without_kernels())
        stack.enter_context(patch.object(experts, "_runs_kernels", lambda _: True))
        stack.enter_context(fake_flex_attention())
        is_fast = capability is not None and window_attention.has_fast_causal_kernel(capability)
        stack.enter_context(
            patch.object(window_attention, "_has_fast_causal_kernel", lambda _: is_fast)
        )
        if strategy.compile:
            stack.enter_context(patch.object(torch, "compile", CompiledLayers().compile))
        if strategy.has_fp8:
            stack.enter_context(
                patch.object(fp8, "_runs_kernels", lambda _: not torch.compiler.is_compiling())
            )
        yield


def import_libraries() -> None:
    """Import what every trace needs, before processes are forked."""
    import peft  # noqa: F401
    import torch._dynamo  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401
