"""Load a base model as a Strategy says, or an artefact for inference: from files or with random
weights, quantized on the way, on the wanted device.
"""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import MXFP4, Dtype
from tightfit.core.errors import (
    InvalidInputError,
    SetupError,
    UsageError,
    UserError,
    first_line,
)
from tightfit.core.settings import Sharding
from tightfit.core.strategy import Strategy
from tightfit.estimation.weights import packs_experts
from tightfit.models.config import read_quant_method
from tightfit.models.families.registry import find_family
from tightfit.runtime.attention import (
    choose_attention_name,
    read_model_config,
    register_attention,
    resolve_attention,
)
from tightfit.runtime.libraries import is_out_of_memory, silence_libraries, torch_dtype
from tightfit.runtime.vocabulary import add_new_tokens

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


_QUANTIZED = (Dtype.NF4, Dtype.INT8)


def plain_dtype(strategy: Strategy) -> torch.dtype:
    """The dtype of every value that is not quantized."""
    return torch_dtype(strategy.compute if strategy.weights.is_quantized else strategy.weights)


def load_base(
    folder: Path,
    strategy: Strategy,
    device: torch.device,
    *,
    random_weights: bool = False,
    attention: str | None = None,
) -> PreTrainedModel:
    """The base model on `device`, in training mode, without a key-value cache.

    Weights go from the file to the device tensor by tensor and are quantized on the way, so there
    is never a second whole copy. Reads local files only. `attention`: as in `read_config`.
    """
    silence_libraries()
    register_attention()
    config = read_config(folder, strategy, attention=attention)
    stored = read_quant_method(config.to_dict())
    if stored not in (None, MXFP4) and not random_weights:
        raise InvalidInputError(
            f"{folder} is already quantized ({stored}), and training quantizes the original "
            "weights itself.",
            remedy="name the model it was made from",
        )
    weights = strategy.weights
    if weights.is_quantized and weights not in _QUANTIZED:
        raise UsageError(
            f"{weights.value} weights cannot be loaded for training.",
            remedy="--set weights=nf4, or int8, bf16, fp16, fp32",
        )
    if weights.is_quantized:
        require_bitsandbytes(f"{weights.value} weights need bitsandbytes")
    if random_weights:
        model = make_random_model(config, strategy, device)
    else:
        model = read_model(folder, config, strategy, device_map={"": device})
    if weights is Dtype.NF4:
        check_dequantization(model, device)
    add_new_tokens(model, folder, strategy.new_tokens)
    return finish_load(model, strategy)


def load_meta(
    folder: Path, strategy: Strategy, *, has_varlen: bool | None = None
) -> PreTrainedModel:
    """The same model without values: every tensor on the meta device, none quantized.

    `has_varlen`: as in `choose_attention_name`.
    """
    import torch

    silence_libraries()
    register_attention()
    config = read_config(folder, strategy, has_varlen=has_varlen)
    with torch.device("meta"):
        model = build_model(config, strategy)
    add_new_tokens(model, folder, strategy.new_tokens)
    return finish_load(model, strategy)


def read_config(
    folder: Path,
    strategy: Strategy,
    *,
    attention: str | None = None,
    has_varlen: bool | None = None,
) -> PretrainedConfig:
    """The model's config, with the attention that both the plan and the family allow.

    `attention`: transformers' name of another implementation than the strategy's.
    `has_varlen`: as in `choose_attention_name`.
    """
    from tightfit.runtime.kernels.experts import use_grouped_experts
    from tightfit.runtime.own_attention import accept_kernels

    config = read_model_config(folder)
    config.use_cache = False
    use_grouped_experts(config)
    # One that is named is taken as it is: kernels of ours in its place have no key-value cache.
    config._attn_implementation = attention or resolve_attention(
        config, choose_attention_name(strategy, has_varlen=has_varlen)
    )
    if find_family(config.model_type).own_attention:
        accept_kernels(config)
    return config


def _unpack_mxfp4() -> Any:
    import transformers

    library: Any = transformers  # not annotated
    return library.Mxfp4Config(dequantize=True)


