"""What the documentation names: every constant, every result file, and figures as the files say."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tightfit.core.strategy import Attention, Method, Strategy
from tightfit.estimate.activations import estimate_layer_bytes
from tightfit.models.resolve import resolve_model

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FORMULAS = ROOT / "docs" / "formulas.md"


def holds_number(value: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Constant) and type(node.value) in (int, float)
        for node in ast.walk(value)
    )


def numeric_constants(path: Path) -> Iterator[str]:
    """Names in capitals that a module gives a number, or a table of numbers."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        names = (target.id for target in targets if isinstance(target, ast.Name))
        yield from (name for name in names if name.isupper() and holds_number(value))


def test_every_constant_has_a_row_with_its_file() -> None:
    rows = set(re.findall(r"^\| `([A-Z0-9_]+)` \|.*\| `(\w+\.py)` \|", FORMULAS.read_text(), re.M))
    modules = sorted((ROOT / "src" / "tightfit" / "estimate").glob("*.py"))
    found = {(name, path.name) for path in modules for name in numeric_constants(path)}

    assert len(found) > 60, "the scan lost its constants"
    without_number = {"EAGER_ONLY", "POSITION_BIAS", "FUSED_ROTARY", "COMPOSED_GELU"}
    assert found - {("NO_ADAPTERS", "flops.py")} - rows == set(), "not in docs/formulas.md"
    assert {row for row in rows if row[0] not in without_number} - found == set(), "gone from code"


def test_result_files_that_documents_mention_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    mentioned = {
        (page.name, name)
        for page in pages
        for name in re.findall(r"benchmarks/results/([\w-]+\.json)", page.read_text())
    }

    assert len(mentioned) >= 5, "the scan lost its mentions"
    assert {pair for pair in mentioned if not (RESULTS / pair[1]).exists()} == set()


def test_worked_layer_is_what_the_estimator_counts_and_the_gpu_held() -> None:
    text = FORMULAS.read_text()
    written = int(re.findall(r"\*\*sum\*\* \| \| \*\*([\d,]+)\*\*", text)[0].replace(",", ""))
    section = text.split("### A Llama layer, worked")[1].split("**sum**")[0]
    terms = [int(cell.replace(",", "")) for cell in re.findall(r"\| ([\d,]+) \|\n", section)]
    spec = resolve_model("Llama-3.2-1B")
    strategy = Strategy(method=Method.FULL, checkpointing=False, attention=Attention.SDPA)
    cases = json.loads((RESULTS / "h200_steps.json").read_text())["cases"]
    (row,) = (case for case in cases if case["name"].startswith("Llama-3.2-1B task=saved"))
    measured = row["saved"]["full"]["bytes_per_token_per_layer"]

    assert sum(terms) == written
    assert estimate_layer_bytes(spec, spec.blocks[0], strategy).saved == written
    assert f"{measured:,}" in text
    assert written == pytest.approx(measured, rel=0.005)


def accuracy_figures() -> list[tuple[str, int, float, float]]:
    """Start of the row, count, median and 90th percentile, as the result files have them."""

    def read(name: str) -> Any:
        return json.loads((RESULTS / name).read_text())

    steps, others = read("h200_memory.json")["total"], read("published_memory.json")["total"]
    speed = read("published_time.json")["groups"]
    return [
        ("allocated", steps["cases"], steps["median_error"], steps["p90_error"]),
        ("reserved", steps["cases"], steps["median_reserved_error"], steps["p90_reserved_error"]),
        ("memory that", others["memory_rows"], others["median_error"], others["p90_error"]),
        *(
            (start, speed[group]["jobs"], speed[group]["median_error"], speed[group]["p90_error"])
            for start, group in (
                ("speed, our own table", "our own table, H200"),
                ("speed, training steps", "measured steps, H200"),
                ("speed that", "all published"),
            )
        ),
    ]


@pytest.mark.parametrize(("start", "count", "median", "p90"), accuracy_figures())
def test_accuracy_is_what_the_result_files_say(
    start: str, count: int, median: float, p90: float
) -> None:
    (line,) = re.findall(rf"^\| {start}.*$", FORMULAS.read_text(), re.M)

    assert f"| {count} | {100 * median:.1f}% | {100 * p90:.1f}% |" in line
