"""What a reader is shown of encoded rows: which tokens are trained, and the rows by length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from tightfit.core.errors import NotFoundError

if TYPE_CHECKING:  # what draws a chart of rows by length needs none of these
    from tightfit.data.encode import EncodedDataset
    from tightfit.data.report import SplitReport
    from tightfit.data.token_store import TokenStore
    from tightfit.data.tokenizer import ChatTokenizer


class Piece(NamedTuple):
    """A stretch of a row, all of one kind."""

    text: str
    is_trained: bool
    is_special: bool
    """The tokenizer's special token itself, not letters that spell it."""


class ViewedRow(NamedTuple):
    """A row to be shown."""

    place: str
    answer: str
    """Of preferences: `chosen`, `rejected`, `good` or `bad`."""
    num_tokens: int
    num_trained_tokens: int
    pieces: tuple[Piece, ...]

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "place": self.place,
            **({"answer": self.answer} if self.answer else {}),
            "num_tokens": self.num_tokens,
            "num_trained_tokens": self.num_trained_tokens,
            "segments": [
                {"text": text, "trained": trained, "special": special}
                for text, trained, special in self.pieces
            ],
        }


def view_row(store: TokenStore, index: int, tokenizer: ChatTokenizer) -> ViewedRow:
    """One row of a store, cut where the mask or the kind of token changes."""
    row = store.row(index)
    special = set(tokenizer.control.ids.values())
    tokens = row.tokens.tolist()
    kinds = [(flag, token in special) for token, flag in zip(tokens, row.trained, strict=True)]
    is_pair = store.description.is_encoder_decoder
    pieces: list[Piece] = []
    start, text_before, side = 0, "", 0
    for (is_trained, is_special), group in groupby(kinds):
        end = start + len(list(group))
        if is_pair and is_trained and not kinds[start - 1][0]:
            side, text_before = start, ""  # the decoder's text begins here
        # Differences of decoded prefixes, so that blanks at the seams stay.
        text = tokenizer.decode(tokens[side:end])
        pieces.append(Piece(text[len(text_before) :], bool(is_trained), is_special))
        start, text_before = end, text
    answer = _name_answer(store, index)
    return ViewedRow(row.place, answer, len(tokens), int(store.num_trained[index]), tuple(pieces))


def pick_rows(store: TokenStore, count: int) -> list[int]:
    """So many rows, spread evenly, the first among them; of pairs both rows."""
    size = store.description.rows_per_example
    num_examples = len(store) // size
    count = min(num_examples, count)
    first = [number * num_examples // count * size for number in range(count)]
    return [row + at for row in first for at in range(size)]


def _name_answer(store: TokenStore, index: int) -> str:
    if store.is_good is not None:
        return "good" if store.is_good[index] else "bad"
    if store.description.rows_per_example > 1:
        return "rejected" if index % 2 else "chosen"
    return ""


def find_row(encoded: EncodedDataset, wanted: int) -> Iterator[tuple[TokenStore, int]]:
    """Every encoded row that comes from this line or row of a data file."""
    import numpy as np

    stores = [store for store in (encoded.train, encoded.eval) if store is not None]
    numbers = [np.load(store.folder / "numbers.npy") for store in stores]
    found = [
        (store, int(at))
        for store, rows in zip(stores, numbers, strict=True)
        for at in np.flatnonzero(rows == wanted)
    ]
    if not found:
        known = np.concatenate(numbers)
        nearest = int(known[np.argmin(np.abs(known - wanted))])
        raise NotFoundError(
            f"No encoded row begins at line {wanted:,}; the nearest is {nearest:,}.",
            remedy=f"--row {nearest}",
        )
    yield from found


# Rows by length.


def count_lengths(lengths: Any) -> dict[int, int]:
    """Rows by length."""
    import numpy as np

    values, counts = np.unique(lengths, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


class Bin(NamedTuple):
    """Rows with `first` to `last` tokens."""

    first: int
    last: int
    num_rows: int


def choose_step(top: int, *, most: int) -> int:
    """A round width that makes at most `most` bins up to `top`."""
    scale = 1
    while True:
        for step in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500):
            if -(-top // (step * scale)) <= most:
                return step * scale
        scale *= 1000


def make_bins(rows_by_length: Mapping[int, int], *, step: int, top: int) -> list[Bin]:
    """Bins of equal width from 1 up to `top`; longer rows are not counted."""
    counts = [0] * -(-top // step)
    for length, num_rows in rows_by_length.items():
        if length <= len(counts) * step:
            counts[(length - 1) // step] += num_rows
    return [Bin(at * step + 1, (at + 1) * step, count) for at, count in enumerate(counts)]


def summarize_lengths(split: SplitReport, by_length: Mapping[int, int], *, most: int) -> list[Bin]:
    """At most `most` bins up to where nearly all rows are, and the longer rows as one more."""
    top = split.percentiles["p99"]
    bins = make_bins(by_length, step=choose_step(top, most=most), top=top)
    end = bins[-1].last
    while not bins[0].num_rows and len(bins) > 1:
        del bins[0]
    rest = sum(rows for length, rows in by_length.items() if length > end)
    if rest:
        bins.append(Bin(end + 1, split.max_tokens, rest))
    else:
        bins[-1] = bins[-1]._replace(last=min(end, max(split.max_tokens, bins[-1].first)))
    return bins