def build_model(config: PretrainedConfig, strategy: Strategy) -> PreTrainedModel:
    """The family's model on the current default device, not quantized."""
    auto = auto_class(config)
    model: PreTrainedModel = auto.from_config(
        config,
        dtype=plain_dtype(strategy),
        attn_implementation=config._attn_implementation,
        trust_remote_code=False,
    )
    return model


def bitsandbytes_config(strategy: Strategy) -> Any:
    """transformers' BitsAndBytesConfig; None if the weights are not quantized."""
    if strategy.weights not in _QUANTIZED:
        return None
    import torch
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig  # not annotated
    if strategy.weights is Dtype.INT8:
        return make(load_in_8bit=True)
    compute = torch_dtype(strategy.compute)
    return make(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=strategy.double_quant,
        bnb_4bit_compute_dtype=compute,
        # ZeRO-3 gathers all parameters in one dtype, codes included.
        bnb_4bit_quant_storage=compute if strategy.sharding is Sharding.ZERO3 else torch.uint8,
    )


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' auto class for a causal or an encoder-decoder model."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def read_model(
    folder: Path, config: PretrainedConfig, strategy: Strategy, **options: Any
) -> PreTrainedModel:
    """`from_pretrained` with local files and without remote code; `options` are added to it.

    Raises a UserError for unreadable files and missing tensors; out of memory is passed on.
    """
    quantization = bitsandbytes_config(strategy)
    from_mxfp4 = read_quant_method(config.to_dict()) == MXFP4
    if from_mxfp4 and quantization is None:
        quantization = _unpack_mxfp4()
    elif from_mxfp4:
        del config.quantization_config  # it would be taken instead of ours
    if quantization is not None:
        options["quantization_config"] = quantization
    packing: Any = nullcontext()
    if packs_experts(strategy):
        from tightfit.runtime.packed_experts import packing_experts

        packing = packing_experts(nf4_options(strategy), from_mxfp4=from_mxfp4)
    try:
        with packing:
            model, info = auto_class(config).from_pretrained(
                str(folder),
                config=config,
                dtype=plain_dtype(strategy),
                attn_implementation=config._attn_implementation,
                local_files_only=True,
                trust_remote_code=False,
                weights_only=True,
                output_loading_info=True,
                **options,
            )
    except (
        *(OSError, ValueError, RuntimeError, KeyError, ImportError, TypeError, AttributeError),
        pickle.UnpicklingError,
    ) as error:
        if is_out_of_memory(error):
            raise
        raise _unreadable(folder, error) from error
    check_missing(folder, sorted(info["missing_keys"]))
    if from_mxfp4:
        model._weight_conversions = []  # or saving would give plain values the names of codes
    loaded: PreTrainedModel = model
    return loaded


def check_missing(folder: Path, missing: list[str]) -> None:
    """Raise for missing tensors, which transformers only logs and initializes at random."""
    if missing:
        raise InvalidInputError(
            f"{folder} lacks {len(missing)} tensors of the model, {missing[0]} first.",
            remedy="fetch the model again; these weights are not those of its config.json",
        )


def _unreadable(folder: Path, error: Exception) -> UserError:
    if isinstance(error, ImportError):
        return SetupError(
            f"Loading {folder} needs a package that is missing: {first_line(error)}.",
            remedy="pip install 'tightfit[train]'",
        )
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error).lower():
        return InvalidInputError(
            f"The weights of {folder} are a pickle that holds more than tensors, which could run "
            "any code.",
            remedy="fetch the model's safetensors files instead",
        )
    return InvalidInputError(
        f"transformers cannot load {folder}: {first_line(error)}.",
        remedy="fetch the model again, or name another: tightfit models",
    )


