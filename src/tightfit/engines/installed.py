"""What this machine has for running models: packages, GPUs, and whether the two fit together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tightfit.runtime.artefacts import Artefact, ArtefactKind

if TYPE_CHECKING:
    from tightfit.engines.open import EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Packages and GPUs, as far as a choice of engine needs to know them."""

    has_transformers: bool
    """transformers and torch."""
    has_llama: bool
    has_vllm: bool
    gpu_names: tuple[str, ...] = ()
    """GPUs that the driver shows, usable or not."""
    num_torch_gpus: int = 0
    """GPUs that torch can use; 0 also where torch was not asked."""
    num_llama_gpus: int = 0
    """GPUs that this build of llama.cpp can use."""


def probe_installed(request: EngineRequest) -> Installed:
    """Look, and load torch only where the answer depends on it."""
    from tightfit.hardware.nvml import read_driver
    from tightfit.runtime.ggml import has_llama

    is_llama = request.engine == "llama.cpp" or (
        request.engine == "auto" and request.artefact.kind is ArtefactKind.GGUF
    )
    has_torch = find_spec("torch") is not None and find_spec("transformers") is not None
    return Installed(
        has_transformers=has_torch,
        has_llama=has_llama(),
        has_vllm=find_spec("vllm") is not None,
        gpu_names=tuple(gpu.name for gpu in read_driver().gpus),
        num_torch_gpus=_count_torch_gpus() if has_torch and not is_llama else 0,
        num_llama_gpus=_count_llama_gpus() if has_llama() and is_llama else 0,
    )


def read_gptq_bits(artefact: Artefact) -> int | None:
    """Bits of a GPTQ folder's weights; None for other kinds and where it does not say."""
    if artefact.kind is not ArtefactKind.GPTQ:
        return None
    try:
        stated = json.loads((artefact.path / "config.json").read_bytes())["quantization_config"]
        return int(stated["bits"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _count_torch_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _count_llama_gpus() -> int:
    from tightfit.engines.llama.devices import list_gpus

    return len(list_gpus())
