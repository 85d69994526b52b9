"""Phases around the training step: load, eval, save, merge, quantize, inference."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Method, Strategy
from tightfit.estimate.activations import estimate_layer_bytes
from tightfit.estimate.buffers import estimate_buffer_bytes
from tightfit.estimate.inference import inference_components, kv_row_bytes
from tightfit.estimate.logits import estimate_loss_bytes
from tightfit.estimate.memory import Moment
from tightfit.estimate.state import StateBytes, estimate_state_bytes
from tightfit.estimate.weights import (
    NF4_BLOCK,
    as_answering,
    estimate_weight_bytes,
    largest_layer,
    largest_matrix,
    num_trainable,
)
from tightfit.models.spec import ModelSpec

LOAD = "load"
CALIBRATION_ROWS = 128
CALIBRATION_LENGTH = 2048
"""GPTQ's usual calibration set. Source: arXiv:2210.17323 section 4."""


def estimate_phases(spec: ModelSpec, strategy: Strategy, *, is_cpu: bool = False) -> list[Moment]:
    """Peaks of everything a job does beside the step, on the fullest GPU."""
    state = estimate_state_bytes(spec, strategy)
    phases = [estimate_load(spec, strategy, state)]
    if strategy.is_trained:
        phases += [_eval(spec, strategy, state, is_cpu=is_cpu), _save(spec, strategy, state)]
        if strategy.method is Method.LORA:
            phases.append(_merge(spec))
    return [*phases, _quantize(spec), _inference(spec, strategy)]


def _moment(name: str, **parts: int) -> Moment:
    return Moment(name=name, components={key: size for key, size in parts.items() if size})


def estimate_load(spec: ModelSpec, strategy: Strategy, state: StateBytes | None = None) -> Moment:
    """Weights arrive matrix by matrix; a quantized one exists unpacked while it is packed.

    An unpacked base comes packed too. The last matrix is unpacked beside its codes and scales,
    which with double quantization are unpacked first. fp8 comes last, matrix by matrix: scaled in
    bf16 on the way, from bf16 in which all are there, or from codes that are unpacked for it.
    """
    unpacked = 2 * largest_matrix(spec) if strategy.weights.is_quantized else 0
    if strategy.stores_fp8:
        others = 0 if strategy.unpacked_base else spec.linear_params - largest_matrix(spec)
        unpacked = others + 4 * largest_matrix(spec)
    elif strategy.unpacked_base:
        scales = largest_matrix(spec) // NF4_BLOCK
        unpacked = largest_matrix(spec) // 2 + (5 if strategy.double_quant else 4) * scales
    state = state or estimate_state_bytes(spec, strategy)
    gathered = estimate_buffer_bytes(spec, strategy).forward if strategy.is_trained else 0
    return _moment(
        LOAD,
        weights=state.weights,
        quantization=state.quantization,
        adapters=state.adapters,
        communication=gathered,
        dequantized=unpacked,
    )


def _eval(spec: ModelSpec, strategy: Strategy, state: StateBytes, *, is_cpu: bool) -> Moment:
    """One batch of the training size without gradients: one layer's tensors and the loss."""
    tokens = strategy.tokens_per_micro_batch
    layers = [estimate_layer_bytes(spec, b, strategy, is_cpu=is_cpu) for b in spec.blocks]
    buffers = estimate_buffer_bytes(spec, strategy)
    return _moment(
        "eval",
        weights=state.weights,
        quantization=state.quantization,
        adapters=state.adapters,
        optimizer=state.optimizer,
        activations=tokens * max(layer.saved for layer in layers),
        logits=estimate_loss_bytes(spec, strategy).forward,
        communication=buffers.forward,
        dequantized=buffers.dequantized_forward,
        weight_norms=buffers.weight_norms,
    )


def _save(spec: ModelSpec, strategy: Strategy, state: StateBytes) -> Moment:
    """Each sharded tensor is gathered on its own, then copied to the host."""
    gathered = 0
    if strategy.sharding.shards_weights:
        trained = min(num_trainable(spec, strategy), spec.embedding_params)
        gathered = trained * (4 if strategy.weights is Dtype.FP32 else 2)
    return _moment(
        "save",
        weights=state.weights,
        quantization=state.quantization,
        adapters=state.adapters,
        optimizer=state.optimizer,
        communication=gathered,
    )


def _merge(spec: ModelSpec) -> Moment:
    """Layer by layer: the base matrix in 16 bit, and in fp32 while its adapter is added."""
    return _moment("merge", weights=2 * largest_layer(spec), activations=8 * largest_matrix(spec))


def _quantize(spec: ModelSpec) -> Moment:
    """GPTQ, one layer at a time: weights, one fp32 Hessian and its inverse, calibration inputs."""
    widest = max(part.in_features for block in spec.blocks for part in block.linears)
    inputs = 2 * CALIBRATION_ROWS * CALIBRATION_LENGTH * spec.hidden_size
    return _moment(
        "quantize",
        weights=2 * largest_layer(spec),
        quantization=2 * 4 * widest**2 + 4 * largest_matrix(spec),
        activations=2 * inputs,
    )


def kv_cache_bytes(spec: ModelSpec, strategy: Strategy) -> int:
    """Keys and values of every layer for `micro_batch` rows of `seq_len` tokens."""
    return strategy.micro_batch * kv_row_bytes(spec, strategy.seq_len)


def _inference(spec: ModelSpec, strategy: Strategy) -> Moment:
    """Generation on one GPU with the base weights as stored and a full KV cache.

    fp8 is for training alone: what answers is the base as it was read.
    """
    strategy = as_answering(strategy)
    weights = estimate_weight_bytes(spec, strategy)
    parts = inference_components(
        spec,
        weight_bytes=weights.packed + weights.plain,
        kv_bytes=kv_cache_bytes(spec, strategy),
        compute=strategy.compute,
        num_rows=strategy.micro_batch,
        pass_tokens=strategy.tokens_per_micro_batch,
    )
    parts["quantization"] = weights.quantization_state
    parts["dequantized"] = 2 * largest_matrix(spec) if strategy.weights.is_quantized else 0
    return _moment("inference", **parts)
