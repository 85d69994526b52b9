"""From a job to its traced memory: record a few layers on fake tensors (training steps, then
evaluation, save, generation, resume), extend to full depth, replay, sum up.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.core.child_process import end_with_parent
from tightfit.core.files import temporary_folder
from tightfit.core.objectives import ExampleKind
from tightfit.core.objectives import Objective as ObjectiveKind
from tightfit.core.settings import MAX_SEQ_LEN, Sharding
from tightfit.core.strategy import Strategy
from tightfit.data.token_store import EncodedRow, StoreDescription, TokenStore
from tightfit.runtime.attention import REPEAT, name_inference_attention, needs_padding_mask
from tightfit.runtime.layers import decoder_layers
from tightfit.trace.caching_allocator import (
    AllocatorSettings,
    CachingAllocator,
    Replay,
    find_smallest_capacity,
    replay,
)
from tightfit.trace.concrete_values import set_concrete_value
from tightfit.trace.depth import (
    CannotExtend,
    DepthExtrapolation,
    extend_operation_log,
    fill_defaults,
    find_extrapolation_obstacle,
    find_fewest_recomputed,
    plan_depths,
    read_depth,
    with_depth,
)
from tightfit.trace.gpu_emulation import GpuEmulation
from tightfit.trace.recorder import Recorder, track_modules
from tightfit.trace.recording import (
    GRADIENTS,
    INPUTS,
    KV_CACHE,
    OTHER_PROCESSES,
    WEIGHTS,
    Recording,
    build_timeline,
    describe_peak,
    list_stage_peaks,
)
from tightfit.trace.result import OperationLog, TracedMemory
from tightfit.trace.tracer import TraceResponse, list_versions
from tightfit.training.batches import (
    Batch,
    BatchMaker,
    Collate,
    ReferenceLogProbs,
    collate_encoder_decoder,
    collate_packed,
    collate_padded,
)
from tightfit.training.engine import evaluating, init_optimizer_state
from tightfit.training.step import measure_kl, train_step, with_kl
from tightfit.training.tracing.engine import (
    FAKE_DEVICE,
    MicroBatchesDifferError,
    RecordedEngine,
    build_fake_engine,
    build_meta_module,
    fake_process_group,
    list_local_tensors,
    make_training,
    mark_optimizer_state,
    record_fsdp,
)
from tightfit.training.tracing.fake_kernels import (
    import_libraries,
    list_quantization_state,
    without_kernels,
)
from tightfit.training.tracing.job import Document, TraceJob, find_trace_obstacle
from tightfit.training.zero import to_deepspeed_strategy

if TYPE_CHECKING:
    from transformers import PretrainedConfig


# Record one job on fake tensors: training steps, then evaluation, save, generation, resume.


def make_real_batch(job: TraceJob, config: PretrainedConfig) -> Batch:
    """One micro-batch in host memory, collated as in training, for a model of this `config`."""
    rows = job.rows or list_longest_rows(job, is_pair=config.is_encoder_decoder)
    if config.is_encoder_decoder:
        return collate_encoder_decoder([_encode(row) for row in rows], pad_token_id=0)
    has_mask = job.strategy.quirks.padding_mask or needs_padding_mask(config)
    collate = partial(collate_padded, pad_token_id=0, has_mask=has_mask)
    if job.strategy.packing:
        collate = partial(collate_packed, pad_token_id=0)
    if job.strategy.objective is ObjectiveKind.SFT:
        return collate([_encode(row) for row in rows])
    return _make_preference_batch(job.strategy, rows, collate)


def _encode(row: Sequence[Document]) -> list[EncodedRow]:
    return [
        EncodedRow(
            np.ones(document.num_tokens, dtype=np.int32),
            np.arange(document.num_tokens) >= document.num_prompt,
            "",
        )
        for document in row
    ]


class _MadeRows(TokenStore):
    """Rows that are in memory; each is one of an example's, which are as long."""

    def __init__(self, rows: Sequence[EncodedRow], example: ExampleKind) -> None:
        construct: Any = StoreDescription.model_construct  # without what only files need
        self.description = construct(example=example, seq_len=MAX_SEQ_LEN)
        size = self.description.rows_per_example
        self._rows = [row for row in rows for _ in range(size)]
        self.lengths = np.array([len(row.tokens) for row in self._rows], dtype=np.int32)
        self.num_trained = np.array(
            [int(row.trained[1:].sum()) for row in self._rows], dtype=np.int32
        )
        is_labelled = example is ExampleKind.LABELLED
        self.is_good = np.arange(len(self._rows)) % 2 == 0 if is_labelled else None

    def row(self, index: int) -> EncodedRow:
        return self._rows[index]


