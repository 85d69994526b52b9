"""In which dtype unquantized artefacts are compared: fp32 where it fits, so that noise is least."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.export.verify.config import read_stored_dtype
from tightfit.runtime.artefacts import Artefact, ArtefactKind

_ROOM_FRACTION = 0.7
"""Of the free memory that weights may take; the rest is for scores and arithmetic."""


def choose_weights(artefact: Artefact, wanted: Dtype | None, device: str) -> Dtype | None:
    """For a folder with plain weights, or an adapter on one. None: packed, so as it is."""
    if artefact.kind not in (ArtefactKind.MODEL, ArtefactKind.ADAPTER):
        return None
    if wanted is not None:
        return wanted
    from tightfit.runtime.stored_weights import StoredWeights

    stored = StoredWeights(artefact.base or artefact.path).tensors.values()
    needed = 4 * sum(tensor.num_values for tensor in stored)
    if needed <= _ROOM_FRACTION * _free_bytes(device):
        return Dtype.FP32
    return Dtype(read_stored_dtype(artefact) or Dtype.BF16.value)


def _free_bytes(device: str) -> int:
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return sum(torch.cuda.mem_get_info(n)[0] for n in range(torch.cuda.device_count()))
    import psutil

    return int(psutil.virtual_memory().available)
