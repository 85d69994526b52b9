"""What one layer keeps for its backward pass, tensor by tensor."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter
from typing import Any

import torch
from torch import nn

from _measure_case import Case, Meter
from _measure_model import autocast_for, build_model, draw_batch

SAVED_VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "full eager": {"attention": "eager"},
    "full padding": {"padding": True},
    "full fp32 autocast bf16": {"weights": "fp32", "autocast": "bf16"},
    "full checkpointed": {"checkpointing": "non-reentrant"},
    "lora bf16 adapters": {"method": "lora", "adapters": "bf16"},
    "lora fp32 adapters autocast bf16": {"method": "lora", "autocast": "bf16"},
    "lora fp32 base autocast bf16": {"method": "lora", "weights": "fp32", "autocast": "bf16"},
}


def measure_saved(case: Case, meter: Meter, *, device: str, dry_run: bool) -> dict[str, Any]:
    """What one layer keeps for the backward pass: the difference of a 4- and a 2-layer model."""
    report = {}
    for label, changes in SAVED_VARIANTS.items():
        variant = dataclasses.replace(case, **changes)
        try:
            report[label] = saved_per_layer(variant, meter, device=device, dry_run=dry_run)
        except Exception as error:  # one variant a family lacks must not cost the others
            report[label] = {"error": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()
    return {"saved": report}


def saved_per_layer(case: Case, meter: Meter, *, device: str, dry_run: bool) -> dict[str, Any]:
    held, tensors = {}, {}
    for depth in (2, 4):
        cut = dataclasses.replace(case, num_layers=depth)
        model, _ = build_model(cut, device=device, dry_run=dry_run)
        batch = draw_batch(case, model, device)
        with autocast_for(case, device):
            loss = model(**batch).loss
        loss.backward()  # warm: workspaces exist before the reading
        model.zero_grad(set_to_none=True)
        del loss
        before = meter.allocated()
        with autocast_for(case, device):
            tensors[depth], loss = saved_tensors(model, batch)
        held[depth] = meter.allocated() - before
        del model, batch, loss
        gc.collect()
    per_layer = {k: (n - tensors[2][k]) / 2 for k, n in tensors[4].items() if n != tensors[2][k]}
    outside = {k: n - 2 * per_layer.get(k, 0) for k, n in tensors[2].items()}
    tokens = case.micro_batch * case.seq_len
    slope = (held[4] - held[2]) / 2
    return {
        "bytes_per_token_per_layer": slope / tokens,
        "outside_layers_bytes_per_token": (held[2] - 2 * slope) / tokens,
        "tensors_per_layer": per_layer,
        "tensors_outside_layers": {k: n for k, n in outside.items() if n > 0},
    }


def saved_tensors(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[Counter[str], Any]:
    """Count the distinct storages autograd saves, by dtype and shape; weights are not counted."""
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    counts: Counter[str] = Counter()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in known and tensor.numel() > 1:
            known.add(pointer)
            full = tensor.untyped_storage().nbytes() / tensor.element_size() / tensor.numel()
            share = "" if full == 1 else f" of a storage {full:g}x its size"
            kind = str(tensor.dtype).removeprefix("torch.")
            counts[f"{kind}{list(tensor.shape)}{share}"] += 1
        # Kept as it came, a node's own output would hold that node alive for ever.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(**batch).loss
    return counts, loss
