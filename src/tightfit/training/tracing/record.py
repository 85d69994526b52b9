"""Record one job on fake tensors: training steps, then evaluation, save, generation, resume."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.core.strategy import Sharding, Strategy
from tightfit.data.token_store import EncodedRow
from tightfit.runtime.attention import needs_padding_mask
from tightfit.runtime.layers import decoder_layers
from tightfit.trace.concrete_values import set_concrete_value
from tightfit.trace.gpu_emulation import GpuEmulation
from tightfit.trace.recorder import Recorder, track_modules
from tightfit.trace.recording import GRADIENTS, INPUTS, KV_CACHE, OPTIMIZER, WEIGHTS, Recording
from tightfit.training.batches import Batch, collate_encoder_decoder, collate_packed, collate_padded
from tightfit.training.engine import evaluating, init_optimizer_state
from tightfit.training.step import StepPlan, train_step
from tightfit.training.tracing.engine import (
    FAKE_DEVICE,
    MicroBatchesDifferError,
    RecordedEngine,
    build_fake_engine,
    build_meta_module,
    list_local_tensors,
    make_training,
)
from tightfit.training.tracing.fake_kernels import list_quantization_state, without_kernels
from tightfit.training.tracing.job import Document, TraceJob
from tightfit.training.tracing.sharded import (
    build_distributed_engine,
    fake_process_group,
    record_fsdp,
    to_engine_strategy,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def make_real_batch(job: TraceJob, config: PretrainedConfig) -> Batch:
    """One micro-batch in host memory, collated as in training, for a model of this `config`."""
    rows = job.rows or list_longest_rows(job, is_pair=config.is_encoder_decoder)
    encoded = [[_encode_document(document) for document in row] for row in rows]
    if config.is_encoder_decoder:
        return collate_encoder_decoder(encoded, pad_token_id=0)
    if job.strategy.packing:
        return collate_packed(encoded, pad_token_id=0)
    has_mask = job.strategy.quirks.padding_mask or needs_padding_mask(config)
    return collate_padded(encoded, pad_token_id=0, has_mask=has_mask)


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


def _encode_document(document: Document) -> EncodedRow:
    trained = np.arange(document.num_tokens) >= document.num_prompt
    return EncodedRow(np.ones(document.num_tokens, dtype=np.int32), trained, "")


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
        with recorder.in_stage("eval"), evaluating(engine):
            engine.module(**_make_eval_batch(job, engine.model.config, batch, recorder))
    if "save" in names:
        with recorder.in_stage("save"):
            recorder.mark_stage()  # adapters are copied to the host as they are
            engine.trained_state()
    # Generation and resume happen in new processes, without optimizer state.
    engine.optimizer.state.clear()
    if "generate" in names:
        with recorder.in_stage("generate"), evaluating(engine):
            _generate(engine.model, batch, recorder)
    if "resume" in names:
        with recorder.in_stage("resume"):
            _resume(engine.optimizer, recorder)


def _resume(optimizer: Any, recorder: Recorder) -> None:
    """A resume allocates the optimizer state by a step, whose gradients are freed after it."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]

    def mark_gradients(*_step: Any) -> None:
        recorder.mark(list_local_tensors(weight.grad for weight in weights), GRADIENTS)

    hook = optimizer.register_step_pre_hook(mark_gradients)
    init_optimizer_state(optimizer)
    hook.remove()
    states = optimizer.state.values()
    recorder.mark(
        list_local_tensors(value for state in states for value in state.values()), OPTIMIZER
    )


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
    if model.config.is_encoder_decoder:
        _generate_encoder_decoder(model, prompts, batch["attention_mask"], recorder)
        return
    with _cached_attention(model):
        prefilled = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
        recorder.mark(_list_cached(prefilled.past_key_values), KV_CACHE)
        more = model(
            input_ids=prompts[:, :1],
            past_key_values=prefilled.past_key_values,
            use_cache=True,
            logits_to_keep=1,
        )
        recorder.mark(_list_cached(more.past_key_values), KV_CACHE)


def _generate_encoder_decoder(model: Any, prompts: Any, mask: Any, recorder: Recorder) -> None:
    """Encode the prompts, decode one token, then another from the cache."""
    options = {"decoder_input_ids": prompts[:, :1], "attention_mask": mask, "use_cache": True}
    first = model(input_ids=prompts, **options)
    recorder.mark(_list_cached(first.past_key_values), KV_CACHE)
    encoded = (first.encoder_last_hidden_state,)
    more = model(encoder_outputs=encoded, past_key_values=first.past_key_values, **options)
    recorder.mark(_list_cached(more.past_key_values), KV_CACHE)


def _list_cached(cache: Any) -> list[Tensor]:
    """Keys and values of every layer; an encoder-decoder has two caches."""
    parts = [
        getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")
    ]
    caches = [part for part in parts if part is not None] or [cache]
    layers = [layer for part in caches for layer in getattr(part, "layers", ())]
    return list_local_tensors(value for layer in layers for value in vars(layer).values())


@contextmanager
def _cached_attention(model: Any) -> Iterator[None]:
    """Varlen attention has no key-value cache; generation uses SDPA."""
    config = model.config.get_text_config()
    trained = config._attn_implementation
    if trained.startswith("tightfit_varlen"):
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = trained


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
    strategy = to_engine_strategy(job.strategy)
    capability = job.compute_capability
    has_varlen = capability is not None and capability >= (8, 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
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
        if strategy.sharding is Sharding.SINGLE:
            engine = build_fake_engine(module, strategy, training, recorder)
        else:
            engine = build_distributed_engine(
                module, strategy, training, context=context, recorder=recorder
            )
        track_modules(module, decoder_layers(module), recorder)
        recorder.hold(list_local_tensors([*module.parameters(), *module.buffers()]), WEIGHTS)
        recorder.hold(list_quantization_state(module), WEIGHTS)
        batch = make_fake_batch(real, FAKE_DEVICE)
        recorder.hold(batch.values(), INPUTS)
        recorded = RecordedEngine(engine, recorder, strategy.grad_accum - num_run)
        plan = StepPlan(
            num_trained_tokens=1,
            learning_rate=training.learning_rate,
            seeds=(0,) * num_run,
        )
        _run_steps(lambda: train_step(recorded, [batch] * num_run, plan), recorder)
        run_stages(job, engine, batch, recorder)
    return recorder.finish()


def _run_steps(take_step: Callable[[], object], recorder: Recorder) -> None:
    """Record `NUM_STEPS` steps; a steady step that leaves memory as it was is copied, not rerun."""
    since = recorder.position()
    while recorder.step < NUM_STEPS:
        if recorder.step >= FIRST_STEADY_STEP and recorder.repeat_step(since):
            continue
        since = recorder.position()
        recorder.step += 1
        take_step()
