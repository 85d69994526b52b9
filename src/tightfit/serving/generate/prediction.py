"""Prediction of memory and speed for a `generate` run, before the model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import DoesNotFitError, UserError
from tightfit.core.sampling import Sampling
from tightfit.core.strategy import Strategy
from tightfit.core.units import render_bytes
from tightfit.data.prompter import Prompter
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
    KV_MEMORY_FRACTION,
    MAX_GPU_SLOTS,
    PREFILL_COLUMNS,
    PREFILL_TOKENS,
    ROW_SPARE_FRACTION,
    round_columns,
)
from tightfit.estimation.inference import (
    InferenceEstimate,
    InferenceJob,
    estimate_inference,
    kv_row_bytes,
)
from tightfit.estimation.memory import judge_fit
from tightfit.estimation.result import Verdict
from tightfit.estimation.weights import estimate_weight_bytes
from tightfit.hardware.local import probe_cpu, probe_here
from tightfit.hardware.types import Gpu, Node
from tightfit.models.resolve import measure_weights, resolve_model
from tightfit.models.spec import ModelSpec
from tightfit.runtime.artefacts import Artefact, ArtefactKind
from tightfit.serving.generate.measure import count_threads
from tightfit.serving.generate.prompts import Prompt

NUM_SAMPLED_PROMPTS = 64
"""Counted with the tokenizer; the lengths of the others follow from their characters."""
VLLM_SLOTS = 256
LLAMA_PASS_TOKENS = 512
"""llama.cpp's `n_ubatch`."""
LLAMA_CPU_FRACTION = 0.18
"""Of the rate of fp32 products, what llama.cpp's kernels for packed weights reach on a CPU: 17 of
96e9 a core, 63 tokens/s of SmolLM2-135M Q4_1 with four answers at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLengths:
    """Of prompts, in tokens."""

    mean: float
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePrediction:
    """What is expected of a run."""

    choice: EngineChoice
    spec: ModelSpec
    gpu: Gpu
    job: InferenceJob
    estimate: InferenceEstimate
    capacity_bytes: int
    """Free on the device now."""
    weight_file_bytes: int | None

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
    sizes = [sum(len(message.content) for message in prompt.messages) for prompt in prompts]
    by_size = sorted(range(len(prompts)), key=lambda place: -sizes[place])
    step = max(1, len(by_size) // NUM_SAMPLED_PROMPTS)
    sampled = by_size[::step][:NUM_SAMPLED_PROMPTS]
    counted: dict[int, int] = {}
    for place in sampled:
        try:
            prompt = prompts[place]
            tokens = (
                prompter.continue_text(prompt.text) if is_raw else prompter.ask(prompt.messages)
            )
            counted[place] = len(tokens)
        except (UserError, UnicodeEncodeError):
            continue  # reported when it is answered
    if not counted:
        return PromptLengths(mean=1.0, longest=1)
    mean = sum(counted.values()) / len(counted)
    return PromptLengths(mean=mean, longest=max(counted.values()))


def predict_inference(
    request: EngineRequest, lengths: PromptLengths, sampling: Sampling
) -> InferencePrediction | None:
    """Memory and speed of this request. None where the model's shapes are not known."""
    artefact = request.artefact
    choice = choose_engine(
        artefact, request, probe_installed(request), gptq_bits=read_gptq_bits(artefact)
    )
    try:
        spec = resolve_model(str(artefact.base or artefact.path))
    except UserError:
        return None
    node = _find_node(choice.device, request.threads)
    capacity = node.free_gpu_memory_bytes or node.gpu.memory_bytes
    case = _Case(request, choice, spec, lengths, sampling, capacity)
    job = case.make_job()
    return InferencePrediction(
        choice=choice,
        spec=spec,
        gpu=node.gpu,
        job=job,
        estimate=estimate_inference(spec, job, node.gpu),
        capacity_bytes=capacity,
        weight_file_bytes=_file_bytes(artefact, spec),
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
    """Ways to need less, the least painful first."""
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


@dataclass(frozen=True, slots=True)
class _Case:
    request: EngineRequest
    choice: EngineChoice
    spec: ModelSpec
    lengths: PromptLengths
    sampling: Sampling
    capacity_bytes: int

    @property
    def _longest(self) -> int:
        """Of prompt and answer together."""
        return min(self._context, self.lengths.longest + self.sampling.max_new_tokens)

    @property
    def _context(self) -> int:
        return choose_context(self.request.context, self.spec.max_positions)

    def make_job(self) -> InferenceJob:
        if self.choice.engine == "llama.cpp":
            return self._of_llama()
        return self._of_torch()

    def _of_llama(self) -> InferenceJob:
        from tightfit.engines.llama_cpp import (
            CPU_SLOTS,
            GPU_SLOTS,
            KV_VALUE_BYTES,
            SPARE_MEMORY_FRACTION,
            read_llama_file,
        )

        file = read_llama_file(self.request.artefact.path)
        context = choose_context(self.request.context, file.context)
        is_cpu = self.choice.device == "cpu"
        room = self.capacity_bytes * SPARE_MEMORY_FRACTION
        most = int(room // max(1, file.kv_bytes_per_token * context))
        slots = self.request.slots or max(1, min(CPU_SLOTS if is_cpu else GPU_SLOTS, most))
        return InferenceJob(
            weight_bytes=file.weight_bytes,
            compute=Dtype.FP32 if is_cpu else Dtype.FP16,
            num_slots=slots,
            num_columns=context,
            prompt_tokens=self.lengths.mean,
            new_tokens=self.sampling.max_new_tokens,
            pass_tokens=min(LLAMA_PASS_TOKENS, context * slots),
            kv_value_bytes=KV_VALUE_BYTES,
            compute_fraction=LLAMA_CPU_FRACTION if is_cpu else 1.0,
        )

    def _of_torch(self) -> InferenceJob:
        is_cpu = self.choice.device == "cpu"
        weights, compute, size = self._weights()
        slots = self.request.slots or (CPU_SLOTS if is_cpu else self._gpu_slots(size, compute))
        most = PREFILL_TOKENS["cpu" if is_cpu else "cuda"]
        longest = self.lengths.longest
        prefill = max(longest, min(most, slots * longest))
        is_ours = self.choice.engine == "transformers"
        has_rows = is_ours and is_cpu  # on a GPU, fixed slots whose steps are replayed as graphs
        columns = (
            int(self._longest * (1 + ROW_SPARE_FRACTION))
            if has_rows
            else round_columns(self._longest)
        )
        return InferenceJob(
            weight_bytes=size,
            compute=compute,
            num_slots=slots,
            num_columns=columns,
            prompt_tokens=self.lengths.mean,
            new_tokens=self.sampling.max_new_tokens,
            pass_tokens=prefill * min(PREFILL_COLUMNS, longest) // longest,
            kv_value_bytes=compute.value_bytes,
            joining_tokens=prefill if is_ours else 0,
            expands_heads=has_rows,
            is_quantized=weights.is_quantized,
            replays_steps=is_ours and not is_cpu,
        )

    def _weights(self) -> tuple[Dtype, Dtype, int]:
        """How they lie in memory, what is computed in, and their bytes."""
        from tightfit.runtime.libraries import silence_libraries

        silence_libraries()  # before the import that makes libraries talk
        from tightfit.runtime.load_for_inference import choose_device, choose_dtype, choose_load

        artefact = self.request.artefact
        device = choose_device(self.choice.device)
        if artefact.kind in (ArtefactKind.GPTQ, ArtefactKind.BITSANDBYTES):
            kind = Dtype.GPTQ4 if artefact.kind is ArtefactKind.GPTQ else Dtype.NF4
            return kind, choose_dtype(device), _file_bytes(artefact, self.spec) or 0
        load = choose_load(artefact, self.request.weights, device)
        strategy = Strategy(
            weights=load.weights, compute=load.compute, double_quant=load.double_quant
        )
        size = estimate_weight_bytes(self.spec, strategy).total
        if artefact.kind is ArtefactKind.ADAPTER:
            size += measure_weights(artefact.path) or 0
        return load.weights, load.compute, size

    def _gpu_slots(self, weight_bytes: int, compute: Dtype) -> int:
        if self.choice.engine == "vllm":
            return VLLM_SLOTS
        each = kv_row_bytes(self.spec, max(1, self._context // 2), compute.value_bytes)
        free = max(0, self.capacity_bytes - weight_bytes)
        return max(1, min(MAX_GPU_SLOTS, int(free * KV_MEMORY_FRACTION // max(1, each))))


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


def _file_bytes(artefact: Artefact, spec: ModelSpec) -> int | None:
    if artefact.path.is_file():
        return artefact.path.stat().st_size
    if artefact.base is not None:
        return (measure_weights(artefact.base) or 0) + (measure_weights(artefact.path) or 0)
    return measure_weights(artefact.path) or spec.file_bytes
