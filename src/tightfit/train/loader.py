"""Batches made ahead of their use by a thread, so that the device waits for none."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tightfit.data.token_store import StoreDescription
from tightfit.train.batches import (
    Batch,
    Collate,
    collate_packed,
    collate_padded,
    collate_pairs,
    without_loss,
)
from tightfit.train.feed import Feed, Item, StepItems
from tightfit.train.place import Place

_AHEAD = 2
"""Steps kept ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatches:
    """One rank's tensors of one step, still in host memory."""

    items: StepItems
    batches: list[Batch]
    wait_seconds: float
    """How long the trainer had to wait for them."""


def choose_collate(
    description: StoreDescription, *, is_packed: bool, has_mask: bool = False
) -> Collate:
    """How sequences of this store become tensors. `has_mask`: padded rows come with theirs."""
    pad_token_id = description.pad_token_id
    if description.is_encoder_decoder:
        return partial(collate_pairs, pad_token_id=pad_token_id)
    if is_packed:
        return partial(collate_packed, pad_token_id=pad_token_id)
    return partial(collate_padded, pad_token_id=pad_token_id, has_mask=has_mask)


class Loader:
    """Yields the batches of steps `start` to `end` for one rank."""

    def __init__(self, feed: Feed, collate: Collate, *, micro_batch: int, place: Place) -> None:
        self._feed = feed
        self._collate = collate
        self._micro_batch = micro_batch
        self._place = place

    def longest(self) -> Batch:
        """The batch that needs the most memory."""
        return self._make(self._feed.longest(self._micro_batch))

    def steps(self, start: int, end: int) -> Iterator[StepBatches]:
        ready: queue.Queue[StepBatches | BaseException] = queue.Queue(maxsize=_AHEAD)
        has_stopped = threading.Event()
        work = partial(self._fill, ready, has_stopped, range(start, end))
        thread = threading.Thread(target=work, name="batches", daemon=True)
        thread.start()
        try:
            for _ in range(start, end):
                asked = time.perf_counter()
                made = ready.get()
                if isinstance(made, BaseException):
                    raise made
                waited = time.perf_counter() - asked
                yield StepBatches(items=made.items, batches=made.batches, wait_seconds=waited)
        finally:
            has_stopped.set()

    def _fill(
        self,
        ready: queue.Queue[StepBatches | BaseException],
        has_stopped: threading.Event,
        steps: range,
    ) -> None:
        try:
            for step in steps:
                _put(ready, self._make_step(step), has_stopped.is_set)
                if has_stopped.is_set():
                    return
        except BaseException as fault:
            _put(ready, fault, has_stopped.is_set)

    def _make_step(self, step: int) -> StepBatches:
        items = self._feed.deal(
            step,
            rank=self._place.rank,
            world_size=self._place.world_size,
            micro_batch=self._micro_batch,
        )
        batches = [self._make(chunk) for chunk in items.micro_batches]
        return StepBatches(items=items, batches=batches, wait_seconds=0.0)

    def _make(self, items: tuple[Item, ...]) -> Batch:
        is_spare = not items
        rows = [self._feed.rows(item) for item in items or (self._feed.shortest(),)]
        batch = self._collate(rows)
        if is_spare:
            batch = without_loss(batch)
        if self._place.device.type == "cuda":
            return {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch


def _put(
    ready: queue.Queue[StepBatches | BaseException],
    made: StepBatches | BaseException,
    is_over: Callable[[], bool],
) -> None:
    """Wait for room, but not for a reader that has gone."""
    while not is_over():
        try:
            ready.put(made, timeout=0.2)
        except queue.Full:
            continue
        return


def to_device(batch: Batch, place: Place) -> Batch:
    return {name: tensor.to(place.device, non_blocking=True) for name, tensor in batch.items()}
