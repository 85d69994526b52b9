"""Our kernels of a decoding step against plain torch, in triton's interpreter."""

from __future__ import annotations

from interpreted import interpret


def test_results_are_those_of_torch() -> None:
    distances = interpret("decode_script.py")
    assert len(distances) == 9
    assert not any(away for name, away in distances.items() if "written" in name)
    assert max(distances.values()) < 1e-6, distances
