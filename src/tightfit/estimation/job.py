"""The whole estimate of one job: memory by phase, host, disk, time and verdict."""

from __future__ import annotations

from functools import partial

from tightfit.core.dtypes import Dtype
from tightfit.core.profiles import DataProfile
from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy
from tightfit.core.trainers import find_trainer
from tightfit.core.units import GIB, render_bytes
from tightfit.estimation.activations import estimate_layer_bytes, estimate_loss_bytes
from tightfit.estimation.communication import describe_network
from tightfit.estimation.host_and_disk import (
    DEFAULT_CHECKPOINTS,
    estimate_disk_components,
    estimate_host_components,
    estimate_phase_host_bytes,
)
from tightfit.estimation.inference import inference_components, kv_row_bytes
from tightfit.estimation.memory import (
    Moment,
    estimate_context_bytes,
    estimate_moments,
    find_error_fraction,
    judge_fit,
    list_reserved_components,
    peak_moment,
)
from tightfit.estimation.result import (
    DiskSpace,
    Estimate,
    EstimateSummary,
    GpuMemory,
    HostMemory,
    ParameterCounts,
    Phase,
    Verdict,
)
from tightfit.estimation.state import StateBytes, estimate_buffer_bytes, estimate_state_bytes
from tightfit.estimation.step_time import estimate_step_time
from tightfit.estimation.weights import (
    NF4_BLOCK,
    as_loaded,
    as_used_for_inference,
    estimate_weight_bytes,
    largest_layer,
    largest_matrix,
    most_dequantized,
    num_trainable,
    packs_experts,
)
from tightfit.hardware.types import Node
from tightfit.models.spec import ModelSpec, Role

# Phases around the training step: load, eval, save, merge, quantize, inference

LOAD = "load"
CALIBRATION_ROWS = 128
CALIBRATION_LENGTH = 2048
"""GPTQ's usual calibration set. Source: arXiv:2210.17323 section 4."""


def estimate_phases(spec: ModelSpec, strategy: Strategy, *, is_cpu: bool = False) -> list[Moment]:
    """Peaks of all phases but the training step, on the fullest GPU."""
    phases = [estimate_load(spec, strategy)]
    if strategy.is_trained:
        phases += [_eval(spec, strategy, is_cpu=is_cpu), _save(spec, strategy)]
        if strategy.method is Method.LORA:
            # Layer by layer: the base matrix in 16 bit, and in fp32 while its adapter is added.
            weights, added = 2 * largest_layer(spec), 8 * largest_matrix(spec)
            phases.append(_make_moment("merge", weights=weights, activations=added))
    return [*phases, _quantize(spec), _inference(spec, strategy)]


def _make_moment(name: str, **parts: int) -> Moment:
    return Moment(name=name, components={key: size for key, size in parts.items() if size})


def _weight_parts(state: StateBytes) -> dict[str, int]:
    return {
        "weights": state.weights,
        "quantization": state.quantization,
        "adapters": state.adapters,
    }


def estimate_load(spec: ModelSpec, strategy: Strategy) -> Moment:
    """Weights are loaded matrix by matrix; each is held in 16 bit while it is quantized.

    A dequantized base is loaded in nf4: the last matrix exists beside its codes and scales, which
    double quantization dequantizes first. fp8 is cast last, matrix by matrix, with a scaled bf16
    copy; from a bf16 base all matrices are there, from nf4 only the one being cast.
    """
    temporary = 2 * most_dequantized(spec, strategy) if strategy.weights.is_quantized else 0
    if strategy.stores_fp8:
        others = 0 if strategy.dequantized_base else spec.linear_params - largest_matrix(spec)
        temporary = others + 4 * largest_matrix(spec)
    elif strategy.dequantized_base:
        scales = most_dequantized(spec, as_used_for_inference(strategy)) // NF4_BLOCK
        temporary = NF4_BLOCK * scales // 2 + (5 if strategy.double_quant else 4) * scales
    gathered = estimate_buffer_bytes(spec, strategy).forward if strategy.is_trained else 0
    parts = _weight_parts(estimate_state_bytes(spec, strategy))
    return _make_moment(LOAD, **parts, communication=gathered, dequantized=temporary)


