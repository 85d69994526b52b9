"""The data of a run, encoded before any process starts."""

from __future__ import annotations

import sys
from pathlib import Path

from tightfit.cli.describe import count_of
from tightfit.cli.terminal.output import write_err
from tightfit.core.training import Training
from tightfit.data.encode import Encoded, EncodeRequest, encode_dataset
from tightfit.data.meter import ReadProgress


def encode_for(
    training: Training,
    *,
    model_folder: Path,
    seq_len: int,
    cache: Path | None = None,
    skip_faulty: bool = False,
) -> Encoded:
    """Encode, or find encoded, counting aloud where somebody watches."""
    is_watched = sys.stderr is not None and sys.stderr.isatty()

    def tell(state: ReadProgress) -> None:
        write_err(f"\rencoding data: {count_of(state.num_rows, 'row')} ({state.fraction:.0%})")

    request = EncodeRequest(
        sources=training.data,
        model_folder=model_folder,
        template=training.template,
        train_on=training.train_on,
        seq_len=seq_len,
        eval_fraction=training.eval_fraction,
        seed=training.seed,
        cache=cache,
        skip_faulty=skip_faulty,
    )
    try:
        return encode_dataset(request, watch=tell if is_watched else None)
    finally:
        if is_watched:
            write_err("\r\x1b[K")
