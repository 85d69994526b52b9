"""The batch that a trace runs on: collated as in training, with real token numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tightfit.data.token_store import EncodedRow
from tightfit.estimate.trace.shadows import give_shadow
from tightfit.runtime.attention import needs_padding_mask
from tightfit.train.batches import Batch, collate_packed, collate_padded, collate_pairs
from tightfit.train.tracing.job import Document, TraceJob

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def make_real_batch(job: TraceJob, config: PretrainedConfig) -> Batch:
    """One micro-batch in host memory, as a model of this `config` gets it."""
    rows = job.rows or list_longest_rows(job, is_pair=config.is_encoder_decoder)
    encoded = [[_encode(document) for document in row] for row in rows]
    if config.is_encoder_decoder:
        return collate_pairs(encoded, pad_token_id=0)
    if job.strategy.packing:
        return collate_packed(encoded, pad_token_id=0)
    has_mask = job.strategy.quirks.padding_mask or needs_padding_mask(config)
    return collate_padded(encoded, pad_token_id=0, has_mask=has_mask)


def list_longest_rows(job: TraceJob, *, is_pair: bool = False) -> tuple[tuple[Document, ...], ...]:
    """The largest batch that the plan allows, every token of it trained.

    Rows that are not packed differ in length by a token, so that a mask, where there is one, is
    no empty one. A pair is as much again to read, for the encoder.
    """
    strategy = job.strategy
    length = strategy.seq_len
    if strategy.packing:
        mean = min(job.document_len or length, length)
        whole, rest = divmod(length, mean)
        row = (Document(num_tokens=mean),) * whole
        row += (Document(num_tokens=rest),) if rest else ()
        return (row,) * strategy.micro_batch
    less = max(1, length - 1)
    first, others = (
        (Document(num_tokens=2 * size, num_prompt=size) if is_pair else Document(num_tokens=size),)
        for size in (length, less)
    )
    return (first, *(others,) * (strategy.micro_batch - 1))


def _encode(document: Document) -> EncodedRow:
    trained = np.arange(document.num_tokens) >= document.num_prompt
    return EncodedRow(np.ones(document.num_tokens, dtype=np.int32), trained, "")


def make_fake_batch(real: Batch, device: torch.device) -> Batch:
    """The same on fake tensors that know their values. Call inside the fake mode."""
    return {
        name: give_shadow(torch.empty(values.shape, dtype=values.dtype, device=device), values)
        for name, values in real.items()
    }