def require_bitsandbytes(problem: str) -> None:
    """Raise if it cannot be imported; `problem` says what needs it."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"{problem}, which cannot be imported: {first_line(error)}.",
            remedy="pip install bitsandbytes",
        ) from error


def finish_load(model: PreTrainedModel, strategy: Strategy) -> PreTrainedModel:
    """The loaded model in training mode, with attention of ours, and frozen what no text trains."""
    import torch

    from tightfit.runtime.layers import list_other_parts
    from tightfit.runtime.own_attention import use_own_attention

    model.config.use_cache = False
    family = find_family(model.config.model_type)
    if family.own_attention:
        use_own_attention(model)
    for name in list_other_parts(model):  # no text passes them, so no gradient reaches them
        model.get_submodule(name).requires_grad_(False)
    if family.frozen:  # as the class says; transformers trains all that it loads
        for name, parameter in model.named_parameters():
            if name.endswith(family.frozen):
                parameter.requires_grad_(False)
    if strategy.weights is Dtype.NF4:
        disable_cpu_repacking(model)
    if strategy.weights.is_quantized and strategy.upcast_unquantized:
        # Norms, embeddings and head in fp32, as in peft's `prepare_model_for_kbit_training`.
        for parameter in model.parameters():
            is_packed = type(parameter).__name__ in ("Params4bit", "Int8Params")
            if not is_packed and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
    # bitsandbytes and dropout depend on the mode; transformers returns eval mode.
    model.train()
    return model


def disable_cpu_repacking(model: Any) -> None:
    """Stop bitsandbytes from repacking nf4 codes for CPUs with AVX512-bf16.

    It does so in eval mode, in place, into a layout that can be neither trained nor sharded.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


MAX_NF4_ERROR = 0.15
"""Relative error of normal values. nf4 loses 0.092 with blocks of 64; bitsandbytes 0.50.2 loses
0.2 to 0.4 on a CPU where the row length is no multiple of the block size."""


def check_dequantization(model: Any, device: torch.device) -> None:
    """Raise if this bitsandbytes does not return what it quantized, for any width of the model."""
    for width in list_4bit_widths(model):
        error = float(quantize_and_dequantize(width, device))
        if error > MAX_NF4_ERROR:
            raise SetupError(
                f"bitsandbytes dequantizes nf4 matrices of width {width} wrongly on this "
                f"{device.type}: the relative error is {error:.0%}, where nf4's own is 9%.",
                remedy="--set weights=bf16, or train on a GPU",
            )


def list_4bit_widths(model: Any) -> list[int]:
    """The distinct input widths of the 4-bit matrices."""
    widths = {
        module.in_features
        for module in model.modules()
        if type(getattr(module, "weight", None)).__name__ == "Params4bit"
    }
    return sorted(widths)


def quantize_and_dequantize(width: int, device: torch.device) -> torch.Tensor:
    """The relative error of normal values after a round trip, as a tensor on `device`."""
    import torch
    from bitsandbytes import functional

    bnb: Any = functional  # not annotated
    drawn = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    values = drawn.to(device)
    codes, state = bnb.quantize_4bit(values, quant_type="nf4")
    lost = bnb.dequantize_4bit(codes, state) - values
    share: torch.Tensor = lost.norm() / values.norm()
    return share


def make_random_model(
    config: PretrainedConfig, strategy: Strategy, device: torch.device
) -> PreTrainedModel:
    """The model with random weights, otherwise as loaded from disk: for measuring.

    Quantized layer by layer, so no more than one matrix is held unquantized.
    """
    import torch

    with torch.device("meta"):
        model: Any = build_model(config, strategy)
    if strategy.weights.is_quantized:
        for name, linear in list_quantizable(model):
            model.set_submodule(name, _make_random_quantized(linear, strategy, device))
        mark_quantized(model, strategy)
    if packs_experts(strategy):
        _pack_random_experts(model, strategy, device)
    materialize_empty(model, device)
    with torch.no_grad():
        model.initialize_weights()
    model.tie_weights()
    random_model: PreTrainedModel = model
    return random_model


def _pack_random_experts(model: Any, strategy: Strategy, device: torch.device) -> None:
    import torch

    from tightfit.runtime.packed_experts import hold_codes, list_packable, quantize

    for _, module, name in list_packable(model):
        shape = tuple(module.get_parameter(name).shape)
        values = torch.empty(shape, dtype=plain_dtype(strategy), device=device).normal_(0.0, 0.02)
        codes = quantize(values, nf4_options(strategy))
        codes._is_hf_initialized = True  # transformers' mark of values to keep
        hold_codes(module, name, codes, shape)


