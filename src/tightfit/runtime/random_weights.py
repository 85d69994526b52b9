"""A model with weights drawn at random, for measuring a shape: packed layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    from tightfit.runtime.load import LoadRequest


def draw_model(
    config: PretrainedConfig, request: LoadRequest, device: torch.device
) -> PreTrainedModel:
    """As loaded from disk would be, values apart. Never holds more than one unpacked matrix."""
    import torch

    from tightfit.runtime.load import build_model, packing_config

    with torch.device("meta"):
        model: Any = build_model(config, request)
    if request.weights.is_quantized:
        packing = packing_config(request)
        for name, linear in list_packable(model):
            model.set_submodule(name, _draw_packed(linear, request, packing, device))
        kind = "is_loaded_in_8bit" if request.weights is Dtype.INT8 else "is_loaded_in_4bit"
        setattr(model, kind, True)
        model.is_quantized = True
        model.quantization_method = packing.quant_method
        model.config.quantization_config = packing
    place_empty(model, device)
    with torch.no_grad():
        model.initialize_weights()
    model.tie_weights()
    drawn: PreTrainedModel = model
    return drawn


def place_empty(model: nn.Module, device: torch.device) -> None:
    """Put every tensor that is still on the meta device on `device`, ties kept, values not."""
    import torch
    from torch import nn

    placed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)  # set on meta; means nothing now
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in placed:
                values = torch.empty_like(parameter, device=device)
                placed[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            module._parameters[name] = placed[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies, masks) on `device`.

    For a model whose parameters come from elsewhere: they are left alone.
    """
    import torch

    owners = [module for module in model.modules() if any(b.is_meta for b in _own_buffers(module))]
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        parameter._is_hf_initialized = True  # transformers' mark of values to keep
    for module in owners:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        with torch.no_grad():
            _family_of(model, module)._init_weights(module)
    for parameter in parameters:
        del parameter._is_hf_initialized


def _own_buffers(module: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in module._buffers.values() if buffer is not None]


def _family_of(model: nn.Module, module: nn.Module) -> Any:
    """The innermost transformers model around `module`, which knows how to initialize it."""
    from transformers import PreTrainedModel

    around = [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and any(child is module for child in part.modules())
    ]
    return around[-1]


def list_packable(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """What transformers packs when it loads: every linear layer but the head and fp32 keepers."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    named: Any = model  # not annotated
    head = named.get_output_embeddings()
    kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    return [
        (name, module)
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D))
        and module is not head
        and not any(part in kept for part in name.split("."))
    ]


def _draw_packed(
    linear: Any, request: LoadRequest, packing: Any, device: torch.device
) -> nn.Module:
    import torch
    from bitsandbytes import nn as packed
    from torch import nn

    bnb: Any = packed  # not annotated

    is_linear = type(linear) is nn.Linear
    num_out, num_in = linear.weight.shape if is_linear else reversed(linear.weight.shape)
    values = torch.empty(num_out, num_in, dtype=request.plain_dtype, device=device)
    values.normal_(0.0, 0.02)
    shape = (num_in, num_out, linear.bias is not None)
    if request.weights is Dtype.INT8:
        new = bnb.Linear8bitLt(
            *shape,
            has_fp16_weights=False,
            threshold=packing.llm_int8_threshold,
            device=torch.device("meta"),
        )
        # bitsandbytes packs int8 only on the way from the CPU.
        new.weight = bnb.Int8Params(values.cpu(), requires_grad=False).to(device)
    else:
        new = bnb.Linear4bit(
            *shape,
            packing.bnb_4bit_compute_dtype,
            compress_statistics=packing.bnb_4bit_use_double_quant,
            quant_type="nf4",
            quant_storage=packing.bnb_4bit_quant_storage,
            device=torch.device("meta"),
        )
        new.weight = bnb.Params4bit(
            values,
            requires_grad=False,
            compress_statistics=packing.bnb_4bit_use_double_quant,
            quant_type="nf4",
            quant_storage=packing.bnb_4bit_quant_storage,
            module=new,
        ).to(device)
    new.weight._is_hf_initialized = True  # transformers' mark of values to keep
    if linear.bias is not None:
        new.bias = nn.Parameter(
            torch.zeros(num_out, dtype=request.plain_dtype, device=device), requires_grad=False
        )
    new.source_cls = type(linear)
    new.requires_grad_(False)
    module: nn.Module = new
    return module
