"""torch's devices and dtypes, and recognizing out-of-memory errors."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_OUT_OF_MEMORY_WORDS = (
    "out of memory",  # CUDA, NCCL, and the driver below them
    "can't allocate memory",  # torch's CPU allocator
    "not enough memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "bad_alloc",
    "could not create a primitive",  # oneDNN, when its scratch memory is refused
)


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """torch's dtype of an unquantized format. Quantized ones have none: see `load.py`."""
    import torch

    known = {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}
    if dtype not in known:
        raise ValueError(f"{dtype.value} values are quantized and have no torch dtype")
    return known[dtype]


def local_device(rank: int, *, is_cpu: bool = False) -> torch.device:
    """The device of the `rank`-th process of this machine: its GPU, or the CPU without any."""
    import torch

    if is_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if rank >= num_gpus:
        raise SetupError(
            f"Process {rank} of this machine needs a GPU of its own, and {num_gpus} can be seen.",
            remedy="check CUDA_VISIBLE_DEVICES, or plan for fewer GPUs: tightfit hardware",
        )
    return torch.device("cuda", rank)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether GPU or host memory ran out, anywhere in the chain of causes."""
    import torch

    return any(
        isinstance(link, (MemoryError, torch.cuda.OutOfMemoryError))
        or (isinstance(link, OSError) and link.errno == errno.ENOMEM)
        or (isinstance(link, RuntimeError) and _mentions_memory(link))
        for link in _chain(error)
    )


def _mentions_memory(error: RuntimeError) -> bool:
    text = str(error).lower()
    return any(words in text for words in _OUT_OF_MEMORY_WORDS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