def materialize_empty(model: nn.Module, device: torch.device) -> None:
    """Allocate every tensor of the meta device on `device`, without values; tied ones stay tied."""
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
    """Compute buffers that no checkpoint holds (rotary frequencies, masks) on `device`.

    Parameters are left alone.
    """
    import torch
    from transformers import PreTrainedModel

    owners = [
        module
        for module in model.modules()
        if any(b is not None and b.is_meta for b in module._buffers.values())
    ]
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        parameter._is_hf_initialized = True  # transformers' mark of values to keep
    for module in owners:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        # The innermost transformers model around the module knows how to initialize it.
        around: list[Any] = [
            part
            for part in model.modules()
            if isinstance(part, PreTrainedModel) and any(m is module for m in part.modules())
        ]
        with torch.no_grad():
            around[-1]._init_weights(module)
    for parameter in parameters:
        del parameter._is_hf_initialized


def list_quantizable(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """The layers transformers quantizes: every linear one but the head and those kept in fp32."""
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


def make_quantized_linear(linear: Any, strategy: Strategy) -> Any:
    """bitsandbytes' layer of the same shape on the meta device; its weight is to be set."""
    import torch
    from bitsandbytes import nn as quantized
    from torch import nn

    bnb: Any = quantized  # not annotated
    config = bitsandbytes_config(strategy)
    is_linear = type(linear) is nn.Linear
    num_out, num_in = linear.weight.shape if is_linear else reversed(linear.weight.shape)
    shape = (num_in, num_out, linear.bias is not None)
    meta = torch.device("meta")
    if strategy.weights is Dtype.INT8:
        layer = bnb.Linear8bitLt(
            *shape, has_fp16_weights=False, threshold=config.llm_int8_threshold, device=meta
        )
    else:
        layer = bnb.Linear4bit(
            *shape, config.bnb_4bit_compute_dtype, **nf4_options(strategy), device=meta
        )
        disable_cpu_repacking(layer)
    layer.bias = linear.bias
    layer.source_cls = type(linear)
    layer.requires_grad_(False)
    return layer


def quantized_parameter(values: torch.Tensor, layer: Any, strategy: Strategy) -> Any:
    """bitsandbytes' parameter of these values, quantized once it is moved to its device."""
    from bitsandbytes import nn as quantized

    bnb: Any = quantized  # not annotated
    if strategy.weights is Dtype.INT8:
        return bnb.Int8Params(values, requires_grad=False)
    return bnb.Params4bit(values, requires_grad=False, **nf4_options(strategy), module=layer)


def mark_quantized(model: Any, strategy: Strategy) -> None:
    """Set what transformers sets on a model that it has quantized; peft reads it."""
    config = bitsandbytes_config(strategy)
    is_int8 = strategy.weights is Dtype.INT8
    setattr(model, "is_loaded_in_8bit" if is_int8 else "is_loaded_in_4bit", True)
    model.is_quantized = True
    model.quantization_method = config.quant_method
    model.config.quantization_config = config
    model.config._is_quantized = True  # Mamba layers then call the module whose weight they read


def nf4_options(strategy: Strategy) -> dict[str, Any]:
    """The arguments of bitsandbytes' 4-bit layers and parameters."""
    config = bitsandbytes_config(strategy)
    return {
        "compress_statistics": config.bnb_4bit_use_double_quant,
        "quant_type": config.bnb_4bit_quant_type,
        "quant_storage": config.bnb_4bit_quant_storage,
    }


def _make_random_quantized(linear: Any, strategy: Strategy, device: torch.device) -> nn.Module:
    import torch
    from torch import nn

    layer = make_quantized_linear(linear, strategy)
    shape = (layer.out_features, layer.in_features)
    values = torch.empty(shape, dtype=plain_dtype(strategy), device=device).normal_(0.0, 0.02)
    if strategy.weights is Dtype.INT8:
        values = values.cpu()  # bitsandbytes quantizes to int8 only on the way from the CPU
    layer.weight = quantized_parameter(values, layer, strategy).to(device)
    layer.weight._is_hf_initialized = True  # transformers' mark of values to keep
    if linear.bias is not None:
        zeros = torch.zeros(layer.out_features, dtype=plain_dtype(strategy), device=device)
        layer.bias = nn.Parameter(zeros, requires_grad=False)
    module: nn.Module = layer
    return module
