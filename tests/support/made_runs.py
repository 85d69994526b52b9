"""Run folders with made-up metrics under real plans: for the tests of the ledger and of `runs`."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

from tightfit.core.profiles import DataProfile
from tightfit.core.strategy import DataSource, Training
from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.resolve import resolve_model
from tightfit.planning.plan import Plan
from tightfit.planning.request import JobRequest
from tightfit.planning.search import search
from tightfit.runs.metrics import EvalRecord, EventRecord, Record, StepRecord, write_records
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

MODEL = "SmolLM2-135M"
PROFILE = DataProfile(
    source="rows.jsonl",
    format="alpaca",
    num_rows=1280,
    num_tokens=256_000,
    num_trained_tokens=128_000,
    mean_tokens=200.0,
    max_tokens=480,
    percentiles={"p50": 150, "p90": 400, "p95": 440, "p99": 470},
    histogram=((128, 400), (256, 500), (512, 380)),
    num_truncated=0,
    seq_len=512,
    tokenizer="guessed",
    is_exact=False,
    padding_waste_fraction={"1": 0.0, "2": 0.3, "4": 0.5, "8": 0.65, "16": 0.75},
    packing_waste_fraction=0.02,
    num_packed_rows=510,
)


@cache
def make_plan(on: str = "T4", method: str = "lora", micro_batch: int = 4) -> Plan:
    request = JobRequest(
        spec=resolve_model(MODEL),
        method=method,
        seq_len=512,
        num_epochs=2.0,
        profile=PROFILE,
        fixed={"micro_batch": micro_batch},
    )
    plan = search(request, resolve_hardware(on), num_plans=1, is_coarse=True).plans[0]
    training = Training(
        model_path="models/smol", data=(DataSource(path="rows.jsonl"),), learning_rate=2e-4
    )
    return plan.model_copy(update={"training": training, "why": ("nothing <is> faster",)})


def make_step(step: int, **fields: Any) -> StepRecord:
    """A plausible step of a run of 80 steps an epoch."""
    seconds = 0.5 if step > 2 else 2.0
    values: dict[str, Any] = {
        "step": step,
        "epoch": step / 80,
        "loss": 1.2 + 1.6 * math.exp(-step / 25) + 0.08 * math.sin(1.7 * step),
        "learning_rate": 2e-4,
        "grad_norm": 1.0,
        "num_tokens": 3200,
        "num_trained_tokens": 1600,
        "seconds": seconds,
        "data_wait_seconds": 0.005,
        "tokens_per_second": 3200 / seconds,
        "mfu_fraction": 0.21,
        "gpu_allocated_bytes": 2_000_000_000 + 1_000_000 * (step % 7),
        "gpu_reserved_bytes": 2_300_000_000,
        "host_bytes": 3_100_000_000,
        "num_alloc_retries": 0,
    }
    return StepRecord(**(values | fields))


def make_eval(step: int, loss: float) -> EvalRecord:
    return EvalRecord(
        step=step,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),
        num_trained_tokens=4000,
        seconds=3.0,
    )


def make_records(num_steps: int = 160) -> list[Record]:
    records: list[Record] = [make_eval(0, 2.75)]
    for step in range(1, num_steps + 1):
        records.append(make_step(step))
        if step % 40 == 0:
            records.append(make_eval(step, 1.25 + 1.5 * math.exp(-step / 30)))
    records.insert(3, EventRecord(step=2, text="tokenizer has no pad token: <unk> pads"))
    return records


def make_run(
    path: Path,
    *,
    plan: Plan | None = None,
    records: list[Record] | None = None,
    status: RunStatus = RunStatus.FINISHED,
    **state: Any,
) -> RunFolder:
    """A whole run folder; `state` are further fields of its state.json."""
    run = RunFolder(path=path)
    path.mkdir(parents=True)
    run.write_plan(plan or make_plan())
    held = make_records() if records is None else records
    write_records(run.metrics_path, held)
    last = max((record.step for record in held), default=0)
    values = {"step": last, "num_steps": 160, "updated_at": "2026-07-01T10:00:00+00:00"} | state
    run.write_state(RunState(status=status, **values))
    return run
