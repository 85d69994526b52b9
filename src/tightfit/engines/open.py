"""The engines as records: choose one and a device for an artefact, say why, and load it.

Light to import: the command line takes the engines' names from here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import SetupError, UsageError
from tightfit.core.reading import read_json_file
from tightfit.core.text import did_you_mean
from tightfit.runtime.llama_cpp import REMEDY as LLAMA_REMEDY
from tightfit.runtime.llama_cpp import has_llama

if TYPE_CHECKING:
    from pathlib import Path

    from tightfit.data.templates import Prompter
    from tightfit.engines.protocol import Engine
    from tightfit.runtime.model_files import Artefact


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
    pooling: str | None = None
    """`mean` or `last`, of embeddings. None: as the model states, else the mean."""
    takes_adapters: bool = False
    """LoRA adapters may be added to it."""
    adapter_bytes: int = 0
    """Memory that they will take, which no slot may."""
    needs_logits: bool = False
    """Choose only an engine that computes logits of whole texts, as `verify` needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One engine: how it is loaded, and what the choice between engines asks about it."""

    name: str
    opener: str
    """`module:function` that loads an artefact: (request, why) -> Engine."""
    is_installed: Callable[[], bool]
    missing: str
    """The problem where it is not installed, about the artefact `{name}`."""
    install: str
    """The remedy."""
    check: Callable[[EngineRequest, int | None], None]
    """Raises `UsageError` for an artefact or setting it cannot take or would silently ignore;
    the number is the bits of GPTQ weights."""
    count_gpus: Callable[[], int]
    """GPUs that its library can use."""
    gpu_library: str
    """That library in words, where it cannot use a GPU that is here."""
    gpu_install: str
    needs_gpu: bool = False
    weights: tuple[Dtype, ...] = ()
    """Dtypes that it can hold plain weights in; none: always as stored."""


_LEAVE_OUT = "leave --engine out"
VLLM_GPTQ_BITS = (4, 8)
"""Widths that vLLM's GPTQ kernels take."""
VLLM_REMEDY = (
    "install vLLM in an environment of its own, beside tightfit there (it wants other releases "
    "of transformers): python -m venv vllm && vllm/bin/pip install vllm, then tightfit as here; "
    "or leave --engine out"
)
_KIND_NAMES = {
    "model": "a Hugging Face folder",
    "adapter": "an adapter",
    "gptq": "a GPTQ folder",
    "bitsandbytes": "a bitsandbytes folder",
    "compressed-tensors": "a compressed-tensors folder",
    "gguf": "a GGUF file",
}


def _count_torch_gpus() -> int:
    if find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _count_llama_gpus() -> int:
    from tightfit.engines.llama_devices import list_gpus

    return len(list_gpus()) if has_llama() else 0


def _refuse_llama_options(engine: str, request: EngineRequest) -> None:
    for option, value in (("--hosts", request.hosts), ("--threads", request.threads)):
        if value:
            raise UsageError(
                f"`{option}` belongs to llama.cpp; {request.artefact.name} runs on {engine}.",
                remedy=f"leave {option} out, or name a GGUF file",
            )


def _check_transformers(request: EngineRequest, _gptq_bits: int | None) -> None:
    _refuse_llama_options("transformers", request)


def _check_llama(request: EngineRequest, _gptq_bits: int | None) -> None:
    artefact = request.artefact
    if artefact.kind.value != "gguf":
        raise UsageError(
            f"llama.cpp runs GGUF files; {artefact.name} is {_KIND_NAMES[artefact.kind.value]}.",
            remedy=f"tightfit quantize {artefact.name} --to q8_0    (or leave --engine out)",
        )
    if request.weights is not None:
        raise UsageError(
            "llama.cpp runs a GGUF file's weights as stored; "
            f"`--weights {request.weights.value}` is not possible.",
            remedy="leave --weights out, or --engine transformers, which dequantizes the file",
        )


def _check_vllm(request: EngineRequest, gptq_bits: int | None) -> None:
    name, kind = request.artefact.name, request.artefact.kind.value
    if request.needs_logits:
        raise UsageError("vLLM does not compute logits of whole texts.", remedy=_LEAVE_OUT)
    if kind == "gptq" and gptq_bits not in VLLM_GPTQ_BITS:
        width = f"{gptq_bits} bits" if gptq_bits else "an unnamed number of bits"
        raise UsageError(
            f"vLLM takes GPTQ weights of 4 or 8 bits; {name} has {width}.", remedy=_LEAVE_OUT
        )
    if kind == "gguf":
        raise UsageError(f"vLLM is not used for GGUF files here; {name} is one.", remedy=_LEAVE_OUT)
    _refuse_llama_options("vllm", request)
    if request.weights is not None and request.weights not in RECORDS["vllm"].weights:
        raise UsageError(
            f"`--weights {request.weights.value}` is for the transformers engine.",
            remedy="--engine transformers, or --weights bf16|fp16",
        )
    if request.device == "cpu":
        raise UsageError("vLLM is used on GPUs only here.", remedy="--engine transformers")


