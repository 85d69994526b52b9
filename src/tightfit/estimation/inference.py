"""Inference: memory by part, bytes and FLOPs of a pass, and tokens per second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Strategy
from tightfit.estimation.flops import count_pairs, sum_workload
from tightfit.estimation.memory import estimate_context_bytes
from tightfit.estimation.weights import most_dequantized
from tightfit.hardware.rates import stream_bytes_per_second, sustained_flops
from tightfit.hardware.types import Gpu
from tightfit.models.spec import ModelSpec, Role

INFERENCE_SLACK_FRACTION = 0.02
"""Rounding of the allocator's blocks, as a share of all but the weights; as in training."""
HOST_KERNELS_PER_LAYER = 40
HOST_KERNEL_SECONDS = 20e-6
"""A step of transformers' eager decoder, launched from Python without gradients: its kernels by
`step_time.count_forward_kernels`, each between the 13 us of the smallest operation and the 35 us
of training on our H200 machine."""
HOST_TOKEN_SECONDS = 150e-6
"""Choosing, decoding and handing on one token: 0.1 ms greedy and 0.17 ms drawn, in an engine of
ours with 2 layers on a CPU; it explains half of what a card with 64 slots falls short by."""
PRODUCTS_PER_LAYER = 9
"""Which all threads of a CPU begin and end together: seven linear layers, and attention's two."""
BARRIER_SECONDS = 1e-3
"""What a product waits for a thread that another program has displaced, for each thread above one
that a core is wanted by. Our measurement: a step of 2 layers took 11 ms with one thread and 102 ms
with two, on two cores that nine other threads wanted too."""
REPLAYED_LAYER_SECONDS = 24e-6
"""Norms, rotary embedding, attention's second kernel and sums between a layer's products in a CUDA
graph with our kernels: what is left of the steps of Llama-2-7B on our H200 for 1, 8 and 64 rows
beside reading weights and cache (h200_decoding.json)."""
PLAIN_REPLAYED_LAYER_SECONDS = 120e-6
"""The same without them, before Ampere: a step for one row took 7.05 ms, of which reading the
weights is 3.2 (h200_generation.json). It holds for nf4 too, whose kernel is bound by unpacking: the
step for one row took 4.53 ms (h200_decoding.json)."""
PRODUCT_READ_FRACTION = 0.86
"""Of the rate of a copy, at which cuBLAS reads a matrix for a few rows. For a single row there is a
kernel of our own, which reaches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceJob:
    """How one engine answers many prompts."""

    weight_bytes: int
    """In memory, scales included."""
    compute: Dtype
    num_slots: int
    """Answers generated at the same time."""
    num_columns: int
    """Tokens that each slot keeps keys and values for."""
    prompt_tokens: float
    """Of one prompt, on average."""
    new_tokens: float
    """Of one answer, on average."""
    pass_tokens: int
    """Most tokens of one pass, prompts included."""
    kv_value_bytes: int = 2
    joining_tokens: int = 0
    """Tokens whose keys and values exist twice while their prompts are added to the batch."""
    expands_heads: bool = False
    """One layer's keys and values are repeated for every query head that shares them."""
    is_quantized: bool = False
    """Whole matrices are dequantized before use."""
    replays_steps: bool = False
    """Steps run as CUDA graphs."""
    compute_fraction: float = 1.0
    """Rate of the engine's kernels, of the device's sustained rate."""
    drives_from_python: bool = False
    """Each kernel is launched from Python, which a fast GPU has to wait for."""


