"""Import third-party libraries quickly, and keep them quiet and offline."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tightfit.core.strategy import Strategy
from tightfit.planning.requirements import BITSANDBYTES


def silence_libraries() -> None:
    """Turn off progress bars, logs and network access; errors still raise."""
    # Forked processes would print a warning about tokenizers' threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # All files are local by now; some libraries look for kernels on the hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about missing kernels
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
