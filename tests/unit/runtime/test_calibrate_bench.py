"""The clock on a GPU, held to a device that is made up, and the list of what is measured there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from made_calibrations import make_calibration, make_collectives
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Node
from tightfit.runtime.calibrate import bench as benches
from tightfit.runtime.calibrate import kernels, measure
from tightfit.runtime.calibrate.bench import Bench
from tightfit.runtime.calibrate.compare import compare_rates
from tightfit.runtime.calibrate.kernels import attend_eagerly

KERNEL_SECONDS = 3e-6


class FakeDevice:
    """A queue: each call takes the device 3 us, after what it was told to wait."""

    def __init__(self) -> None:
        self.busy_until = 0.0
        self.spun: list[float] = []
        self.calls = 0

    def launch(self) -> None:
        self.calls += 1
        self.busy_until += KERNEL_SECONDS

    def spin(self, cycles: int) -> None:
        self.spun.append(cycles / benches.SPIN_HZ)
        self.busy_until += cycles / benches.SPIN_HZ


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = fake.busy_until

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", fake.spin)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return fake


def make_bench(monkeypatch: pytest.MonkeyPatch) -> benches.Bench:
    monkeypatch.setattr(benches.Bench, "is_cpu", property(lambda _: False))
    return benches.Bench(
        device=torch.device("cpu"), dtype=torch.float32, supports_bf16=True, deadline=1e18
    )


def test_the_clock_sees_the_device_and_not_the_host(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting before each round is not in the time, and is there in each."""
    bench = make_bench(monkeypatch)

    assert bench.seconds(device.launch) == pytest.approx(KERNEL_SECONDS)
    assert len(device.spun) == benches.NUM_ROUNDS
    assert min(device.spun) >= 1e-4
    assert device.calls <= 3 + benches.NUM_ROUNDS * benches.MOST_REPEATS


@pytest.mark.parametrize(
    ("capability", "supports_bf16", "kinds"),
    [
        ((7, 5), False, ["fp16", "fp32"]),
        ((8, 0), True, ["bf16", "fp32", "fp16", "tf32"]),
        ((9, 0), True, ["bf16", "fp32", "fp16", "tf32", "fp8", "fp8-exact"]),
    ],
)
def test_what_a_card_has_is_measured(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    supports_bf16: bool,
    kinds: list[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    bench = make_bench(monkeypatch)
    bench.supports_bf16 = supports_bf16

    planned = kernels._plan(bench)

    assert [kind for kind, _ in planned] == kinds
    for _, shapes in planned:
        assert kernels.ANCHORS["cuda"] in shapes
        assert len(set(shapes)) == len(shapes)
    usual = planned[0][1]
    assert min(n for _, n, _ in usual) == 8, "LoRA's thin products"
    assert max(n for _, n, _ in usual) == 128_256, "a vocabulary"
    assert len(usual) < 40, "a plan carries them"


def test_eager_attention_is_attention() -> None:
    """Against torch's own, with a causal mask."""
    q, k, v = (torch.randn(2, 3, 8, 4, generator=torch.manual_seed(n)) for n in range(3))
    mask = torch.full((8, 8), float("-inf")).triu(1)[None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.testing.assert_close(attend_eagerly(q, k, v, mask=mask), expected)


def test_every_measured_part_stands_in_the_table() -> None:
    found: Any = make_calibration(num_gpus=4, collectives=make_collectives(100e9))
    node = Node(gpu=found.apply(find_gpu("H200-SXM")), num_gpus=4)

    rows = {row.name: row for row in compare_rates(found, node)}

    assert rows["all_gather of 16384 MiB, 4 GPUs, as a ring"].measured == pytest.approx(100e9)
    # What was measured is held against the catalogue, not against itself.
    assert rows["best bf16 product"].ratio == pytest.approx(400 / (0.80 * 989), rel=0.01)
    assert rows["fused AdamW in bf16, 1e9 values"].measured == pytest.approx(0.010)
    parts = ("CUDA context", "attention", "copy", "elementwise", "unpacking", "host:", "pinned")
    for part in (*parts, "from kernel", "bf16 product 2048 x 4096 x 4096"):
        assert any(name.startswith(part) for name in rows), part


@pytest.mark.parametrize(("times", "is_kept"), [((4, 3, 4, 11), True), ((4, 3, 4, 3), False)])
def test_a_deeper_model_that_seems_quicker_is_timed_again(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], is_kept: bool
) -> None:
    """Other work disturbed it; twice so, and there is no figure instead of an absurd one."""
    left = iter(times)
    bench = Bench(device=torch.device("cpu"), dtype=torch.float32, supports_bf16=True, deadline=0.0)

    def time_steps(_bench: Bench, _model: object) -> tuple[float, float]:
        seconds = 1e-3 * next(left, 40.0)
        return seconds, 2 * seconds

    monkeypatch.setattr(measure, "_time_steps", time_steps)
    found = measure.measure_host(bench)
    if is_kept:
        assert found.layer_forward_seconds == pytest.approx(7e-3 / (32 - 4))
        assert found.layer_backward_seconds == pytest.approx(14e-3 / (32 - 4))
    else:
        assert found.layer_forward_seconds is None
        assert any("disturbed" in one for one in bench.skipped)