class InferenceEstimate(NamedTuple):
    """The estimate of an inference job."""

    components: dict[str, int]
    """Name to bytes, summing to `peak_bytes`."""
    pass_seconds: float
    """One step of all slots."""
    new_tokens_per_second: float
    """Of all slots together, the time for reading prompts included."""
    bound: str
    """What limits a step: `memory bandwidth`, `compute` or `host`."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.components.values())


def estimate_inference(spec: ModelSpec, job: InferenceJob, gpu: Gpu) -> InferenceEstimate:
    """Peak memory on one device, and tokens per second with every slot in use.

    Memory: weights, keys and values, one layer's tensors of the largest pass, scores of the
    last positions, the process. Time: the slower of weights and cache through memory and of the
    arithmetic, or the host where it starts every kernel; prompts cost arithmetic alone.
    Leaves out: spreading over several devices, speculative decoding, sampling.
    """
    rows = job.num_slots * kv_row_bytes(spec, job.num_columns, job.kv_value_bytes)
    parts = inference_components(
        spec,
        weight_bytes=job.weight_bytes,
        kv_bytes=rows + kv_row_bytes(spec, job.joining_tokens, job.kv_value_bytes),
        compute=job.compute,
        num_rows=job.num_slots,
        pass_tokens=job.pass_tokens,
    )
    if job.is_quantized:
        parts["dequantized"] = 2 * most_dequantized(spec, Strategy(weights=Dtype.NF4))
    if job.expands_heads and spec.num_heads > spec.num_kv_heads:
        repeated = 2 * spec.num_heads * spec.head_dim * job.compute.value_bytes
        parts["repeated_heads"] = job.num_slots * job.num_columns * repeated
    moving = sum(size for name, size in parts.items() if name != "weights")
    parts["allocator_slack"] = int(INFERENCE_SLACK_FRACTION * moving)
    name = "process" if gpu.is_cpu else "cuda_context"
    parts[name] = estimate_context_bytes(
        1, is_cpu=gpu.is_cpu, measured_bytes=gpu.measured_context_bytes
    )
    times = _pass_times(spec, job, gpu)
    bound = max(times, key=lambda kind: times[kind])
    reading = estimate_answer_flops(spec, num_prompt=round(job.prompt_tokens), num_new=1)
    prompt_seconds = reading / (job.compute_fraction * sustained_flops(gpu, job.compute))
    per_answer = prompt_seconds + max(job.new_tokens - 1, 0) * times[bound] / job.num_slots
    return InferenceEstimate(
        components={key: size for key, size in parts.items() if size},
        pass_seconds=times[bound],
        new_tokens_per_second=job.new_tokens / per_answer if per_answer else 0.0,
        bound=bound,
    )


class HostShare(NamedTuple):
    """What an engine's own work on the host gets of the cores."""

    num_threads: int = 1
    """Of its products, where the CPU is the device."""
    threads_per_core: float = 1.0
    """That want to run, of all workers and of other programs; at least 1."""
    slowdown: float = 1.0
    """Of the arithmetic, by what other programs use."""


WHOLE_HOST = HostShare()
"""Nobody else wants the cores, or nothing is known of them."""


def add_host_time(
    spec: ModelSpec,
    job: InferenceJob,
    tokens_per_second: float,
    *,
    drives_layers: bool,
    share: HostShare,
) -> float:
    """New tokens a second of one engine, from the device's rate and the host's time for them.

    Every token is chosen and handed on; where Python drives each layer on a CPU, its kernels are
    started one by one; and a product of several threads ends with the last of them, which other
    programs may have displaced. Leaves out the host's time for reading prompts.
    """
    host = HOST_TOKEN_SECONDS
    if drives_layers:
        host += spec.num_layers * HOST_KERNELS_PER_LAYER * HOST_KERNEL_SECONDS / job.num_slots
    waiting = 0.0
    if share.num_threads > 1:
        products = spec.num_layers * PRODUCTS_PER_LAYER + 1
        waiting = products * (share.threads_per_core - 1) * BARRIER_SECONDS / job.num_slots
    device = share.slowdown / tokens_per_second
    return 1 / (device + share.threads_per_core * host + waiting)


def inference_components(
    spec: ModelSpec,
    *,
    weight_bytes: int,
    kv_bytes: int,
    compute: Dtype,
    num_rows: int,
    pass_tokens: int,
) -> dict[str, int]:
    """Tensors at the peak of answering: a prompt is read while the cache is full."""
    value = compute.value_bytes
    widest = 2 * spec.intermediate_size + 4 * spec.hidden_size
    return {
        "weights": weight_bytes,
        "kv_cache": kv_bytes,
        "activations": pass_tokens * widest * value,
        "logits": num_rows * spec.vocab_size * (value + 4),
    }


