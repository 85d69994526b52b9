"""What a loaded model needs before it trains: kernels, adapters, compilation, recomputation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tightfit.core.strategy import Method, Strategy
from tightfit.core.training import Training
from tightfit.estimate.readers import can_join_trained
from tightfit.estimate.spare_columns import leaves_spare_columns
from tightfit.runtime.adapters import add_adapters
from tightfit.runtime.attention import check_packable
from tightfit.runtime.folded_adapters import fold_adapters
from tightfit.runtime.fp8_linear import use_fp8
from tightfit.runtime.kernels import apply_fused_kernels
from tightfit.runtime.layers import decoder_layers
from tightfit.runtime.readers import join_adapters, join_trained
from tightfit.runtime.unpacked import unpack_base, unpack_waiting


def finish_model(model: Any, strategy: Strategy, training: Training) -> Any:
    """The model as the plan trains it, in training mode; on any device, meta included.

    Adapters are drawn with the run's seed, whatever was drawn before.
    """
    if strategy.packing:
        check_packable(model)
    if strategy.fused_kernels:
        apply_fused_kernels(model)
    if strategy.unpacked_base:
        unpack_base(model, waits=strategy.stores_fp8)
    if strategy.method is Method.LORA:
        torch.manual_seed(training.seed)
        model = add_adapters(model, strategy, training)
    if strategy.has_fp8:
        use_fp8(model, is_backward_alone=strategy.fp8_gradients)
        unpack_waiting(model)
    if strategy.folded_adapters:
        fold_adapters(model)
    if leaves_spare_columns(model.config.model_type, strategy):
        join_adapters(model)
    if can_join_trained(model.config.model_type, strategy):
        join_trained(model)
    # bitsandbytes repacks weights in eval mode, which no gradient passes through.
    model.train()
    layers = decoder_layers(model)
    if strategy.compile:
        compile_layers(layers)
    recompute_layers(layers[: strategy.count_recomputed(len(layers))])
    return model


def recompute_layers(layers: list[nn.Module]) -> None:
    """Keep these layers' inputs alone, and run them again in the backward pass.

    `forward` is wrapped, not the call around it, so that a layer's shards are
    gathered once for recomputing and backward together; and non-reentrant, so
    that frozen embeddings need not pretend to want gradients.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def compile_layers(layers: list[nn.Module]) -> None:
    """Layer by layer: all share one compiled graph, and what wraps them stays outside of it."""
    for layer in layers:
        layer.forward = torch.compile(layer.forward)