def _eval(spec: ModelSpec, strategy: Strategy, *, is_cpu: bool) -> Moment:
    """One batch of the training size without gradients: one layer's tensors and the loss."""
    state, buffers = estimate_state_bytes(spec, strategy), estimate_buffer_bytes(spec, strategy)
    layers = [estimate_layer_bytes(spec, b, strategy, is_cpu=is_cpu) for b in spec.blocks]
    return _make_moment(
        "eval",
        **_weight_parts(state),
        optimizer=state.optimizer,
        reference=state.reference,
        activations=strategy.tokens_per_micro_batch * max(layer.saved for layer in layers),
        logits=estimate_loss_bytes(spec, strategy).forward,
        communication=buffers.forward,
        dequantized=buffers.dequantized_forward,
        weight_norms=buffers.weight_norms,
    )


def _save(spec: ModelSpec, strategy: Strategy) -> Moment:
    """Sharded tensors are gathered one at a time, then copied to the host."""
    state, gathered = estimate_state_bytes(spec, strategy), 0
    if strategy.sharding.shards_weights:
        trained = min(num_trainable(spec, strategy), spec.embedding_params)
        gathered = trained * (4 if strategy.weights is Dtype.FP32 else 2)
    parts = _weight_parts(state) | {"reference": state.reference}
    return _make_moment("save", **parts, optimizer=state.optimizer, communication=gathered)


