"""Our norm kernels against plain torch, in triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
from interpreted import interpret


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return interpret("norm_script.py")


@pytest.mark.parametrize(("kind", "within"), [("fp32", 1e-6), ("in_place", 1e-6), ("bf16", 8e-3)])
def test_results_and_gradients_are_those_of_torch(
    found: dict[str, Any], kind: str, within: float
) -> None:
    for name in ("y", "x", "weight"):
        assert 0.0 < found[kind][name] < within, name


def test_spare_columns_are_zeros(found: dict[str, Any]) -> None:
    assert found["fp32"]["spare"] == found["bf16"]["spare"] == 0.0


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_model_with_them_learns_the_same(found: dict[str, Any], family: str, method: str) -> None:
    """Two layers: five norms, and two for the heads of each layer of qwen3."""
    reported = found[f"{family} {method}"]
    assert reported["norms"] == (5 if family == "llama" else 9)
    assert reported["worst"] < 2e-5
    if method == "lora":
        assert reported["roomy"] == 10
