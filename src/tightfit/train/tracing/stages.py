"""What a job does beside its steps, on fake tensors: evaluate, save, generate, resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tightfit.estimate.trace.recorder import Recorder
from tightfit.train.batches import Batch
from tightfit.train.evaluation import evaluating
from tightfit.train.state import prime_optimizer

_PLAIN_ATTENTION = "sdpa"


def run_stages(names: tuple[str, ...], engine: Any, batch: Batch, recorder: Recorder) -> None:
    """The stages after training, in the order in which a job goes through them."""
    recorder.step = 0
    if "eval" in names:
        with recorder.in_stage("eval"), evaluating(engine):
            engine.module(**batch)
    if "save" in names:
        with recorder.in_stage("save"):
            engine.trained_state()
    # The process that generates, and the one that resumes, start without optimizer state.
    engine.optimizer.state.clear()
    if "generate" in names:
        with recorder.in_stage("generate"), evaluating(engine):
            _generate(engine.model, batch)
    if "resume" in names:
        with recorder.in_stage("resume"):
            prime_optimizer(engine.optimizer)


def _generate(model: Any, batch: Batch) -> None:
    """A whole batch of prompts into the cache, then one token more."""
    if model.config.is_encoder_decoder:
        return
    prompts = batch["input_ids"]
    with _cached_attention(model):
        prefilled = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
        model(
            input_ids=prompts[:, :1],
            past_key_values=prefilled.past_key_values,
            use_cache=True,
            logits_to_keep=1,
        )


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
