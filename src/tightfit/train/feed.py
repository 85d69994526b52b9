"""Which rows each step trains on: decided by the seed alone, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tightfit.data.epochs import epoch_rows
from tightfit.data.packing import pack_best_fit
from tightfit.data.token_store import EncodedRow, TokenStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

Item = tuple[int, ...]
"""Rows that share one sequence: a single row, or a pack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItems:
    """One rank's share of a step, and what the whole step holds."""

    step: int
    micro_batches: tuple[tuple[Item, ...], ...]
    """Empty ones keep their place: every rank makes as many passes as the others."""
    num_tokens: int
    """Real tokens of the step over all ranks."""
    num_trained_tokens: int
    """Tokens with loss over all ranks: what the loss is divided by."""


class Feed:
    """The training rows in the order of their use.

    Step `s` takes the next `effective_batch` sequences of the epoch's order. They
    are sorted by length, so that rows of one micro-batch need little padding, and
    dealt to micro-batches and ranks. Another number of ranks or another micro-batch
    deals the same sequences of the same step differently, and nothing else changes.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        effective_batch: int,
        seq_len: int,
        is_packed: bool,
        seed: int,
        shuffle: bool,
    ) -> None:
        self.store = store
        self.effective_batch = effective_batch
        self._seq_len = seq_len
        self._is_packed = is_packed
        self._seed = seed
        self._shuffle = shuffle
        self.num_items = len(self._items(0))
        self.steps_per_epoch = -(-self.num_items // effective_batch)

    def count_steps(self, num_epochs: float) -> int:
        """Optimizer steps of that many passes, the last one begun counted whole."""
        return max(1, -int(-num_epochs * self.steps_per_epoch // 1))

    def deal(self, step: int, *, rank: int, world_size: int, micro_batch: int) -> StepItems:
        """What `rank` does in `step` (from 0)."""
        items = self._items_of(step)
        by_length = sorted(items, key=self._count_tokens, reverse=True)
        num_passes = -(-self.effective_batch // (micro_batch * world_size))
        chunks = [
            tuple(by_length[at : at + micro_batch])
            for at in range(0, num_passes * world_size * micro_batch, micro_batch)
        ]
        return StepItems(
            step=step,
            micro_batches=tuple(chunks[rank::world_size]),
            num_tokens=sum(map(self._count_tokens, items)),
            num_trained_tokens=sum(map(self.count_trained, items)),
        )

    def longest(self, micro_batch: int) -> tuple[Item, ...]:
        """The micro-batch that needs the most memory: the longest sequences, all at once."""
        items = sorted(self._items(0), key=self._count_tokens, reverse=True)
        return tuple(items[:micro_batch])

    def shortest(self) -> Item:
        """What a rank computes on, without learning, where the rows do not go round."""
        return min(self._items(0), key=self._count_tokens)

    def rows(self, item: Item) -> list[EncodedRow]:
        return [self.store.row(index) for index in item]

    def places(self, step: int) -> list[str]:
        """Where the rows of a step came from, those of all ranks, for messages."""
        return [self.store.place(row) for item in self._items_of(step) for row in item]

    def count_trained(self, item: Item) -> int:
        return int(self.store.num_trained[list(item)].sum())

    def _count_tokens(self, item: Item) -> int:
        return int(self.store.lengths[list(item)].sum())

    def _items_of(self, step: int) -> list[Item]:
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.effective_batch
        return self._items(epoch)[start : start + self.effective_batch]

    def _items(self, epoch: int) -> list[Item]:
        return _epoch_items(self, epoch)

    def list_items(self, epoch: int) -> list[Item]:
        """The epoch's sequences in order; `_items` remembers the last two."""
        rows = epoch_rows(self.store, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        if not self._is_packed:
            return [(int(row),) for row in rows]
        packs = pack_best_fit(self.store.lengths[rows].tolist(), self._seq_len)
        packed = [tuple(int(rows[index]) for index in pack) for pack in packs]
        # Best fit leaves the packs sorted by their longest row.
        return [packed[index] for index in self._order(len(packed), epoch)]

    def _order(self, size: int, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(size)
        return np.random.default_rng((self._seed, epoch, 1)).permutation(size)


@lru_cache(maxsize=4)
def _epoch_items(feed: Feed, epoch: int) -> list[Item]:
    return feed.list_items(epoch)
