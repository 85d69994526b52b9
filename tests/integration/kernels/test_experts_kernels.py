"""Our kernels between the products of experts against plain torch, in triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
from interpreted import interpret

from tightfit.runtime.kernels.gating import Gating


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return interpret("experts_script.py")


@pytest.mark.parametrize(("kind", "within"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("gating", [gating.name for gating in Gating])
def test_results_and_gradients_are_those_of_torch(
    found: dict[str, Any], gating: str, kind: str, within: float
) -> None:
    """The output; then gradients of hidden states, weights, matrices, biases and adapters."""
    distances = found[f"{gating} {kind}"]
    assert len(distances) == (11 if gating == "CLAMPED" else 9)
    assert 0.0 < max(distances) < within, distances
