"""Each kind of bottleneck is named where its signs stand, with a next step that changes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tightfit.engines.protocol import Done, EngineInfo, FinishReason
from tightfit.serving.generate.run import EngineRun, RunMeasurements
from tightfit.serving.generate.statistics import (
    Bottleneck,
    BottleneckKind,
    Timeline,
    name_bottleneck,
    suggest_slots,
)

INFO = EngineInfo(
    engine="transformers",
    version="5",
    why="because",
    model="m",
    format="bf16",
    device="cuda:0",
    max_context=4096,
    num_slots=4,
    num_params=10**9,
    weight_bytes=10**9,
    kv_bytes_per_token=1000,
)
ANSWER = Done(
    reason=FinishReason.STOP,
    text="",
    num_prompt_tokens=1,
    num_new_tokens=1,
    submitted_s=0,
    first_token_s=0,
    finished_s=0,
)
CALM = Timeline(
    seconds=60.0,
    num_passes=100,
    mean_active=4.0,
    starved_fraction=0.0,
    bytes_moved=1e9,
    peak_bytes_per_second=1e9,
)


def name(
    *,
    info: dict[str, Any] | None = None,
    measured: dict[str, Any] | None = None,
    bandwidth: float | None = 0.2,
    compute: float | None = 0.05,
    num_answers: int = 1000,
    **timeline: float,
) -> Bottleneck:
    """The verdict over a run that waits for nothing, apart from what is given."""
    run = EngineRun(
        info=replace(INFO, **info or {}),
        timings=[ANSWER] * num_answers,
        failures=[],
        measured=RunMeasurements(**{"load_seconds": 5.0, **(measured or {})}),
        num_threads=1,
    )
    return name_bottleneck(
        run,
        CALM._replace(**timeline),
        bandwidth_fraction=bandwidth,
        compute_fraction=compute,
    )


CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("signs", "kind", "step"),
    [
        (
            {"info": CPU, "measured": {"idle_gpu": "NVIDIA H200"}},
            BottleneckKind.GPU_UNUSED,
            "--device cuda",
        ),
        ({"measured": {"is_offloaded": True}}, BottleneckKind.PCIE, "--weights nf4"),
        (
            {"measured": {"load_seconds": 100.0, "load_disk_bytes": 20 * 10**9}},
            BottleneckKind.DISK,
            "faster disk",
        ),
        (
            {"measured": {"load_seconds": 100.0, "load_disk_bytes": 0}},
            BottleneckKind.LOADING,
            "tightfit serve",
        ),
        ({"starved_fraction": 0.5}, BottleneckKind.FEEDING, "prompts"),
        (
            {"info": CPU, "measured": {"cores_fraction": 0.3}},
            BottleneckKind.OTHER_WORK,
            "OMP_NUM_THREADS",
        ),
        (
            {"info": {**CPU, "num_hosts": 2}, "measured": {"cores_fraction": 0.3}},
            BottleneckKind.HOSTS,
            "only this machine was measured",
        ),
        ({"bandwidth": 0.8}, BottleneckKind.MEMORY_BANDWIDTH, "--parallel 16"),
        (
            {"bandwidth": 0.8, "num_answers": 4},
            BottleneckKind.MEMORY_BANDWIDTH,
            "tightfit quantize",
        ),
        ({"compute": 0.7, "bandwidth": 0.6}, BottleneckKind.COMPUTE, "device"),
        ({"mean_active": 1.2}, BottleneckKind.BATCH, "more prompts"),
        ({}, BottleneckKind.BATCH, "--parallel 16"),
        (
            {"info": {"num_slots": 256}, "mean_active": 250.0},
            BottleneckKind.OVERHEAD,
            "--parallel",
        ),
    ],
)
def test_the_signs_lead_to_the_kind_and_the_next_step(
    signs: dict[str, Any], kind: BottleneckKind, step: str
) -> None:
    found = name(**signs)

    assert found.kind is kind
    assert step in found.sentence
    assert found.sentence.endswith(".")
    assert found.sentence.count(". ") == 0, "one sentence"


def test_every_kind_is_covered_above() -> None:
    cases = test_the_signs_lead_to_the_kind_and_the_next_step.pytestmark
    assert {case[1] for case in cases[0].args[1]} == set(BottleneckKind)


def test_a_mistake_is_named_before_a_limit() -> None:
    found = name(info=CPU, measured={"idle_gpu": "a GPU"}, bandwidth=0.9)
    assert found.kind is BottleneckKind.GPU_UNUSED


def test_unmeasured_ceilings_accuse_nobody() -> None:
    assert name(bandwidth=None, compute=None).kind is BottleneckKind.BATCH


@pytest.mark.parametrize("slots", [1, 4, 8, 64, 256])
@pytest.mark.parametrize("answers", [1, 10, 10_000])
def test_suggested_slots_are_more_and_can_be_filled(slots: int, answers: int) -> None:
    wanted = suggest_slots(slots, answers)
    assert wanted is None or slots < wanted <= answers
