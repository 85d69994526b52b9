"""Load an artefact for inference: eval mode, key-value cache on, on one device or several."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DoesNotFitError, InvalidInputError, SetupError
from tightfit.core.strategy import Strategy
from tightfit.core.units import render_bytes
from tightfit.runtime.adapters import load_adapter
from tightfit.runtime.attention import choose_inference_attention, read_model_config
from tightfit.runtime.libraries import is_out_of_memory, silence_libraries, torch_dtype
from tightfit.runtime.load import (
    check_dequantization,
    disable_cpu_repacking,
    load_base,
    read_config,
    read_model,
    require_bitsandbytes,
)
from tightfit.runtime.model_files import (
    Artefact,
    ArtefactKind,
    import_gguf,
    read_compressed_format,
)

if TYPE_CHECKING:
    import torch

_ROOM_FRACTION = 0.9
"""Of a GPU's free memory for weights; the rest is for the cache and activations."""
_BYTES_PER_PARAM = {
    Dtype.FP32: 4.0,
    Dtype.BF16: 2.0,
    Dtype.FP16: 2.0,
    Dtype.INT8: 1.1,
    Dtype.NF4: 0.65,
}
"""Rough, with embeddings and scales: only to decide whether one GPU is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready for inference."""

    model: Any
    """transformers' own class, adapters inside it."""
    format: str
    """Of the weights: `bf16`, `nf4`, `gptq-4`, ..."""
    device: str
    """`cpu`, `cuda:0`, `cuda:0-3`."""
    note: str = ""
    """A sentence on how the weights are used, if there was a choice."""


def load_for_inference(
    artefact: Artefact, *, weights: Dtype | None = None, device: str = "auto"
) -> LoadedModel:
    """The artefact's model. `weights` None: as the run had it, or what suits the device.

    On a CPU unquantized weights are fp32, which is fast and exact there.
    """
    import torch

    silence_libraries()
    home = choose_device(device)
    try:
        loaded = _load(artefact, weights, home, can_spread=device in ("auto", "cuda"))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise DoesNotFitError(
            f"{artefact.name} does not fit the memory of {home}.",
            remedy="--weights nf4 (or int8), another --device, or a quantized version: "
            "tightfit quantize",
        ) from error
    model = loaded.model
    model.config.use_cache = True
    model.generation_config.use_cache = True
    for parameter in model.parameters():
        if parameter.dtype in (torch.float32, torch.float16, torch.bfloat16):
            parameter.requires_grad_(False)
    model.eval()
    return loaded


def choose_device(name: str) -> torch.device:
    """The device of that name; for `auto` and `cuda` the GPU with the most free memory."""
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SetupError(
            f"`{name}` was requested, and torch sees no GPU.",
            remedy="--device cpu, or see what is wrong: tightfit doctor",
        )
    num_gpus = torch.cuda.device_count()
    if name in ("auto", "cuda"):
        free = [torch.cuda.mem_get_info(number)[0] for number in range(num_gpus)]
        return torch.device("cuda", max(range(num_gpus), key=lambda number: free[number]))
    number = name.removeprefix("cuda:")
    if not number.isdigit() or int(number) >= num_gpus:
        raise InvalidInputError(
            f"There is no device `{name}`; torch sees {num_gpus} GPUs.",
            remedy=f"--device auto, cpu, cuda or cuda:0 to cuda:{num_gpus - 1}",
        )
    return torch.device("cuda", int(number))


def choose_dtype(device: torch.device) -> Dtype:
    """The default dtype of unquantized weights on this device."""
    import torch

    if device.type == "cpu":
        return Dtype.FP32
    major, _ = torch.cuda.get_device_capability(device)
    return Dtype.BF16 if major >= 8 else Dtype.FP16


def choose_load(artefact: Artefact, weights: Dtype | None, device: torch.device) -> Strategy:
    """How to hold the weights in memory."""
    strategy = artefact.strategy
    best = choose_dtype(device)
    if weights is not None:
        chosen = weights
    elif strategy is None or (not strategy.weights.is_quantized and device.type == "cpu"):
        chosen = best
    else:
        chosen = strategy.weights
        if chosen is Dtype.BF16 and best is Dtype.FP16:
            chosen = best
    compute = chosen
    if chosen.is_quantized:
        compute = best if strategy is None or device.type != "cpu" else strategy.compute
    double_quant = True if strategy is None else strategy.double_quant
    return Strategy(weights=chosen, compute=compute, double_quant=double_quant)


