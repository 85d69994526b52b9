"""From raw times to the rates that estimates read."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from made_calibrations import make_calibration, make_collectives, make_host_times
from tightfit.hardware.calibration import Calibration, HostTimes, MatmulTime
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Gpu


def test_the_gap_between_kernels_is_taken_off_their_times() -> None:
    times = make_host_times(1.0).model_copy(update={"kernel_seconds": 2e-6})
    slow = MatmulTime(dtype="bf16", m=512, n=16, k=4096, seconds=10e-6)
    quick = MatmulTime(dtype="bf16", m=16, n=16, k=16, seconds=2.1e-6)

    found = make_calibration(host_times=times, matmuls=(slow, quick)).rates()

    assert [row[3] for row in found.matmuls["bf16"]] == [8e-6, pytest.approx(0.525e-6)]
    assert found.kernel_gap_seconds == 2e-6


def test_a_layer_of_the_catalogues_host_gives_the_catalogues_constants() -> None:
    found = make_calibration(host_times=make_host_times(1.0)).rates()

    assert found.host_forward_seconds == pytest.approx(35e-6)
    assert found.host_backward_seconds == pytest.approx(14e-6)
    assert found.host_checkpoint_seconds == pytest.approx(0.6e-3)


def test_without_transformers_there_is_no_layer() -> None:
    times = HostTimes(op_seconds=5e-6, backward_op_seconds=5e-6, kernel_seconds=1e-6)
    found = make_calibration(host_times=times).rates()

    assert found.host_forward_seconds is None
    assert found.kernel_gap_seconds == 1e-6


def test_what_a_hot_card_keeps_of_the_rate_after_a_rest() -> None:
    rested = MatmulTime(dtype="bf16", m=512, n=512, k=512, seconds=1e-5)
    other = rested.model_copy(update={"dtype": "fp16", "seconds": 5e-6})

    def keeps(seconds: float, **changes: object) -> float | None:
        hot = rested.model_copy(update={"seconds": seconds} | changes)
        return make_calibration(matmuls=(other, rested), sustained=hot).rates().sustained_fraction

    assert keeps(1.25e-5) == pytest.approx(0.8)
    assert keeps(0.9e-5) == 1.0, "noise makes no card faster"
    assert keeps(1.25e-5, k=1024) is None, "nothing to compare with"
    assert make_calibration().rates().sustained_fraction is None


def test_tf32_is_kept_but_not_estimated_with() -> None:
    rows = tuple(
        MatmulTime(dtype=dtype, m=512, n=512, k=512, seconds=1e-5)
        for dtype in ("fp32", "tf32", "fp8")
    )
    assert set(make_calibration(matmuls=rows).rates().matmuls) == {"fp32", "fp8"}


def test_a_ring_of_four_carries_three_quarters() -> None:
    gather, *_ = (one for one in make_collectives(100e9) if one.kind == "all_gather")
    large = max(make_collectives(100e9), key=lambda one: one.num_bytes)

    assert large.ring_bytes_per_second == pytest.approx(100e9)
    assert gather.ring_bytes_per_second < 100e9


def test_json_and_back() -> None:
    found = make_calibration(collectives=make_collectives(100e9))

    assert Calibration.model_validate_json(found.model_dump_json()) == found
    gpu = found.apply(find_gpu("H200-SXM"))
    assert Gpu.model_validate_json(gpu.model_dump_json()) == gpu
    assert len(gpu.measured.model_dump_json() if gpu.measured else "") < 3000


def test_a_card_without_rates_says_nothing_of_them() -> None:
    gpu = find_gpu("H200-SXM")

    assert "measured" not in gpu.model_dump()
    assert "measured" not in gpu.model_dump_json()
    assert Gpu.model_validate(gpu.model_dump()) == gpu


def test_nonsense_is_refused() -> None:
    for changes in ({"seconds": float("nan")}, {"format": 2}, {"unknown": 1}):
        with pytest.raises(ValidationError):
            make_calibration(**changes)
