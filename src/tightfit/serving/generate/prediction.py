"""Prediction of memory and speed for a `generate` run, before the model is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DoesNotFitError, UserError
from tightfit.core.sampling import Sampling
from tightfit.core.strategy import Strategy
from tightfit.core.units import render_bytes
from tightfit.data.templates import Prompter
from tightfit.engines.open import (
    EngineChoice,
    EngineRequest,
    choose_engine,
    probe_installed,
    read_gptq_bits,
)
from tightfit.engines.protocol import choose_context
from tightfit.engines.transformers.rows import (
    CPU_SLOTS,
    PREFILL_COLUMNS,
    PREFILL_TOKENS,
    ROW_SPARE_FRACTION,
    count_gpu_slots,
    round_columns,
)
from tightfit.estimation.inference import (
    WHOLE_HOST,
    HostShare,
    InferenceEstimate,
    InferenceJob,
    add_host_time,
    estimate_inference,
    kv_row_bytes,
)
from tightfit.estimation.memory import judge_fit
from tightfit.estimation.result import Verdict
from tightfit.estimation.weights import estimate_weight_bytes
from tightfit.hardware.local import probe_cpu, probe_here
from tightfit.hardware.machine import read_busy_threads, read_machine
from tightfit.hardware.types import Gpu, Node
from tightfit.models.resolve import measure_weights
from tightfit.models.spec import ModelSpec
from tightfit.runtime.model_files import ArtefactKind
from tightfit.runtime.resolve import resolve_model
from tightfit.serving.generate.prompts import Prompt
from tightfit.serving.generate.run import count_threads

NUM_SAMPLED_PROMPTS = 64
"""Counted with the tokenizer; the lengths of the others follow from their characters."""
VLLM_SLOTS = 256
LLAMA_PASS_TOKENS = 512
"""llama.cpp's `n_ubatch`."""
LLAMA_CPU_FRACTION = 0.18
"""Of the rate of fp32 products, what llama.cpp's kernels for packed weights reach on a CPU: 17 of
96e9 a core, 63 tokens/s of SmolLM2-135M Q4_1 with four answers at a time."""


class PromptLengths(NamedTuple):
    """Of prompts, in tokens."""

    mean: float
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePrediction:
    """Predicted memory and speed of a run, and what they follow from."""

    choice: EngineChoice
    spec: ModelSpec
    gpu: Gpu
    job: InferenceJob
    estimate: InferenceEstimate
    capacity_bytes: int
    """Free on the device now."""
    weight_file_bytes: int | None
    share: HostShare = WHOLE_HOST

    @property
    def drives_layers(self) -> bool:
        """Python starts each kernel, and the CPU that it runs on is the device."""
        return self.gpu.is_cpu and self.choice.engine == "transformers"

    @property
    def new_tokens_per_second(self) -> float:
        """With the host's own time, and the cores that others use."""
        return add_host_time(
            self.spec,
            self.job,
            self.estimate.new_tokens_per_second,
            drives_layers=self.drives_layers,
            share=self.share,
        )

    @property
    def verdict(self) -> Verdict:
        parts = self.estimate.components
        return judge_fit(
            allocated_bytes=self.estimate.peak_bytes - parts.get("allocator_slack", 0),
            reserved_bytes=self.estimate.peak_bytes,
            capacity_bytes=self.capacity_bytes,
        )


