"""DeepSpeed as rank 0 of four whose others are made up: what its allocator reports, as JSON."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from zero_trace_cases import (
    BUCKET_VALUES,
    LIVE_VALUES,
    NUM_STEPS,
    WORLD_SIZE,
    ZERO_TRACES,
    make_rows,
    make_strategy,
    write_config,
)

from allocator_reports import Told, listening, mark_start
from tightfit.core.strategy import Strategy
from tightfit.training import zero
from tightfit.training.distributed import DistContext
from tightfit.training.step import train_step
from tightfit.training.zero import build_zero_engine


def run(model: Path, strategy: Strategy, context: DistContext) -> Told:
    from zero_cases import Case, make_plan

    case = Case(sharding=strategy.sharding, method=strategy.method, num_ranks=WORLD_SIZE)
    plan = make_plan(model, case).model_copy(update={"strategy": strategy})
    accumulated = strategy.grad_accum
    numbers: Any = {"divisor": 1, "learning_rate": 1e-5, "seeds": [0] * accumulated}
    with listening() as reported:
        rows = make_rows(strategy)
        engine = build_zero_engine(plan, context)
        mark_start()
        for _ in range(NUM_STEPS):
            outcome = train_step(engine, [rows] * accumulated, **numbers)
            assert not outcome.update.is_skipped
    engine.close()
    del engine
    gc.collect()  # not to be freed in the next case
    return reported


def main(out: Path) -> None:
    warnings.simplefilter("ignore")
    model = Path(tempfile.mkdtemp(dir=out.parent))
    (model / "llama").mkdir()
    write_model(model / "llama")
    vars(zero).update(ZERO_BUCKET_VALUES=BUCKET_VALUES, ZERO3_LIVE_VALUES=LIVE_VALUES)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(WORLD_SIZE)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    context = DistContext(
        rank=0,
        local_rank=0,
        world_size=WORLD_SIZE,
        local_world_size=WORLD_SIZE,
        device=torch.device("cpu"),
    )
    found = {}
    for name, changes in ZERO_TRACES.items():
        reported = run(model, make_strategy(**changes), context)
        found[name] = [reported.peak_bytes, reported.live_bytes]
    out.write_text(json.dumps(found), "utf-8")


def write_model(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(folder)
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    auto.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
