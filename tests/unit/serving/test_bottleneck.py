"""Each kind of bottleneck is named where its signs stand, with a next step that changes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tightfit.serving.generate.statistics import (
    BottleneckKind,
    RunSigns,
    name_bottleneck,
    suggest_slots,
)

CALM = RunSigns(
    is_cpu=False,
    seconds=60.0,
    load_seconds=5.0,
    bandwidth_fraction=0.2,
    compute_fraction=0.05,
    mean_active=4.0,
    num_slots=4,
    num_answers=1000,
)


@pytest.mark.parametrize(
    ("signs", "kind", "step"),
    [
        (
            replace(CALM, is_cpu=True, idle_gpu="NVIDIA H200"),
            BottleneckKind.GPU_UNUSED,
            "--device cuda",
        ),
        (replace(CALM, is_offloaded=True), BottleneckKind.PCIE, "--weights nf4"),
        (
            replace(CALM, load_seconds=100.0, load_disk_bytes=20 * 10**9),
            BottleneckKind.DISK,
            "faster disk",
        ),
        (
            replace(CALM, load_seconds=100.0, load_disk_bytes=0),
            BottleneckKind.LOADING,
            "tightfit serve",
        ),
        (replace(CALM, starved_fraction=0.5), BottleneckKind.FEEDING, "prompts"),
        (
            replace(CALM, is_cpu=True, cores_fraction=0.3),
            BottleneckKind.OTHER_WORK,
            "OMP_NUM_THREADS",
        ),
        (
            replace(CALM, is_cpu=True, cores_fraction=0.3, num_hosts=2),
            BottleneckKind.HOSTS,
            "only this machine was measured",
        ),
        (replace(CALM, bandwidth_fraction=0.8), BottleneckKind.MEMORY_BANDWIDTH, "--parallel 16"),
        (
            replace(CALM, bandwidth_fraction=0.8, num_answers=4),
            BottleneckKind.MEMORY_BANDWIDTH,
            "tightfit quantize",
        ),
        (
            replace(CALM, compute_fraction=0.7, bandwidth_fraction=0.6),
            BottleneckKind.COMPUTE,
            "device",
        ),
        (replace(CALM, mean_active=1.2), BottleneckKind.BATCH, "more prompts"),
        (CALM, BottleneckKind.BATCH, "--parallel 16"),
        (replace(CALM, num_slots=256, mean_active=250.0), BottleneckKind.OVERHEAD, "--parallel"),
    ],
)
def test_the_signs_lead_to_the_kind_and_the_next_step(
    signs: RunSigns, kind: BottleneckKind, step: str
) -> None:
    found = name_bottleneck(signs)

    assert found.kind is kind
    assert step in found.sentence
    assert found.sentence.endswith(".")
    assert found.sentence.count(". ") == 0, "one sentence"


def test_every_kind_is_covered_above() -> None:
    cases = test_the_signs_lead_to_the_kind_and_the_next_step.pytestmark  # type: ignore[attr-defined]
    assert {case[1] for case in cases[0].args[1]} == set(BottleneckKind)


def test_a_mistake_is_told_before_a_limit() -> None:
    signs = replace(CALM, is_cpu=True, idle_gpu="a GPU", bandwidth_fraction=0.9)
    assert name_bottleneck(signs).kind is BottleneckKind.GPU_UNUSED


def test_unmeasured_ceilings_accuse_nobody() -> None:
    signs = replace(CALM, bandwidth_fraction=None, compute_fraction=None)
    assert name_bottleneck(signs).kind is BottleneckKind.BATCH


@pytest.mark.parametrize("slots", [1, 4, 8, 64, 256])
@pytest.mark.parametrize("answers", [1, 10, 10_000])
def test_suggested_slots_are_more_and_can_be_filled(slots: int, answers: int) -> None:
    wanted = suggest_slots(replace(CALM, num_slots=slots, num_answers=answers))
    assert wanted is None or slots < wanted <= answers
