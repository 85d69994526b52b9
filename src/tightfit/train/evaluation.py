"""Loss on the held-back rows while training goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tightfit.data.token_store import TokenStore
from tightfit.runs.metrics import EvalRecord
from tightfit.train.batches import Batch, Collate, count_trained, to_device, without_loss
from tightfit.train.distributed import DistContext
from tightfit.train.step import sum_over_ranks

_MAX_LOSS = 80.0
"""Its exponential still fits into a JSON number that people can read."""


@contextmanager
def evaluating(engine: Any) -> Iterator[None]:
    """The engine's model as it answers: no dropout, no gradients, the arithmetic of training."""
    engine.module.eval()
    try:
        with torch.no_grad(), engine.autocast():
            yield
    finally:
        engine.module.train()


class Evaluation:
    """One pass over a store, its rows dealt to all ranks in batches of like length."""

    def __init__(
        self, store: TokenStore, collate: Collate, *, micro_batch: int, place: DistContext
    ) -> None:
        self._store = store
        self._collate = collate
        self._micro_batch = micro_batch
        self._place = place
        self._is_encoder_decoder = store.description.is_encoder_decoder

    def run(self, engine: Any, step: int) -> EvalRecord:
        """Mean loss per trained token after `step` steps."""
        start = time.perf_counter()
        loss_sum, num_trained = 0.0, 0
        with evaluating(engine):
            for batch in self._batches():
                num_trained += count_trained(batch, is_encoder_decoder=self._is_encoder_decoder)
                loss_sum += float(engine.module(**to_device(batch, self._place)))
        total, count = sum_over_ranks(loss_sum, num_trained, device=self._place.device)
        loss = total / max(1.0, count)
        return EvalRecord(
            step=step,
            loss=loss,
            perplexity=math.exp(min(loss, _MAX_LOSS)),
            num_trained_tokens=int(count),
            seconds=time.perf_counter() - start,
        )

    def _batches(self) -> Iterator[Batch]:
        """This rank's batches; every rank has as many, the last ones perhaps without loss."""
        order = sorted(range(len(self._store)), key=lambda row: -int(self._store.lengths[row]))
        size = self._micro_batch
        chunks = [order[at : at + size] for at in range(0, len(order), size)]
        num_rounds = -(-len(chunks) // self._place.world_size)
        for turn in range(num_rounds):
            at = turn * self._place.world_size + self._place.rank
            chunk = chunks[min(at, len(chunks) - 1)]
            batch = self._collate([[self._store.row(row)] for row in chunk])
            yield batch if at < len(chunks) else without_loss(batch)
