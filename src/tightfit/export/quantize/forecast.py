"""What quantizing will take: host memory, disk and time, before anything starts."""

from __future__ import annotations

from math import ceil

from pydantic import NonNegativeFloat, NonNegativeInt

from tightfit.core.frozen import Frozen
from tightfit.core.units import MIB
from tightfit.estimate.host_and_disk import FILE_SHARD_BYTES
from tightfit.estimate.weights import largest_layer, largest_matrix
from tightfit.export.formats import ExportFormat, FormatFamily
from tightfit.export.quantize.gguf import MAIN_TYPES, SLICE_VALUES, fit_width
from tightfit.models.spec import ModelSpec

PROCESS_BYTES = 620 * MIB
"""A process with torch, transformers and the quantizer loaded; measured on Linux, CPU build."""
BITS = {
    "Q8_0": 8.5, "Q6_K": 6.5625, "Q5_K": 5.5, "Q4_K": 4.5, "Q3_K": 3.4375, "Q2_K": 2.625,
    "Q5_1": 6.0, "Q5_0": 5.5, "Q4_0": 4.5, "F16": 16.0,
}  # fmt: skip
"""Bits per weight with scales. Source: block sizes in ggml-common.h."""
MIXED_MORE = 1.12
"""A file's mean over its main type: some tensors get more bits."""
VOCABULARY_BYTES = 40
"""Of a token in the file's metadata: its text, score, type and share of the merges."""
NF4_BITS, INT8_BITS, GPTQ_SCALE_BITS = 4.127, 8.03, 20.0
"""nf4 with doubly quantized scales; int8 with one scale per row; per group a 16-bit scale and a
zero point."""
VALUES_PER_SECOND = {ExportFormat.Q8_0: 80e6}
K_VALUES_PER_SECOND = 8e6
"""Of one core of a server CPU, importance included; measured, and rough."""
CPU_FLOPS = 60e9
GPU_FLOPS = 40e12
"""What calibration reaches on a small share of a server CPU, and on a data-centre GPU."""
TUNED_PASSES = 3
"""Forward and backward of one layer per iteration, in forward passes."""


class QuantizeForecast(Frozen):
    """What one target will take."""

    host_bytes: NonNegativeInt
    """Most memory of the process that does it."""
    disk_bytes: NonNegativeInt
    """Of the result."""
    seconds: NonNegativeFloat
    """Rough: it depends on the machine and on what else runs there."""


class QuantizeEffort(Frozen):
    """What the forecast depends on beside the model."""

    num_tokens: int
    """Of calibration; 0: none is needed or it is measured already."""
    group_size: int = 128
    iters: int = 0
    num_threads: int = 1
    has_gpu: bool = False
    stored_bytes: int = 2
    """Of one value of the source."""


def estimate_quantize(
    spec: ModelSpec, target: ExportFormat, effort: QuantizeEffort
) -> QuantizeForecast:
    """Memory, disk and time of one target. Leaves out the check behind it."""
    estimate = {
        FormatFamily.GGUF: _estimate_gguf,
        FormatFamily.GPTQ: _estimate_gptq,
        FormatFamily.BITS: _estimate_bits,
    }[target.family]
    return estimate(spec, target, effort)


def _estimate_gguf(
    spec: ModelSpec, target: ExportFormat, effort: QuantizeEffort
) -> QuantizeForecast:
    """Slices of fp32 for each thread; the importance holds the model in fp32."""
    host = PROCESS_BYTES + effort.num_threads * 4 * SLICE_VALUES * 6
    seconds = spec.num_params / (
        VALUES_PER_SECOND.get(target, K_VALUES_PER_SECOND) * effort.num_threads
    )
    if effort.num_tokens and target.takes_importance:
        host = max(host, PROCESS_BYTES + (2 if effort.has_gpu else 4) * spec.num_params)
        seconds += _forward_seconds(spec, effort)
    return QuantizeForecast(host_bytes=host, disk_bytes=_gguf_bytes(spec, target), seconds=seconds)


def _gguf_bytes(spec: ModelSpec, target: ExportFormat) -> int:
    """The main type or what rows of odd width get instead, and a head of six or eight bits."""
    kind = MAIN_TYPES[target]
    mixed = 1.0 if target in (ExportFormat.Q8_0, ExportFormat.Q6_K) else MIXED_MORE
    layers = sum(
        block.num_layers * part.num_params * BITS[fit_width(kind, part.in_features)]
        for block in spec.blocks
        for part in block.linears
    )
    head = BITS[fit_width("Q8_0" if kind == "Q8_0" else "Q6_K", spec.hidden_size)]
    own = spec.lm_head_params if not spec.tie_embeddings else 0
    embedding = head if spec.tie_embeddings else BITS[fit_width(kind, spec.hidden_size)]
    bits = mixed * layers + own * head + spec.embedding_params * embedding
    rest = spec.position_params + spec.outer_params
    return ceil(bits / 8 + 4 * rest) + spec.vocab_size * VOCABULARY_BYTES


def _estimate_gptq(
    spec: ModelSpec, target: ExportFormat, effort: QuantizeEffort
) -> QuantizeForecast:
    """The model as stored, one layer in fp32 with its tuning state, and the inputs of two layers.

    Source: auto-round works block by block on cached inputs (github.com/intel/auto-round).
    """
    inputs = 2 * 4 * effort.num_tokens * spec.hidden_size
    layer = largest_layer(spec) * (4 + (12 if effort.iters else 4))
    group = effort.group_size if effort.group_size > 0 else spec.hidden_size
    packed = spec.linear_params * (target.bits + GPTQ_SCALE_BITS / group) / 8
    passes = 2 + TUNED_PASSES * effort.iters * min(1.0, 8 * 512 / max(effort.num_tokens, 1))
    search = spec.linear_params * 200 / 1e9  # grid search of the scales, on one core
    return QuantizeForecast(
        host_bytes=int(PROCESS_BYTES + effort.stored_bytes * spec.num_params + layer + inputs),
        disk_bytes=ceil(packed + 2 * (spec.num_params - spec.linear_params)),
        seconds=passes * _forward_seconds(spec, effort) + search,
    )


def _estimate_bits(
    spec: ModelSpec, target: ExportFormat, effort: QuantizeEffort
) -> QuantizeForecast:
    """The packed model, and the file it is read from, which is mapped while it is read."""
    bits = NF4_BITS if target is ExportFormat.NF4 else INT8_BITS
    packed = ceil(spec.linear_params * bits / 8) + 2 * (spec.num_params - spec.linear_params)
    mapped = min(effort.stored_bytes * spec.num_params, FILE_SHARD_BYTES)
    return QuantizeForecast(
        host_bytes=PROCESS_BYTES + packed + mapped + 4 * largest_matrix(spec),
        disk_bytes=packed,
        seconds=5 + spec.num_params * effort.stored_bytes / 500e6,
    )


def _forward_seconds(spec: ModelSpec, effort: QuantizeEffort) -> float:
    rate = GPU_FLOPS if effort.has_gpu else CPU_FLOPS
    return 2 * spec.num_params * effort.num_tokens / rate
