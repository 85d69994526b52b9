"""Rows by length as bins of one round width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_STEPS = (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500)


class Bin(NamedTuple):
    """Rows with `first` to `last` tokens."""

    first: int
    last: int
    num_rows: int


def choose_step(top: int, *, most: int) -> int:
    """A round width that makes at most `most` bins up to `top`."""
    scale = 1
    while True:
        for step in _STEPS:
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
