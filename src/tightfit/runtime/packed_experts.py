"""A layer's experts in nf4: packed while they are loaded, unpacked one matrix at a time.

bitsandbytes packs linear layers, and transformers keeps the experts of a layer as one bare
parameter. Here that parameter holds nf4 codes, and `runtime/kernels/experts.py` dequantizes it for
each product. Only experts that run there can be packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from tightfit.runtime.kernels.experts import EXPERT_MATRICES, PACKED, runs_here

if TYPE_CHECKING:
    from torch import nn

_BLOCK = 64
MXFP4_ENDINGS = ("_blocks", "_scales")
"""Of the names of tensors that hold MXFP4: codes, and a scale for each 32 of them."""


class Packed(NamedTuple):
    """What turns a parameter's codes into values again."""

    state: Any
    """bitsandbytes' QuantState: scales, their scales, and the table of 16 values."""
    shape: tuple[int, ...]
    """[experts, out, in], or transposed."""

    def unpack(self, codes: Tensor) -> Tensor:
        from bitsandbytes import functional

        dequantize: Any = functional.dequantize_4bit  # not annotated
        values: Tensor = dequantize(codes.as_subclass(Tensor), self.state)
        return values.view(self.shape)

    def unpack_chosen(self, codes: Tensor, experts: Tensor) -> Tensor:
        """The matrices of these experts alone, `[numbers, out, in]`."""
        from bitsandbytes import functional

        bnb: Any = functional  # not annotated
        state, num_values = self.state, prod(self.shape[1:])
        if num_values % state.blocksize:  # a block spans two experts
            return self.unpack(codes)[experts]
        scales = state.absmax
        if state.nested:
            scales = bnb.dequantize_blockwise(scales, state.state2) + state.offset
        chosen = bnb.QuantState(
            absmax=scales.view(self.shape[0], -1)[experts].reshape(-1).float(),
            shape=torch.Size([len(experts) * num_values // _BLOCK, _BLOCK]),
            code=state.code,
            blocksize=state.blocksize,
            quant_type=state.quant_type,
            dtype=state.dtype,
        )
        stored = codes.as_subclass(Tensor).view(torch.uint8).view(self.shape[0], -1)[experts]
        values: Tensor = bnb.dequantize_4bit(stored.reshape(-1, 1), chosen)
        return values.view(len(experts), *self.shape[1:])


def find_packed(module: nn.Module, name: str) -> Packed | None:
    """The module keeps it, since sharding drops what is attached to a parameter."""
    packed: Packed | None = vars(module).get(PACKED, {}).get(name)
    return packed


def list_packable(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """The path, module and name of every matrix of experts that can be packed."""
    return [
        (f"{path}.{name}", module, name)
        for path, module in model.named_modules()
        if hasattr(module, "has_gate") and runs_here(module)
        for name in EXPERT_MATRICES
    ]


def list_packed(model: nn.Module) -> list[tuple[nn.Module, str, Packed]]:
    return [
        (module, name, packed)
        for module in model.modules()
        for name, packed in vars(module).get(PACKED, {}).items()
    ]


def hold_codes(module: nn.Module, name: str, codes: Any, shape: tuple[int, ...]) -> None:
    """Make quantized values, a `Params4bit`, the module's parameter of this name."""
    module._parameters[name] = codes
    vars(module).setdefault(PACKED, {})[name] = Packed(codes.quant_state, shape)


def to_rows(values: Tensor) -> Tensor:
    """Rows of one block of nf4 each: bitsandbytes is right about them on every device."""
    is_whole = values.numel() % _BLOCK == 0
    return values.reshape(-1, _BLOCK) if is_whole else values.reshape(1, -1)


def quantize(values: Tensor, options: dict[str, Any]) -> Any:
    """The values of one matrix of experts as `Params4bit`, on the device where they are."""
    from bitsandbytes import nn as quantized

    bnb: Any = quantized  # not annotated
    rows = bnb.Params4bit(to_rows(values), requires_grad=False, **options)
    return rows._quantize(values.device)


def pack_meta_experts(model: nn.Module) -> None:
    """Codes without values or scales in place of the experts of a model on the meta device."""
    for _, module, name in list_packable(model):
        shape = tuple(module.get_parameter(name).shape)
        codes = torch.empty(prod(shape) // 2, 1, dtype=torch.uint8, device="meta")
        module._parameters[name] = torch.nn.Parameter(codes, requires_grad=False)
        vars(module).setdefault(PACKED, {})[name] = Packed(None, shape)


@contextmanager
def as_values(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Meanwhile, matrices of experts have the shape and dtype of their values, which are not there.

    peft sizes and places its adapters by them.
    """
    codes = {}
    for module, name, packed in list_packed(model):
        codes[module, name] = parameter = module.get_parameter(name)
        value = torch.zeros(1, dtype=dtype, device=parameter.device).expand(packed.shape)
        module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
    try:
        yield
    finally:
        for (module, name), parameter in codes.items():
            module._parameters[name] = parameter


def unpack_all(model: nn.Module) -> int:
    """Put plain frozen values in place of codes, matrix by matrix; returns how many."""
    found = list_packed(model)
    for module, name, packed in found:
        values = packed.unpack(module.get_parameter(name))
        module._parameters[name] = torch.nn.Parameter(values, requires_grad=False)
        del vars(module)[PACKED][name]
    return len(found)


_CHUNK_ROWS = 1 << 20
"""transformers unpacks MXFP4 with eight bytes per code: so many blocks of 32 values at a time."""


@contextmanager
def packing_experts(options: dict[str, Any], *, from_mxfp4: bool) -> Iterator[None]:
    """Let transformers pack experts too, as it reads them: each matrix as soon as it is whole.

    `from_mxfp4`: the files hold them in MXFP4, as those of gpt-oss do.
    """
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    from transformers.quantizers import auto
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    base_operation: Any = ConversionOps
    base_quantize: Any = Bnb4bitQuantize
    base_quantizer: Any = Bnb4BitHfQuantizer
    make_converter: Any = WeightConverter

    class Unpack(base_operation):  # type: ignore[misc]
        """The values of MXFP4 codes. They come in a float dtype, which holds a byte exactly."""

        def convert(self, input_dict: Any, *, full_layer_name: str = "", **_: Any) -> Any:
            codes, scales = (
                next(_first(found) for name, found in input_dict.items() if name.endswith(ending))
                for ending in MXFP4_ENDINGS
            )
            unpack: Any = convert_moe_packed_tensors
            values = unpack(
                codes.to(torch.uint8),
                scales.to(torch.uint8),
                dtype=codes.dtype,
                rows_per_chunk=_CHUNK_ROWS,
            )
            return {full_layer_name: values}

    class Quantize(base_quantize):  # type: ignore[misc]
        def convert(self, input_dict: Any, *, model: Any = None, **context: Any) -> Any:
            packable = self.hf_quantizer.packable
            experts = {name: input_dict[name] for name in input_dict if name in packable}
            others = {name: input_dict[name] for name in input_dict if name not in packable}
            made = super().convert(others, model=model, **context) if others else {}
            for path, found in experts.items():
                values = _first(found)
                made[path] = quantize(values, options)
                module, name = packable[path]
                hold_codes(module, name, made[path], tuple(values.shape))
            return made

    class Quantizer(base_quantizer):  # type: ignore[misc]
        def _process_model_before_weight_loading(self, model: Any, *args: Any, **more: Any) -> None:
            super()._process_model_before_weight_loading(model, *args, **more)
            self.packable = {path: (module, name) for path, module, name in list_packable(model)}

        def param_needs_quantization(self, model: Any, param_name: str, **more: Any) -> bool:
            if param_name in self.packable:
                return True
            return bool(super().param_needs_quantization(model, param_name, **more))

        def get_quantize_ops(self) -> Any:
            return Quantize(self)

        def get_weight_conversions(self) -> Any:
            if not from_mxfp4:
                return super().get_weight_conversions()
            return [
                make_converter([name + ending for ending in MXFP4_ENDINGS], name, [Unpack()])
                for name in EXPERT_MATRICES
            ]

    with patch.dict(auto.AUTO_QUANTIZER_MAPPING, {"bitsandbytes_4bit": Quantizer}):
        yield


def _first(found: Any) -> Tensor:
    tensor: Tensor = found[0] if isinstance(found, list) else found
    return tensor