_TORCH = "the installed torch"
_TORCH_INSTALL = (
    "install torch's CUDA build (pytorch.org shows the command), or choose the CPU: --device cpu"
)
RECORDS = {
    record.name: record
    for record in (
        EngineRecord(
            name="transformers",
            opener="tightfit.engines.transformers.engine:open_transformers",
            is_installed=lambda: all(find_spec(one) for one in ("torch", "transformers")),
            missing="{name} needs torch and transformers, which are not installed.",
            install="pip install 'tightfit[train]'",
            check=_check_transformers,
            count_gpus=_count_torch_gpus,
            gpu_library=_TORCH,
            gpu_install=_TORCH_INSTALL,
            weights=(Dtype.FP32, Dtype.BF16, Dtype.FP16, Dtype.NF4, Dtype.INT8),
        ),
        EngineRecord(
            name="llama.cpp",
            opener="tightfit.engines.llama_cpp:open_llama",
            is_installed=has_llama,
            missing="{name} is a GGUF file, which needs llama.cpp, and that is not installed.",
            install=LLAMA_REMEDY,
            check=_check_llama,
            count_gpus=_count_llama_gpus,
            gpu_library="this build of llama.cpp",
            gpu_install="install a CUDA build of xllamacpp, or choose the CPU: --device cpu",
        ),
        EngineRecord(
            name="vllm",
            opener="tightfit.engines.vllm:open_vllm",
            is_installed=lambda: find_spec("vllm") is not None,
            missing="vLLM is not installed here.",
            install=VLLM_REMEDY,
            check=_check_vllm,
            count_gpus=_count_torch_gpus,
            gpu_library=_TORCH,
            gpu_install=_TORCH_INSTALL,
            needs_gpu=True,
            weights=(Dtype.FP32, Dtype.BF16, Dtype.FP16),
        ),
    )
}
ENGINES = ("auto", *RECORDS)
ENGINE_WEIGHTS = tuple(
    dict.fromkeys(("auto", *(one.value for record in RECORDS.values() for one in record.weights)))
)
"""What `--weights` accepts."""


def open_engine(request: EngineRequest) -> Engine:
    """Load the artefact with the engine that suits it. `info.why` says which and why.

    Raises `UserError` for what the user can fix: a missing package, too large a context,
    a damaged file, settings that contradict each other.
    """
    from tightfit.runtime.model_files import ArtefactKind, import_gguf
    from tightfit.runtime.staged import use_staged

    artefact = request.artefact
    choice = choose_engine(request, probe_installed(request), gptq_bits=read_gptq_bits(artefact))
    why = choice.why
    if choice.engine == "transformers" and artefact.kind is ArtefactKind.GGUF:
        # The plain model that transformers reads.
        artefact = replace(artefact, kind=ArtefactKind.MODEL, path=import_gguf(artefact.path))
    elif not request.needs_logits:  # `verify` must read the files that it was given
        artefact, note = use_staged(artefact)
        why = " ".join(filter(None, (why, note)))
    module, _, function = RECORDS[choice.engine].opener.partition(":")
    chosen = replace(request, artefact=artefact, engine=choice.engine, device=choice.device)
    engine: Engine = getattr(import_module(module), function)(chosen, why=why)
    return engine


def open_prompter(request: EngineRequest) -> Prompter:
    """The artefact's tokenizer and template, or the template that was asked for."""
    from tightfit.data.templates import Prompter
    from tightfit.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(request.artefact.tokenizer)
    return Prompter(tokenizer, request.template or request.artefact.template)


def open_adapter_prompter(engine: Engine, folder: Path) -> Prompter:
    """The adapter's own tokenizer and template where it has them, else its base's."""
    from tightfit.data.templates import Prompter
    from tightfit.data.tokenizer import load_tokenizer

    if not (folder / "tokenizer.json").is_file():
        return engine.prompter
    return Prompter(load_tokenizer(folder), None)


