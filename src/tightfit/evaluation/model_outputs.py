"""Outputs of a torch model on many rows: greedy answers in batches, and loss by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tightfit.core.progress import CountProgress
from tightfit.data.token_store import EncodedRow, TokenStore
from tightfit.runtime.attention import needs_padding_mask
from tightfit.runtime.devices import is_out_of_memory

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """How to answer."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    pad_id: int
    batch: int = 16


def generate_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    request: GenerateRequest,
    watch: CountProgress | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt, up to and without the stop token.

    Padding is on the left, so that every prompt ends where its answer begins. A batch
    that runs out of memory is halved and tried again.
    """
    model.eval()
    order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
    answers: list[list[int]] = [[] for _ in prompts]
    size, done = request.batch, 0
    while done < len(order):
        places = order[done : done + size]
        try:
            found = _generate([prompts[place] for place in places], model, request)
        except RuntimeError as error:
            if size == 1 or not is_out_of_memory(error):
                raise
            size = (size + 1) // 2
            _free_memory()
            continue
        for place, answer in zip(places, found, strict=True):
            answers[place] = answer
        done += len(places)
        if watch is not None:
            watch(done, len(order))
    return answers


def _generate(
    prompts: Sequence[Sequence[int]], model: Any, request: GenerateRequest
) -> list[list[int]]:
    import torch

    inputs, mask = _pad_left(prompts, request.pad_id, model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=inputs, attention_mask=mask, generation_config=_greedy(model, request)
        )
    # An encoder-decoder's output begins with its own start token instead of the prompt.
    first = 1 if model.config.is_encoder_decoder else inputs.shape[1]
    stops = set(request.stop_ids)
    return [_until_stop(row, stops) for row in output[:, first:].tolist()]


def _greedy(model: Any, request: GenerateRequest) -> Any:
    """Greedy search, whatever sampling or penalties the model's generation config has."""
    import transformers

    own = model.generation_config
    settings: Any = transformers.GenerationConfig
    return settings(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        use_cache=True,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=list(request.stop_ids),
        pad_token_id=request.pad_id,
        bos_token_id=getattr(own, "bos_token_id", None),
        decoder_start_token_id=getattr(own, "decoder_start_token_id", None),
    )


def _pad_left(
    prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    longest = max(map(len, prompts))
    tokens = [[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _until_stop(tokens: list[int], stops: set[int]) -> list[int]:
    end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def _free_memory() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Loss by row, from which means and intervals are computed.

MAX_LOGITS = 1 << 28
"""Values of one batch's logits: 1 GiB in fp32. Limits the tokens per batch."""
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLosses:
    """Negative log-likelihood of each row's trained tokens, in nats."""

    sums: NDArray[np.float64]
    num_tokens: NDArray[np.int64]

    @property
    def mean(self) -> float:
        """Over tokens, not over rows."""
        return float(self.sums.sum() / self.num_tokens.sum())


def measure_loss(model: Any, store: TokenStore, watch: CountProgress | None = None) -> RowLosses:
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
    watch: CountProgress | None = None,
) -> RowLosses:
    """The same from an engine's logits."""
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
    if not is_pair:  # a position predicts the next token
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
