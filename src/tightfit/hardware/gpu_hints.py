"""Which GPU a cluster means by its own words: a GRES type, node features, a product label."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.core.errors import UserError
from tightfit.core.units import GIB
from tightfit.hardware.catalogue import Match, find_gpu, list_gpus, match_gpu
from tightfit.hardware.types import Gpu

MIG_MEMORY_FRACTION = 0.93
"""Of a slice's nominal GiB; drivers show 0.95 (4864 MiB for 1g.5gb), torch a little less."""
MIG_COMPUTE_SLICES = 7
"""An A100 or H100 divides its multiprocessors into sevenths (NVIDIA MIG User Guide)."""

_MIG = re.compile(
    r"(?P<base>.*?)[\s\-_.]*(?:mig[\s\-_.]*)?(?P<g>[1-7])g\.(?P<gb>[0-9]{1,3})gb.*", re.I
)
_MEMORY = re.compile(r"(?<![0-9])([0-9]{1,3})\s*g(?:b|ib)?(?![a-z0-9])", re.IGNORECASE)
_ARCHITECTURES: dict[str, tuple[tuple[int, ...], ...]] = {
    "kepler": ((3,),),
    "maxwell": ((5,),),
    "pascal": ((6,),),
    "volta": ((7, 0),),
    "turing": ((7, 5),),
    "ampere": ((8, 0), (8, 6)),
    "ada": ((8, 9),),
    "lovelace": ((8, 9),),
    "hopper": ((9,),),
    "blackwell": ((10,), (12,)),
}
"""First parts of the compute capabilities that go by this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """A GPU, what had to be assumed to name it, and whether it is a slice of one."""

    gpu: Gpu | None
    warnings: tuple[str, ...] = ()
    is_slice: bool = False


def guess_gpu(kind: str | None, hints: Sequence[str]) -> Guess:
    """The catalogue's GPU for a type word (None: not stated) beside free-form hints.

    In order: the type itself, a MIG profile, a hint that names a GPU, and last the
    slowest card that has the memory and architecture the hints speak of.
    """
    mig = _MIG.fullmatch(kind) if kind else None
    if mig is not None:
        return _slice(mig)
    if kind is not None:
        match = _try_match(kind)
        if match is not None:
            return _narrow(kind, match, hints)
    for hint in hints:
        match = _try_match(hint)
        if match is not None:
            guess = _narrow(hint, match, hints)
            said = f"GPU type `{kind}`" if kind else "A GPU type that is not stated"
            note = f"{said} is read as {match.gpu.name} by the feature `{hint}`."
            return Guess(gpu=guess.gpu, warnings=guess.warnings or (note,))
    return _by_memory(kind, hints)


def _try_match(word: str) -> Match | None:
    try:
        return match_gpu(word)
    except UserError:
        return None


def _narrow(word: str, match: Match, hints: Sequence[str]) -> Guess:
    """Choose among the variants of a word by the memory or board that the hints name."""
    if not match.others:
        return Guess(gpu=match.gpu)
    variants = [match.gpu, *(find_gpu(name) for name in match.others)]
    sizes = _memory_sizes(hints)
    fitting = [gpu for gpu in variants if gpu.marketing_gb in sizes] or variants
    boards = [board for board in ("pcie", "sxm") if any(board in hint.lower() for hint in hints)]
    right = [
        gpu for gpu in fitting if any(board in gpu.name.lower() for board in boards)
    ] or fitting
    chosen = right[0]
    if len(right) == 1:
        return Guess(gpu=chosen)
    rest = ", ".join(gpu.name for gpu in right[1:])
    return Guess(gpu=chosen, warnings=(f"`{word}` is read as {chosen.name}; also known: {rest}.",))


def _memory_sizes(hints: Sequence[str]) -> set[float]:
    return {float(size) for hint in hints for size in _MEMORY.findall(hint)}


def _by_memory(kind: str | None, hints: Sequence[str]) -> Guess:
    said = f"GPU type `{kind}`" if kind else "A GPU type that is not stated"
    words = {word for hint in (*hints, kind or "") for word in re.split(r"[^a-z]+", hint.lower())}
    generations = [part for word in sorted(words) for part in _ARCHITECTURES.get(word, ())]
    sizes = _memory_sizes([*hints, kind or ""])
    fitting = [
        gpu
        for gpu in list_gpus()
        if gpu.marketing_gb in sizes and gpu.compute_capability is not None
        if not generations or any(_is_of(gpu, generation) for generation in generations)
    ]
    if not fitting:
        known = f" (features: {', '.join(hints)})" if hints else ""
        note = f"{said}{known} is not in the catalogue; its nodes are left out."
        return Guess(
            gpu=None, warnings=(note + " Describe them in a cluster YAML to plan for them.",)
        )
    slowest = min(fitting, key=lambda gpu: max(gpu.peak_flops.values()))
    note = f"{said} is planned as {slowest.name}, the slowest known card with its memory."
    return Guess(gpu=slowest, warnings=(note,))


def _is_of(gpu: Gpu, generation: tuple[int, ...]) -> bool:
    capability = gpu.compute_capability
    return capability is not None and capability[: len(generation)] == generation


def _slice(mig: re.Match[str]) -> Guess:
    match = _try_match(mig["base"]) if mig["base"] else None
    whole = match.gpu if match else find_gpu("A100")
    sevenths, gigabytes = int(mig["g"]), int(mig["gb"])
    # 5 of 40 GB or 10 of 80 GB in one seventh: the larger card shows in the larger slice.
    if match and match.others and gigabytes / sevenths >= whole.marketing_gb / 4:
        larger = [find_gpu(name) for name in match.others]
        whole = max([whole, *larger], key=lambda gpu: gpu.marketing_gb)
    gpu = slice_gpu(whole, sevenths=sevenths, gigabytes=gigabytes)
    note = f"{gpu.name}: one job uses one MIG slice; slices cannot work together."
    return Guess(gpu=gpu, warnings=(note,), is_slice=True)


def slice_gpu(whole: Gpu, *, sevenths: int, gigabytes: int) -> Gpu:
    """A MIG slice as a small GPU: its share of the arithmetic and of the memory's speed."""
    compute = min(1.0, sevenths / MIG_COMPUTE_SLICES)
    memory = min(1.0, gigabytes / whole.marketing_gb)
    return whole.model_copy(
        update={
            "name": f"{whole.name} MIG {sevenths}g.{gigabytes}gb",
            "marketing_gb": float(gigabytes),
            "memory_bytes": int(gigabytes * GIB * MIG_MEMORY_FRACTION),
            "peak_flops": {kind: rate * compute for kind, rate in whole.peak_flops.items()},
            "achievable_bf16_flops": None,
            "memory_bytes_per_second": whole.memory_bytes_per_second * memory,
            "nvlink_bytes_per_second": None,
            "prices": (),
            "notes": f"a MIG slice of {whole.name}: rates scaled by its share",
        }
    )
