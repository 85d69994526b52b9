"""Which rows an epoch shows, in which order: by seed and epoch alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tightfit.data.token_store import TokenStore

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def epoch_rows(
    store: TokenStore, *, seed: int, epoch: int, shuffle: bool = True
) -> NDArray[np.int64]:
    """Row indices of one epoch.

    A source of weight 2 gives each row twice, of 0.5 a half drawn anew each
    epoch, of 2.5 both. The number of rows is the same in every epoch.
    """
    import numpy as np

    weights = store.description.source_of_row_weights
    if all(weight == 1.0 for weight in weights):
        rows = np.arange(len(store), dtype=np.int64)
    else:
        ids = store.source_ids
        parts = [
            _draw(np.flatnonzero(ids == source), weight, (seed, epoch, source))
            for source, weight in enumerate(weights)
        ]
        rows = np.sort(np.concatenate(parts))
    return rows[_order(len(rows), (seed, epoch))] if shuffle else rows


def _draw(rows: NDArray[np.int64], weight: float, seeds: tuple[int, ...]) -> NDArray[np.int64]:
    import numpy as np

    whole = int(weight)
    num_more = round((weight - whole) * len(rows))
    if not whole and not num_more and len(rows):
        num_more = 1  # a source that was named is seen
    more = rows[_order(len(rows), seeds)[:num_more]]
    return np.concatenate([np.repeat(rows, whole), more])


def _order(size: int, seeds: tuple[int, ...]) -> NDArray[np.int64]:
    """A permutation. Sorting uniform numbers keeps it alike over numpy's versions."""
    import numpy as np

    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seeds)))
    return np.argsort(generator.random(size), kind="stable").astype(np.int64)