def _make_preference_batch(
    strategy: Strategy, rows: Sequence[Sequence[Document]], collate: Collate
) -> Batch:
    """Both answers of a pair are as long; KTO's mismatched rows are as long as its own."""
    record = strategy.objective.record
    store = _MadeRows([one for row in rows for one in _encode(row)], record.example)
    maker = BatchMaker(store, collate, needs_kl=record.needs_kl)
    if strategy.precompute_reference:
        nothing = np.zeros(len(store), dtype=np.float32)
        maker.reference = ReferenceLogProbs(nothing, nothing if record.needs_kl else None)
    items, start = [], 0
    for row in rows:
        end = start + len(row) * record.num_sequences
        items.append(tuple(range(start, end, record.num_sequences)))
        start = end
    return maker.make(items)


def list_longest_rows(job: TraceJob, *, is_pair: bool = False) -> tuple[tuple[Document, ...], ...]:
    """The largest batch that the plan allows, with every token trained.

    Unpacked rows differ in length by one token, so that a mask, if there is one, masks something.
    A pair has a prompt of the same length for the encoder.
    """
    strategy = job.strategy
    length = strategy.seq_len
    if strategy.packing:
        mean = min(job.document_len or length, length)
        whole, rest = divmod(length, mean)
        row = (Document(num_tokens=mean),) * whole
        row += (Document(num_tokens=rest),) if rest else ()
        return (row,) * strategy.micro_batch
    less = max(1, length - 1)
    first, others = (
        (Document(num_tokens=2 * size, num_prompt=size) if is_pair else Document(num_tokens=size),)
        for size in (length, less)
    )
    return (first, *(others,) * (strategy.micro_batch - 1))


def make_fake_batch(real: Batch, device: torch.device) -> Batch:
    """The batch as fake tensors with known values. Call inside the fake mode."""
    return {
        name: set_concrete_value(
            torch.empty(values.shape, dtype=values.dtype, device=device), values
        )
        for name, values in real.items()
    }


# Stages after training


def run_stages(job: TraceJob, engine: Any, batch: Batch, recorder: Recorder) -> None:
    """Run the job's stages after training, in their order."""
    recorder.step = 0
    names = job.stages
    if "eval" in names:
        with recorder.setting("stage", "eval"), evaluating(engine):
            scored = _make_eval_batch(job, engine.model.config, batch, recorder)
            if job.strategy.objective.record.needs_kl:
                scored = with_kl(scored, measure_kl(engine, [scored], num_examples=1))
            engine.module(**scored)
    if "save" in names:
        with recorder.setting("stage", "save"):
            recorder.mark_stage()  # adapters are copied to the host as they are
            engine.trained_state()
    # Generation and resume happen in new processes, without optimizer state.
    engine.optimizer.state.clear()
    if "generate" in names:
        config = engine.model.config.get_text_config()
        trained = config._attn_implementation
        if trained not in ("sdpa", "eager", REPEAT):  # the others have no key-value cache
            config._attn_implementation = name_inference_attention(config)
        with recorder.setting("stage", "generate"), evaluating(engine):
            _generate(engine.model, batch, recorder)
        config._attn_implementation = trained
    if "resume" in names:
        with recorder.setting("stage", "resume"):
            # Allocates the optimizer state by a step, whose gradients are freed after it.
            optimizer = engine.optimizer
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            hook = optimizer.register_step_pre_hook(
                lambda *_: recorder.mark(list_local_tensors(w.grad for w in weights), GRADIENTS)
            )
            init_optimizer_state(optimizer)
            hook.remove()
            mark_optimizer_state(optimizer, recorder)


