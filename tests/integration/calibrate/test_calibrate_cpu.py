"""This machine's CPU measured for real, in a few seconds, through the same code as a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from machine_pace import allow, children_seconds
from tightfit.hardware.calibration import Calibration
from tightfit.hardware.local import probe_cpu
from tightfit.runtime.calibrate.bench import Bench
from tightfit.runtime.calibrate.kernels import CPU_SHAPES, measure_matmuls, measure_traffic
from tightfit.runtime.calibrate.links import _train_once, measure_collectives, measure_context


def make_bench(seconds: float) -> Bench:
    return Bench(
        device=torch.device("cpu"),
        dtype=torch.float32,
        supports_bf16=False,
        deadline=time.monotonic() + seconds,
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `tightfit calibrate --device cpu` prints with a small budget."""
    folder = tmp_path_factory.mktemp("data")
    before = children_seconds()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tightfit.cli.app", "calibrate"),
            *("--device", "cpu", "--seconds", "6", "--json", "--force"),
        ],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "TIGHTFIT_LEDGER": str(folder / "ledger.sqlite"),
            "OMP_NUM_THREADS": "1",
        },
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    seconds = children_seconds() - before  # not of who else is at work here
    return {**json.loads(done.stdout), "processor_seconds": seconds, "folder": folder}


def test_ends_in_time_and_is_on_disk(told: Any) -> None:
    assert told["processor_seconds"] < allow(90)
    path = Path(told["path"])
    assert path.parent == told["folder"] / "calibrations"
    assert (
        Calibration.model_validate_json(path.read_bytes()).model_dump(mode="json")
        == (told["calibration"])
    )


def test_the_rates_are_a_cpus(told: Any) -> None:
    """Orders of magnitude that any CPU of the last 15 years has, and no GPU."""
    rates = Calibration.model_validate(told["calibration"]).rates()

    flops = [2.0 * m * n * k / s for m, n, k, s in rates.matmuls["fp32"]]
    assert 1e8 < max(flops) < 2e13
    assert rates.host_forward_seconds is not None
    assert 1e-7 < rates.host_forward_seconds < 1e-2
    assert rates.context_bytes is None
    assert rates.host_link_bytes_per_second is None
    assert rates.kernel_gap_seconds is None


def test_the_rate_is_what_a_stopwatch_says() -> None:
    """A second measure of the same product, by hand, before and after."""
    left, right = torch.randn(512, 2048), torch.randn(2048, 2048)

    def stop_time() -> float:
        times = []
        for _ in range(9):
            start = time.perf_counter()
            left @ right.T
            times.append(time.perf_counter() - start)
        return sorted(times)[4]

    tries = []
    for _ in range(3):  # a pause of the machine spoils one
        before = stop_time()
        [row] = measure_matmuls(make_bench(-1.0))  # no time: the one product, close to both
        by_hand = sorted([before, stop_time()])
        assert (row.m, row.n, row.k) == (512, 2048, 2048)
        tries.append((row.seconds, by_hand))
    assert any(low / 2.5 < seconds < 2.5 * high for seconds, (low, high) in tries), tries


def test_no_time_leaves_one_product_and_says_so() -> None:
    bench = make_bench(-1.0)

    rows = measure_matmuls(bench)

    assert [(row.m, row.n, row.k) for row in rows] == [(512, 2048, 2048)]
    missing = len(CPU_SHAPES) - 1
    assert bench.skipped == [
        f"{missing} of {len(CPU_SHAPES)} fp32 products: no time or memory left"
    ]
    assert measure_traffic(bench) == []


def test_what_does_not_fit_is_left_out() -> None:
    bench = make_bench(30.0)

    def refuse() -> Any:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    assert bench.try_seconds(refuse) is None
    with pytest.raises(RuntimeError, match="another"):
        bench.try_seconds(lambda: (_ for _ in ()).throw(RuntimeError("another error")))


def test_collectives_over_two_processes() -> None:
    rows, why = measure_collectives(2, backend="gloo", timeout_seconds=90)

    assert why == ""
    assert {(row.kind, row.num_ranks) for row in rows} == {("all_reduce", 2), ("all_gather", 2)}
    assert all(1e4 < row.ring_bytes_per_second < 1e12 for row in rows)


def test_collectives_that_fail_say_why_and_leave_nobody_behind() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU: CUDA_VISIBLE_DEVICES= pytest")
    rows, why = measure_collectives(1, backend="nccl", timeout_seconds=90)

    assert rows == []
    assert why.startswith("collectives: ")


def test_the_context_is_asked_of_a_process_that_trains_once() -> None:
    """Its step runs anywhere; its memory is a GPU's."""
    _train_once(torch.device("cpu"))
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU: CUDA_VISIBLE_DEVICES= pytest")
    size, why = measure_context()

    assert size is None
    assert why.startswith("the CUDA context: ")


def test_the_name_is_the_probes_so_that_plans_find_it(told: Any) -> None:
    assert told["calibration"]["gpu_name"] == probe_cpu().groups[0].node.gpu.name
