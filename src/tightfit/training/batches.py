"""From encoded rows to batches: sampling, collation, and a thread that prepares batches ahead."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice

import numpy as np
import torch

from tightfit.data.packing import pack_best_fit
from tightfit.data.token_store import EncodedRow, StoreDescription, TokenStore, epoch_rows
from tightfit.training.distributed import DistContext

Item = tuple[int, ...]
"""Indices of the rows that share one sequence: one row, or several packed ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItems:
    """One rank's share of a step, and the totals of the whole step."""

    step: int
    micro_batches: tuple[tuple[Item, ...], ...]
    """May hold empty ones: every rank runs the same number of micro-batches."""
    num_tokens: int
    """Real tokens of the step over all ranks."""
    num_trained_tokens: int
    """Tokens with loss over all ranks: the divisor of the loss."""


class BatchSampler:
    """Chooses the rows of each step from the seed alone, whatever the number of ranks.

    A step takes the next `effective_batch` sequences of the epoch's order, sorts them by length
    (less padding) and splits them over micro-batches and ranks. With another number of ranks or
    another micro-batch a step still trains on the same sequences.
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
        self._items = lru_cache(maxsize=4)(self._list_items)
        self.steps_per_epoch = -(-len(self._items(0)) // effective_batch)

    def count_steps(self, num_epochs: float) -> int:
        """Optimizer steps of that many epochs, rounded up."""
        return max(1, -int(-num_epochs * self.steps_per_epoch // 1))

    def deal(self, step: int, *, rank: int, world_size: int, micro_batch: int) -> StepItems:
        """The share of `rank` in `step` (from 0)."""
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
            num_trained_tokens=sum(int(self.store.num_trained[list(item)].sum()) for item in items),
        )

    def longest(self, micro_batch: int) -> tuple[Item, ...]:
        """The micro-batch that needs the most memory: the longest sequences together."""
        items = sorted(self._items(0), key=self._count_tokens, reverse=True)
        return tuple(items[:micro_batch])

    def shortest(self) -> Item:
        """The sequence a rank runs without loss when a step has too few rows for all ranks."""
        return min(self._items(0), key=self._count_tokens)

    def rows(self, item: Item) -> list[EncodedRow]:
        return [self.store.row(index) for index in item]

    def locations(self, step: int) -> list[str]:
        """File and row of each text of a step, of all ranks, for messages."""
        return [self.store.place(row) for item in self._items_of(step) for row in item]

    def _count_tokens(self, item: Item) -> int:
        return int(self.store.lengths[list(item)].sum())

    def _items_of(self, step: int) -> list[Item]:
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.effective_batch
        return self._items(epoch)[start : start + self.effective_batch]

    def _list_items(self, epoch: int) -> list[Item]:
        """The epoch's sequences in order."""
        rows = epoch_rows(self.store, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        if not self._is_packed:
            return [(int(row),) for row in rows]
        packs = pack_best_fit(self.store.lengths[rows].tolist(), self._seq_len)
        packed = [tuple(int(rows[index]) for index in pack) for pack in packs]
        if not self._shuffle:
            return packed
        # Best fit returns the packs sorted by their longest row.
        order = np.random.default_rng((self._seed, epoch, 1)).permutation(len(packed))
        return [packed[index] for index in order]


Batch = dict[str, torch.Tensor]
"""What `Objective.forward` takes. `lengths`: of each sequence without its padding."""
IGNORED = -100
"""The label of a token without loss, as torch's `cross_entropy` has it."""

Sequences = Sequence[Sequence[EncodedRow]]
"""One micro-batch: per sequence the rows that share it."""
Collate = Callable[[Sequences], Batch]


def collate_padded(sequences: Sequences, *, pad_token_id: int, has_mask: bool = False) -> Batch:
    """One row per sequence, padded on the right to the longest.

    A causal decoder never attends to padding on the right, and padding has no loss: a mask would
    change neither loss nor gradients, and rule out the fastest attention kernels.
    `has_mask`: add a mask, for models that would attend to padding.
    """
    rows = [sequence[0] for sequence in sequences]
    shape = (len(rows), max(len(row.tokens) for row in rows))
    batch = _empty_batch(shape, pad_token_id)
    for index, row in enumerate(rows):
        _write_row(batch, index, 0, row)
    lengths = [len(row.tokens) for row in rows]
    batch["lengths"] = torch.tensor(lengths)
    if has_mask:
        batch["attention_mask"] = _make_mask(lengths)
    return batch


def collate_packed(sequences: Sequences, *, pad_token_id: int) -> Batch:
    """Several rows per sequence; positions restart with each row.

    There is no attention mask: attention finds the boundaries from the positions. Padding at the
    end is one more row, without loss.
    """
    lengths = [sum(len(row.tokens) for row in sequence) for sequence in sequences]
    shape = (len(sequences), max(lengths))
    batch = _empty_batch(shape, pad_token_id)
    batch["lengths"] = torch.tensor(lengths)
    batch["position_ids"] = torch.zeros(shape, dtype=torch.long)
    for index, sequence in enumerate(sequences):
        start = 0
        for row in sequence:
            _write_row(batch, index, start, row)
            end = start + len(row.tokens)
            batch["position_ids"][index, start:end] = torch.arange(len(row.tokens))
            start = end
        batch["position_ids"][index, start:] = torch.arange(shape[1] - start)
    return batch


def collate_encoder_decoder(sequences: Sequences, *, pad_token_id: int) -> Batch:
    """Prompts for the encoder, trained tokens for the decoder."""
    rows = [sequence[0] for sequence in sequences]
    read = [torch.from_numpy(row.tokens[~row.trained].astype("int64")) for row in rows]
    learnt = [torch.from_numpy(row.tokens[row.trained].astype("int64")) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(read, batch_first=True, padding_value=pad_token_id),
        "attention_mask": _make_mask([len(tokens) for tokens in read]),
        "labels": pad(learnt, batch_first=True, padding_value=IGNORED),
    }


def without_loss(batch: Batch) -> Batch:
    """The same batch with every label ignored."""
    return batch | {"labels": torch.full_like(batch["labels"], IGNORED)}


def count_trained(batch: Batch, *, is_encoder_decoder: bool) -> int:
    """Tokens that carry loss; a causal model's first token is never predicted."""
    labels = batch["labels"] if is_encoder_decoder else batch["labels"][:, 1:]
    return int((labels != IGNORED).sum())


def _empty_batch(shape: tuple[int, int], pad_token_id: int) -> Batch:
    return {
        "input_ids": torch.full(shape, pad_token_id, dtype=torch.long),
        "labels": torch.full(shape, IGNORED, dtype=torch.long),
    }


def _make_mask(lengths: list[int]) -> torch.Tensor:
    """An attention mask: 1 for a token, 0 for padding."""
    return (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()


def _write_row(batch: Batch, index: int, start: int, row: EncodedRow) -> None:
    end = start + len(row.tokens)
    tokens = torch.from_numpy(row.tokens.astype("int64"))
    trained = torch.from_numpy(row.trained.copy())
    # A row's first token has no context; in a pack it would be predicted from the row before.
    trained[0] = False
    batch["input_ids"][index, start:end] = tokens
    batch["labels"][index, start:end] = torch.where(trained, tokens, IGNORED)


# Batches made ahead of their use by a thread, so that the device waits for none.

_NUM_PREFETCHED = 2
"""Steps prepared ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """One rank's batches of one step, in host memory."""

    items: StepItems
    batches: list[Batch]
    wait_seconds: float = 0.0
    """How long the loop waited for them."""


def choose_collate(
    description: StoreDescription, *, is_packed: bool, has_mask: bool = False
) -> Collate:
    """The collate function for this store. `has_mask`: padded rows get an attention mask."""
    pad_token_id = description.pad_token_id
    if description.is_encoder_decoder:
        return partial(collate_encoder_decoder, pad_token_id=pad_token_id)
    if is_packed:
        return partial(collate_packed, pad_token_id=pad_token_id)
    return partial(collate_padded, pad_token_id=pad_token_id, has_mask=has_mask)


class BatchLoader:
    """Prepares one rank's batches in a thread, ahead of their use."""

    def __init__(
        self, sampler: BatchSampler, collate: Collate, *, micro_batch: int, context: DistContext
    ) -> None:
        self._sampler = sampler
        self._collate = collate
        self._micro_batch = micro_batch
        self._context = context

    def longest(self) -> Batch:
        """The batch that needs the most memory."""
        return self._make(self._sampler.longest(self._micro_batch))

    def steps(self, start: int, end: int) -> Iterator[StepBatches]:
        """The batches of steps `start` to `end`."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        steps = iter(range(start, end))
        first = islice(steps, _NUM_PREFETCHED)
        ahead = deque(pool.submit(self._make_step, step) for step in first)
        try:
            while ahead:
                began = time.perf_counter()
                made = ahead.popleft().result()
                waited = time.perf_counter() - began
                ahead.extend(pool.submit(self._make_step, step) for step in islice(steps, 1))
                yield replace(made, wait_seconds=waited)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _make_step(self, step: int) -> StepBatches:
        items = self._sampler.deal(
            step,
            rank=self._context.rank,
            world_size=self._context.world_size,
            micro_batch=self._micro_batch,
        )
        batches = [self._make(chunk) for chunk in items.micro_batches]
        return StepBatches(items=items, batches=batches)

    def _make(self, items: tuple[Item, ...]) -> Batch:
        """A batch; without items, one that has no loss, for a step with too few rows."""
        rows = [self._sampler.rows(item) for item in items or (self._sampler.shortest(),)]
        batch = self._collate(rows)
        if not items:
            batch = without_loss(batch)
        if self._context.device.type == "cuda":
            return {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch


def to_device(batch: Batch, context: DistContext) -> Batch:
    return {name: tensor.to(context.device, non_blocking=True) for name, tensor in batch.items()}
