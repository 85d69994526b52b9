"""Kernels measured alone and in steps: what they move, what they multiply, what the page says."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "benchmarks" / "results" / "h200_kernels.json"
PAGE = ROOT / "docs" / "calibrate.md"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        names = ("_kernels", "_kernel_steps", "measure_kernels")
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(RESULT.read_text())
    return read


class Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the inputs and results of every operation that is not a view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            flat = [part for arg in args for part in (arg if isinstance(arg, list) else [arg])]
            tensors = [part for part in (*flat, result) if isinstance(part, torch.Tensor)]
            self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def test_kernels_move_as_many_bytes_as_they_are_said_to(scripts: dict[str, ModuleType]) -> None:
    kernels = scripts["_kernels"]
    scores = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16)
    kinds = [*kernels.list_kinds((256, 512), CPU), *kernels.list_softmaxes(scores)]
    for kind in kinds:
        if kind.name == "layer norm":  # gives a tuple, and counts its statistics as nothing
            continue
        with Moved() as moved:
            kind.work()

        assert kind.moved_bytes == pytest.approx(moved.num_bytes, rel=0.01), kind.name
    assert len(kinds) == 17


def test_flops_of_products_are_those_that_torch_counts(scripts: dict[str, ModuleType]) -> None:
    left, right = torch.empty(2048, 1024, device="meta"), torch.empty(1024, 4096, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.mm(left, right)
    shapes = [list(left.shape), list(right.shape)]
    count = scripts["_kernel_steps"].count_flops

    assert count(("aten::mm", shapes, 3, 1.0)) == 3 * counter.get_total_flops()
    assert count(("aten::addmm", [[4096], *shapes, [], []], 1, 1.0)) == counter.get_total_flops()
    assert count(("aten::mm", [[2048, 16], [16, 4096]], 3, 1.0)) == 0
    assert count(("aten::add", [*shapes, []], 3, 1.0)) == 0


def test_short_operations_have_no_row_but_are_counted(scripts: dict[str, ModuleType]) -> None:
    ops = [
        ("aten::mul", [[8], [8]], 2, 15e-6),
        ("aten::add", [[8], [8]], 1, 25e-6),
        ("aten::mm", [[2048, 2048], [2048, 2048]], 1, 50e-6),
    ]
    found = scripts["_kernel_steps"].describe_steps("job", [0.3, 0.1, 0.2], {"clock_mhz": [9]}, ops)
    (step,) = found["steps"]

    assert [row["op"] for row in found["ops"]] == ["aten::mm", "aten::add"]
    assert step["device_seconds"] == pytest.approx(90e-6)
    assert step["left_out_seconds"] == pytest.approx(15e-6)
    assert step["product_flops_per_second"] == pytest.approx(2 * 2048**3 / 50e-6)
    assert step["step_seconds"] == 0.2


def test_kernels_that_no_operation_started_are_found(scripts: dict[str, ModuleType]) -> None:
    """As the profiler lists a step: each kernel, those of an operation with it too, and spans."""
    kinds: Any = torch.autograd

    def on_card(name: str, microseconds: float, *, is_span: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            device_type=kinds.DeviceType.CUDA,
            name=name,
            time_range=SimpleNamespace(elapsed_us=lambda: microseconds),
            is_user_annotation=is_span,
        )

    of_product = SimpleNamespace(name="gemm", duration=7.0)
    product = SimpleNamespace(device_type=kinds.DeviceType.CPU, kernels=[of_product])
    events = [
        *(product, on_card("gemm", 7.0), on_card("_adamw", 30.0), on_card("_adamw", 10.0)),
        on_card("Optimizer.step#KernelAdamW.step", 45.0, is_span=True),
    ]
    assert scripts["_kernel_steps"].read_kernels(events) == [("_adamw", [], 2, pytest.approx(4e-5))]


def test_parts_run_without_a_gpu_and_are_written_a_row_a_line(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    script = scripts["measure_kernels"]
    rows = {
        "products": scripts["_kernels"].measure_products(CPU),
        "traffic": scripts["_kernels"].measure_traffic(CPU),
    }
    script.write_document(tmp_path / "kernels.json", {"gpu": None}, rows)
    text = (tmp_path / "kernels.json").read_text()

    assert json.loads(text) == {"gpu": None, **rows}
    assert len(re.findall(r"^  \{", text, re.M)) == 4 + 17
    assert all(script.summarize(part, row) for part, found in rows.items() for row in found)


def test_committed_rows_agree_with_each_other(
    scripts: dict[str, ModuleType], committed: dict[str, Any]
) -> None:
    shortest = scripts["_kernel_steps"].LEAST_SECONDS
    for row in committed["traffic"]:
        assert row["bytes_per_second"] * row["seconds"] == pytest.approx(row["moved_bytes"], 1e-3)
    for step in committed["steps"]:
        ops = [row for row in committed["ops"] if row["job"] == step["name"]]
        total = sum(row["seconds"] for row in ops) + step["left_out_seconds"]

        assert total == pytest.approx(step["device_seconds"], rel=1e-3)
        assert step["device_seconds"] < step["step_seconds"]
        assert min(row["seconds"] for row in ops) >= shortest
    names = [job for _, job, _ in _list_committed(scripts["measure_kernels"], committed)]

    assert [job.name for job in names] == [step["name"] for step in committed["steps"]]
    assert not any(job.strategy.fused_kernels for job in names)


def _list_committed(script: ModuleType, committed: dict[str, Any]) -> list[Any]:
    (command,) = committed["commands"]
    jobs = command.rpartition("--jobs ")[2]
    found: list[Any] = script.list_work(_Arguments(jobs))
    return found


class _Arguments:
    parts, device = "steps", "cuda"

    def __init__(self, jobs: str) -> None:
        self.jobs = jobs


def test_page_says_what_the_file_says(committed: dict[str, Any]) -> None:
    (report,) = re.findall(r"^Why the pause:(?:.+\n)+", PAGE.read_text(), re.M)
    product = committed["products"][0]
    (step,) = (row for row in committed["steps"] if row["name"] == "llama7b-lora-ckpt")
    large = {row["kind"]: row for row in committed["traffic"] if row["shape"] == [32768, 4096]}
    slow = [
        large[kind]["values_per_second"] / 1e9
        for kind in (
            *("times a row", "fp32 times a column", "bf16 to fp32", "heads first"),
            *("half of each head negated", "halves of heads swapped"),
        )
    ]
    expected = [
        f"from {product['rested_flops_per_second'] / 1e12:.0f}",
        f"to {product['sustained_flops_per_second'] / 1e12:.0f} TFLOP/s",
        f"{product['power_watts']:.0f} W",
        f"ran at {step['product_flops_per_second'] / 1e12:.0f}",
        f"{step['step_seconds']:.3f} s",
        f"{step['device_seconds']:.3f} s",
        f"{large['add']['bytes_per_second'] / 1e12:.1f} TB/s",
        f"{min(slow):.0f} to {max(slow):.0f} G values/s",
    ]
    flat = " ".join(report.split())

    assert [text for text in expected if text not in flat] == []
