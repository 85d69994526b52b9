"""Keep libraries from talking: no progress bars, no advice on stderr, no calls home."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any


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
