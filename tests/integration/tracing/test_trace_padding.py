"""A padded batch is traced as it is trained: without a mask, in the memory that formulas tell."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.core.strategy import Quirks, Strategy
from tightfit.core.units import GIB
from tightfit.estimation.memory import estimate_moments, peak_moment
from tightfit.models.catalogue import read_source_config
from tightfit.models.resolve import resolve_model
from tightfit.trace.caching_allocator import AllocatorSettings
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import DepthTracer, replay_unlimited

CARD = (9, 0)
ROWS, LENGTH = 8, 2048
MODEL = "Llama-3.2-1B"


def make_strategy(**changes: Any) -> Strategy:
    return Strategy.model_validate(
        {
            "method": "full",
            "micro_batch": ROWS,
            "seq_len": LENGTH,
            "checkpointing": False,
            **changes,
        }
    )


def trace_bytes(strategy: Strategy) -> int:
    """Peak of allocated memory over the steps of a batch whose rows differ in length."""
    config = read_source_config(resolve_model(MODEL))
    assert config is not None
    job = TraceJob(config=config, strategy=strategy, compute_capability=CARD, stages=())
    tracer = DepthTracer(job)
    recording = tracer.record(strategy.count_recomputed(tracer.num_layers))
    return replay_unlimited(recording, AllocatorSettings()).peak_allocated_bytes


@pytest.fixture(scope="module")
def bare() -> int:
    return trace_bytes(make_strategy())


def test_the_closed_form_tells_what_a_padded_batch_takes(bare: int) -> None:
    reported = peak_moment(estimate_moments(resolve_model(MODEL), make_strategy())).allocated_bytes

    assert reported == pytest.approx(bare, rel=0.02)


def test_a_mask_would_cost_its_copies_and_repeated_keys(bare: int) -> None:
    """Per layer a copy of the mask in 16 bit, and keys and values four times as wide."""
    spec = resolve_model(MODEL)
    masked = trace_bytes(make_strategy(quirks=Quirks(padding_mask=True)))

    copies = ROWS * LENGTH * LENGTH * 2
    wider = 2 * 2 * ROWS * LENGTH * (spec.num_heads - spec.num_kv_heads) * spec.head_dim
    assert masked - bare == pytest.approx(spec.num_layers * (copies + wider), rel=0.05)
    assert masked - bare > 2 * GIB
