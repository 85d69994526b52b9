"""Selective checkpointing: the smallest number of recomputed layers with which a job fits."""

from __future__ import annotations

from collections.abc import Callable

from tightfit.estimate.trace.depth import BASE_LAYERS

_NUM_SECANTS = 2
"""Guesses along a straight line before halving: memory is nearly linear in recomputed layers."""


def find_fewest_recomputed(
    needed_bytes: Callable[[int], int], *, num_layers: int, room_bytes: int
) -> int | None:
    """The fewest layers, counted from the first, whose recomputation makes a job fit.

    `needed_bytes` tells what the job needs with so many recomputed layers. It may rise where
    the peak lies elsewhere, so the answer is a number that fits while one fewer does not, and
    not always the fewest of all. None where the job does not fit with all of them.
    """
    too_few, needed_at_most = 0, needed_bytes(0)
    if needed_at_most <= room_bytes:
        return 0
    # Nearly all comes from the traces that the numbers in between need too; all has its own.
    for enough in (num_layers - BASE_LAYERS, num_layers):
        if enough <= too_few:
            continue
        needed_at_least = needed_bytes(enough)
        if needed_at_least <= room_bytes:
            break
        too_few, needed_at_most = enough, needed_at_least
    else:
        return None
    num_guesses = 0
    while enough - too_few > 1:
        guess = (too_few + enough) // 2
        if num_guesses < _NUM_SECANTS:
            saved = needed_at_most - needed_at_least
            missing = needed_at_most - room_bytes
            guess = too_few + -(-missing * (enough - too_few) // saved)
            guess = min(max(guess, too_few + 1), enough - 1)
        num_guesses += 1
        needed = needed_bytes(guess)
        if needed <= room_bytes:
            enough, needed_at_least = guess, needed
        else:
            too_few, needed_at_most = guess, needed
    return enough