def measure_prompts(
    prompts: Sequence[Prompt], prompter: Prompter, *, is_raw: bool
) -> PromptLengths:
    """Mean and longest, from the longest and an even sample of the others."""
    by_size = sorted(
        prompts, key=lambda prompt: -sum(len(message.content) for message in prompt.messages)
    )
    step = max(1, len(by_size) // NUM_SAMPLED_PROMPTS)
    counts: list[int] = []
    for prompt in by_size[::step][:NUM_SAMPLED_PROMPTS]:
        # What cannot be encoded is reported when it is answered.
        with contextlib.suppress(UserError, UnicodeEncodeError):
            tokens = (
                prompter.continue_text(prompt.text)
                if is_raw
                else prompter.ask(prompt.messages, prompt.tools)
            )
            counts.append(len(tokens))
    if not counts:
        return PromptLengths(mean=1.0, longest=1)
    return PromptLengths(mean=sum(counts) / len(counts), longest=max(counts))


def predict_inference(
    request: EngineRequest, lengths: PromptLengths, sampling: Sampling
) -> InferencePrediction | None:
    """Memory and speed of this request. None where the model's shapes are not known."""
    artefact = request.artefact
    choice = choose_engine(request, probe_installed(request), gptq_bits=read_gptq_bits(artefact))
    try:
        spec = resolve_model(str(artefact.base or artefact.path))
    except UserError:
        return None
    node = _find_node(choice.device, request.threads)
    capacity = node.free_gpu_memory_bytes or node.gpu.memory_bytes
    if choice.engine == "llama.cpp":
        job = _llama_job(request, choice, lengths, sampling, capacity)
    else:
        job = _torch_job(request, choice, spec, lengths, sampling, capacity)
    return InferencePrediction(
        choice=choice,
        spec=spec,
        gpu=node.gpu,
        job=job,
        estimate=estimate_inference(spec, job, node.gpu),
        capacity_bytes=capacity,
        weight_file_bytes=artefact.size_bytes or spec.file_bytes,
        share=share_cores(count_threads(request.threads)) if node.gpu.is_cpu else WHOLE_HOST,
    )


def share_cores(num_threads: int, *, num_workers: int = 1) -> HostShare:
    """Of this machine's cores as they are used now, for workers of so many threads."""
    machine = read_machine()
    cores, busy = machine.num_usable_cores, read_busy_threads(machine)
    ours = num_threads * num_workers
    return HostShare(
        num_threads=num_threads,
        threads_per_core=max(1.0, (busy + ours) / cores),
        slowdown=max(1.0, (busy + min(ours, cores)) / cores),
    )


def require_fit(prediction: InferencePrediction, request: EngineRequest) -> None:
    """Raise before anything is loaded where it cannot fit, with what would."""
    if prediction.verdict is not Verdict.DOES_NOT_FIT:
        return
    free = render_bytes(prediction.capacity_bytes)
    remedy = "another --device, a smaller model, or --no-check to try all the same"
    for words, job in _smaller_jobs(prediction, request):
        estimate = estimate_inference(prediction.spec, job, prediction.gpu)
        if replace(prediction, job=job, estimate=estimate).verdict is Verdict.FITS:
            remedy = f"{words}    (needs {render_bytes(estimate.peak_bytes)})"
            break
    raise DoesNotFitError(
        f"{request.artefact.name} needs {render_bytes(prediction.estimate.peak_bytes)} to answer "
        f"{prediction.job.num_slots} prompts at a time; {prediction.gpu.name} has {free} free.",
        remedy=remedy,
    )


def _smaller_jobs(
    prediction: InferencePrediction, request: EngineRequest
) -> Iterator[tuple[str, InferenceJob]]:
    """Options that need less memory, the least painful first, and the job each gives."""
    job = prediction.job
    slots = job.num_slots // 2
    while slots:
        yield f"--parallel {slots}", _with_slots(job, slots)
        slots //= 2
    plain = (ArtefactKind.MODEL, ArtefactKind.ADAPTER)
    can_pack = prediction.choice.engine == "transformers" and request.artefact.kind in plain
    if can_pack and not job.is_quantized:
        packed = Strategy(weights=Dtype.NF4, double_quant=True)
        size = estimate_weight_bytes(prediction.spec, packed).total
        small = replace(job, weight_bytes=size, is_quantized=True)
        yield "--weights nf4", small
        yield "--weights nf4 --parallel 1", _with_slots(small, 1)
        job = small
    columns = job.num_columns // 2
    while columns >= 256:
        yield f"--context {columns} --parallel 1", replace(_with_slots(job, 1), num_columns=columns)
        columns //= 2


def _with_slots(job: InferenceJob, slots: int) -> InferenceJob:
    joining = min(job.joining_tokens, slots * job.num_columns)
    return replace(job, num_slots=slots, joining_tokens=joining)


def _llama_job(
    request: EngineRequest,
    choice: EngineChoice,
    lengths: PromptLengths,
    sampling: Sampling,
    capacity_bytes: int,
) -> InferenceJob:
    from tightfit.engines import llama_cpp

    file = llama_cpp.read_llama_file(request.artefact.path)
    context = choose_context(request.context, file.context)
    is_cpu = choice.device == "cpu"
    room = capacity_bytes * llama_cpp.SPARE_MEMORY_FRACTION
    most = int(room // max(1, file.kv_bytes_per_token * context))
    most = min(most, llama_cpp.CPU_SLOTS if is_cpu else llama_cpp.GPU_SLOTS)
    slots = request.slots or max(1, most)
    return InferenceJob(
        weight_bytes=file.weight_bytes,
        compute=Dtype.FP32 if is_cpu else Dtype.FP16,
        num_slots=slots,
        num_columns=context,
        prompt_tokens=lengths.mean,
        new_tokens=sampling.max_new_tokens,
        pass_tokens=min(LLAMA_PASS_TOKENS, context * slots),
        kv_value_bytes=llama_cpp.KV_VALUE_BYTES,
        compute_fraction=LLAMA_CPU_FRACTION if is_cpu else 1.0,
    )


def _torch_job(
    request: EngineRequest,
    choice: EngineChoice,
    spec: ModelSpec,
    lengths: PromptLengths,
    sampling: Sampling,
    capacity_bytes: int,
) -> InferenceJob:
    is_cpu = choice.device == "cpu"
    is_ours = choice.engine == "transformers"
    weights, compute, weight_bytes = _torch_weights(request, choice.device, spec)
    context = choose_context(request.context, spec.max_positions)
    slots = request.slots
    if slots is None and is_cpu:
        slots = CPU_SLOTS
    elif slots is None and not is_ours:
        slots = VLLM_SLOTS
    elif slots is None:
        row_bytes = kv_row_bytes(spec, max(1, context // 2), compute.value_bytes)
        slots = count_gpu_slots(capacity_bytes - weight_bytes, row_bytes)
    longest = lengths.longest
    prefill = max(longest, min(PREFILL_TOKENS["cpu" if is_cpu else "cuda"], slots * longest))
    columns = min(context, longest + sampling.max_new_tokens)
    has_rows = is_ours and is_cpu  # on a GPU, fixed slots whose steps are replayed as graphs
    return InferenceJob(
        weight_bytes=weight_bytes,
        compute=compute,
        num_slots=slots,
        num_columns=int(columns * (1 + ROW_SPARE_FRACTION)) if has_rows else round_columns(columns),
        prompt_tokens=lengths.mean,
        new_tokens=sampling.max_new_tokens,
        pass_tokens=prefill * min(PREFILL_COLUMNS, longest) // longest,
        kv_value_bytes=compute.value_bytes,
        joining_tokens=prefill if is_ours else 0,
        expands_heads=has_rows,
        is_quantized=weights.is_quantized,
        replays_steps=is_ours and not is_cpu,
    )


def _torch_weights(
    request: EngineRequest, device_name: str, spec: ModelSpec
) -> tuple[Dtype, Dtype, int]:
    """The weights' format in memory, the compute dtype, and the weights' bytes."""
    from tightfit.runtime.libraries import silence_libraries

    silence_libraries()  # before the import that makes libraries talk
    from tightfit.runtime.inference import choose_device, choose_dtype, choose_load

    artefact = request.artefact
    device = choose_device(device_name)
    if artefact.kind in (ArtefactKind.GPTQ, ArtefactKind.BITSANDBYTES):
        kind = Dtype.GPTQ4 if artefact.kind is ArtefactKind.GPTQ else Dtype.NF4
        return kind, choose_dtype(device), artefact.size_bytes or spec.file_bytes or 0
    strategy = choose_load(artefact, request.weights, device)
    size = estimate_weight_bytes(spec, strategy).total
    if artefact.kind is ArtefactKind.ADAPTER:
        size += measure_weights(artefact.path) or 0
    return strategy.weights, strategy.compute, size


def _find_node(device: str, threads: int | None) -> Node:
    """The device; of a CPU, the share of its rates that the engine's threads can reach."""
    if device != "cpu":
        return probe_here().groups[0].node
    node = probe_cpu().groups[0].node
    share = min(1.0, count_threads(threads) / (node.num_cores or 1))
    rates = {kind: share * rate for kind, rate in node.gpu.peak_flops.items()}
    reach = share * node.gpu.memory_bytes_per_second
    return node.model_copy(
        update={
            "gpu": node.gpu.model_copy(
                update={"peak_flops": rates, "memory_bytes_per_second": reach}
            )
        }
    )
