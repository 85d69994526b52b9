"""EngineRequest and the one door to a loaded model: choose an engine, say why, load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tightfit.core.dtypes import Dtype
from tightfit.engines.protocol import Engine
from tightfit.runtime.artefacts import Artefact, ArtefactKind
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
    """How the weights lie in memory: fp32, bf16, fp16, nf4 or int8. Not for llama.cpp."""
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
    """Only an engine that gives scores of whole texts will do, as for `verify`."""


def open_engine(request: EngineRequest) -> Engine:
    """Load the artefact with the engine that suits it. `info.why` says which and why.

    Raises `UserError` for all that the user can mend: a missing package, too large a context,
    a damaged file, settings that contradict each other.
    """
    from tightfit.engines.choose import choose_engine
    from tightfit.engines.installed import probe_installed, read_gptq_bits

    artefact = request.artefact
    choice = choose_engine(
        artefact, request, probe_installed(request), gptq_bits=read_gptq_bits(artefact)
    )
    chosen = replace(request, engine=choice.engine, device=choice.device)
    why = choice.why
    is_unpacked = choice.engine == "transformers" and artefact.kind is ArtefactKind.GGUF
    if not is_unpacked and not request.needs_logits:  # `verify` looks at the very files it names
        staged, said = use_staged(artefact)
        chosen, why = replace(chosen, artefact=staged), " ".join(filter(None, (why, said)))
    if choice.engine == "llama.cpp":
        from tightfit.engines.llama.engine import open_llama

        return open_llama(chosen, why=why)
    if choice.engine == "vllm":
        from tightfit.engines.vllm.engine import open_vllm

        return open_vllm(chosen, why=why)
    from tightfit.engines.transformers.engine import open_transformers

    if is_unpacked:
        chosen = replace(chosen, artefact=_unpack(artefact))
    return open_transformers(chosen, why=why)


def open_prompter(request: EngineRequest) -> Prompter:
    """The artefact's tokenizer and template, or the template that was asked for."""
    from tightfit.data.prompter import Prompter
    from tightfit.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(request.artefact.tokenizer)
    return Prompter(tokenizer, request.template or request.artefact.template)


def _unpack(artefact: Artefact) -> Artefact:
    """A GGUF file as the plain model that transformers reads."""
    from tightfit.runtime.import_models import import_gguf

    return replace(artefact, kind=ArtefactKind.MODEL, path=import_gguf(artefact.path))
