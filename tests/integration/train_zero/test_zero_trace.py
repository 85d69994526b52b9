"""Traces of ZeRO against DeepSpeed itself, as torch's allocator reports its steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from zero_trace_cases import (
    BUCKET_VALUES,
    CONFIG,
    LIVE_VALUES,
    NUM_STEPS,
    ZERO_TRACES,
    make_rows,
    make_strategy,
    write_config,
)

from tightfit.core.strategy import Strategy
from tightfit.trace.gpu_emulation import GpuEmulation
from tightfit.trace.recorder import Recorder
from tightfit.trace.recording import INPUTS
from tightfit.training import zero as zero_engine
from tightfit.training.step import train_step
from tightfit.training.tracing import zero
from tightfit.training.tracing.engine import (
    build_fake_engine,
    build_meta_module,
    fake_process_group,
    make_training,
    record_fsdp,
)
from tightfit.training.tracing.trace import make_fake_batch
from tightfit.training.zero import to_deepspeed_strategy

WORKER = Path(__file__).with_name("zero_trace_worker.py")
SUPPORT = Path(__file__).parents[2] / "support"
TOLERANCE = 0.005
"""CPU kernels take scratch of their own, DeepSpeed some numbers that are not traced."""
LIVE_BYTES = 2_000


class NoWorkspace(GpuEmulation):
    """A CPU's kernels are not a card's."""

    def workspace_blocks(self, *_call: object) -> list[int]:
        return []

    def persistent_blocks(self, *_call: object) -> list[int]:
        return []


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """Peak and live bytes of each case under DeepSpeed."""
    out = tmp_path_factory.mktemp("zero-trace") / "told.json"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(WORKER.parent), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(WORKER), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[int]] = json.loads(out.read_text("utf-8"))
    return found


def trace_steps(folder: Path, strategy: Strategy) -> tuple[int, int]:
    """(peak, live) bytes of the steps."""
    write_config(folder)
    training = make_training(strategy, folder)
    module = build_meta_module(folder, strategy, training, has_varlen=False)
    rows = make_rows(strategy)
    recorder = Recorder(NoWorkspace(), vocab_size=CONFIG["vocab_size"])
    accumulated = strategy.grad_accum
    numbers: Any = {"divisor": 1, "learning_rate": 1e-5, "seeds": [0] * accumulated}
    with (
        fake_process_group(strategy) as context,
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder,
        record_fsdp(recorder),
    ):
        engine = build_fake_engine(module, strategy, training, context=context, recorder=recorder)
        batch = make_fake_batch(rows, torch.device("cpu"))
        recorder.hold(batch.values(), INPUTS)
        recorder.stage = "backward"
        for step in range(1, NUM_STEPS + 1):
            recorder.step = step
            train_step(engine, [batch] * accumulated, **numbers)
    live = peak = 0
    for allocation, begins in recorder.finish().walk():
        live += allocation.num_bytes if begins else -allocation.num_bytes
        if allocation.step:
            peak = max(peak, live)
    return peak, live


@pytest.mark.parametrize("name", list(ZERO_TRACES))
def test_a_trace_takes_what_deepspeed_takes(
    tmp_path: Path, name: str, told: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero.FakeZeroEngine, "bucket_size", BUCKET_VALUES)
    monkeypatch.setattr(zero_engine, "ZERO3_LIVE_VALUES", LIVE_VALUES)
    strategy = to_deepspeed_strategy(make_strategy(**ZERO_TRACES[name]))
    peak, live = trace_steps(tmp_path, strategy)
    told_peak, told_live = told[name]
    print(name, peak, told_peak, live, told_live)
    assert abs(live - told_live) <= LIVE_BYTES
    assert abs(peak - told_peak) <= TOLERANCE * told_peak
