"""Every optimizer's record is whole, and says what its class really keeps."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from tightfit.core.optimizers import Optimizer


@pytest.mark.parametrize("optimizer", Optimizer)
def test_its_class_takes_its_options(optimizer: Optimizer) -> None:
    torch = pytest.importorskip("torch", reason="pip install 'tightfit[train]'")
    made = _make(optimizer, torch.nn.Parameter(torch.ones(4, 4)))

    assert made.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("optimizer", [one for one in Optimizer if not one.record.cpu_problem])
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_its_state_is_as_large_as_the_record_says(optimizer: Optimizer) -> None:
    torch = pytest.importorskip("torch", reason="pip install 'tightfit[train]'")
    record = optimizer.record
    parameter = torch.nn.Parameter(torch.ones(256, 256))
    made = _make(optimizer, parameter)
    parameter.grad = torch.full_like(parameter, 0.5)
    try:
        made.step()
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"{record.factory} does not step on this CPU ({error}): make test-gpu")
    # Paged state hangs as an attribute on the tensor; a step counter is one value.
    kept = [x for x in made.state[parameter].values() if torch.is_tensor(x) and x.numel() > 1]
    stated = record.state_bytes
    if stated is None:
        stated = record.state_values * parameter.element_size()

    measured = sum(x.numel() * x.element_size() for x in kept) / parameter.numel()
    # Adafactor keeps a row and a column: 8 bytes for 256 values. A quantization map is 1 KiB.
    assert measured == pytest.approx(stated, abs=0.05)


def _make(optimizer: Optimizer, parameter: Any) -> Any:
    record = optimizer.record
    if record.package is not None:
        pytest.importorskip(record.package, reason=f"pip install {record.package}")
    module, _, name = record.factory.partition(":")
    return getattr(import_module(module), name)([parameter], lr=1e-3, **record.options)


@pytest.mark.parametrize("optimizer", Optimizer)
def test_its_time_is_known(optimizer: Optimizer) -> None:
    record = optimizer.record
    assert (record.update_bytes is None) == (record.seconds_per_param is not None)


def test_words_are_the_values() -> None:
    assert Optimizer("adamw-8bit") is Optimizer.ADAMW_8BIT
    assert Optimizer.ADAMW.value == "adamw"
