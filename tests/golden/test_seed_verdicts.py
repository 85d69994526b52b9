"""Jobs whose outcome people observed, and what the planner says of each."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import Method, Sharding
from tightfit.core.strategy import Quirks, Strategy
from tightfit.core.units import GB
from tightfit.estimation.result import Estimate, Verdict
from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.resolve import resolve_model
from tightfit.planning.filter import judge_strategy

SEEDS = Path(__file__).parent / "seed_verdicts.csv"
ALLOWED = {
    "works": {Verdict.FITS, Verdict.TIGHT},
    "oom": {Verdict.TIGHT, Verdict.DOES_NOT_FIT},
    "invalid": {Verdict.ILLEGAL},
}


def seed_rows() -> list[dict[str, str]]:
    with SEEDS.open() as stream:
        return [row for row in csv.DictReader(stream) if row["observed"]]


def seed_estimate(row: dict[str, str]) -> Estimate:
    strategy = Strategy(
        method=Method(row["method"]),
        weights=Dtype(row["quant"] or row["weights_dtype"]),
        compute=Dtype(row["compute"]),
        adapter_dtype=Dtype.FP32,
        optimizer=Optimizer(row["optimizer"]),
        lora_rank=int(row["lora_r"] or 8),
        lora_targets=tuple((row["lora_targets"] or "all-linear").split(";")),
        micro_batch=int(row["micro_batch"]),
        seq_len=int(row["seq_len"]),
        checkpointing=row["grad_ckpt"] == "yes",
        attention=Attention(row["attention"]),
        sharding=Sharding(row["strategy"]),
        gpus_per_node=int(row["gpus"]),
        quirks=Quirks(packs_subclasses=True),  # seen with transformers 4, which packed FalconLinear
    )
    node = resolve_hardware(f"{row['gpus']}x{row['gpu_type']}").groups[0].node
    return judge_strategy(spec=resolve_model(row["model"]), strategy=strategy, node=node)


@pytest.mark.parametrize("row", seed_rows(), ids=lambda row: str(row["id"]))
def test_verdict_agrees_with_what_was_observed(row: dict[str, str]) -> None:
    estimate = seed_estimate(row)

    assert estimate.verdict in ALLOWED[row["observed"]]
    if row["observed_gpu_GB"]:
        assert estimate.gpu.peak_allocated_bytes / GB == pytest.approx(
            float(row["observed_gpu_GB"]), rel=0.15
        )


def test_seed_verdicts_were_all_read() -> None:
    assert len(seed_rows()) == 12
