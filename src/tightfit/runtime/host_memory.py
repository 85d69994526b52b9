"""Page-locked host memory, which a GPU reads and writes beside its computation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class PinnedBuffer:
    """Values in host memory, page-locked where `device` is a GPU.

    Not by `pin_memory`: torch rounds its page-locked blocks up to a power of two and keeps them
    when they are freed, which can take more than twice the memory.
    """

    def __init__(self, num_values: int, dtype: torch.dtype, device: torch.device) -> None:
        # Written once, by all cores: locking pages that are not there yet takes far longer.
        self._values = torch.zeros(num_values, dtype=dtype)
        self.dtype = dtype
        if device.type == "cuda":
            cuda: Any = torch.cuda  # not annotated
            runtime = cuda.cudart()
            address = self._values.data_ptr()
            error = runtime.cudaHostRegister(address, self._values.nbytes, 0)
            cuda.check_error(int(error))
            # Not at exit, when CUDA may be gone first.
            weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False

    def holds(self, like: Tensor) -> bool:
        """Whether it is large enough for the values of `like`, in their dtype."""
        return self.dtype is like.dtype and self._values.numel() >= like.numel()

    def view(self, shape: torch.Size) -> Tensor:
        """The first values, in this shape."""
        return self._values[: shape.numel()].view(shape)
