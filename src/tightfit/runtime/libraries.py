"""Import third-party libraries quickly and keep them quiet: no progress bars, no advice on stderr,
no network.
"""

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
    """Errors still raise; what a library only mentions is ours to check and to say."""
    # A forked data worker would otherwise print advice about tokenizers' threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # Every file is local by the time a library loads it; some look for kernels on the hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it deplores the kernels it lacks
    # torch's word, with its stack, on an ARM processor that has no bf16 and is asked for it.
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS")
    import torch
    from huggingface_hub import utils as hub
    from transformers.utils import logging as logging_of_transformers

    if not torch.cuda.is_available():
        # transformers imports DeepSpeed where it is installed, which then deplores the CPU.
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

    peft imports bitsandbytes wherever it is installed, which takes two seconds: where no strategy
    wants it, it seems not to be. The garbage collector would go through the libraries again and
    again, and copy what it goes through in processes that are forked off: it never looks at them.
    """
    if not any(BITSANDBYTES.is_wanted(strategy) for strategy in strategies):
        sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
