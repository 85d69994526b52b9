"""Every optimizer's record is whole, and its class can be made."""

from __future__ import annotations

from importlib import import_module

import pytest

from tightfit.core.optimizers import Optimizer


@pytest.mark.parametrize("optimizer", Optimizer)
def test_its_class_takes_its_options(optimizer: Optimizer) -> None:
    torch = pytest.importorskip("torch", reason="pip install 'tightfit[train]'")
    record = optimizer.record
    module, _, name = record.factory.partition(":")
    if record.package is not None:
        pytest.importorskip(record.package, reason=f"pip install {record.package}")
    make = getattr(import_module(module), name)
    made = make([torch.nn.Parameter(torch.ones(4, 4))], lr=1e-3, **record.options)

    assert made.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("optimizer", Optimizer)
def test_its_time_is_known(optimizer: Optimizer) -> None:
    record = optimizer.record
    assert (record.update_bytes is None) == (record.seconds_per_param is not None)


def test_words_are_the_values() -> None:
    assert Optimizer("adamw-8bit") is Optimizer.ADAMW_8BIT
    assert Optimizer.ADAMW.value == "adamw"
