"""Time of traced jobs: few layers tell of many, and more work takes longer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tightfit.core.strategy import Strategy
from tightfit.hardware.catalogue import find_gpu
from tightfit.trace.result import RECOMPUTE, TracedTime
from tightfit.trace.traced_time import estimate_traced_time
from tightfit.trace.tracer import TraceResponse
from tightfit.training.tracing.job import TraceJob
from tightfit.training.tracing.trace import trace

DEPTH = 9
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
"""With a head so small that layers are nearly all there is."""


@cache
def _answer(
    num_layers: int = DEPTH,
    is_full_depth: bool = False,
    room_bytes: int | None = None,
    **fields: Any,
) -> TraceResponse:
    plain = {"micro_batch": 4, "seq_len": 2048, "checkpointing": False, "method": "full"}
    asked: dict[str, Any] = {
        "config": CONFIG | {"num_hidden_layers": num_layers},
        "strategy": plain | fields,
        "compute_capability": (9, 0),
        "stages": (),
        "is_full_depth": is_full_depth,
        "room_bytes": room_bytes,
    }
    return trace(TraceJob.model_validate(asked))


def _time(answer: TraceResponse, **fields: Any) -> TracedTime:
    # From the disk, as later runs have it.
    log = TraceResponse.model_validate_json(answer.model_dump_json()).operations
    assert log is not None
    return estimate_traced_time(log, find_gpu("H200-SXM"), Strategy.model_validate(fields))


def _plain() -> TracedTime:
    return _time(_answer())


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "lora", "checkpointing": True},
        {"sharding": "fsdp", "gpus_per_node": 4, "checkpointing": True},
        {"sharding": "ddp", "gpus_per_node": 4, "recomputed_layers": 3, "checkpointing": True},
    ],
    ids=str,
)
def test_few_layers_take_as_long_as_all_of_them_do(fields: dict[str, Any]) -> None:
    few, whole = (_answer(is_full_depth=is_full, **fields) for is_full in (False, True))
    assert few.traced is not None
    assert whole.traced is not None
    assert few.traced.num_traced_layers < whole.traced.num_traced_layers == DEPTH
    short, full = _time(few), _time(whole)
    assert short.seconds_per_step == pytest.approx(full.seconds_per_step, rel=0.01)
    assert short.stages == pytest.approx(full.stages, rel=0.02)
    assert short.flops == pytest.approx(full.flops)


def test_twice_the_layers_take_about_twice_as_long() -> None:
    ratio = _time(_answer(2 * DEPTH)).seconds_per_step / _plain().seconds_per_step
    assert 1.9 < ratio <= 2.0


def test_twice_the_micro_batches_take_about_twice_as_long_but_for_the_update() -> None:
    twice, once = _time(_answer(grad_accum=2)), _plain()
    assert twice.flops == 2 * once.flops
    assert twice.stages["forward"] == pytest.approx(2 * once.stages["forward"], rel=0.03)
    assert twice.stages["update"] == pytest.approx(once.stages["update"], rel=0.1)


def test_recomputing_takes_nearly_another_forward_pass() -> None:
    """Torch ends a layer's recomputation where nothing further was saved: before its last sum."""
    again = _time(_answer(checkpointing=True))
    assert _plain().stages[RECOMPUTE] == 0
    assert 0.6 < again.stages[RECOMPUTE] / again.stages["forward"] < 1.0
    more = again.seconds_per_step - _plain().seconds_per_step
    assert more == pytest.approx(again.stages[RECOMPUTE], rel=0.1)


def test_a_job_that_chooses_its_layers_is_timed_with_those_it_chose() -> None:
    none, every = _answer().traced, _answer(checkpointing=True).traced
    assert none is not None
    assert every is not None
    room = (none.peak_reserved_bytes + every.peak_reserved_bytes) // 2
    chosen = _answer(room_bytes=room, checkpointing=True)
    count = chosen.fewest_recomputed
    assert count is not None
    assert 0 < count < DEPTH
    stated = _answer(checkpointing=True, recomputed_layers=count)
    assert chosen.operations == stated.operations
    assert _time(chosen).seconds_per_step > _plain().seconds_per_step


def test_a_rank_of_fsdp_computes_as_much_and_updates_a_part() -> None:
    rank = _time(_answer(sharding="fsdp", gpus_per_node=4))
    assert rank.flops == _plain().flops
    assert rank.stages["update"] < _plain().stages["update"]
    updated = [one.components["optimizer"] for one in (rank, _plain())]
    assert updated[0] == pytest.approx(updated[1] / 4, rel=0.05)
