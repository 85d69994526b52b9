"""Casts to fp8: the numbers of torch in triton's interpreter, and what they are compiled to."""

from __future__ import annotations

from typing import Any

import pytest
from interpreted import interpret

NUM_CASES = 10
NUM_KERNELS = 5


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return interpret("fp8_script.py")


@pytest.mark.parametrize(
    "what", ["rows", "columns", "turned", "rows beside", "columns beside", "columns stacked"]
)
def test_casts_are_those_of_torch(found: dict[str, Any], what: str) -> None:
    assert len(found) == NUM_CASES
    assert [case for case, same in found.items() if not same[what]] == []


def test_memory_is_read_and_written_16_bytes_at_a_time() -> None:
    """By every thread: no value of 8 or 16 bits goes alone, as where columns are read as rows."""
    compiled = interpret("fp8_compile_script.py")
    assert len(compiled) == 2 * NUM_KERNELS
    for name, steps in compiled.items():
        kinds = {"ld.global"} if "_find_largest" in name else {"ld.global", "st.global"}
        assert {step[:9] for step in steps if step.endswith("v4.b32")} == kinds, name
        assert not [step for step in steps if step.endswith(("b8", "b16"))], name