def _make_eval_batch(job: TraceJob, config: Any, batch: Batch, recorder: Recorder) -> Batch:
    """Evaluation does not pack rows, even if training does."""
    if not job.strategy.packing:
        return batch
    unpacked = job.strategy.model_copy(update={"packing": False})
    eval_job = job.model_copy(update={"strategy": unpacked, "rows": None})
    with _disable_current_modes():
        real = make_real_batch(eval_job, config)
    fake = make_fake_batch(real, FAKE_DEVICE)
    recorder.hold(fake.values(), INPUTS)
    return fake


def _generate(model: Any, batch: Batch, recorder: Recorder) -> None:
    """Prefill the cache with a batch of prompts, then decode one token."""
    prompts = batch["input_ids"]
    options: dict[str, Any]
    if model.config.is_encoder_decoder:
        options = {"decoder_input_ids": prompts[:, :1], "attention_mask": batch["attention_mask"]}
        first = model(input_ids=prompts, use_cache=True, **options)
        recorder.mark(_list_cached(first.past_key_values), KV_CACHE)
        options["encoder_outputs"] = (first.encoder_last_hidden_state,)
    else:
        options = {"logits_to_keep": 1}
        first = model(input_ids=prompts, use_cache=True, **options)
        recorder.mark(_list_cached(first.past_key_values), KV_CACHE)
        options["input_ids"] = prompts[:, :1]
    more = model(past_key_values=first.past_key_values, use_cache=True, **options)
    recorder.mark(_list_cached(more.past_key_values), KV_CACHE)


def _list_cached(cache: Any) -> list[Tensor]:
    """Keys and values of every layer; an encoder-decoder has two caches."""
    parts = [
        getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")
    ]
    caches = [part for part in parts if part is not None] or [cache]
    layers = [layer for part in caches for layer in getattr(part, "layers", ())]
    return list_local_tensors(value for layer in layers for value in vars(layer).values())


# The whole job

NUM_STEPS = 3
"""The first allocates the optimizer state; the second is like all later ones, but with little
memory the allocator's cache after the second changes the third."""
FIRST_STEADY_STEP = 2
"""The first step that starts with optimizer state."""


def record_job(job: TraceJob) -> Recording:
    """Record every allocation of the job."""
    num_run = count_traced_micro_batches(job.strategy)
    with without_kernels(job.strategy, FAKE_DEVICE, job.compute_capability):
        try:
            return _record(job, num_run)
        except MicroBatchesDifferError:
            return _record(job, job.strategy.grad_accum)


def count_traced_micro_batches(strategy: Strategy) -> int:
    """Micro-batches of a step that are run: the first, one that represents those after it, and the
    last, with which several ranks reduce their gradients."""
    return min(strategy.grad_accum, 2 if strategy.sharding is Sharding.SINGLE else 3)


def _record(job: TraceJob, num_run: int) -> Recording:
    """Run `num_run` micro-batches of each step; the others are recorded as copies of the second."""
    strategy = job.strategy
    if strategy.sharding.is_zero:  # DeepSpeed requires one dtype throughout
        strategy = to_deepspeed_strategy(strategy)
    capability = job.compute_capability
    has_varlen = capability is not None and capability >= (8, 0)
    with temporary_folder() as folder:
        (folder / "config.json").write_text(json.dumps(job.config), "utf-8")
        training = make_training(strategy, folder, random_weights=job.random_weights)
        module = build_meta_module(folder, strategy, training, has_varlen=has_varlen)
    text = module.model.config.get_text_config()
    recorder = Recorder(GpuEmulation(job.compute_capability), vocab_size=text.vocab_size)
    real = make_real_batch(job, module.model.config)
    with (
        fake_process_group(strategy) as context,
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
        record_fsdp(recorder),
    ):
        engine = build_fake_engine(module, strategy, training, context=context, recorder=recorder)
        track_modules(module, decoder_layers(module), recorder)
        recorder.hold(list_local_tensors([*module.parameters(), *module.buffers()]), WEIGHTS)
        recorder.hold(list_quantization_state(module), WEIGHTS)
        batch = make_fake_batch(real, FAKE_DEVICE)
        recorder.hold(batch.values(), INPUTS)
        recorded = RecordedEngine(engine, recorder, strategy.grad_accum - num_run)
        since = recorder.position()
        while recorder.step < NUM_STEPS:
            # A steady step that leaves memory as it was is copied, not run again.
            if recorder.step >= FIRST_STEADY_STEP and recorder.repeat_step(since):
                continue
            since = recorder.position()
            recorder.step += 1
            train_step(
                recorded,
                [batch] * num_run,
                divisor=1,
                learning_rate=training.learning_rate,
                seeds=[0] * num_run,
            )
        run_stages(job, engine, batch, recorder)
    return recorder.finish()


