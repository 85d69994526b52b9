"""What the shell offers for names: models and hardware, from the offline catalogue."""

from __future__ import annotations

import re
from pathlib import Path

_COUNT_BEFORE_NAME = re.compile(r"^((?:\d+\s*n\s*x\s*)?\d+\s*x\s*)(.*)$", re.IGNORECASE)


def complete_model(incomplete: str) -> list[str]:
    """Catalogue names, with and without the owner. A shell never sees an error from here."""
    try:
        from tightfit.models.resolve import list_models

        names = [row.model for row in list_models()]
    except Exception:
        return []
    short = [name.rsplit("/", 1)[-1] for name in names]
    return _starting_with(incomplete, [*short, *names])


def complete_gpu(incomplete: str) -> list[str]:
    """GPU names as one word."""
    return _starting_with(incomplete, _gpu_words())


def complete_hardware(incomplete: str) -> list[str]:
    """`here`, `slurm`, `k8s`, GPU names; after `4x` or `2n x 4x` the names behind the count."""
    counted = _COUNT_BEFORE_NAME.match(incomplete)
    if counted is not None:
        head, rest = counted.groups()
        return [head + name for name in _starting_with(rest, _gpu_words())]
    return _starting_with(incomplete, ["here", "slurm", "slurm:", "k8s", *_gpu_words()])


def complete_job(incomplete: str) -> list[str]:
    """A model, or a recipe file in this folder."""
    recipes = [str(path) for pattern in ("*.yaml", "*.yml") for path in Path().glob(pattern)]
    return [*_starting_with(incomplete, sorted(recipes)), *complete_model(incomplete)]


def _gpu_words() -> list[str]:
    try:
        from tightfit.hardware.catalogue import gpu_names

        return [name.replace(" ", "-") for name in gpu_names()]
    except Exception:
        return []


def _starting_with(incomplete: str, names: list[str]) -> list[str]:
    fold = incomplete.lower()
    return [name for name in dict.fromkeys(names) if name.lower().startswith(fold)]
