"""From encoded rows to batches: sampling, collation, and a thread that prepares batches ahead."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tightfit.core.objectives import ExampleKind
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
    """Tokens with loss over all ranks."""
    divisor: int
    """Of the loss: the trained tokens, or the pairs or labelled answers, over all ranks."""
    num_chosen_tokens: int = 0
    """Trained tokens of the pairs' chosen answers, over all ranks."""

    @property
    def nll_weight(self) -> float | None:
        """Turns the sum over chosen tokens, once divided by `divisor`, into their mean."""
        return self.divisor / self.num_chosen_tokens if self.num_chosen_tokens else None


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
        self.rows_per_example = store.description.rows_per_example
        self._lengths = store.example_lengths
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
        rows = [row for item in items for row in self._rows_of(item)]
        num_trained = int(self.store.num_trained[rows].sum())
        is_sft = self.store.description.example is ExampleKind.ANSWER
        num_chosen = 0
        if self.rows_per_example > 1:
            num_chosen = int(self.store.num_trained[[row for item in items for row in item]].sum())
        chunks = [
            tuple(by_length[at : at + micro_batch])
            for at in range(0, num_passes * world_size * micro_batch, micro_batch)
        ]
        return StepItems(
            step=step,
            micro_batches=tuple(chunks[rank::world_size]),
            num_tokens=int(self.store.lengths[rows].sum()),
            num_trained_tokens=num_trained,
            divisor=num_trained if is_sft else sum(map(len, items)),
            num_chosen_tokens=num_chosen,
        )

    def longest(self, micro_batch: int) -> tuple[Item, ...]:
        """The micro-batch that needs the most memory: the longest sequences together."""
        items = sorted(self._items(0), key=self._count_tokens, reverse=True)
        return tuple(items[:micro_batch])

    def shortest(self) -> Item:
        """The sequence a rank runs without loss when a step has too few rows for all ranks."""
        return min(self._items(0), key=self._count_tokens)

    def locations(self, step: int) -> list[str]:
        """File and row of each text of a step, of all ranks, for messages."""
        return [self.store.place(row) for item in self._items_of(step) for row in item]

    def _count_tokens(self, item: Item) -> int:
        """In the item's sequence; in the longer one of pairs."""
        return int(self._lengths[list(item)].sum())

    def _rows_of(self, item: Item) -> list[int]:
        return [index + at for index in item for at in range(self.rows_per_example)]

    def _items_of(self, step: int) -> list[Item]:
        epoch, index = divmod(step, self.steps_per_epoch)
        start = index * self.effective_batch
        return self._items(epoch)[start : start + self.effective_batch]

    def _list_items(self, epoch: int) -> list[Item]:
        """The epoch's sequences in order."""
        rows = epoch_rows(self.store, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        if not self._is_packed:
            return [(int(row),) for row in rows]
        packs = pack_best_fit(self._lengths[rows].tolist(), self._seq_len)
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
    ignored = {
        name: torch.full_like(tensor, IGNORED)
        for name, tensor in batch.items()
        if name.endswith("labels")
    }
    empty = {
        name: torch.zeros_like(tensor)
        for name, tensor in batch.items()
        if name.endswith("answer_lengths")
    }
    return batch | ignored | empty


def count_trained(batch: Batch, *, is_encoder_decoder: bool) -> int:
    """Tokens that carry loss; a causal model's first token is never predicted."""
    labels = batch["labels"] if is_encoder_decoder else batch["labels"][:, 1:]
    return int((labels != IGNORED).sum())


def count_divisor(batch: Batch, *, is_encoder_decoder: bool = False) -> int:
    """What its loss is divided by: trained tokens, or the examples that carry loss."""
    if "answer_lengths" not in batch:
        return count_trained(batch, is_encoder_decoder=is_encoder_decoder)
    size = 1 if "is_good" in batch else 2
    return int((batch["answer_lengths"] > 0).sum()) // size


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


class ReferenceLogProbs(NamedTuple):
    """Of every row of a store, computed before training."""

    rows: NDArray[np.float32]
    mismatched: NDArray[np.float32] | None
    """KTO's rows for the divergence."""


KL_PREFIX = "kl_"
"""Of what a batch holds of KTO's mismatched rows."""


def split_kl(batch: Batch) -> tuple[Batch, Batch]:
    """A batch, and what it holds of mismatched rows, as a batch."""
    own = {name: value for name, value in batch.items() if not name.startswith(KL_PREFIX)}
    mismatched = {
        name.removeprefix(KL_PREFIX): value
        for name, value in batch.items()
        if name.startswith(KL_PREFIX)
    }
    return own, mismatched


class BatchMaker:
    """Makes batches from a store's items.

    KTO estimates the divergence from the reference over mismatched rows: each row's prompt with the
    answer of the row before it, in one drawn order of all rows that stays the same.
    """

    def __init__(
        self,
        store: TokenStore,
        collate: Collate,
        *,
        seed: int = 0,
        needs_kl: bool = False,
    ) -> None:
        self._store = store
        self._collate = collate
        self._size = store.description.rows_per_example
        self.reference: ReferenceLogProbs | None = None
        self._partners: NDArray[np.int64] | None = None
        self.needs_kl = needs_kl
        if needs_kl:
            order = np.random.default_rng((seed, len(store))).permutation(len(store))
            self._partners = np.empty_like(order)
            self._partners[order] = np.roll(order, 1)

    def make(self, items: Sequence[Item], *, nll_weight: float | None = None) -> Batch:
        """`nll_weight`: pairs over chosen tokens, of the whole step; else of the batch."""
        rows = [
            [index + at for index in item] for item in items for at in range(self._size)
        ]  # of pairs a sequence of chosen answers, then one of rejected ones
        sequences = [[self._store.row(index) for index in sequence] for sequence in rows]
        batch = self._collate(sequences)
        if self._store.description.example is ExampleKind.ANSWER:
            return batch
        answers = [index + at for item in items for index in item for at in range(self._size)]
        batch |= self._describe_answers(batch, rows, self._number_answers(items), answers)
        if self.reference is not None:
            batch["reference"] = torch.from_numpy(self.reference.rows[answers])
        if self._store.is_good is not None:
            batch["is_good"] = torch.from_numpy(self._store.is_good[answers])
        else:
            lengths = batch["answer_lengths"][0::2]
            own = len(lengths) / max(1, int(lengths.sum()))
            batch["nll_weight"] = torch.tensor(own if nll_weight is None else nll_weight)
        if self._partners is not None:
            mismatched = self.make_mismatched(answers)
            batch |= {KL_PREFIX + name: value for name, value in mismatched.items()}
        return batch

    def make_mismatched(self, rows: Sequence[int]) -> Batch:
        """KTO's rows for the divergence."""
        assert self._partners is not None
        sequences = [[self._mismatch(index)] for index in rows]
        batch = self._collate(sequences)
        answer_ids = torch.arange(len(rows))[:, None].expand(batch["labels"].shape)
        batch["answer_ids"] = answer_ids.contiguous()
        batch["answer_lengths"] = (batch["labels"][:, 1:] != IGNORED).sum(dim=1)
        if self.reference is not None and self.reference.mismatched is not None:
            batch["reference"] = torch.from_numpy(self.reference.mismatched[list(rows)])
        return batch

    def _mismatch(self, index: int) -> EncodedRow:
        assert self._partners is not None
        own, other = self._store.row(index), self._store.row(int(self._partners[index]))
        prompt = own.tokens[: int(own.trained.argmax())]
        start = int(other.trained.argmax())
        limit = self._store.description.seq_len
        tokens = np.concatenate([prompt, other.tokens[start:]])[:limit]
        unread = np.zeros(len(prompt), dtype=np.bool_)
        trained = np.concatenate([unread, other.trained[start:]])[:limit]
        return EncodedRow(tokens, trained, own.place)

    def _number_answers(self, items: Sequence[Item]) -> list[list[int]]:
        """Numbers of each sequence's answers: a pair's follow each other. By place, since a source
        of weight 2 may have a row twice in a batch."""
        numbers: list[list[int]] = []
        first = 0
        for item in items:
            for at in range(self._size):
                numbers.append([first + self._size * place + at for place in range(len(item))])
            first += self._size * len(item)
        return numbers

    def _describe_answers(
        self,
        batch: Batch,
        sequences: Sequence[Sequence[int]],
        numbers: Sequence[Sequence[int]],
        answers: Sequence[int],
    ) -> Batch:
        """Which answer each token belongs to, and how many trained tokens each answer has."""
        answer_ids = torch.zeros_like(batch["labels"])
        for index, sequence in enumerate(sequences):
            start = 0
            for row, number in zip(sequence, numbers[index], strict=True):
                end = start + int(self._store.lengths[row])
                answer_ids[index, start:end] = number
                start = end
        lengths = torch.from_numpy(self._store.num_trained[list(answers)].astype("int64"))
        return {"answer_ids": answer_ids, "answer_lengths": lengths}


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
        self,
        sampler: BatchSampler,
        collate: Collate,
        *,
        micro_batch: int,
        context: DistContext,
        maker: BatchMaker | None = None,
    ) -> None:
        self._sampler = sampler
        self.maker = maker or BatchMaker(sampler.store, collate)
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
            rank=self._context.batch_rank,
            world_size=self._context.num_batch_ranks,
            micro_batch=self._micro_batch,
        )
        batches = [self._make(chunk, items.nll_weight) for chunk in items.micro_batches]
        return StepBatches(items=items, batches=batches)

    def _make(self, items: tuple[Item, ...], nll_weight: float | None = None) -> Batch:
        """A batch; without items, one that has no loss, for a step with too few rows."""
        batch = self.maker.make(items or (self._sampler.shortest(),), nll_weight=nll_weight)
        if not items:
            batch = without_loss(batch)
        if self._context.device.type == "cuda":
            return {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch


def to_device(batch: Batch, context: DistContext) -> Batch:
    return {name: tensor.to(context.device, non_blocking=True) for name, tensor in batch.items()}
