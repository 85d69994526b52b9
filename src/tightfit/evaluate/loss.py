"""Loss over encoded rows, by row, so that means and their spread can be had from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightfit.data.token_store import EncodedRow, TokenStore
from tightfit.evaluate.generate import Watch
from tightfit.runtime.attention import needs_padding_mask

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

MAX_LOGITS = 1 << 28
"""Values of one batch's logits: 1 GiB in fp32. Sets how many tokens go together."""
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLosses:
    """Negative log-likelihood of each row's trained tokens, in nats."""

    sums: NDArray[np.float64]
    num_tokens: NDArray[np.int64]

    @property
    def mean(self) -> float:
        """Every token weighs the same, whichever row it stands in."""
        return float(self.sums.sum() / self.num_tokens.sum())


def measure_loss(model: Any, store: TokenStore, watch: Watch | None = None) -> RowLosses:
    """One pass over all rows, without gradients, in eval mode."""
    import numpy as np
    import torch

    model.eval()
    sums = np.zeros(len(store))
    done = 0
    for places in list_batches(store.lengths, model.config.get_text_config().vocab_size):
        with torch.inference_mode():
            sums[places] = _row_sums([store.row(place) for place in places], model, store)
        done += len(places)
        if watch is not None:
            watch(done, len(store))
    return RowLosses(sums=sums, num_tokens=store.num_trained.astype(np.int64))


def measure_loss_by_logits(
    score: Callable[[Sequence[int]], NDArray[np.float32]],
    store: TokenStore,
    watch: Watch | None = None,
) -> RowLosses:
    """The same from an engine's scores, row by row."""
    import numpy as np

    sums = np.zeros(len(store))
    for place in range(len(store)):
        row = store.row(place)
        at = np.flatnonzero(row.trained[1:])
        if len(at):
            scores = score(row.tokens.tolist())[at].astype(np.float64)
            highest = scores.max(axis=1)
            total = np.log(np.exp(scores - highest[:, None]).sum(axis=1)) + highest
            sums[place] = (total - scores[np.arange(len(at)), row.tokens[at + 1]]).sum()
        if watch is not None:
            watch(place + 1, len(store))
    return RowLosses(sums=sums, num_tokens=store.num_trained.astype(np.int64))


def list_batches(lengths: NDArray[np.int32], vocab_size: int) -> Iterator[list[int]]:
    """Rows of like length together, the longest first; each batch's logits within the limit."""
    import numpy as np

    max_tokens = max(MAX_LOGITS // vocab_size, 1)
    order = np.argsort(-lengths, kind="stable").tolist()
    while order:
        size = max(max_tokens // max(int(lengths[order[0]]), 1), 1)
        yield order[:size]
        order = order[size:]


def _row_sums(rows: list[EncodedRow], model: Any, store: TokenStore) -> NDArray[np.float64]:
    import torch
    from torch.nn.functional import cross_entropy

    is_pair = store.description.is_encoder_decoder
    lay_out = _pairs if is_pair else _sequences
    inputs, labels = lay_out(rows, store.description.pad_token_id, model.device)
    if not needs_padding_mask(model.config):
        del inputs["attention_mask"]
    logits = model(**inputs).logits
    if not is_pair:  # a position predicts the token behind it
        logits, labels = logits[:, :-1], labels[:, 1:]
    is_trained = labels != IGNORED
    losses = cross_entropy(logits[is_trained].float(), labels[is_trained], reduction="none")
    sums = torch.zeros(len(rows), dtype=torch.float64, device=losses.device)
    sums.index_add_(0, is_trained.nonzero()[:, 0], losses.double())
    values: NDArray[np.float64] = sums.cpu().numpy()
    return values


def _sequences(
    rows: list[EncodedRow], pad_id: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    import numpy as np

    tokens = _padded([row.tokens for row in rows], pad_id, device)
    mask = _padded([np.ones(len(row.tokens), np.int64) for row in rows], 0, device)
    labels = _padded([np.where(row.trained, row.tokens, IGNORED) for row in rows], IGNORED, device)
    return {"input_ids": tokens, "attention_mask": mask}, labels


def _pairs(
    rows: list[EncodedRow], pad_id: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    import numpy as np

    read = [row.tokens[~row.trained] for row in rows]
    mask = _padded([np.ones(len(tokens), np.int64) for tokens in read], 0, device)
    labels = _padded([row.tokens[row.trained] for row in rows], IGNORED, device)
    inputs = {"input_ids": _padded(read, pad_id, device), "attention_mask": mask, "labels": labels}
    return inputs, labels


def _padded(rows: list[NDArray[np.int32]], filler: int, device: torch.device) -> torch.Tensor:
    import numpy as np
    import torch

    table = np.full((len(rows), max(map(len, rows))), filler, dtype=np.int64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return torch.from_numpy(table).to(device)
