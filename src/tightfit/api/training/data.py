"""Reading and encoding a job's data, with progress."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.core.data_profile import DataProfile
from tightfit.core.progress import Progress
from tightfit.core.training import DataSource, Training

if TYPE_CHECKING:
    from tightfit.data.encode import EncodedDataset
    from tightfit.data.streams import ReadProgress


def profile_sources(
    sources: tuple[DataSource, ...], *, seq_len: int, model: str, progress: Progress | None = None
) -> DataProfile:
    """The data's length distribution, from its files."""
    from tightfit.data.profile import profile_dataset

    watch = _make_watch(progress, "reading data")
    return profile_dataset(sources, seq_len=seq_len, model=model, watch=watch)


def encode_for(
    training: Training,
    *,
    model_folder: Path,
    seq_len: int,
    cache: Path | None = None,
    skip_faulty: bool = False,
    progress: Progress | None = None,
) -> EncodedDataset:
    """Encode the data as a run reads it, or find it encoded."""
    from tightfit.data.encode import EncodeRequest, encode_dataset

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
    return encode_dataset(request, watch=_make_watch(progress, "encoding data"))


def _make_watch(progress: Progress | None, what: str) -> Callable[[ReadProgress], None] | None:
    if progress is None:
        return None

    def watch(state: ReadProgress) -> None:
        progress(what, state.num_bytes, state.total_bytes)

    return watch
