"""Models known by their size alone."""

from __future__ import annotations

import pytest

from tightfit.core.errors import NotFoundError
from tightfit.models.resolve import resolve_model


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("1e9-params", 10**9),
        ("7B-params", 7 * 10**9),
        ("2851e6-params", 2_851_000_000),
        ("12.5m-params", 12_500_000),
        ("1t-params", 10**12),
    ],
)
def test_the_stated_size_is_met_exactly_and_the_shape_is_said_to_be_assumed(
    name: str, num_params: int
) -> None:
    spec = resolve_model(name)

    assert spec.num_params == num_params
    assert any("assumed" in warning for warning in spec.warnings)


def test_whole_layers_hold_most_of_it() -> None:
    spec = resolve_model("7B-params")

    assert sum(block.num_params for block in spec.blocks) > 0.85 * spec.num_params


@pytest.mark.parametrize(
    "name", ["0-params", "1e99-params", "-5B-params", "params", "1e13000-params"]
)
def test_absurd_sizes_are_no_models(name: str) -> None:
    with pytest.raises(NotFoundError):
        resolve_model(name)