def fork_pool(num_processes: int) -> ProcessPoolExecutor:
    """A pool of forked processes: they share what is imported here, and end with this process.

    Without that, one would wait for work forever: it holds both ends of the pipe that its work
    comes through.
    """
    return ProcessPoolExecutor(
        num_processes,
        mp_context=get_context("fork"),
        initializer=_start_child,
        initargs=(os.getpid(),),
    )


def _start_child(parent_pid: int) -> None:
    end_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent


class CannotTraceError(Exception):
    """The tracer cannot run this job; the closed-form estimate still applies."""


class DepthTracer:
    """Records one job with any number of recomputed layers; caches its traces."""

    def __init__(self, job: TraceJob) -> None:
        """Raise if a trace of the job's strategy would be wrong."""
        obstacle = find_trace_obstacle(job.strategy)
        if obstacle:
            raise CannotTraceError(obstacle)
        self._job = job
        self.num_layers = read_depth(job.config) or 0
        self.num_traced = 0
        """Layers of the deepest model that ran."""
        self.refusal = (
            "asked for"
            if job.is_full_depth
            else find_extrapolation_obstacle(fill_defaults(job.config))
        )
        self._known: dict[tuple[object, ...], tuple[DepthExtrapolation, list[OperationLog]]] = {}
        """What deeper models are extrapolated from; no logs if any depth has none."""

    def record(self, num_recomputed: int) -> Recording:
        """The full-depth job with its first `num_recomputed` layers recomputed."""
        # Layers of each kind: recomputed ones, then the others.
        kinds: tuple[int, ...] = (self.num_layers,)
        if 0 < num_recomputed < self.num_layers:
            kinds = (num_recomputed, self.num_layers - num_recomputed)
        if not self.refusal:
            try:
                return self._extend(kinds, is_recomputed=num_recomputed > 0)
            except CannotExtend as error:
                self.refusal = str(error)
        return self._run(kinds, is_recomputed=num_recomputed > 0)

    def _extend(self, kinds: tuple[int, ...], *, is_recomputed: bool) -> Recording:
        plan = plan_depths(kinds)
        if not plan.grown:
            return self._run(kinds, is_recomputed=is_recomputed)
        key = (is_recomputed, plan.base, plan.grown)
        if key not in self._known:
            recordings = self._run_all((plan.base, *plan.grown), is_recomputed=is_recomputed)
            base, *grown = recordings
            logs = [one.operations for one in recordings if one.operations is not None]
            if len(logs) < len(recordings):
                logs = []
            self._known[key] = DepthExtrapolation(plan, base, grown), logs
        growth, logs = self._known[key]
        recording = growth.extend(plan.num_more)
        if logs:
            try:
                recording.operations = extend_operation_log(logs[0], logs[1:], plan)
            except CannotExtend:  # then time comes from the closed form
                recording.operations = None
        return recording

    def _run_all(
        self, depths: Sequence[tuple[int, ...]], *, is_recomputed: bool
    ) -> list[Recording]:
        """Record each depth: the first here, the others in forked processes."""
        self.num_traced = max(self.num_traced, *map(sum, depths))
        jobs = [self._job_of(kinds, is_recomputed=is_recomputed) for kinds in depths]
        import_libraries()
        with fork_pool(len(jobs) - 1) as others:
            waiting = [others.submit(record_job, job) for job in jobs[1:]]
            return [record_job(jobs[0]), *(one.result() for one in waiting)]

    def _run(self, kinds: tuple[int, ...], *, is_recomputed: bool) -> Recording:
        self.num_traced = max(self.num_traced, sum(kinds))
        return record_job(self._job_of(kinds, is_recomputed=is_recomputed))

    def _job_of(self, kinds: tuple[int, ...], *, is_recomputed: bool) -> TraceJob:
        depth = sum(kinds)
        strategy = self._job.strategy.model_copy(
            update={
                "checkpointing": is_recomputed,
                "recomputed_layers": kinds[0] if len(kinds) > 1 else None,
            }
        )
        config = self._job.config
        if depth != self.num_layers:
            config = with_depth(config, depth)
        return self._job.model_copy(update={"strategy": strategy, "config": config})


