"""Load a base model as its plan says: from files or with random weights, quantized on the way, on
the wanted device.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, SetupError, UsageError, UserError
from tightfit.core.strategy import Strategy
from tightfit.runtime.attention import choose_attention_name, register_attention, resolve_attention
from tightfit.runtime.devices import is_out_of_memory, torch_dtype
from tightfit.runtime.libraries import silence_libraries

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel


# Does this bitsandbytes unpack what it packs? Tried before a model is trusted to it.

MAX_NF4_ERROR = 0.15
"""Of normal values, as a share of their norm. nf4 loses 0.092 with blocks of 64; bitsandbytes
0.50.2 loses 0.2 to 0.4 on a CPU where rows are no multiple of a block."""


def check_dequantization(model: Any, device: torch.device) -> None:
    """Pack and unpack a few rows of every width that the model has; raise where they differ."""
    for width in list_4bit_widths(model):
        error = measure_dequantization_error(width, device)
        if error > MAX_NF4_ERROR:
            raise SetupError(
                f"bitsandbytes does not unpack nf4 matrices of width {width} rightly on this "
                f"{device.type}: {error:.0%} of the values' size is lost, where 9% is nf4's own.",
                remedy="--set weights=bf16, or train on a GPU",
            )


def list_4bit_widths(model: Any) -> list[int]:
    """Widths of the matrices that are packed in 4 bits, each once."""
    widths = {
        module.in_features
        for module in model.modules()
        if type(getattr(module, "weight", None)).__name__ == "Params4bit"
    }
    return sorted(widths)


def measure_dequantization_error(width: int, device: torch.device) -> float:
    """Norm of what is lost by packing normal values, as a share of their norm."""
    return float(quantize_and_dequantize(width, device))


def quantize_and_dequantize(width: int, device: torch.device) -> torch.Tensor:
    """`measure_dequantization_error`'s answer while it is still on `device`."""
    import torch
    from bitsandbytes import functional

    bnb: Any = functional  # not annotated
    drawn = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    values = drawn.to(device)
    codes, state = bnb.quantize_4bit(values, quant_type="nf4")
    lost = bnb.dequantize_4bit(codes, state) - values
    share: torch.Tensor = lost.norm() / values.norm()
    return share


# A model with weights drawn at random, for measuring a shape: packed layer by layer.


def make_random_model(
    config: PretrainedConfig, request: LoadRequest, device: torch.device
) -> PreTrainedModel:
    """As loaded from disk would be, values apart. Never holds more than one unpacked matrix."""
    import torch

    with torch.device("meta"):
        model: Any = build_model(config, request)
    if request.weights.is_quantized:
        packing = bitsandbytes_config(request)
        for name, linear in list_quantizable(model):
            model.set_submodule(name, _make_random_quantized(linear, request, packing, device))
        kind = "is_loaded_in_8bit" if request.weights is Dtype.INT8 else "is_loaded_in_4bit"
        setattr(model, kind, True)
        model.is_quantized = True
        model.quantization_method = packing.quant_method
        model.config.quantization_config = packing
    materialize_empty(model, device)
    with torch.no_grad():
        model.initialize_weights()
    model.tie_weights()
    drawn: PreTrainedModel = model
    return drawn


def materialize_empty(model: nn.Module, device: torch.device) -> None:
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


