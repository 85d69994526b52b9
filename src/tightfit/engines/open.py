"""Choose an engine and device for an artefact, say why, and load it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import SetupError, UsageError
from tightfit.core.suggest import did_you_mean
from tightfit.engines.protocol import Engine
from tightfit.runtime.artefacts import Artefact, ArtefactKind
from tightfit.runtime.llama_cpp import REMEDY as LLAMA_REMEDY
from tightfit.runtime.staged import use_staged

if TYPE_CHECKING:
    from tightfit.data.prompter import Prompter


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What to load, and how. None: what suits the artefact and the machine."""

    artefact: Artefact
    engine: str = "auto"
    """`auto`, `transformers`, `llama.cpp` or `vllm`."""
    weights: Dtype | None = None
    """Dtype of the weights in memory: fp32, bf16, fp16, nf4 or int8. Not for llama.cpp."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` (every GPU that can be seen) or `cuda:N`."""
    context: int | None = None
    """Most tokens of prompt and answer together. None: the model's own, at most 4096."""
    slots: int | None = None
    """Requests that are computed at once."""
    threads: int | None = None
    """Of llama.cpp."""
    hosts: tuple[str, ...] = ()
    """`host:port` of llama.cpp's RPC servers."""
    template: str | None = None
    """Name or file of another chat template. None: the artefact's."""
    needs_logits: bool = False
    """Choose only an engine that computes logits of whole texts, as `verify` needs."""


def open_engine(request: EngineRequest) -> Engine:
    """Load the artefact with the engine that suits it. `info.why` says which and why.

    Raises `UserError` for what the user can fix: a missing package, too large a context,
    a damaged file, settings that contradict each other.
    """

    artefact = request.artefact
    choice = choose_engine(
        artefact, request, probe_installed(request), gptq_bits=read_gptq_bits(artefact)
    )
    chosen = replace(request, engine=choice.engine, device=choice.device)
    why = choice.why
    is_imported = choice.engine == "transformers" and artefact.kind is ArtefactKind.GGUF
    if (
        not is_imported and not request.needs_logits
    ):  # `verify` must read the files that it was given
        staged, said = use_staged(artefact)
        chosen, why = replace(chosen, artefact=staged), " ".join(filter(None, (why, said)))
    if choice.engine == "llama.cpp":
        from tightfit.engines.llama_cpp import open_llama

        return open_llama(chosen, why=why)
    if choice.engine == "vllm":
        from tightfit.engines.vllm import open_vllm

        return open_vllm(chosen, why=why)
    from tightfit.engines.transformers.engine import open_transformers

    if is_imported:
        chosen = replace(chosen, artefact=_import_gguf_artefact(artefact))
    return open_transformers(chosen, why=why)


def open_prompter(request: EngineRequest) -> Prompter:
    """The artefact's tokenizer and template, or the template that was asked for."""
    from tightfit.data.prompter import Prompter
    from tightfit.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(request.artefact.tokenizer)
    return Prompter(tokenizer, request.template or request.artefact.template)


def _import_gguf_artefact(artefact: Artefact) -> Artefact:
    """A GGUF file as the plain model that transformers reads."""
    from tightfit.runtime.model_files import import_gguf

    return replace(artefact, kind=ArtefactKind.MODEL, path=import_gguf(artefact.path))


# Installed packages and GPUs.


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledEngines:
    """Packages and GPUs, as far as the choice of an engine depends on them."""

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


