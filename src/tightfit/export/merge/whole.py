"""A merge with the whole model in memory, for files that hold the adapted matrices in parts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError
from tightfit.export.merge.changes import ADAPTER
from tightfit.runtime.adapters import load_adapter
from tightfit.runtime.load import LoadRequest, load_base

if TYPE_CHECKING:
    from tightfit.export.merge.merge import MergeRequest


def write_whole(
    request: MergeRequest, work: Path, missing: tuple[str, ...], *, is_tied_changed: bool
) -> None:
    """Mixtures of experts: transformers stacks the experts when it loads and parts them again
    when it saves; in between peft sees the stacked matrix and can add to it."""
    import torch
    from peft.tuners.lora import LoraLayer

    artefact = request.artefact
    assert artefact.base is not None
    if is_tied_changed:
        raise InvalidInputError(
            f"The adapter changes both {missing[0]}, which the base's files hold in parts, and a "
            "matrix that embeddings and head share.",
            remedy="use the adapter as it is: tightfit chat ADAPTER",
        )
    dtype = request.dtype or _stored_dtype(artefact.base)
    model: Any = load_base(
        artefact.base, LoadRequest(weights=dtype, compute=dtype), torch.device("cpu")
    )
    adapted: Any = load_adapter(model, artefact.path)
    layers = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    for number, layer in enumerate(layers, start=1):
        _merge_in_place(layer)
        if request.report is not None:
            request.report("layers", number, len(layers))
    merged = adapted.merge_and_unload()  # every layer is merged: this only takes peft's away
    merged.config.use_cache = True
    merged.save_pretrained(
        str(work), max_shard_size=request.max_shard_bytes, safe_serialization=True
    )


def _merge_in_place(layer: Any) -> None:
    """In fp32, and back to what it was."""
    import torch

    owner = layer.get_base_layer()
    attribute = getattr(layer, "parameter_name", "weight")
    parameter = getattr(owner, attribute)
    dtype = parameter.dtype
    with torch.no_grad():
        parameter.data = parameter.data.float()
        for name, value in layer.named_parameters(recurse=True):
            if "lora_" in name and "base_layer" not in name:
                value.data = value.data.float()
        layer.merge(adapter_names=[ADAPTER])
        parameter = getattr(owner, attribute)
        parameter.data = parameter.data.to(dtype)


def _stored_dtype(base: Path) -> Dtype:
    """What most of the base's bytes are."""
    import torch

    from tightfit.runtime.stored_weights import StoredWeights

    names = {torch.float32: Dtype.FP32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.FP16}
    sizes: dict[Dtype, int] = {}
    for tensor in StoredWeights(base).tensors.values():
        if tensor.dtype in names:
            found = names[tensor.dtype]
            sizes[found] = sizes.get(found, 0) + tensor.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=Dtype.FP32)
