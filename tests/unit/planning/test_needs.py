"""Packages that a strategy runs, and which of them are missing."""

from __future__ import annotations

import pytest

from tightfit.core.strategy import Strategy
from tightfit.planning.plan import REQUIRED_PACKAGES, list_missing_packages


@pytest.mark.parametrize(
    ("fields", "extras"),
    [
        ({}, []),
        ({"sharding": "zero3", "gpus_per_node": 2}, ["zero"]),
        ({"sharding": "fsdp", "gpus_per_node": 2}, []),
        ({"weights": "nf4"}, ["bits"]),
        ({"optimizer": "adamw-8bit"}, ["bits"]),
        ({"fused_kernels": True}, ["kernels"]),
        ({"loss": "fused"}, ["kernels"]),
        ({"loss": "chunked"}, []),
        ({"weights": "nf4", "loss": "fused", "sharding": "zero2", "gpus_per_node": 2},
         ["bits", "kernels", "zero"]),
    ],
)  # fmt: skip
def test_what_a_strategy_needs(fields: dict[str, object], extras: list[str]) -> None:
    strategy = Strategy.model_validate(fields)

    assert [need.extra for need in list_missing_packages(strategy, lambda _: None)] == extras
    assert list_missing_packages(strategy, lambda _: "1.0") == ()


def test_the_extras_bring_the_packages() -> None:
    from pathlib import Path

    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    for need in REQUIRED_PACKAGES:
        (line,) = (row for row in text.splitlines() if row.startswith(f"{need.extra} = "))
        assert need.package in line