def list_quantizable(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
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


def _make_random_quantized(
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


_QUANTIZED = (Dtype.NF4, Dtype.INT8)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What a base model is to be in memory."""

    weights: Dtype
    compute: Dtype
    """Arithmetic of packed weights, and the format of what stays unpacked beside them."""
    double_quant: bool = True
    attention: str = "sdpa"
    """A name that transformers knows, or one of `attention.py`'s."""
    upcast_unquantized: bool = False
    random_weights: bool = False
    quant_storage: Dtype | None = None
    """What nf4 codes are stored as, for sharding beside values of that dtype. None: bytes."""

    @classmethod
    def from_strategy(
        cls, strategy: Strategy, *, is_packed: bool, random_weights: bool = False
    ) -> LoadRequest:
        return cls(
            weights=strategy.weights,
            compute=strategy.compute,
            double_quant=strategy.double_quant,
            attention=choose_attention_name(strategy, is_packed=is_packed),
            upcast_unquantized=strategy.upcast_unquantized,
            random_weights=random_weights,
        )

    @property
    def plain_dtype(self) -> torch.dtype:
        """Of every value that is not packed."""
        return torch_dtype(self.compute if self.weights.is_quantized else self.weights)


def load_base(folder: Path, request: LoadRequest, device: torch.device) -> PreTrainedModel:
    """The base model on `device`, in training mode, without a key-value cache.

    Weights go from the file to the device tensor by tensor, and are packed on the
    way, so that no second copy is ever whole. Reads local files only.
    """
    silence_libraries()
    register_attention()
    config = read_config(folder, request)
    _check_quantization(folder, config, request)
    if request.random_weights:
        model = make_random_model(config, request, device)
    else:
        model = _read_model(folder, config, request, device)
    if request.weights is Dtype.NF4:
        check_dequantization(model, device)
    return _finish_load(model, request)


def load_meta(folder: Path, request: LoadRequest) -> PreTrainedModel:
    """The same model without values: every tensor on the meta device, nothing packed."""
    import torch

    silence_libraries()
    register_attention()
    config = read_config(folder, request)
    with torch.device("meta"):
        model = build_model(config, request)
    return _finish_load(model, request)


def read_config(folder: Path, request: LoadRequest) -> PretrainedConfig:
    """The model's config, with the attention that both the plan and the family allow."""
    from transformers import AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise InvalidInputError(
            f"transformers cannot read {folder / 'config.json'}: {_first_line(fault)}.",
            remedy="name a model of a family that transformers knows: tightfit models",
        ) from fault
    config.use_cache = False
    config._attn_implementation = resolve_attention(config, request.attention)
    return config


def build_model(config: PretrainedConfig, request: LoadRequest) -> PreTrainedModel:
    """The family's module tree on the current default device, unpacked."""
    auto = _auto_class(config)
    model: PreTrainedModel = auto.from_config(
        config,
        dtype=request.plain_dtype,
        attn_implementation=config._attn_implementation,
        trust_remote_code=False,
    )
    return model


def bitsandbytes_config(request: LoadRequest) -> Any:
    """transformers' BitsAndBytesConfig for packed weights; None where nothing is packed."""
    if request.weights not in _QUANTIZED:
        return None
    import torch
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig  # not annotated
    if request.weights is Dtype.INT8:
        return make(load_in_8bit=True)
    storage = request.quant_storage
    return make(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=request.double_quant,
        bnb_4bit_compute_dtype=torch_dtype(request.compute),
        bnb_4bit_quant_storage=torch.uint8 if storage is None else torch_dtype(storage),
    )


def _auto_class(config: PretrainedConfig) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def _read_model(
    folder: Path, config: PretrainedConfig, request: LoadRequest, device: torch.device
) -> PreTrainedModel:
    packing = bitsandbytes_config(request)
    extra = {} if packing is None else {"quantization_config": packing}
    try:
        model, info = _auto_class(config).from_pretrained(
            str(folder),
            config=config,
            dtype=request.plain_dtype,
            attn_implementation=config._attn_implementation,
            device_map={"": device},
            local_files_only=True,
            trust_remote_code=False,
            weights_only=True,
            output_loading_info=True,
            **extra,
        )
    except (OSError, ValueError, RuntimeError, ImportError, pickle.UnpicklingError) as fault:
        if is_out_of_memory(fault):
            raise
        raise _unreadable(folder, fault) from fault
    # transformers only mentions a missing tensor, and fills it with noise.
    missing = sorted(info["missing_keys"])
    if missing:
        raise InvalidInputError(
            f"{folder} lacks {len(missing)} tensors of the model, {missing[0]} first.",
            remedy="fetch the model again; these weights are not those of its config.json",
        )
    loaded: PreTrainedModel = model
    return loaded


def _unreadable(folder: Path, fault: Exception) -> UserError:
    if isinstance(fault, ImportError):
        return SetupError(
            f"Loading {folder} needs a package that is missing: {_first_line(fault)}.",
            remedy="pip install 'tightfit[train]'",
        )
    if isinstance(fault, pickle.UnpicklingError) or "weights_only" in str(fault).lower():
        return InvalidInputError(
            f"The weights of {folder} are a pickle that holds more than tensors, which could run "
            "any code.",
            remedy="fetch the model's safetensors files instead",
        )
    return InvalidInputError(
        f"transformers cannot load {folder}: {_first_line(fault)}.",
        remedy="fetch the model again, or name another: tightfit models",
    )


def _check_quantization(folder: Path, config: PretrainedConfig, request: LoadRequest) -> None:
    stored = getattr(config, "quantization_config", None)
    if stored is not None and not request.random_weights:
        method = stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method
        raise InvalidInputError(
            f"{folder} is already quantized ({getattr(method, 'value', method)}), and training "
            "packs the original weights itself.",
            remedy="name the model it was made from",
        )
    if not request.weights.is_quantized:
        return
    if request.weights not in _QUANTIZED:
        raise UsageError(
            f"{request.weights.value} weights cannot be loaded for training.",
            remedy="--set weights=nf4, or int8, bf16, fp16, fp32",
        )
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as fault:
        raise SetupError(
            f"{request.weights.value} weights need bitsandbytes, which cannot be imported: "
            f"{_first_line(fault)}.",
            remedy="pip install bitsandbytes",
        ) from fault


def _finish_load(model: PreTrainedModel, request: LoadRequest) -> PreTrainedModel:
    model.config.use_cache = False
    if request.weights is Dtype.NF4:
        _disable_cpu_repacking(model)
    if request.weights.is_quantized and request.upcast_unquantized:
        _upcast(model)
    # bitsandbytes and dropout both look at the mode; transformers hands out eval mode.
    model.train()
    return model


def _disable_cpu_repacking(model: Any) -> None:
    """Stop bitsandbytes from repacking nf4 codes for CPUs with bf16 units.

    It does so in eval mode, in place, into a layout that neither trains nor shards.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _upcast(model: PreTrainedModel) -> None:
    """Norms, embeddings and head in fp32, as peft's `prepare_model_for_kbit_training` has them."""
    import torch

    for parameter in model.parameters():
        is_packed = type(parameter).__name__ in ("Params4bit", "Int8Params")
        if not is_packed and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()


def _first_line(fault: BaseException) -> str:
    lines = str(fault).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(fault).__name__