def probe_installed(request: EngineRequest) -> InstalledEngines:
    """Probe this machine; import torch only where the choice depends on it."""
    from tightfit.hardware.nvml import read_driver
    from tightfit.runtime.llama_cpp import has_llama

    is_llama = request.engine == "llama.cpp" or (
        request.engine == "auto" and request.artefact.kind is ArtefactKind.GGUF
    )
    has_torch = find_spec("torch") is not None and find_spec("transformers") is not None
    return InstalledEngines(
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
    from tightfit.engines.llama_devices import list_gpus

    return len(list_gpus())


# The choice of engine and device.

ENGINES = ("auto", "transformers", "llama.cpp", "vllm")
VLLM_GPTQ_BITS = (4, 8)
"""Widths that vLLM's GPTQ kernels take."""
VLLM_REMEDY = (
    "install vLLM in an environment of its own, beside tightfit there (it wants other releases "
    "of transformers): python -m venv vllm && vllm/bin/pip install vllm, then tightfit as here; "
    "or leave --engine out"
)
_TORCH_REMEDY = (
    "install torch's CUDA build (pytorch.org shows the command), or choose the CPU: --device cpu"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine, where it computes, and why."""

    engine: str
    device: str
    """`cpu`, `cuda` (every GPU) or `cuda:N`."""
    why: str


def choose_engine(
    artefact: Artefact,
    request: EngineRequest,
    installed: InstalledEngines,
    *,
    gptq_bits: int | None = None,
) -> EngineChoice:
    """A pure function. Raises `UserError` where no engine can run the artefact."""
    if request.engine not in ENGINES:
        near = did_you_mean(request.engine, ENGINES)
        raise UsageError(
            f"`--engine {request.engine[:40]}` is not known.{near}",
            remedy="--engine " + "|".join(ENGINES),
        )
    engine, reason = _choose_engine_name(artefact, request, installed, gptq_bits)
    _check_settings(engine, request)
    _check_packages(engine, artefact, installed)
    device, place = _choose_device(engine, request, installed)
    return EngineChoice(engine=engine, device=device, why=f"{engine}, {reason}; {place}.")


def _choose_engine_name(
    artefact: Artefact, request: EngineRequest, installed: InstalledEngines, gptq_bits: int | None
) -> tuple[str, str]:
    """The engine by name, and the reason as part of a sentence."""
    if request.engine == "llama.cpp" and artefact.kind is not ArtefactKind.GGUF:
        raise UsageError(
            f"llama.cpp runs GGUF files; {artefact.name} is {_KIND_NAMES[artefact.kind]}.",
            remedy=f"tightfit quantize {artefact.name} --to q8_0    (or leave --engine out)",
        )
    if request.engine == "vllm":
        _check_vllm(artefact, request, gptq_bits)
    if request.engine == "transformers" and artefact.kind is ArtefactKind.GGUF:
        return "transformers", "as asked, with the GGUF file's weights dequantized first"
    if request.engine != "auto":
        return request.engine, "as asked"
    if artefact.kind is ArtefactKind.GGUF:
        return "llama.cpp", "because it runs GGUF files as they are"
    if _suits_vllm(artefact, request, installed, gptq_bits):
        return "vllm", "because it is installed and fastest for many requests on a GPU"
    if artefact.kind is ArtefactKind.ADAPTER:
        return "transformers", "because it runs an adapter on its base model unmerged"
    return "transformers", f"because it reads {_KIND_NAMES[artefact.kind]} as it is"


_KIND_NAMES = {
    ArtefactKind.MODEL: "a Hugging Face folder",
    ArtefactKind.ADAPTER: "an adapter",
    ArtefactKind.GPTQ: "a GPTQ folder",
    ArtefactKind.BITSANDBYTES: "a bitsandbytes folder",
    ArtefactKind.GGUF: "a GGUF file",
}


def _suits_vllm(
    artefact: Artefact, request: EngineRequest, installed: InstalledEngines, gptq_bits: int | None
) -> bool:
    """Whether vLLM is chosen by `auto`: only where no capability is lost."""
    is_right_kind = artefact.kind is ArtefactKind.MODEL or (
        artefact.kind is ArtefactKind.GPTQ and gptq_bits in VLLM_GPTQ_BITS
    )
    is_quantized = request.weights is not None and request.weights.is_quantized
    return (
        installed.has_vllm
        and installed.num_torch_gpus > 0
        and request.device in ("auto", "cuda")
        and is_right_kind
        and not is_quantized
        and not request.needs_logits
    )


def _check_vllm(artefact: Artefact, request: EngineRequest, gptq_bits: int | None) -> None:
    remedy = "leave --engine out"
    if request.needs_logits:
        raise UsageError("vLLM does not compute logits of whole texts.", remedy=remedy)
    if artefact.kind is ArtefactKind.GPTQ and gptq_bits not in VLLM_GPTQ_BITS:
        width = f"{gptq_bits} bits" if gptq_bits else "an unnamed number of bits"
        raise UsageError(
            f"vLLM takes GPTQ weights of 4 or 8 bits; {artefact.name} has {width}.", remedy=remedy
        )
    if artefact.kind is ArtefactKind.GGUF:
        raise UsageError(
            f"vLLM is not used for GGUF files here; {artefact.name} is one.", remedy=remedy
        )


def _check_settings(engine: str, request: EngineRequest) -> None:
    """Settings that the engine would silently ignore are refused."""
    if engine != "llama.cpp":
        for option, value in (("--hosts", request.hosts), ("--threads", request.threads)):
            if value:
                raise UsageError(
                    f"`{option}` belongs to llama.cpp; {request.artefact.name} runs on {engine}.",
                    remedy=f"leave {option} out, or name a GGUF file",
                )
    if engine == "llama.cpp" and request.weights is not None:
        raise UsageError(
            "llama.cpp runs a GGUF file's weights as stored; "
            f"`--weights {request.weights.value}` is not possible.",
            remedy="leave --weights out, or --engine transformers, which dequantizes the file",
        )
    if engine == "vllm" and request.weights is not None and request.weights.is_quantized:
        raise UsageError(
            f"`--weights {request.weights.value}` is for the transformers engine.",
            remedy="--engine transformers, or --weights bf16|fp16",
        )


def _check_packages(engine: str, artefact: Artefact, installed: InstalledEngines) -> None:
    if engine == "llama.cpp" and not installed.has_llama:
        raise SetupError(
            f"{artefact.name} is a GGUF file, which needs llama.cpp, and that is not installed.",
            remedy=LLAMA_REMEDY,
        )
    if engine == "transformers" and not installed.has_transformers:
        raise SetupError(
            f"{artefact.name} needs torch and transformers, which are not installed.",
            remedy="pip install 'tightfit[train]'",
        )
    if engine == "vllm" and not installed.has_vllm:
        raise SetupError("vLLM is not installed here.", remedy=VLLM_REMEDY)


def _choose_device(
    engine: str, request: EngineRequest, installed: InstalledEngines
) -> tuple[str, str]:
    """The device, and its description."""
    if request.device == "cpu":
        if engine == "vllm":
            raise UsageError("vLLM is used on GPUs only here.", remedy="--engine transformers")
        return "cpu", "on the CPU, as asked"
    num_gpus = installed.num_llama_gpus if engine == "llama.cpp" else installed.num_torch_gpus
    if engine == "llama.cpp" and request.hosts:
        return ("cuda" if num_gpus else "cpu"), f"with {len(request.hosts)} other hosts"
    if num_gpus == 0:
        return _fall_back_to_cpu(engine, request, installed)
    number = request.device.partition(":")[2]
    if number and int(number) >= num_gpus:
        raise UsageError(
            f"`--device {request.device}` was asked for; {num_gpus} can be seen, counted from 0.",
            remedy="--device cuda, or check CUDA_VISIBLE_DEVICES: tightfit hardware",
        )
    if number:
        return request.device, f"on GPU {number}, as asked"
    named = f" ({installed.gpu_names[0]})" if installed.gpu_names else ""
    return "cuda", f"on {num_gpus} GPU{'s' if num_gpus > 1 else ''}{named}"


def _fall_back_to_cpu(
    engine: str, request: EngineRequest, installed: InstalledEngines
) -> tuple[str, str]:
    """No GPU can be used: say whether there is none, or one that the software cannot see."""
    library = "this build of llama.cpp" if engine == "llama.cpp" else "the installed torch"
    remedy = (
        "install a CUDA build of xllamacpp, or choose the CPU: --device cpu"
        if engine == "llama.cpp"
        else _TORCH_REMEDY
    )
    unseen = (
        f"{library} cannot use the {installed.gpu_names[0]} that is here"
        if installed.gpu_names
        else "there is no CUDA GPU here"
    )
    if request.device != "auto" or engine == "vllm":
        asked = "vLLM needs a GPU" if engine == "vllm" else f"`--device {request.device}` was asked"
        raise SetupError(
            f"{asked}, and {unseen}.",
            remedy=remedy if installed.gpu_names else "--device cpu --engine auto",
        )
    if installed.gpu_names:
        return "cpu", f"on the CPU by mistake?: {unseen} ({remedy})"
    return "cpu", "no CUDA GPU here: on the CPU"
