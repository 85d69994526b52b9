"""Load a base model as its plan says: once, in the wanted format, on the wanted device."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import EnvironmentFaultError, InvalidInputError, UsageError, UserError
from tightfit.core.strategy import Strategy
from tightfit.runtime.attention import choose_attention_name, fit_attention, register_attention
from tightfit.runtime.devices import is_out_of_memory, torch_dtype
from tightfit.runtime.packing_check import check_unpacking
from tightfit.runtime.quiet import silence_libraries

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

_PACKED = (Dtype.NF4, Dtype.INT8)


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
    _check_packing(folder, config, request)
    if request.random_weights:
        from tightfit.runtime.random_weights import draw_model

        model = draw_model(config, request, device)
    else:
        model = _read_model(folder, config, request, device)
    if request.weights is Dtype.NF4:
        check_unpacking(model, device)
    return _settle(model, request)


def load_meta(folder: Path, request: LoadRequest) -> PreTrainedModel:
    """The same model without values: every tensor on the meta device, nothing packed."""
    import torch

    silence_libraries()
    register_attention()
    config = read_config(folder, request)
    with torch.device("meta"):
        model = build_model(config, request)
    return _settle(model, request)


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
    config._attn_implementation = fit_attention(config, request.attention)
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


def packing_config(request: LoadRequest) -> Any:
    """transformers' BitsAndBytesConfig for packed weights; None where nothing is packed."""
    if request.weights not in _PACKED:
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
    packing = packing_config(request)
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
        return EnvironmentFaultError(
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


def _check_packing(folder: Path, config: PretrainedConfig, request: LoadRequest) -> None:
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
    if request.weights not in _PACKED:
        raise UsageError(
            f"{request.weights.value} weights cannot be loaded for training.",
            remedy="--set weights=nf4, or int8, bf16, fp16, fp32",
        )
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as fault:
        raise EnvironmentFaultError(
            f"{request.weights.value} weights need bitsandbytes, which cannot be imported: "
            f"{_first_line(fault)}.",
            remedy="pip install bitsandbytes",
        ) from fault


def _settle(model: PreTrainedModel, request: LoadRequest) -> PreTrainedModel:
    model.config.use_cache = False
    if request.weights is Dtype.NF4:
        _keep_codes(model)
    if request.weights.is_quantized and request.upcast_unquantized:
        _upcast(model)
    # bitsandbytes and dropout both look at the mode; transformers hands out eval mode.
    model.train()
    return model


def _keep_codes(model: Any) -> None:
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
