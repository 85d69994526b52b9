"""DataReport: what a dataset holds and what encoding made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from tightfit.data.findings import Finding
from tightfit.data.lengths import buckets, percentiles
from tightfit.data.packing import count_packed_rows
from tightfit.data.token_store import TokenStore
from tightfit.data.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceReport(_Frozen):
    """One source as the recipe names it."""

    name: str
    split: Literal["train", "eval"]
    weight: float
    files: tuple[str, ...]
    format: str
    """`alpaca`, `chat`, ...; several joined by `+`; empty where no row was understood."""
    num_rows: NonNegativeInt
    """Examples read, before any was left out, cut into pieces or split into turns."""
    num_encoded_rows: NonNegativeInt
    num_tokens: NonNegativeInt
    num_trained_tokens: NonNegativeInt


class SplitReport(_Frozen):
    """Rows that are trained on, or rows that are evaluated on."""

    num_rows: PositiveInt
    num_tokens: PositiveInt
    num_trained_tokens: NonNegativeInt
    mean_tokens: float
    max_tokens: PositiveInt
    percentiles: dict[str, int]
    histogram: tuple[tuple[int, int], ...]
    """(upper length, rows) pairs, ascending."""
    num_packed_rows: PositiveInt
    packing_efficiency_fraction: float
    """Share of slots that hold tokens after best-fit packing at `seq_len`."""
    num_rows_with_stop: NonNegativeInt


class DataReport(_Frozen):
    """Everything that is worth knowing before training; `report.json` beside the stores."""

    key: str
    seq_len: PositiveInt
    train_on: str
    template: str
    """`tokenizer`, a name, or a file; `none` where none was used."""
    template_text: str = ""
    """The Jinja text itself, to be saved beside the tuned weights."""
    tokenizer: str
    pad_token: str
    pad_token_id: NonNegativeInt
    stop_tokens: tuple[str, ...]
    """That end answers here, and are trained."""
    sources: tuple[SourceReport, ...]
    train: SplitReport
    eval: SplitReport | None = None
    num_read: NonNegativeInt
    """Examples read from all sources."""
    longest_row_tokens: NonNegativeInt
    """Before truncation: the `seq_len` that would cut nothing."""
    num_truncated: NonNegativeInt
    num_lost_tokens: NonNegativeInt
    num_dropped: NonNegativeInt
    num_duplicates: NonNegativeInt
    num_empty_answers: NonNegativeInt
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def formats(self) -> str:
        """All formats, in order of appearance."""
        return "+".join(dict.fromkeys(s.format for s in self.sources if s.format))


def describe_split(
    lengths: NDArray[np.int64], num_trained: NDArray[np.int64], num_with_stop: int, seq_len: int
) -> SplitReport:
    """Numbers over the rows of one side."""
    import numpy as np

    values, counts = np.unique(np.minimum(lengths, seq_len), return_counts=True)
    by_length = dict(zip(values.tolist(), counts.tolist(), strict=True))
    num_packed = count_packed_rows(by_length, seq_len)
    num_tokens = int(lengths.sum())
    return SplitReport(
        num_rows=len(lengths),
        num_tokens=num_tokens,
        num_trained_tokens=int(num_trained.sum()),
        mean_tokens=num_tokens / len(lengths),
        max_tokens=int(lengths.max()),
        percentiles=percentiles(by_length),
        histogram=buckets(by_length),
        num_packed_rows=num_packed,
        packing_efficiency_fraction=sum(n * c for n, c in by_length.items())
        / (num_packed * seq_len),
        num_rows_with_stop=num_with_stop,
    )


def list_segments(
    store: TokenStore, index: int, tokenizer: ChatTokenizer
) -> list[tuple[str, bool]]:
    """A row as stretches of text that are trained or not, for showing the mask.

    Texts are differences of decoded prefixes, so that blanks at the seams stay.
    """
    row = store.row(index)
    tokens, flags = row.tokens.tolist(), row.trained.tolist()
    is_pair = store.description.is_encoder_decoder
    segments: list[tuple[str, bool]] = []
    start, said = 0, ""
    for end in _seams(flags):
        if is_pair:  # two texts, not one
            segments.append((tokenizer.decode(tokens[start:end]), flags[start]))
        else:
            text = tokenizer.decode(tokens[:end])
            segments.append((text[len(said) :], flags[start]))
            said = text
        start = end
    return segments


def _seams(flags: Sequence[bool]) -> list[int]:
    changes = [i for i in range(1, len(flags)) if flags[i] != flags[i - 1]]
    return [*changes, len(flags)] if flags else []
