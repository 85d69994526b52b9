"""Faster kernels: refused in one sentence without their package."""

from __future__ import annotations

import sys

import pytest
from tiny_models import make_model

from tightfit.core.errors import SetupError
from tightfit.runtime.kernels.liger import apply_fused_kernels


def test_without_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(SetupError, match="liger-kernel") as caught:
        apply_fused_kernels(make_model("llama"))
    assert "pip install liger-kernel" in caught.value.remedy
