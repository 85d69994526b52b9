"""Devices, and telling a lack of memory from other errors."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest
import torch

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import SetupError
from tightfit.runtime.libraries import is_out_of_memory, local_device, torch_dtype


def test_a_real_lack_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)


def test_a_capped_process_runs_out() -> None:
    """What a memory limit makes of an allocation on the CPU, in a process of its own."""
    probe = """
import resource, torch
from tightfit.runtime.libraries import is_out_of_memory
_, hard = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, hard))
try:
    torch.zeros(1 << 30)
except BaseException as error:
    print(is_out_of_memory(error))
"""
    said = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert said.stdout == "True\n"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_counts(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_cause_counts_too() -> None:
    outer = RuntimeError("worker died")
    outer.__cause__ = MemoryError()

    assert is_out_of_memory(outer)


def test_dtypes() -> None:
    assert torch_dtype(Dtype.BF16) is torch.bfloat16
    with pytest.raises(ValueError, match="nf4"):
        torch_dtype(Dtype.NF4)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device(3) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device(1) == torch.device("cuda:1")
    assert local_device(1, is_cpu=True) == torch.device("cpu")
    with pytest.raises(SetupError, match="2 can be seen"):
        local_device(2)
