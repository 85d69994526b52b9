"""Load folders in compressed-tensors' layout, which llm-compressor and auto-round write for vLLM.

transformers and the compressed-tensors package unpack the codes; formats that round activations
too (fp8, mxfp4, nvfp4) round them here as well, so that scores are those of the served model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import SetupError, first_line
from tightfit.core.strategy import Strategy
from tightfit.runtime.attention import choose_inference_attention
from tightfit.runtime.libraries import torch_dtype
from tightfit.runtime.load import read_config, read_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def load_compressed(folder: Path, *, dtype: Dtype, device: torch.device) -> PreTrainedModel:
    """The folder's model on `device`, its matrices unpacked once, to `dtype`."""
    import torch

    try:
        import compressed_tensors  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"{folder} holds weights of compressed-tensors, which cannot be imported: "
            f"{first_line(error)}.",
            remedy="pip install compressed-tensors",
        ) from error
    strategy = Strategy(weights=dtype, compute=dtype)
    config: Any = read_config(folder, strategy, attention=choose_inference_attention(folder))
    config.quantization_config["dequantize"] = True
    model: Any = read_model(folder, config, strategy)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        module.quantization_enabled = scheme.input_activations is not None
        # Scales and shapes of the codes that are gone.
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            if name.startswith("weight_"):
                delattr(module, name)
    # Unpacked matrices have the dtype of their scales; scales of inputs stay as stored.
    plain = (torch.float32, torch.float16, torch.bfloat16)
    for name, parameter in model.named_parameters():
        if parameter.dtype in plain and not name.rpartition(".")[2].startswith("input_"):
            parameter.data = parameter.data.to(torch_dtype(dtype))
    return model.to(device).eval()  # type: ignore[no-any-return]


def rounds_activations(model: Any) -> bool:
    """Whether a layer's own forward rounds its inputs, and so must run."""
    return any(getattr(module, "quantization_enabled", False) for module in model.modules())
