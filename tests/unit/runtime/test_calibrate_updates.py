"""Calibration measures our AdamW kernel only where it runs and updates as torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from tightfit.runtime.calibrate import kernels
from tightfit.runtime.calibrate.bench import Bench
from tightfit.runtime.calibrate.kernels import measure_optimizers, updates_alike
from tightfit.runtime.kernels.adamw import TritonAdamW

CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A device that passes for a GPU, timed by the clock of a CPU, with small tensors."""
    made = Bench(device=CPU, dtype=torch.bfloat16, supports_bf16=True, deadline=float("inf"))
    monkeypatch.setattr(kernels, "NUM_TENSORS", {"cpu": (2, 64)})
    monkeypatch.setattr(Bench, "is_cpu", False)
    monkeypatch.setattr(Bench, "has_room", lambda _bench, _size: True)
    monkeypatch.setattr(Bench, "try_seconds", lambda _bench, make: make() and 1e-3)
    monkeypatch.setattr(kernels, "find_spec", lambda _name: object())
    return made


def _list_kinds(bench: Bench) -> list[tuple[str, str]]:
    return [(row.by, row.dtype) for row in measure_optimizers(bench)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_update_passes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert updates_alike(CPU, dtype)


class _Deaf(TritonAdamW):
    """Does not clip: the update of the weights alone would hardly tell."""

    def scale_next(self, factor: Tensor) -> None:
        pass


class _Eager(TritonAdamW):
    """Takes a step too large."""

    def __init__(self, groups: Any, *, lr: float) -> None:
        super().__init__(groups, lr=1.2 * lr)


@pytest.mark.parametrize("wrong", [_Deaf, _Eager])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_update_does_not(
    wrong: type[TritonAdamW], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "TritonAdamW", wrong)
    torch.manual_seed(0)
    assert not updates_alike(CPU, dtype)


class _Coarse(AdamW):
    """torch's fused one on a card has 1 - beta in fp32."""

    def __init__(self, weights: Any, *, fused: bool = False, **given: Any) -> None:
        betas = (0.9, float(torch.tensor(0.999))) if fused else (0.9, 0.999)
        super().__init__(weights, fused=fused, betas=betas, **given)


def test_a_kernel_that_rounds_less_than_torch_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "AdamW", _Coarse)
    torch.manual_seed(0)
    assert updates_alike(CPU, torch.float32)


def test_both_are_measured_on_a_gpu(bench: Bench) -> None:
    assert _list_kinds(bench) == [
        *(("torch", "fp32"), ("torch", "bf16")),
        *(("kernel", "fp32"), ("kernel", "bf16")),
    ]
    assert bench.skipped == []


def test_a_kernel_that_errs_is_not_measured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TritonAdamW", _Eager)
    assert _list_kinds(bench) == [("torch", "fp32"), ("torch", "bf16")]
    assert bench.skipped[0] == "the AdamW kernel in fp32: its update is not torch's"


def test_a_compiler_that_fails_ends_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_optimizer: TritonAdamW, _closure: Any = None) -> None:
        raise ValueError("no C compiler\nsee the manual")

    monkeypatch.setattr(TritonAdamW, "step", fail)
    assert _list_kinds(bench) == [("torch", "fp32"), ("torch", "bf16")]
    assert bench.skipped[0] == "the AdamW kernel in fp32: ValueError: no C compiler"


def test_without_triton_there_is_no_kernel(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda _name: None)
    assert _list_kinds(bench) == [("torch", "fp32"), ("torch", "bf16")]
    assert bench.skipped[0] == "the AdamW kernel in fp32: triton is not installed"