def trace(job: TraceJob) -> TraceResponse:
    """The job's memory on one GPU, its operations, and the fewest layers it must recompute.

    Recorded on fake tensors, then replayed through a model of torch's caching allocator.
    """
    start = time.perf_counter()
    settings = AllocatorSettings(expandable_segments=job.expandable_segments)
    tracer = DepthTracer(job)
    num_recomputed = job.strategy.count_recomputed(tracer.num_layers)
    fewest = None
    if job.room_bytes is not None and job.strategy.checkpointing:
        fewest = _find_fewest(tracer, job.room_bytes, settings)
        num_recomputed = num_recomputed if fewest is None else fewest
    recording = tracer.record(num_recomputed)
    training = _until_training_ends(recording)
    with fork_pool(1) as pool:  # the search for the smallest capacity takes longest
        smallest = pool.submit(
            find_smallest_capacity,
            training.sizes,
            training.events,
            settings,
            streams=training.streams,
        )
        unlimited = replay_unlimited(training, settings)
        ties = 0.0 if settings.expandable_segments else TIES_FRACTION
        traced = TracedMemory(
            peak_allocated_bytes=unlimited.peak_allocated_bytes,
            peak_reserved_bytes=unlimited.peak_reserved_bytes,
            stages=list_stage_peaks(recording, CachingAllocator(settings)),
            peak=describe_peak(training),
            timeline=build_timeline(recording),
            smallest_capacity_bytes=smallest.result() + int(ties * smallest.result()),
            num_layers=tracer.num_layers,
            num_traced_layers=tracer.num_traced,
            refusal=tracer.refusal,
            seconds=time.perf_counter() - start,
            versions=list_versions(),
        )
    log = recording.operations
    return TraceResponse(
        traced=traced,
        fewest_recomputed=fewest,
        operations=None if log is None else log.shortened(),
    )


TIES_FRACTION = 0.005
"""Added to the capacity without expandable segments. Between free blocks of one size the allocator
takes the lowest address, which a trace does not know (h200_trace.json: 0.3% too low once)."""


def _find_fewest(tracer: DepthTracer, room_bytes: int, settings: AllocatorSettings) -> int | None:
    """The fewest recomputed layers with which the allocator never has to free cached blocks."""

    def reserve(num_recomputed: int) -> int:
        training = _until_training_ends(tracer.record(num_recomputed))
        return replay_unlimited(training, settings).peak_reserved_bytes

    return find_fewest_recomputed(reserve, num_layers=tracer.num_layers, room_bytes=room_bytes)


def replay_unlimited(recording: Recording, settings: AllocatorSettings) -> Replay:
    replayed = replay(recording.sizes, recording.events, settings, streams=recording.streams)
    assert replayed is not None, "nothing runs out of memory without a limit"
    return replayed


def _until_training_ends(recording: Recording) -> Recording:
    for position, event in enumerate(recording.events):
        if event > 0 and recording.allocations[event - 1].stage in OTHER_PROCESSES:
            return Recording(allocations=recording.allocations, events=recording.events[:position])
    return recording
