"""The sweep over the levers: which plans, in which order, and what is made of their figures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tightfit.core.strategy import Strategy

FOLDER = Path(__file__).parents[3] / "benchmarks"
GIB = 2**30


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(FOLDER))
    try:
        names = ("_sweep_order", "_sweep_plans", "measure_sweep", "h200_sweep")
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def order(scripts: dict[str, ModuleType]) -> ModuleType:
    return scripts["_sweep_order"]


@pytest.fixture(scope="module")
def table(scripts: dict[str, ModuleType]) -> ModuleType:
    return scripts["h200_sweep"]


def make_plan(job: str, rank: int, seconds: float, **fields: Any) -> dict[str, Any]:
    return {
        "job": job,
        "rank": rank,
        "strategy": {},
        "tokens_per_step": 8192,
        "predicted_seconds": seconds,
        "closed_form_seconds": seconds,
        "predicted_allocated_bytes": 50 * GIB,
        "predicted_reserved_bytes": 55 * GIB,
        **fields,
    }


def make_row(plan: dict[str, Any], seconds: float | None, when: str = "sweep") -> dict[str, Any]:
    if seconds is None:
        return {"when": when, **plan, "status": "out of memory", "wall_seconds": 5.0}
    return {
        "when": when,
        **plan,
        "status": "ok",
        "step_seconds": seconds,
        "peak_allocated_bytes": 50 * GIB,
        "peak_reserved_bytes": 50 * GIB,
        "wall_seconds": 5.0,
    }


PLANS = [
    make_plan("lora", 1, 0.40),
    make_plan("lora", 2, 0.55),
    make_plan("lora", 3, 0.45, strategy={"compile": True}),
    make_plan("lora", 4, 0.61),
    make_plan("full", 1, 0.30),
    make_plan("full", 2, 0.29),
    make_plan("full", 3, 0.31),
    make_plan("full", 4, 0.33),
]


def name_turns(turns: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str, int]]:
    return [(when, plan["job"], plan["rank"]) for when, plan in turns]


def test_jobs_take_turns_between_two_measurements_of_the_first_plans(order: ModuleType) -> None:
    assert name_turns(order.order_turns(PLANS, within=1.5)) == [
        ("first", "lora", 1),
        ("first", "full", 1),
        ("sweep", "lora", 3),
        ("sweep", "full", 2),
        ("sweep", "lora", 2),
        ("sweep", "full", 3),
        ("sweep", "full", 4),
        ("again", "lora", 1),
        ("again", "full", 1),
    ]


def test_compiled_plans_can_be_left_to_the_end(order: ModuleType) -> None:
    turns = name_turns(order.order_turns(PLANS, within=1.5, is_compiled_last=True))

    assert turns[2:7][-1] == ("sweep", "lora", 3)
    assert sorted(turns) == sorted(name_turns(order.order_turns(PLANS, within=1.5)))


def test_no_plan_within_the_limit_is_skipped(order: ModuleType) -> None:
    def count(within: float) -> int:
        return len(order.choose_swept(PLANS[:4], within=within))

    assert [count(1.0), count(1.13), count(1.4), count(1.6)] == [0, 1, 2, 3]


def test_traced_seconds_do_not_move_the_limit(order: ModuleType) -> None:
    """A first plan traced as much faster than its formula must not narrow the sweep."""
    traced = PLANS[0] | {"predicted_seconds": 0.30}
    chosen = order.choose_swept([traced, *PLANS[1:4]], within=1.4)

    assert [plan["rank"] for plan in chosen] == [3, 2]


def test_what_has_a_row_is_not_measured_again(order: ModuleType) -> None:
    turns = order.order_turns(PLANS, within=1.5)
    rows = [make_row(plan, 0.5, when) for when, plan in turns[:5]]
    rows[2] = make_row(turns[2][1], None)

    assert order.list_missing(turns, rows) == turns[5:]
    assert order.list_missing(turns, [make_row(plan, 0.5, when) for when, plan in turns]) == []


def test_first_plan_is_due_again_where_more_is_measured(order: ModuleType) -> None:
    turns = order.order_turns(PLANS, within=1.5)
    rows = [make_row(plan, 0.5, when) for when, plan in turns if (plan["rank"] != 4)]

    assert name_turns(order.list_missing(turns, rows)) == [
        ("sweep", "full", 4),
        ("again", "full", 1),
    ]


def test_time_for_the_first_plans_is_kept_back(order: ModuleType) -> None:
    rows = [make_row(PLANS[0], 0.4, "first"), make_row(PLANS[4], 0.3, "first")]

    assert not order.must_stop("sweep", rows, seconds_left=10.5)
    assert order.must_stop("sweep", rows, seconds_left=9.5)
    assert not order.must_stop("again", rows, seconds_left=9.5)


def test_warm_up_steps_do_not_count(scripts: dict[str, ModuleType]) -> None:
    report = scripts["measure_sweep"].summarize_steps([9.0, 5.0, 1.0, 1.2, 1.1], num_warm_up=2)

    assert report["step_seconds"] == 1.1
    assert report["spread_fraction"] == pytest.approx(0.2 / 1.1, abs=1e-4)
    assert len(report["all_step_seconds"]) == 5


def test_summary_of_a_job(table: ModuleType) -> None:
    rows = [
        make_row(PLANS[0], 0.42, "first"),
        make_row(PLANS[1], 0.40),
        make_row(PLANS[2], None),
        make_row(PLANS[0], 0.46, "again"),
    ]

    report = table.summarize_job(table.join_plans(rows), {"left": 1, "beyond": 0})

    assert (report["plans"], report["failed"], report["left"]) == (2, 1, 1)
    assert report["fastest_rank"] == 2
    assert report["first_slower_error"] == pytest.approx(0.44 / 0.40 - 1, abs=1e-4)
    assert report["speed_error"] == pytest.approx(0.44 / 0.40 - 1, abs=1e-4)
    assert report["drift"] == pytest.approx(0.46 / 0.42 - 1, abs=1e-4)
    assert report["allocated_error"] == 0
    assert report["reserved_error"] == pytest.approx(0.1)
    # 0.10 of the first plan, and 0.40 measured where 0.55 was predicted.
    assert report["median_speed_error"] == pytest.approx((0.1 + 0.2727) / 2, abs=1e-4)


def test_promises_that_are_not_kept_are_named(table: ModuleType) -> None:
    good = table.summarize_job([make_row(PLANS[0], 0.41) | {"drift": 0.0}], {})
    slow = good | {"first_slower_error": 0.06}

    assert table.list_broken({"lora": good}) == []
    assert table.list_broken({"lora": slow}) == ["lora: first slower error +6.00%, promised 5%"]
    assert table.list_broken({"lora": {"plans": 0}}) == ["lora: the first plan did not run"]


def test_total_is_the_worst_of_all_jobs_whatever_its_sign(table: ModuleType) -> None:
    counts = {"plans": 3, "failed": 0, "left": 1, "beyond": 2}
    job = counts | {"speed_error": -0.08, "allocated_error": None}
    total = table.sum_up({"lora": job, "full": job | {"speed_error": 0.02}})

    doubled = {"plans": 6, "failed": 0, "left": 2, "beyond": 4}
    assert total == doubled | {"worst_speed_error": 0.08}


def test_levers_are_told_as_they_differ_from_the_first_plan(table: ModuleType) -> None:
    first = make_plan("full", 1, 0.3, strategy={"loss": "fused", "fused_kernels": True})
    other = make_plan("full", 2, 0.3, strategy={"loss": "fused", "optimizer": "adamw-8bit"})

    assert table.name_difference(other, first) == "optimizer=adamw-8bit fused_kernels=False"
    assert table.name_difference(first, first) == ""


def test_plans_beyond_the_limit_are_not_left_over(table: ModuleType) -> None:
    rows = [make_row(PLANS[0], 0.4, "first"), make_row(PLANS[2], 0.5)]

    document = {"plans": PLANS, "rows": rows, "within": 1.5}

    # Rank 2 is left; rank 4 is too slow by prediction.
    assert table.count_unmeasured(document, "lora") == {"left": 1, "beyond": 1}


def test_every_setting_of_one_gpu_is_listed_once(scripts: dict[str, ModuleType]) -> None:
    planned = scripts["_sweep_plans"].plan_job(
        "7b-lora", "H200", is_traced=False, has_every_size=True
    )
    plans = planned["plans"]
    strategies = [Strategy.model_validate(plan["strategy"]) for plan in plans]

    assert [plan["rank"] for plan in plans] == list(range(1, len(plans) + 1))
    assert len(set(strategies)) == len(strategies)
    assert {one.micro_batch for one in strategies} == {1, 2, 4}
    assert all(one.micro_batch * one.grad_accum == 4 for one in strategies)
    assert {one.sharding.value for one in strategies} == {"single"}
    assert {one.fused_kernels for one in strategies} == {True, False}
    assert not any(one.compile for one in strategies), "Llama has fused kernels"
    assert not planned["is_calibrated"]


def test_a_table_of_nothing_says_how_to_measure(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "h200_sweep.py"), "--measured", str(tmp_path / "none")]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "benchmarks/measure_sweep.py --out" in done.stderr


def test_document_is_json_with_a_line_per_row(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    document = {"within": 1.5, "plans": PLANS, "rows": []}
    path = tmp_path / "sweep.json"

    scripts["measure_sweep"].write_document(path, document)

    assert json.loads(path.read_text()) == document
    assert all(json.dumps(plan) in path.read_text() for plan in PLANS)
