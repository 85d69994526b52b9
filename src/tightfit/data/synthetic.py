"""Made-up rows: random tokens of given lengths, for measuring a model without its data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.core.data_profile import DataProfile
from tightfit.data.token_store import NewRow, StoreDescription, StoreFile, StoreWriter, TokenStore

if TYPE_CHECKING:
    import numpy as np

SYNTHETIC_SOURCE = "synthetic rows"
_SEED = 0
MAX_SYNTHETIC_TOKENS = 2**25
"""In the file, 160 MiB; the rows then come round again."""


def count_rows(seq_len: int, *, effective_batch: int, num_steps: int) -> int:
    """As many rows as the steps take, whole steps of them, within the bound of the file."""
    most_steps = max(1, MAX_SYNTHETIC_TOKENS // (seq_len * effective_batch))
    return effective_batch * min(num_steps, most_steps)


def draw_lengths(profile: DataProfile, num_rows: int) -> list[int]:
    """Row lengths spread as the dataset's are, shortest first: its quantiles."""
    import numpy as np

    lengths, counts = zip(*profile.histogram, strict=True)
    reached = np.cumsum(counts)
    places = (np.arange(num_rows) + 0.5) / num_rows * reached[-1]
    found = np.searchsorted(reached, places)
    return [min(int(lengths[at]), profile.seq_len) for at in found]


def write_synthetic(
    folder: Path,
    lengths: Sequence[int],
    *,
    vocab_size: int,
    seq_len: int,
    trained_fraction: float = 1.0,
    is_encoder_decoder: bool = False,
) -> TokenStore:
    """A store of random rows; the last part of each is trained, as an answer would be.

    An encoder-decoder's rows have a question and an answer of the given length each.
    """
    import numpy as np

    draw = np.random.default_rng(_SEED)
    folder.mkdir(parents=True)
    writer = StoreWriter(folder)
    for number, length in enumerate(lengths, start=1):
        size = 2 * length if is_encoder_decoder else length
        num_trained = length if is_encoder_decoder else max(1, round(trained_fraction * length))
        writer.add(_draw_row(draw, size, num_trained, number=number, vocab_size=vocab_size))
    writer.close()
    table = writer.table
    description = StoreDescription(
        key="synthetic",
        num_rows=len(lengths),
        num_tokens=writer.num_tokens,
        num_trained_tokens=int(table.column("num_trained").sum()),
        seq_len=seq_len,
        template="none",
        pad_token_id=0,
        stop_token_ids=(),
        num_rows_with_stop=0,
        is_encoder_decoder=is_encoder_decoder,
        format="synthetic",
        tokenizer="random numbers",
        sources=(SYNTHETIC_SOURCE,),
        files=(StoreFile(path=SYNTHETIC_SOURCE, unit="row", source=0),),
        longest_row_tokens=max(lengths),
        num_blob_tokens=writer.num_tokens,
    )
    writer.write_store("train", np.arange(len(lengths)), description)
    return TokenStore(folder / "train")


def _draw_row(
    draw: np.random.Generator, size: int, num_trained: int, *, number: int, vocab_size: int
) -> NewRow:
    import numpy as np

    # The middle of a vocabulary holds words; control tokens stand at its ends.
    tokens = draw.integers(vocab_size // 4, max(1, 3 * vocab_size // 4), size, dtype=np.int32)
    trained = np.zeros(size, dtype=np.bool_)
    trained[size - num_trained :] = True
    return NewRow(
        tokens=tokens,
        trained=trained,
        num_trained=int(trained[1:].sum()),
        has_stop=False,
        num_lost=0,
        file=0,
        number=number,
        digest=number,
    )
