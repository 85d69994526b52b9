"""What a job does beside its steps, on fake tensors: evaluate, save, generate, resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tightfit.estimate.trace.recorder import Recorder
from tightfit.estimate.trace.recording import GRADIENTS, INPUTS, KV_CACHE, OPTIMIZER
from tightfit.train.batches import Batch
from tightfit.train.evaluation import evaluating
from tightfit.train.state import prime_optimizer
from tightfit.train.tracing.batch import make_fake_batch, make_real_batch
from tightfit.train.tracing.job import TraceJob
from tightfit.train.tracing.subject import FAKE_DEVICE, list_local

_PLAIN_ATTENTION = "sdpa"


def run_stages(job: TraceJob, engine: Any, batch: Batch, recorder: Recorder) -> None:
    """The stages after training, in the order in which a job goes through them."""
    recorder.step = 0
    names = job.stages
    if "eval" in names:
        with recorder.in_stage("eval"), evaluating(engine):
            engine.module(**_make_eval_batch(job, engine.model.config, batch, recorder))
    if "save" in names:
        with recorder.in_stage("save"):
            recorder.stand_still()  # adapters go to the host as they lie there
            engine.trained_state()
    # The process that generates, and the one that resumes, start without optimizer state.
    engine.optimizer.state.clear()
    if "generate" in names:
        with recorder.in_stage("generate"), evaluating(engine):
            _generate(engine.model, batch, recorder)
    if "resume" in names:
        with recorder.in_stage("resume"):
            _resume(engine.optimizer, recorder)


def _resume(optimizer: Any, recorder: Recorder) -> None:
    """The state is made to be read into, by a step; its gradients are gone after it."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]

    def mark_gradients(*_step: Any) -> None:
        recorder.mark(list_local(weight.grad for weight in weights), GRADIENTS)

    hook = optimizer.register_step_pre_hook(mark_gradients)
    prime_optimizer(optimizer)
    hook.remove()
    states = optimizer.state.values()
    recorder.mark(list_local(value for state in states for value in state.values()), OPTIMIZER)


def _make_eval_batch(job: TraceJob, config: Any, batch: Batch, recorder: Recorder) -> Batch:
    """Rows are not packed for an evaluation, whatever training does with its own."""
    if not job.strategy.packing:
        return batch
    apart = job.strategy.model_copy(update={"packing": False})
    alone = job.model_copy(update={"strategy": apart, "rows": None})
    with _disable_current_modes():
        real = make_real_batch(alone, config)
    made = make_fake_batch(real, FAKE_DEVICE)
    recorder.hold(made.values(), INPUTS)
    return made


def _generate(model: Any, batch: Batch, recorder: Recorder) -> None:
    """A whole batch of prompts into the cache, then one token more."""
    prompts = batch["input_ids"]
    if model.config.is_encoder_decoder:
        _answer(model, prompts, batch["attention_mask"], recorder)
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


def _answer(model: Any, prompts: Any, mask: Any, recorder: Recorder) -> None:
    """The encoder reads the prompts; the decoder writes a token, and one more."""
    said = {"decoder_input_ids": prompts[:, :1], "attention_mask": mask, "use_cache": True}
    first = model(input_ids=prompts, **said)
    recorder.mark(_list_cached(first.past_key_values), KV_CACHE)
    read = (first.encoder_last_hidden_state,)
    more = model(encoder_outputs=read, past_key_values=first.past_key_values, **said)
    recorder.mark(_list_cached(more.past_key_values), KV_CACHE)


def _list_cached(cache: Any) -> list[Tensor]:
    """Keys and values of every layer; an encoder-decoder has two caches."""
    parts = [
        getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")
    ]
    caches = [part for part in parts if part is not None] or [cache]
    layers = [layer for part in caches for layer in getattr(part, "layers", ())]
    return list_local(value for layer in layers for value in vars(layer).values())


@contextmanager
def _cached_attention(model: Any) -> Iterator[None]:
    """Attention over packed documents knows no cache; generation uses torch's own."""
    config = model.config.get_text_config()
    trained = config._attn_implementation
    if trained.startswith("tightfit_varlen"):
        config._attn_implementation = _PLAIN_ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = trained