def _load(
    artefact: Artefact, weights: Dtype | None, device: torch.device, *, can_spread: bool
) -> LoadedModel:
    import torch

    if artefact.kind is ArtefactKind.GPTQ:
        from tightfit.runtime.gptq import load_gptq, read_gptq_config

        dtype = choose_dtype(device) if weights is None or weights.is_quantized else weights
        model = load_gptq(artefact.path, dtype=torch_dtype(dtype), device=device)
        bits = read_gptq_config(artefact.path).bits
        return LoadedModel(
            model=model,
            format=f"gptq-{bits}",
            device=str(device),
            note="GPTQ codes stay packed and are unpacked at every use, not by gptqmodel's kernels."
            if device.type == "cuda"
            else f"GPTQ codes were unpacked once, to {dtype.value}.",
        )
    if artefact.kind is ArtefactKind.COMPRESSED:
        from tightfit.runtime.compressed_tensors import load_compressed

        dtype = choose_dtype(device) if weights is None or weights.is_quantized else weights
        compressed = load_compressed(artefact.path, dtype=dtype, device=device)
        return LoadedModel(
            model=compressed,
            format=read_compressed_format(artefact.path),
            device=str(device),
            note=f"Codes were unpacked once, to {dtype.value}; activations are rounded where the "
            "format rounds them.",
        )
    if artefact.kind is ArtefactKind.BITSANDBYTES:
        return _load_bitsandbytes(artefact.path, device)
    folder = artefact.base or artefact.path
    if artefact.kind is ArtefactKind.GGUF:
        folder = import_gguf(artefact.path)
    attention = choose_inference_attention(folder)
    strategy = choose_load(artefact, weights, device)
    spread = (
        can_spread and device.type == "cuda" and _needs_several(folder, strategy.weights, device)
    )
    if spread:  # layers over all GPUs, by accelerate
        config = read_config(folder, strategy, attention=attention)
        plain: Any = read_model(folder, config, strategy, device_map="auto")
    else:
        plain = load_base(folder, strategy, device, attention=attention)
    if artefact.kind is ArtefactKind.ADAPTER:
        adapted: Any = load_adapter(plain, artefact.path)
        if plain.dtype == torch.float32:
            # A 16-bit adapter would reduce fp32 activations to its own precision.
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.float()
        plain = adapted.get_base_model()
    used = str(device)
    if spread:
        numbers = sorted({p.device.index for p in plain.parameters() if p.device.type == "cuda"})
        used = f"cuda:{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else used
    return LoadedModel(model=plain, format=strategy.weights.value, device=used)


def _load_bitsandbytes(folder: Path, device: torch.device) -> LoadedModel:
    """A folder that was saved with bitsandbytes' weights."""
    require_bitsandbytes(f"{folder} holds weights of bitsandbytes")
    compute = choose_dtype(device)
    strategy = Strategy(weights=compute, compute=compute)
    config = read_config(folder, strategy, attention=choose_inference_attention(folder))
    stored: Any = config.quantization_config
    settings = stored if isinstance(stored, dict) else stored.to_dict()
    model = read_model(folder, config, strategy, device_map={"": device})
    name = "int8"
    if settings.get("load_in_4bit"):
        name = str(settings.get("bnb_4bit_quant_type", "nf4"))
        disable_cpu_repacking(model)
        check_dequantization(model, device)
    return LoadedModel(model=model, format=name, device=str(device))


def _needs_several(folder: Path, weights: Dtype, device: torch.device) -> bool:
    """Whether the weights are too large for one GPU while there are others."""
    import torch

    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        return False
    config: Any = read_model_config(folder)
    stored = 4 if config.dtype in (None, torch.float32) else 2
    paths = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    num_params = sum(path.stat().st_size for path in paths) / stored
    needed = num_params * _BYTES_PER_PARAM[weights]
    free = [torch.cuda.mem_get_info(number)[0] for number in range(num_gpus)]
    if needed <= free[device.index or 0] * _ROOM_FRACTION:
        return False
    if needed > sum(free) * _ROOM_FRACTION:
        raise DoesNotFitError(
            f"The weights take about {render_bytes(int(needed))}; {num_gpus} GPUs have "
            f"{render_bytes(sum(free))} free.",
            remedy="--weights nf4, or a quantized version: tightfit quantize",
        )
    return True
