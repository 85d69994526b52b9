"""The module that is trained: a loaded model prepared as the plan says, and its objective."""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tightfit.core.strategy import Loss, Method, Strategy
from tightfit.core.training import Training
from tightfit.estimation.fused_projections import (
    can_fuse_trained_projections,
    uses_augmented_weights,
)
from tightfit.estimation.loss import NUM_LOSS_CHUNKS
from tightfit.runtime.adapters import add_adapters
from tightfit.runtime.attention import check_packable
from tightfit.runtime.kernels.fp8 import use_fp8
from tightfit.runtime.kernels.fused_lora import (
    fuse_lora,
    fuse_lora_projections,
    fuse_trained_projections,
)
from tightfit.runtime.layers import (
    apply_fused_kernels,
    decoder_layers,
    dequantize_base,
    dequantize_deferred,
)
from tightfit.runtime.load import LoadRequest
from tightfit.training.batches import IGNORED

_LOGIT_CHANGES = (
    "logit_scale",
    "logits_scaling",
    "mup_width_multiplier",
    "output_multiplier_scale",
)
"""Config fields that scale the head's output; such families use their own forward."""


class Objective(nn.Module):
    """The summed cross-entropy of a batch's trained tokens.

    The head runs on trained positions only: prompts and padding cost no logits. A sum, not a mean:
    micro-batches and ranks add up to the loss of the whole step, each token with the same weight.
    DDP and FSDP wrap this module, so head and loss run inside the wrapped forward.
    """

    def __init__(self, model: Any, loss: Loss, *, slice_factor: int = 1) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._slice_factor = slice_factor

    @classmethod
    def from_strategy(cls, model: Any, strategy: Strategy) -> Objective:
        return cls(model, strategy.loss, slice_factor=strategy.loss_chunk_factor)

    def forward(self, labels: Tensor, **inputs: Tensor) -> Tensor:
        model = _unwrap(self.model)
        if model.config.is_encoder_decoder:
            decoder_ids = model.prepare_decoder_input_ids_from_labels(labels)
            logits = self.model(**inputs, decoder_input_ids=decoder_ids, use_cache=False).logits
            return self._sum_losses(logits[labels != IGNORED], labels[labels != IGNORED])
        wanted = labels[:, 1:] != IGNORED
        targets = labels[:, 1:][wanted]
        if not has_plain_head(model):
            logits = self.model(**inputs, use_cache=False).logits[:, :-1]
            return self._sum_losses(logits[wanted], targets)
        backbone = getattr(model, model.base_model_prefix)
        hidden = backbone(**inputs, use_cache=False).last_hidden_state[:, :-1][wanted]
        return self._from_hidden(model, hidden, targets)

    def _from_hidden(self, model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
        head = model.get_output_embeddings()
        softcap = getattr(model.config, "final_logit_softcapping", None)
        if self._loss is Loss.FUSED:
            return _fused_loss(head, hidden, targets, softcap, self._slice_factor)
        logits = head(hidden)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        return self._sum_losses(logits, targets)

    def _sum_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not len(targets):
            # No trained token, but every parameter must take part in the backward pass.
            return logits.float().sum() * 0.0
        if self._loss is Loss.KERNEL:
            from liger_kernel.transformers import LigerCrossEntropyLoss

            summed: Tensor = LigerCrossEntropyLoss(reduction="sum")(logits.float(), targets)
            return summed
        if self._loss is Loss.CHUNKED:
            return _chunked_loss(logits, targets)
        return cross_entropy(logits.float(), targets, reduction="sum")


def has_plain_head(model: Any) -> bool:
    """Whether logits are the head's output on the backbone's, apart from a softcap."""
    config = model.config
    changed = any(getattr(config, name, None) not in (None, 1, 1.0) for name in _LOGIT_CHANGES)
    backbone = getattr(model, model.base_model_prefix, None)
    return not changed and backbone is not None and backbone is not model


def _unwrap(model: Any) -> Any:
    """The transformers model inside peft's."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _chunked_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with the upcast to fp32 one chunk at a time."""
    pairs = zip(logits.chunk(NUM_LOSS_CHUNKS), targets.chunk(NUM_LOSS_CHUNKS), strict=True)
    losses = [cross_entropy(part.float(), wanted, reduction="sum") for part, wanted in pairs]
    return torch.stack(losses).sum()


def _fused_loss(
    head: Any, hidden: Tensor, targets: Tensor, softcap: float | None, slice_factor: int
) -> Tensor:
    """Liger's head and loss in one kernel, chunk by chunk, without the full logits.

    Older versions of Liger have a fixed chunk size, and then need less memory than planned.
    """
    if not len(targets):
        nothing: Tensor = (head.weight.sum() + hidden.sum()) * 0.0
        return nothing
    bias = getattr(head, "bias", None)
    chunked = _find_chunked_loss() if slice_factor > 1 else None
    if chunked is not None:
        total: Tensor = chunked(
            hidden,
            head.weight,
            targets,
            bias,
            reduction="sum",
            softcap=softcap,
            chunk_mem_const=slice_factor,
        )
        return total
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="sum", softcap=softcap)
    summed: Tensor = loss(head.weight, hidden, targets, bias)
    return summed


def _find_chunked_loss() -> Any | None:
    """Liger's fused loss if its chunk size can be set; older versions cannot."""
    from liger_kernel.transformers import functional

    found = functional.liger_fused_linear_cross_entropy
    return found if "chunk_mem_const" in signature(found).parameters else None


# Preparation: kernels, adapters, compilation, activation checkpointing


def prepare_model(model: Any, strategy: Strategy, training: Training) -> Any:
    """Apply the plan's kernels, adapters and checkpointing; on any device, meta included.

    Adapters are initialized from the run's seed, independent of earlier random numbers. The order
    matters: Liger's kernels before adapters, adapters before fp8, both before fused LoRA.
    """
    if strategy.packing:
        check_packable(model)
    if strategy.fused_kernels:
        apply_fused_kernels(model)
    if strategy.dequantized_base:
        dequantize_base(model, is_deferred=strategy.stores_fp8)
    if strategy.method is Method.LORA:
        torch.manual_seed(training.seed)
        model = add_adapters(model, strategy, training)
    if strategy.has_fp8:
        use_fp8(model, is_backward_alone=strategy.fp8_gradients)
        dequantize_deferred(model)
    if strategy.fused_lora:
        fuse_lora(model)
    if uses_augmented_weights(model.config.model_type, strategy):
        fuse_lora_projections(model)
    if can_fuse_trained_projections(model.config.model_type, strategy):
        fuse_trained_projections(model)
    # In eval mode bitsandbytes repacks weights into a layout without gradients.
    model.train()
    layers = decoder_layers(model)
    if strategy.compile:
        compile_layers(layers)
    recompute_layers(layers[: strategy.count_recomputed(len(layers))])
    return model


def recompute_layers(layers: list[nn.Module]) -> None:
    """Activation checkpointing: keep only these layers' inputs, and recompute in backward.

    Wraps `forward`, not `__call__`, so that FSDP gathers a layer once for recomputation and
    backward together. Non-reentrant, so that frozen embeddings need no gradient.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def compile_layers(layers: list[nn.Module]) -> None:
    """Compile layer by layer: all share one graph, and wrappers stay outside of it."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward)


def make_load_request(strategy: Strategy, training: Training) -> LoadRequest:
    """How to load the base model. Seeds torch: random weights are the same on every rank."""
    torch.manual_seed(training.seed)
    return LoadRequest.from_strategy(
        strategy, is_packed=strategy.packing, random_weights=training.random_weights
    )