def _quantize(spec: ModelSpec) -> Moment:
    """GPTQ, one layer at a time: weights, one fp32 Hessian and its inverse, calibration inputs."""
    widest = max(part.in_features for block in spec.blocks for part in block.linears)
    inputs = 2 * CALIBRATION_ROWS * CALIBRATION_LENGTH * spec.hidden_size
    return _make_moment(
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

    fp8 is used for training only: inference uses the base as stored.
    """
    strategy = as_used_for_inference(strategy)
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
    parts["dequantized"] = (
        2 * most_dequantized(spec, strategy) if strategy.weights.is_quantized else 0
    )
    return _make_moment("inference", **parts)


HOST_SHARE_FRACTION = 0.95
"""Share of a node's memory that a job may use; the rest is the system's."""


def count_inputs_for_host(spec: ModelSpec, strategy: Strategy, capacity_bytes: int | None) -> int:
    """Layers' inputs that the host memory of a node has room for beside the rest of the job."""
    if capacity_bytes is None:
        return spec.num_layers
    none, one = (
        estimate_phase_host_bytes(spec, strategy.model_copy(update={"offloaded_inputs": count}))
        for count in (0, 1)
    )
    each = max(1, one["step"] - none["step"])
    return max(0, int(HOST_SHARE_FRACTION * capacity_bytes - none["step"]) // each)


def exceeds_host_memory(host: HostMemory) -> bool:
    """Whether the job needs more host memory than it may use; False if the node's is unknown."""
    capacity = host.capacity_bytes
    return capacity is not None and host.peak_bytes > HOST_SHARE_FRACTION * capacity


def estimate_job_summary(
    *,
    spec: ModelSpec,
    strategy: Strategy,
    node: Node,
    network_bytes_per_second: float | None = None,
    profile: DataProfile | None = None,
) -> EstimateSummary:
    """Whether `strategy` fits on nodes like `node`, and the time of its step."""
    strategy = as_loaded(spec, strategy)
    gpu = _gpu_memory(spec, strategy, node, _list_moments(spec, strategy, node))
    host = estimate_host_components(spec, strategy, num_examples=_count_examples(profile))
    if node.gpu.is_cpu:  # host memory is device memory
        host = {"processes": strategy.gpus_per_node * gpu.peak_reserved_bytes}
    host_memory = HostMemory(
        peak_bytes=sum(host.values()), capacity_bytes=node.host_memory_bytes, components=host
    )
    error = find_error_fraction(strategy)
    verdict, reason = _verdict(gpu, host_memory, node, error_fraction=error)
    return EstimateSummary(
        verdict=verdict,
        reason=reason,
        gpu=gpu,
        host=host_memory,
        time=estimate_step_time(
            spec=spec,
            strategy=strategy,
            node=node,
            network_bytes_per_second=network_bytes_per_second,
            profile=profile,
            num_trainable=num_trainable(spec, strategy),
        ),
    )


def estimate_job(
    *,
    spec: ModelSpec,
    strategy: Strategy,
    node: Node,
    network_bytes_per_second: float | None = None,
    profile: DataProfile | None = None,
    num_checkpoints: int = DEFAULT_CHECKPOINTS,
) -> Estimate:
    """The estimate of `strategy` on nodes like `node`. Does not check whether it is legal.

    `num_checkpoints` are kept on disk beside the one being written.
    """
    asked, strategy = strategy, as_loaded(spec, strategy)
    summary = estimate_job_summary(
        spec=spec,
        strategy=strategy,
        node=node,
        network_bytes_per_second=network_bytes_per_second,
        profile=profile,
    )
    disk = estimate_disk_components(
        spec,
        strategy,
        num_checkpoints=num_checkpoints,
        num_examples=_count_examples(profile),
    )
    assumptions = _assumptions(spec, strategy, node, network_bytes_per_second)
    if strategy.weights is not asked.weights and not strategy.dequantized_base:
        assumptions.insert(
            0,
            f"transformers packs none of {spec.model_type}'s layers: {asked.weights.value} weights "
            f"stay {strategy.weights.value}",
        )
    return Estimate(
        verdict=summary.verdict,
        reason=summary.reason,
        parameters=ParameterCounts(
            total=spec.num_params,
            trainable=num_trainable(spec, strategy),
            active=spec.num_active_params,
        ),
        gpu=summary.gpu,
        host=summary.host,
        disk=DiskSpace(bytes=sum(disk.values()), components=disk),
        time=summary.time,
        phases=_phases(spec, strategy, node, summary.gpu),
        assumptions=tuple(assumptions),
    )


def _count_examples(profile: DataProfile | None) -> int:
    return 0 if profile is None else profile.num_rows


def _list_moments(spec: ModelSpec, strategy: Strategy, node: Node) -> list[Moment]:
    """Moments of the step; none for method `load`."""
    if not strategy.is_trained:
        return []
    return estimate_moments(spec, strategy, is_cpu=node.gpu.is_cpu)


def _gpu_memory(
    spec: ModelSpec, strategy: Strategy, node: Node, moments: list[Moment]
) -> GpuMemory:
    is_cpu = node.gpu.is_cpu
    context = node.gpu.measured_context_bytes
    # A frozen fp8 base is larger while loading; otherwise training needs at least as much.
    is_loading = not moments or strategy.stores_fp8
    peak = peak_moment([*moments, *([estimate_load(spec, strategy)] if is_loading else [])])
    others = moments if peak in moments else []
    components = list_reserved_components(
        peak, others, strategy, is_cpu=is_cpu, measured_context_bytes=context
    )
    return GpuMemory(
        peak_phase=peak.name,
        peak_allocated_bytes=peak.allocated_bytes,
        peak_reserved_bytes=sum(components.values()),
        context_bytes=estimate_context_bytes(
            strategy.world_size, is_cpu=is_cpu, measured_bytes=context
        ),
        capacity_bytes=node.free_gpu_memory_bytes or node.gpu.memory_bytes,
        components=components,
    )


def _phases(spec: ModelSpec, strategy: Strategy, node: Node, gpu: GpuMemory) -> tuple[Phase, ...]:
    moments = _list_moments(spec, strategy, node)
    is_cpu = node.gpu.is_cpu
    held = partial(
        list_reserved_components,
        strategy=strategy,
        is_cpu=is_cpu,
        measured_context_bytes=node.gpu.measured_context_bytes,
    )
    host = estimate_phase_host_bytes(spec, strategy)

    def phase(moment: Moment, parts: dict[str, int]) -> Phase:
        total = sum(parts.values())
        on_host = strategy.gpus_per_node * total if is_cpu else None
        return Phase(
            name=moment.name,
            peak_allocated_bytes=moment.allocated_bytes,
            peak_reserved_bytes=total,
            components=parts,
            host_peak_bytes=on_host or host.get(moment.name, host["step"]),
        )

    def within(parts: dict[str, int]) -> dict[str, int]:
        """Slack limited to the step's peak reserve, which no moment exceeds."""
        over = max(0, sum(parts.values()) - gpu.peak_reserved_bytes)
        return parts | {"allocator_slack": max(0, parts["allocator_slack"] - over)}

    steps = (phase(m, within(held(m, moments))) for m in moments)
    around = estimate_phases(spec, strategy, is_cpu=is_cpu)
    load, *later = (phase(m, held(m, [])) for m in around)
    return (load, *steps, *later)


def _verdict(
    gpu: GpuMemory, host: HostMemory, node: Node, *, error_fraction: float
) -> tuple[Verdict, str]:
    verdict = judge_fit(
        allocated_bytes=gpu.peak_allocated_bytes + gpu.context_bytes,
        reserved_bytes=gpu.peak_reserved_bytes,
        capacity_bytes=gpu.capacity_bytes,
        error_fraction=error_fraction,
    )
    needs = render_bytes(gpu.peak_reserved_bytes)
    has = f"{node.gpu.name} has {render_bytes(gpu.capacity_bytes)}"
    per = "per process" if node.gpu.is_cpu else "per GPU"
    if exceeds_host_memory(host) and not node.gpu.is_cpu:
        return (
            Verdict.DOES_NOT_FIT,
            f"needs {render_bytes(host.peak_bytes)} of host memory per node; the node has "
            f"{render_bytes(host.capacity_bytes or 0)}, {HOST_SHARE_FRACTION:.0%} of which a job "
            "may take",
        )
    if verdict is Verdict.FITS:
        spare = render_bytes(gpu.capacity_bytes - gpu.peak_reserved_bytes)
        return verdict, f"needs {needs} {per}; {has} ({spare} to spare)"
    if verdict is Verdict.TIGHT:
        tensors = gpu.peak_allocated_bytes + gpu.context_bytes
        outside = "the process" if node.gpu.is_cpu else "CUDA"
        outlook = "it may run, with retries, or run out of memory"
        if tensors > gpu.capacity_bytes:
            outlook = "too little by less than this estimate can be off"
        return verdict, (
            f"needs {render_bytes(tensors)} for tensors and {outside}, {needs} with the "
            f"allocator's slack, {per}; {has}: {outlook}"
        )
    short = render_bytes(gpu.peak_allocated_bytes + gpu.context_bytes - gpu.capacity_bytes)
    return verdict, f"needs {needs} {per}; {has} ({short} short)"


def _assumptions(
    spec: ModelSpec, strategy: Strategy, node: Node, network_bytes_per_second: float | None
) -> list[str]:
    found = list(spec.warnings)
    if strategy.trainer and (doubt := find_trainer(strategy.trainer).reservation):
        found.append(doubt)
    if node.host_memory_bytes is None:
        found.append("host memory was not stated: it is not checked")
    network = describe_network(strategy, network_bytes_per_second)
    if network is not None:
        found.append(network)
    packed = as_used_for_inference(strategy)
    is_by_module = packed.weights.is_quantized and packed.weights is not Dtype.GPTQ4
    experts = [part for b in spec.blocks for part in b.linears if part.role is Role.EXPERT]
    if is_by_module and any(not (p.is_grouped and packs_experts(packed)) for p in experts):
        found.append(
            f"the experts stay in 16 bit: {packed.weights.value} loading packs linear modules, "
            "and transformers keeps experts as bare parameters"
        )
    if node.gpu.measured is not None:
        found.append(f"rates measured here on {node.gpu.measured.date} by tightfit calibrate")
    if node.gpu.memory_bytes < GIB:
        device = "CPU" if node.gpu.is_cpu else "GPU"
        found.append(f"the {device} has less than 1 GiB of memory")
    return found
