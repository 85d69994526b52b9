"""torch and the libraries around it: imported quickly, quiet and offline; devices, dtypes and
out-of-memory errors.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import SetupError
from tightfit.core.strategy import Strategy
from tightfit.planning.plan import BITSANDBYTES

if TYPE_CHECKING:
    import torch


def silence_libraries() -> None:
    """Turn off progress bars, logs and network access; errors still raise."""
    # Forked processes would print a warning about tokenizers' threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # All files are local by now; some libraries look for kernels on the hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about missing kernels
    # Any handler of the root logger would format every graph that is captured.
    logging.getLogger("torch.__trace").propagate = False
    # torch's warning, with its stack, on ARM processors without bf16.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS")
    import torch
    from huggingface_hub import utils as hub
    from transformers.utils import logging as logging_of_transformers

    if not torch.cuda.is_available():
        # transformers imports DeepSpeed if it is installed, which then warns about the CPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    quiet: Any = logging_of_transformers  # not annotated
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    progress: Any = hub
    progress.disable_progress_bars()


# Import the libraries that train a model in less time than they take by themselves.


@contextmanager
def fast_imports(strategies: Sequence[Strategy]) -> Iterator[None]:
    """Around the imports of a process that will run nothing but these strategies.

    peft imports bitsandbytes if it is installed, which takes two seconds: it is hidden unless a
    strategy needs it. Imported objects are exempt from garbage collection, which would traverse
    them repeatedly, and copy their pages in forked processes.
    """
    if not any(BITSANDBYTES.is_wanted(strategy) for strategy in strategies):
        sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# torch's devices and dtypes, and recognizing out-of-memory errors.

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

    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        text = str(link).lower() if isinstance(link, RuntimeError) else ""
        if (
            isinstance(link, (MemoryError, torch.cuda.OutOfMemoryError))
            or (isinstance(link, OSError) and link.errno == errno.ENOMEM)
            or any(words in text for words in _OUT_OF_MEMORY_WORDS)
        ):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False
