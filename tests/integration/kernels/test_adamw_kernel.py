"""Our AdamW against torch's, in triton's interpreter, and what it is compiled to."""

from __future__ import annotations

from typing import Any

import pytest
from interpreted import interpret


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return interpret("adamw_script.py")


def test_weights_and_moments_are_those_of_torch(found: dict[str, Any]) -> None:
    assert found["fp32"].pop("step") == 0.0
    assert len(found["fp32"]) == 3
    for name, error in found["fp32"].items():
        assert error < 1e-6, name


def test_bf16_is_fp32_rounded_once(found: dict[str, Any]) -> None:
    assert found["bf16"] == dict.fromkeys(("weight", "gradient", "exp_avg", "exp_avg_sq"), True)


def test_a_step_that_found_no_numbers_changes_nothing(found: dict[str, Any]) -> None:
    assert found["skips"] is True


def test_calibration_finds_it_fit_for_use(found: dict[str, Any]) -> None:
    """Sums of terms that all but cancel differ by more than their own size's rounding."""
    assert found["passes"] is True


def test_whole_tiles_are_moved_16_bytes_at_a_time() -> None:
    """Four tensors read and three written by each thread; 8 values of 2 or 4 bytes."""
    compiled = interpret("adamw_compile_script.py")
    for kind, num_loads in (("bf16", 1), ("fp32", 2)):
        for capability in (75, 90):
            steps = compiled[f"{kind} {capability}"]
            assert steps.count("ld.global.v4.b32") == 4 * num_loads, steps
            assert steps.count("st.global.v4.b32") == 3 * num_loads, steps
