"""DeepSpeed missing, or bound to another device: one message, one remedy."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tightfit.core.errors import SetupError
from tightfit.training.distributed import DistContext
from tightfit.training.zero import start_deepspeed

CONTEXT = DistContext(
    rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu")
)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")  # restored afterwards


def test_missing_package_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)

    with pytest.raises(SetupError) as caught:
        start_deepspeed(CONTEXT)

    assert "DeepSpeed cannot be imported" in caught.value.problem
    assert "pip install 'tightfit[zero]'" in caught.value.remedy


def test_accelerator_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DeepSpeed imported before us, for the GPU, while the plan is for the CPU."""
    accelerator = ModuleType("deepspeed.accelerator")
    accelerator.get_accelerator = lambda: SimpleNamespace(  # type: ignore[attr-defined]
        device_name=lambda: "cuda"
    )
    package = ModuleType("deepspeed")
    package.ops = ModuleType("deepspeed.ops")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", accelerator)

    with pytest.raises(SetupError) as caught:
        start_deepspeed(CONTEXT)

    assert "started for cuda" in caught.value.problem
    assert "DS_ACCELERATOR=cpu" in caught.value.remedy
    assert os.environ["DS_ACCELERATOR"] == "cpu"
