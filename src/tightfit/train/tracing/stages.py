"""What a job does beside its steps, on fake tensors: evaluate, save, generate, resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from tightfit.estimate.trace.recorder import Recorder
from tightfit.estimate.trace.recording import INPUTS
from tightfit.train.batches import Batch
from tightfit.train.evaluation import evaluating
from tightfit.train.state import prime_optimizer
from tightfit.train.tracing.batch import make_fake_batch, make_real_batch
from tightfit.train.tracing.job import TraceJob
from tightfit.train.tracing.subject import FAKE_DEVICE

_PLAIN_ATTENTION = "sdpa"


def run_stages(job: TraceJob, engine: Any, batch: Batch, recorder: Recorder) -> None:
    """The stages after training, in the order in which a job goes through them."""
    recorder.step = 0
    names = job.stages
    if "eval" in names:
        with recorder.in_stage("eval"), evaluating(engine):
            engine.module(**_make_eval_batch(job, batch, recorder))
    if "save" in names:
        with recorder.in_stage("save"):
            recorder.stand_still()  # adapters go to the host as they lie there
            engine.trained_state()
    # The process that generates, and the one that resumes, start without optimizer state.
    engine.optimizer.state.clear()
    if "generate" in names:
        with recorder.in_stage("generate"), evaluating(engine):
            _generate(engine.model, batch)
    if "resume" in names:
        with recorder.in_stage("resume"):
            prime_optimizer(engine.optimizer)


def _make_eval_batch(job: TraceJob, batch: Batch, recorder: Recorder) -> Batch:
    """Rows are not packed for an evaluation, whatever training does with its own."""
    if not job.strategy.packing:
        return batch
    apart = job.strategy.model_copy(update={"packing": False})
    alone = job.model_copy(update={"strategy": apart, "rows": None})
    with _disable_current_modes():
        real = make_real_batch(alone, is_encoder_decoder=False)
    made = make_fake_batch(real, FAKE_DEVICE)
    recorder.hold(made.values(), INPUTS)
    return made


def _generate(model: Any, batch: Batch) -> None:
    """A whole batch of prompts into the cache, then one token more."""
    prompts = batch["input_ids"]
    if model.config.is_encoder_decoder:
        _answer(model, prompts, batch["attention_mask"])
        return
    with _cached_attention(model):
        prefilled = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
        model(
            input_ids=prompts[:, :1],
            past_key_values=prefilled.past_key_values,
            use_cache=True,
            logits_to_keep=1,
        )


def _answer(model: Any, prompts: Any, mask: Any) -> None:
    """The encoder reads the prompts; the decoder writes a token, and one more."""
    said = {"decoder_input_ids": prompts[:, :1], "attention_mask": mask, "use_cache": True}
    first = model(input_ids=prompts, **said)
    read = (first.encoder_last_hidden_state,)
    model(encoder_outputs=read, past_key_values=first.past_key_values, **said)


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
