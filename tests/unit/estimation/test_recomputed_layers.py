"""Selective checkpointing: between none and all, in memory and in time."""

from __future__ import annotations

import pytest

from tightfit.core.strategy import Strategy
from tightfit.estimation.job import estimate_job
from tightfit.estimation.memory import estimate_moments, estimate_step_peak_bytes
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Node
from tightfit.models.resolve import resolve_model

LLAMA = resolve_model("Llama-2-7b")
NODE = Node(gpu=find_gpu("A100-80GB"), num_gpus=1)


def _strategy(count: int) -> Strategy:
    some = count or None
    return Strategy(micro_batch=4, checkpointing=count > 0, recomputed_layers=some, loss="fused")


def test_more_recomputed_layers_never_need_more_memory() -> None:
    counts = [0, 1, 4, 8, 16, 24, 28, 32]
    peaks = [estimate_step_peak_bytes(LLAMA, _strategy(count)) for count in counts]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks[:6])) == 6


def test_all_layers_is_what_plain_checkpointing_is() -> None:
    assert estimate_moments(LLAMA, _strategy(32)) == estimate_moments(
        LLAMA, _strategy(32).model_copy(update={"recomputed_layers": None})
    )
    assert estimate_moments(LLAMA, _strategy(40)) == estimate_moments(LLAMA, _strategy(32))


def test_time_grows_with_the_recomputed_layers() -> None:
    def recompute(count: int) -> float:
        estimate = estimate_job(spec=LLAMA, strategy=_strategy(count), node=NODE)
        return estimate.time.components["recompute"]

    assert recompute(0) == 0
    assert recompute(8) == pytest.approx(recompute(32) / 4)


def test_the_boundary_is_a_moment_of_its_own() -> None:
    names = [moment.name for moment in estimate_moments(LLAMA, _strategy(16))]
    assert "recompute" in names
    assert "recompute" not in [moment.name for moment in estimate_moments(LLAMA, _strategy(32))]
