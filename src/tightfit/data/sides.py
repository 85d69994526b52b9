"""Which rows are trained on and which evaluated: by content, so that twins stay together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Row indices, ascending."""

    train: NDArray[np.int64]
    eval: NDArray[np.int64]
    in_both: NDArray[np.int64]
    """Training rows whose text is also on the other side."""
    note: str | None = None


def split_sides(
    digests: NDArray[np.int64], is_held_out: NDArray[np.bool_], *, fraction: float, seed: int
) -> Sides:
    """Rows of evaluation sources, and a seeded share of the distinct training examples.

    The draw orders examples by a hash of their text and the seed: the same text
    falls on one side, and adding rows moves few others.
    """
    import numpy as np

    numbers = np.asarray(digests, dtype=np.uint64)
    held = is_held_out
    note = None
    if fraction > 0:
        distinct = np.unique(numbers[~held])
        num_drawn = min(max(round(fraction * len(distinct)), 1), len(distinct) - 1)
        if num_drawn > 0:
            drawn = distinct[np.argsort(_mix(distinct, seed), kind="stable")[:num_drawn]]
            held = held | np.isin(numbers, drawn)
        else:
            note = "There are too few distinct rows to hold any back for evaluation."
    train, evaluated = np.flatnonzero(~held), np.flatnonzero(held)
    in_both = train[np.isin(numbers[train], numbers[evaluated])] if len(evaluated) else train[:0]
    return Sides(train=train, eval=evaluated, in_both=in_both, note=note)


def mark_first(
    digests: NDArray[np.int64], files: NDArray[np.int64], numbers: NDArray[np.int64]
) -> list[tuple[int, int]]:
    """(row, first row with that text) for every example that repeats an earlier one."""
    import numpy as np

    if not len(digests):
        return []
    # Pieces of one example follow each other and share its place; only the first one counts.
    is_start = np.ones(len(digests), dtype=np.bool_)
    is_start[1:] = (np.diff(files) != 0) | (np.diff(numbers) != 0)
    starts = np.flatnonzero(is_start)
    _, first, inverse = np.unique(digests[starts], return_index=True, return_inverse=True)
    earliest = first[inverse]
    repeats = np.flatnonzero(earliest != np.arange(len(starts)))
    return [(int(starts[i]), int(starts[earliest[i]])) for i in repeats]


def _mix(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """SplitMix64's finalizer over value and seed (Steele, Lea, Flood, OOPSLA 2014)."""
    import numpy as np

    golden = 0x9E3779B97F4A7C15
    with np.errstate(over="ignore"):
        mixed = values ^ np.uint64((seed * golden + golden) % 2**64)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        final: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return final
