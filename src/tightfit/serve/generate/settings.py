"""What answers depend on, by names a person understands: the same again means the same answers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tightfit.engines.open import EngineRequest
from tightfit.runtime.artefacts import Artefact
from tightfit.serve.generate.job import GenerateJob
from tightfit.serve.generate.prompts import digest_prompts

_MODEL_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".jinja", ".model")


def describe_settings(request: EngineRequest, job: GenerateJob) -> dict[str, Any]:
    """For the journal's head. Slots, threads and devices are left out: answers do not mean them."""
    sampling = job.sampling
    return {
        "prompts": digest_prompts(job.prompts),
        "model": _digest_model(request.artefact),
        "template": _digest_template(request.template),
        "engine": request.engine,
        "weights": "auto" if request.weights is None else request.weights.value,
        "n": job.num_samples,
        "raw": job.is_raw,
        "max-new-tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top-p": sampling.top_p,
        "top-k": sampling.top_k,
        "min-p": sampling.min_p,
        "repetition-penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
    }


def _digest_model(artefact: Artefact) -> str:
    """Over names, sizes and times of the files: reading them whole would take minutes."""
    digest = hashlib.blake2b(digest_size=16)
    for place in (artefact.path, artefact.base, artefact.tokenizer):
        for path in [] if place is None else _files(place):
            facts = path.stat()
            digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return sorted(path for path in place.iterdir() if path.suffix.lower() in _MODEL_ENDINGS)


def _digest_template(template: str | None) -> str | None:
    if template is None or not Path(template).is_file():
        return template
    return hashlib.blake2b(Path(template).read_bytes(), digest_size=16).hexdigest()
