"""Wide slices of the fused loss are traced as Liger cuts them, in the memory that formulas tell."""

from __future__ import annotations

import pytest

from tightfit.core.strategy import Strategy
from tightfit.estimation.activations import count_chunk_tokens
from tightfit.estimation.memory import estimate_moments, peak_moment
from tightfit.models.catalogue import read_source_config
from tightfit.models.resolve import resolve_model
from tightfit.trace.caching_allocator import AllocatorSettings
from tightfit.trace.recording import Recording
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import DepthTracer, replay_unlimited

CARD = (9, 0)
SPEC = resolve_model("Llama-3.2-1B")


def _strategy(factor: int) -> Strategy:
    return Strategy.model_validate(
        {
            "method": "full",
            "micro_batch": 4,
            "checkpointing": False,
            "loss": "fused",
            "fused_kernels": True,
            "loss_chunk_factor": factor,
        }
    )


def _record(strategy: Strategy) -> Recording:
    config = read_source_config(SPEC)
    assert config is not None
    job = TraceJob(config=config, strategy=strategy, compute_capability=CARD, stages=())
    return DepthTracer(job).record(0)


@pytest.mark.parametrize("factor", [1, 4])
def test_a_slice_is_as_wide_as_asked_and_counted_so(factor: int) -> None:
    strategy = _strategy(factor)
    recording = _record(strategy)
    tokens = strategy.micro_batch * (strategy.seq_len - 1)  # the last of each row has no target
    rows = count_chunk_tokens(
        tokens=tokens, hidden_size=SPEC.hidden_size, vocab_size=SPEC.vocab_size, factor=factor
    )
    logits = {
        a.shape
        for a in recording.allocations
        if a.shape[-1:] == (SPEC.vocab_size,) and "mm" not in a.op
    }
    assert (rows, SPEC.vocab_size) in logits
    traced = replay_unlimited(recording, AllocatorSettings()).peak_allocated_bytes
    reported = peak_moment(estimate_moments(SPEC, strategy)).allocated_bytes
    assert reported == pytest.approx(traced, rel=0.05)
    assert reported >= traced