def read_gptq_bits(artefact: Artefact) -> int | None:
    """Bits of a GPTQ folder's weights; None for other kinds and where it does not say."""
    if artefact.kind.value != "gptq":
        return None
    try:
        stated = read_json_file(artefact.path / "config.json", allows_infinity=True)[
            "quantization_config"
        ]
        return int(stated["bits"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


# The choice of engine and device.


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledEngines:
    """Packages and GPUs, as far as the choice of an engine depends on them."""

    engines: frozenset[str]
    gpu_names: tuple[str, ...] = ()
    """GPUs that the driver shows, usable or not."""
    num_gpus: int = 0
    """GPUs that the library of the likely engine can use."""


def probe_installed(request: EngineRequest) -> InstalledEngines:
    """Probe this machine; import torch only where the choice depends on it."""
    from tightfit.hardware.machine import read_driver

    likely = request.engine if request.engine in RECORDS else "transformers"
    if request.engine == "auto" and request.artefact.kind.value == "gguf":
        likely = "llama.cpp"
    return InstalledEngines(
        engines=frozenset(name for name, record in RECORDS.items() if record.is_installed()),
        gpu_names=tuple(gpu.name for gpu in read_driver().gpus),
        num_gpus=RECORDS[likely].count_gpus(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine, where it computes, and why."""

    engine: str
    device: str
    """`cpu`, `cuda` (every GPU) or `cuda:N`."""
    why: str


def choose_engine(
    request: EngineRequest, installed: InstalledEngines, *, gptq_bits: int | None = None
) -> EngineChoice:
    """A pure function. Raises `UserError` where no engine can run the artefact."""
    if request.engine != "auto" and request.engine not in RECORDS:
        near = did_you_mean(request.engine, ENGINES)
        raise UsageError(
            f"`--engine {request.engine[:40]}` is not known.{near}",
            remedy="--engine " + "|".join(ENGINES),
        )
    name, reason = _choose_name(request, installed, gptq_bits)
    engine = RECORDS[name]
    engine.check(request, gptq_bits)
    if name not in installed.engines:
        problem = engine.missing.format(name=request.artefact.name)
        raise SetupError(problem, remedy=engine.install)
    device, where = _choose_device(engine, request, installed)
    return EngineChoice(engine=name, device=device, why=f"{name}, {reason}; {where}.")


def _choose_name(
    request: EngineRequest, installed: InstalledEngines, gptq_bits: int | None
) -> tuple[str, str]:
    """The engine by name, and the reason as part of a sentence."""
    kind = request.artefact.kind.value
    if request.engine == "transformers" and kind == "gguf":
        return "transformers", "as asked, with the GGUF file's weights dequantized first"
    if request.engine != "auto":
        return request.engine, "as asked"
    if kind == "gguf":
        return "llama.cpp", "because it runs GGUF files as they are"
    # vLLM only where no capability is lost.
    is_quantized = request.weights is not None and request.weights.is_quantized
    if (
        "vllm" in installed.engines
        and installed.num_gpus > 0
        and request.device in ("auto", "cuda")
        and (
            kind in ("model", "compressed-tensors")
            or (kind == "gptq" and gptq_bits in VLLM_GPTQ_BITS)
        )
        and not is_quantized
        and not request.needs_logits
    ):
        return "vllm", "because it is installed and fastest for many requests on a GPU"
    if kind == "adapter":
        return "transformers", "because it runs an adapter on its base model unmerged"
    return "transformers", f"because it reads {_KIND_NAMES[kind]} as it is"


def _choose_device(
    engine: EngineRecord, request: EngineRequest, installed: InstalledEngines
) -> tuple[str, str]:
    """The device, and its description."""
    if request.device == "cpu":
        return "cpu", "on the CPU, as asked"
    num_gpus = installed.num_gpus
    if request.hosts:
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
    engine: EngineRecord, request: EngineRequest, installed: InstalledEngines
) -> tuple[str, str]:
    """No GPU can be used: say whether there is none, or one that the software cannot see."""
    unseen = "there is no CUDA GPU here"
    if installed.gpu_names:
        unseen = f"{engine.gpu_library} cannot use the {installed.gpu_names[0]} that is here"
    if request.device != "auto" or engine.needs_gpu:
        asked = "vLLM needs a GPU" if engine.needs_gpu else f"`--device {request.device}` was asked"
        raise SetupError(
            f"{asked}, and {unseen}.",
            remedy=engine.gpu_install if installed.gpu_names else "--device cpu --engine auto",
        )
    if installed.gpu_names:
        return "cpu", f"on the CPU by mistake?: {unseen} ({engine.gpu_install})"
    return "cpu", "no CUDA GPU here: on the CPU"
