"""From rows to tensors: padded batches, packed batches, and encoder-decoder batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tightfit.data.token_store import EncodedRow

Batch = dict[str, torch.Tensor]
IGNORED = -100
"""Label of a token that carries no loss."""

Sequences = Sequence[Sequence[EncodedRow]]
"""One micro-batch: per sequence the rows that share it."""
Collate = Callable[[Sequences], Batch]


def collate_padded(sequences: Sequences, *, pad_token_id: int, has_mask: bool = False) -> Batch:
    """One row per sequence, padded on the right to the longest.

    A decoder that looks back alone never sees what stands behind a token, and padding carries no
    loss: a mask would change neither loss nor gradients, and cost attention its fastest kernel.
    `has_mask`: mark real tokens all the same, for models that would see padding.
    """
    rows = [sequence[0] for sequence in sequences]
    shape = (len(rows), max(len(row.tokens) for row in rows))
    batch = _empty(shape, pad_token_id)
    for index, row in enumerate(rows):
        _write(batch, index, 0, row)
    if has_mask:
        batch["attention_mask"] = _mark([len(row.tokens) for row in rows])
    return batch


def collate_packed(sequences: Sequences, *, pad_token_id: int) -> Batch:
    """Several rows per sequence. Positions restart with each row, which keeps rows apart.

    There is no attention mask: attention reads the boundaries off the positions.
    What is left at the end counts as one more row, without loss.
    """
    shape = (len(sequences), max(_count(sequence) for sequence in sequences))
    batch = _empty(shape, pad_token_id)
    batch["position_ids"] = torch.zeros(shape, dtype=torch.long)
    for index, sequence in enumerate(sequences):
        start = 0
        for row in sequence:
            _write(batch, index, start, row)
            end = start + len(row.tokens)
            batch["position_ids"][index, start:end] = torch.arange(len(row.tokens))
            start = end
        batch["position_ids"][index, start:] = torch.arange(shape[1] - start)
    return batch


def collate_pairs(sequences: Sequences, *, pad_token_id: int) -> Batch:
    """Encoder-decoder: what is read goes to the encoder, what is learnt to the decoder."""
    rows = [sequence[0] for sequence in sequences]
    read = [torch.from_numpy(row.tokens[~row.trained].astype("int64")) for row in rows]
    learnt = [torch.from_numpy(row.tokens[row.trained].astype("int64")) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(read, batch_first=True, padding_value=pad_token_id),
        "attention_mask": _mark([len(tokens) for tokens in read]),
        "labels": pad(learnt, batch_first=True, padding_value=IGNORED),
    }


def without_loss(batch: Batch) -> Batch:
    """The same batch with nothing to learn: what a rank runs when the rows do not go round."""
    return batch | {"labels": torch.full_like(batch["labels"], IGNORED)}


def count_trained(batch: Batch, *, is_encoder_decoder: bool) -> int:
    """Tokens that carry loss; a causal model's first token is never predicted."""
    labels = batch["labels"] if is_encoder_decoder else batch["labels"][:, 1:]
    return int((labels != IGNORED).sum())


def _empty(shape: tuple[int, int], pad_token_id: int) -> Batch:
    return {
        "input_ids": torch.full(shape, pad_token_id, dtype=torch.long),
        "labels": torch.full(shape, IGNORED, dtype=torch.long),
    }


def _mark(lengths: list[int]) -> torch.Tensor:
    """1 for a token, 0 for padding."""
    return (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()


def _count(sequence: Sequence[EncodedRow]) -> int:
    return sum(len(row.tokens) for row in sequence)


def _write(batch: Batch, index: int, start: int, row: EncodedRow) -> None:
    end = start + len(row.tokens)
    tokens = torch.from_numpy(row.tokens.astype("int64"))
    trained = torch.from_numpy(row.trained.copy())
    # The first token of a row has no token before it that could predict it; in a pack it would
    # otherwise be predicted from the row before.
    trained[0] = False
    batch["input_ids"][index, start:end] = tokens
    batch["labels"][index, start:end] = torch.where(trained, tokens, IGNORED)
