"""Verbs take their options as an object or as keywords, checked as the command line checks them."""

from __future__ import annotations

import inspect

import pytest

from tightfit.api.call import accepts_keywords
from tightfit.api.options.training import TrainOptions
from tightfit.core.errors import UsageError


@accepts_keywords(TrainOptions)
def echo(options: TrainOptions) -> TrainOptions:
    """What was asked for."""
    return options


def test_keywords_make_the_options() -> None:
    assert echo("recipe.yaml", lr=1e-3) == TrainOptions("recipe.yaml", lr=1e-3)


def test_an_options_object_is_taken_as_it_is() -> None:
    options = TrainOptions("recipe.yaml", max_steps=3)

    assert echo(options) is options


def test_values_are_read_as_the_command_line_reads_them() -> None:
    with pytest.raises(UsageError, match="--max-steps"):
        echo("recipe.yaml", max_steps=0)


def test_the_signature_is_that_of_the_options() -> None:
    assert list(inspect.signature(echo).parameters)[:2] == ["job", "data"]
    assert echo.__doc__ == "What was asked for."


@pytest.mark.parametrize("seed", [-1, 2**32, "x", 1.5])
def test_a_seed_has_32_bits(seed: object) -> None:
    with pytest.raises(UsageError, match="--seed"):
        echo("recipe.yaml", seed=seed)  # type: ignore[call-overload]
