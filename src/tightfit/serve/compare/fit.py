"""Whether both models of a page have room, told before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DoesNotFitError, UserError
from tightfit.core.strategy import Strategy
from tightfit.core.units import render_bytes
from tightfit.estimate.weights import estimate_weight_bytes
from tightfit.hardware.nvml import read_driver
from tightfit.models.resolve import resolve_model
from tightfit.runtime.artefacts import Artefact

ROOM_FRACTION = 0.1
"""Beside the weights: keys and values, scratch space, the libraries themselves."""


def estimate_resident_bytes(artefact: Artefact, weights: Dtype | None) -> int:
    """What a loaded model holds, about. None: weights as they are stored.

    Leaves out the cache of a long context, and the adapter, which is small beside its base.
    """
    folder = artefact.base or artefact.path
    if weights is None:
        return round(_measure(folder) * (1 + ROOM_FRACTION))
    found = estimate_weight_bytes(resolve_model(str(folder)), Strategy(weights=weights))
    return round(found.total * (1 + ROOM_FRACTION))


def check_room(
    artefacts: Sequence[Artefact],
    weights: Dtype | None,
    *,
    is_one_at_a_time: bool,
    free_bytes: int,
) -> None:
    """Refuse what will not fit into the memory there is, and say what would."""
    try:
        sizes = [estimate_resident_bytes(artefact, weights) for artefact in artefacts]
    except (UserError, OSError):
        return  # a shape we cannot read is no reason not to try
    needed = max(sizes) if is_one_at_a_time else sum(sizes)
    if needed <= free_bytes:
        return
    told = "The larger of the two models needs" if is_one_at_a_time else "The two models need"
    can_take_turns = not is_one_at_a_time and max(sizes) <= free_bytes
    raise DoesNotFitError(
        f"{told} about {render_bytes(needed)}; {render_bytes(free_bytes)} are free.",
        remedy="add --one-at-a-time    (slower: each is loaded when it is its turn)"
        if can_take_turns
        else "compare smaller versions: tightfit quantize MODEL --to q4_k_m",
    )


def probe_free_bytes(device: str) -> int:
    """Free memory of the GPUs that `device` means; of this machine where that is none."""
    gpus = () if device == "cpu" else read_driver().gpus
    if device.startswith("cuda:"):
        gpus = tuple(gpu for gpu in gpus if str(gpu.index) == device.removeprefix("cuda:"))
    if not gpus:
        return int(psutil.virtual_memory().available)
    return sum(gpu.free_bytes for gpu in gpus)


def _measure(path: Path) -> int:
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)
