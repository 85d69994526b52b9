"""Models known by their size alone."""

from __future__ import annotations

import pytest

from tightfit.core.errors import InvalidInputError, NotFoundError
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


@pytest.mark.parametrize("name", ["-5B-params", "params", "1e13000-params", "7Q-params"])
def test_what_states_no_size_is_no_model(name: str) -> None:
    with pytest.raises(NotFoundError):
        resolve_model(name)


@pytest.mark.parametrize(
    "name", ["0-params", "0B-params", "9M-params", "1e30B-params", "1e99-params", "11T-params"]
)
def test_a_size_no_model_has_names_the_bounds(name: str) -> None:
    with pytest.raises(InvalidInputError, match="10 million to 10 trillion"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("name", "written"), [("7B", "7B-params"), ("13b", "13B-params"), ("1.5 b", "1.5B-params")]
)
def test_a_bare_size_is_told_how_to_be_written(name: str, written: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        resolve_model(name)
    assert written in caught.value.remedy
    assert resolve_model(written).num_params == float(name.strip(" bB")) * 10**9


@pytest.mark.parametrize("name", ["7", "0B", "999T"])
def test_other_numbers_are_not_sizes(name: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        resolve_model(name)
    assert "params" not in caught.value.remedy