def kv_row_bytes(spec: ModelSpec, num_tokens: int, value_bytes: int = 2) -> int:
    """Keys and values of every layer for one row of `num_tokens`.

    Layers with a sliding window keep no more than the window. An encoder-decoder's decoder keeps
    the encoder's side too. Leaves out the state of linear attention and Mamba, whose size does
    not grow with the tokens.
    """
    slots = 0
    for group in sum_workload(spec).attention:
        if group.causal:
            kept = min(num_tokens, group.window or num_tokens)
            times = 2 if spec.is_encoder_decoder else 1
            slots += times * group.num_layers * group.head_dim * kept
    return 2 * spec.num_kv_heads * slots * value_bytes


def estimate_read_fraction(spec: ModelSpec, *, num_active: float) -> float:
    """Share of all weights that one pass over `num_active` tokens reads.

    An untied embedding is looked up, not read. Of experts, those that some token chose, if
    they choose uniformly: 1 - (1 - k/E)^tokens.
    """
    unread = 0.0 if spec.tie_embeddings else float(spec.embedding_params)
    for block in spec.blocks:
        for part in block.linears:
            if part.role is Role.EXPERT:
                missed = (1 - part.copies_per_token / part.copies) ** max(num_active, 1.0)
                unread += block.num_layers * part.num_params * missed
    return 1 - (unread + spec.position_params) / spec.num_params


def estimate_answer_flops(
    spec: ModelSpec, *, num_prompt: int, num_new: int, num_cached: int = 0
) -> float:
    """Multiplications and additions of one answer.

    The last new token is never read again, and scores are computed where a token is chosen.
    `num_cached` prompt tokens were read for an earlier request. An encoder-decoder is counted
    as if its decoder read the prompt.
    Source: as `estimate_forward_flops`.
    """
    work = sum_workload(spec)
    num_read = num_prompt + max(num_new - 1, 0)
    products = sum(
        group.num_layers
        * spec.num_heads
        * group.head_dim
        * (
            count_pairs(num_read, causal=group.causal, window=group.window)
            - count_pairs(num_cached, causal=group.causal, window=group.window)
        )
        for group in work.attention
    )
    linear = 2.0 * (num_read - num_cached) * work.weights_used
    return linear + 4.0 * products + 2.0 * num_new * work.head_weights


def _pass_times(spec: ModelSpec, job: InferenceJob, gpu: Gpu) -> dict[str, float]:
    """Seconds of one step of all slots, halfway through their answers, by limiting resource."""
    context = job.prompt_tokens + job.new_tokens / 2
    weights = job.weight_bytes * estimate_read_fraction(spec, num_active=job.num_slots)
    if job.is_quantized and job.num_slots > 1:  # dequantized to memory, and read again from there
        weights += 2 * job.compute.value_bytes * spec.num_params
    cache = job.num_slots * kv_row_bytes(spec, max(1, round(context)), job.kv_value_bytes)
    has_kernels = not job.is_quantized and (gpu.compute_capability or (0, 0)) >= (8, 0)
    if job.replays_steps and has_kernels and job.num_slots > 1:
        weights /= PRODUCT_READ_FRACTION
    grown = round(context) + 1
    flops = job.num_slots * (
        estimate_answer_flops(spec, num_prompt=grown, num_new=1, num_cached=grown - 1)
    )
    times = {
        "memory bandwidth": (weights + cache) / stream_bytes_per_second(gpu),
        "compute": flops / (job.compute_fraction * sustained_flops(gpu, job.compute)),
    }
    if job.replays_steps and not gpu.is_cpu:
        each = REPLAYED_LAYER_SECONDS if has_kernels else PLAIN_REPLAYED_LAYER_SECONDS
        small = spec.num_layers * each
        times = {kind: seconds + small for kind, seconds in times.items()}
    if job.drives_from_python and not gpu.is_cpu:
        times["host"] = spec.num_layers * HOST_KERNELS_PER_LAYER * HOST_KERNEL_SECONDS
    return times
