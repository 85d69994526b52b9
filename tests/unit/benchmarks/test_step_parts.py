"""Operations of a step by part: on recorded steps of a card, and against torch's own counts."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tightfit.core.optimizers import Optimizer
from tightfit.core.strategy import Strategy
from tightfit.hardware.calibration import Calibration
from tightfit.models.resolve import resolve_model

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture(scope="module")
def parts() -> Iterator[ModuleType]:
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        yield importlib.import_module("_step_parts")
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return Calibration.model_validate_json((RESULTS / "h200_calibration.json").read_bytes())


def facts_of(parts: ModuleType, name: str) -> Any:
    jobs = importlib.import_module("_trace_jobs").SETS
    (job,) = (job for jobs_of_set in jobs.values() for job in jobs_of_set if job.name == name)
    return parts.gather_facts(resolve_model(job.model), job.strategy)


EXPECTED: tuple[tuple[str, list[list[int]], str], ...] = (
    ("aten::mm", [[8192, 4096], [4096, 11008]], "matmul"),
    ("aten::mm", [[8188, 4096], [4096, 32000]], "matmul"),
    ("aten::mm", [[8192, 4096], [4096, 16]], "LoRA products"),
    ("aten::mm", [[16, 8192], [8192, 4096]], "LoRA products"),
    ("aten::addmm_", [[8192, 4096], [8192, 16], [16, 4096], [], []], "LoRA products"),
    ("aten::mm", [[8192, 4096], [4096, 48], [8192, 48]], "LoRA products"),
    ("aten::mm", [[32, 8192], [8192, 4096]], "LoRA products"),
    ("aten::mm", [[8192, 4224], [4224, 4096]], "matmul"),
    ("aten::_scaled_mm", [[8192, 4096], [4096, 11008], [8192, 1], [1, 11008]], "fp8 products"),
    ("_TrainedProductBackward", [[8192, 11008]], "casts to fp8"),
    ("_JoinedProductsBackward", [[8192, 11008], [8192, 11008]], "casts to fp8"),
    ("RmsNormBackward", [[4, 2048, 4096]], "norms, rotary, activations"),
    ("aten::_cudnn_attention_backward", [[4, 32, 2048, 128]] * 5, "attention"),
    ("aten::_flash_attention_forward", [[8192, 32, 64]] * 3, "attention"),
    ("aten::_softmax", [[4, 32, 2048, 2048], [], []], "attention"),
    ("aten::_log_softmax", [[8188, 32000], [], []], "loss"),
    ("aten::copy_", [[8188, 32000], [8188, 32000], []], "loss"),
    ("LigerFusedLinearCrossEntropyFunction", [[8188, 4096], [32000, 4096], [8188]], "loss"),
    ("aten::copy_", [[32000, 4096], [32000, 4096], []], "copies"),
    ("aten::embedding", [[32000, 4096], [4, 2048], [], [], []], "copies"),
    ("aten::cat", [[], []], "copies"),
    ("aten::mul", [[4, 2048, 4096], [4, 2048, 1]], "norms, rotary, activations"),
    ("LigerRMSNormFunctionBackward", [[4, 2048, 4096]], "norms, rotary, activations"),
    ("triton_poi_fused_add_mul_3", [], "norms, rotary, activations"),
    ("bitsandbytes::gemm_4bit", [[4, 1024, 4096], [8388608, 1], []], "nf4 unpacking"),
    ("aten::_fused_adamw_", [[], []], "optimizer"),
    ("_adamw", [], "optimizer"),
    ("aten::_foreach_norm", [[], []], "optimizer"),
    ("bitsandbytes::optimizer_update_8bit_blockwise", [[4096, 4096]], "optimizer"),
    ("aten::isneginf", [[4, 1, 8, 8]], "other"),
)


def test_operations_belong_to_parts(parts: ModuleType) -> None:
    facts = facts_of(parts, "llama7b-lora-ckpt")
    for name, shapes, part in EXPECTED:
        assert parts.classify(name, shapes, facts) == part, (name, shapes)
    assert {part for *_, part in EXPECTED} == set(parts.PARTS) - {"idle"}


def test_full_tuning_has_no_lora_products(parts: ModuleType) -> None:
    facts = facts_of(parts, "llama1b-full-keep")

    assert parts.classify("aten::mm", [[8192, 2048], [2048, 16]], facts) == "matmul"


def test_flops_are_those_that_torch_counts(parts: ModuleType, calibration: Calibration) -> None:
    facts = facts_of(parts, "llama7b-lora-ckpt")
    ceilings = parts.read_ceilings(calibration, facts)
    left, right = torch.empty(64, 32, device="meta"), torch.empty(32, 48, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.mm(left, right)
    row = {"op": "aten::mm", "shapes": [[64, 32], [32, 48]], "count": 3}
    work = parts.count_work(parts.MATMUL, row, facts, ceilings)

    assert work.amount == 3 * counter.get_total_flops()
    assert work.seconds == work.amount / ceilings.matmul_flops_per_second


def test_attention_counts_half_the_square_in_any_layout(
    parts: ModuleType, calibration: Calibration
) -> None:
    facts = facts_of(parts, "llama7b-lora-ckpt")
    ceilings = parts.read_ceilings(calibration, facts)
    query = torch.empty(4, 32, 2048, 128, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    for name, shape in (("_cudnn", [4, 32, 2048, 128]), ("_flash", [8192, 32, 128])):
        row = {"op": f"aten::{name}_attention_forward", "shapes": [shape] * 3, "count": 1}
        work = parts.count_work(parts.ATTENTION, row, facts, ceilings)

        assert work.amount == counter.get_total_flops() / 2


def test_an_update_moves_as_much_as_adamw_reads_and_writes(parts: ModuleType) -> None:
    assert parts.count_update_bytes(Optimizer.ADAMW, 2) == 2 + 4 * 2 + 3 * 2
    assert parts.count_update_bytes(Optimizer.ADAMW_8BIT, 2) == 2 + 2 * 2 + 2 + 4 * 1


@pytest.mark.parametrize("name", ["llama7b-lora-ckpt", "llama1b-full-keep"])
def test_a_recorded_step_is_accounted_for(
    parts: ModuleType, calibration: Calibration, name: str
) -> None:
    recorded = json.loads((RESULTS / "h200_kernels.json").read_text())
    (step,) = (row for row in recorded["steps"] if row["name"] == name)
    ops = [row for row in recorded["ops"] if row["job"] == name]
    facts = facts_of(parts, name)
    ceilings = parts.read_ceilings(calibration, facts)
    rows = {row["part"]: row for row in parts.describe_parts(step, ops, facts, ceilings)}

    assert sum(row["seconds"] for row in rows.values()) == pytest.approx(step["step_seconds"], 1e-3)
    assert rows["other"]["fraction_of_step"] < 0.005
    assert ("LoRA products" in rows) == ("lora" in name)
    # As the recording's own reader counts the large products, and no part beats its ceiling.
    assert rows["matmul"]["rate"] == pytest.approx(step["product_flops_per_second"], rel=0.02)
    assert all(row.get("fraction_of_ceiling", 0.0) < 1.0 for row in rows.values())
    assert rows["norms, rotary, activations"]["fraction_of_ceiling"] > 0.4
    table = parts.render_parts(list(rows.values())).splitlines()
    assert len(table) == len(rows) + 2


def test_a_host_that_waited_is_no_part_of_the_step(parts: ModuleType) -> None:
    """The profiler tells "Command Buffer Full" as if a kernel had run for as long."""
    profile = json.loads((RESULTS / "h200_profile.json").read_text())
    ceilings_of = Calibration.model_validate(profile["calibration"])
    waited = {row["job"] for row in profile["ops"] if row["op"] == "Command Buffer Full"}
    assert waited
    for job, step in zip(profile["jobs"], profile["steps"], strict=True):
        ops = [row for row in profile["ops"] if row["job"] == job["name"]]
        facts = parts.gather_facts(
            resolve_model(job["model"]), Strategy.model_validate(job["strategy"])
        )
        rows = parts.describe_parts(step, ops, facts, parts.read_ceilings(ceilings_of, facts))
        whole = sum(row["seconds"] for row in rows)
        assert whole == pytest.approx(step["step_seconds"], rel=1e-3), job["name"]
