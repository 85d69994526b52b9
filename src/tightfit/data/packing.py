"""Row lengths and batches: percentiles, histogram, padding waste, best-fit packing."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tightfit.core.profiles import LengthCut

# What a distribution of row lengths means for batches: percentiles, buckets, padding.

BUCKET_GROWTH = 1.03
"""Each bucket of the histogram is at most 3% wide, so that re-planning from it loses little."""
PERCENTILES = (50, 90, 95, 99)


def percentiles(rows_by_length: Mapping[int, int]) -> dict[str, int]:
    """Nearest-rank percentiles: the shortest length that covers that share of the rows."""
    num_rows = sum(rows_by_length.values())
    wanted = {f"p{share}": math.ceil(num_rows * share / 100) for share in PERCENTILES}
    found: dict[str, int] = {}
    covered = 0
    for length in sorted(rows_by_length):
        covered += rows_by_length[length]
        for name, rank in wanted.items():
            if name not in found and covered >= rank:
                found[name] = length
    return found


def buckets(rows_by_length: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """(longest length, rows) of neighbouring lengths, ascending; a few hundred at most."""
    pairs: list[tuple[int, int]] = []
    limit = 0
    for length in sorted(rows_by_length):
        if pairs and length <= limit:
            pairs[-1] = (length, pairs[-1][1] + rows_by_length[length])
        else:
            pairs.append((length, rows_by_length[length]))
            limit = math.floor(length * BUCKET_GROWTH)
    return tuple(pairs)


SHORTEST_CANDIDATE = 512
MOST_CANDIDATES = 10
"""The longest of them: a few rows of a million tokens say nothing about 512."""


def list_candidate_lengths(longest: int, *asked: int) -> tuple[int, ...]:
    """Powers of two up to the first that cuts nothing, and what is asked for."""
    last = max(longest, SHORTEST_CANDIDATE) - 1
    top = 1 << last.bit_length()
    powers = [top >> at for at in range(MOST_CANDIDATES) if top >> at >= SHORTEST_CANDIDATE]
    return tuple(sorted({*powers, *asked}))


class LengthTally:
    """Lengths of rows before they are cut, and what other lengths than the one asked for would
    cut. Memory grows with distinct lengths only."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self.rows: Counter[int] = Counter()
        """By the longest side: of a pair there are two, of most rows one."""
        self._sides: Counter[int] = Counter()
        self._first_trained: Counter[int] = Counter()

    def add(self, sides: Sequence[int], first_trained: int) -> None:
        """`first_trained`: with this many tokens or fewer the row trains nothing."""
        self.rows[max(sides)] += 1
        self._sides.update(sides)
        self._first_trained[first_trained] += 1

    def list_cuts(self) -> tuple[LengthCut, ...]:
        if not self.rows:
            return ()
        return tuple(
            LengthCut(
                seq_len=at,
                num_truncated=sum(n for length, n in self.rows.items() if length > at),
                num_lost_tokens=sum(
                    (length - at) * n for length, n in self._sides.items() if length > at
                ),
                num_without_answer=sum(
                    n for first, n in self._first_trained.items() if first >= at
                ),
            )
            for at in list_candidate_lengths(max(self.rows), self.seq_len)
        )


def scaled(rows_by_length: Mapping[int, int], num_rows: int) -> dict[int, int]:
    """The same distribution over `num_rows` rows in whole numbers that sum to it exactly."""
    num_counted = sum(rows_by_length.values())
    if num_counted == num_rows:
        return dict(rows_by_length)
    result: dict[int, int] = {}
    covered = given = 0
    for length in sorted(rows_by_length):
        covered += rows_by_length[length]
        upto = covered * num_rows // num_counted
        if upto > given:
            result[length] = upto - given
            given = upto
    return result


def estimate_padding_waste(pairs: Iterable[tuple[int, int]], micro_batch: int) -> float:
    """Share of slots that padding fills when an epoch's shuffled rows are cut into micro-batches.

    Each batch is padded to its own longest row; the last one may be smaller.
    The slots are the exact expectation over all shuffles: rows are drawn
    without replacement, so the longest of `m` is at most L with probability
    C(rows up to L, m) / C(all rows, m). Grouping by length is not assumed.
    """
    ascending = sorted(pairs)
    num_rows = sum(rows for _, rows in ascending)
    num_tokens = sum(length * rows for length, rows in ascending)
    num_full, rest = divmod(num_rows, micro_batch)
    num_slots = 0.0
    if num_full:
        num_slots += num_full * micro_batch * _expected_longest(ascending, micro_batch, num_rows)
    if rest:
        num_slots += rest * _expected_longest(ascending, rest, num_rows)
    return min(max(1.0 - num_tokens / num_slots, 0.0), 1.0)


def _expected_longest(pairs: list[tuple[int, int]], batch: int, num_rows: int) -> float:
    log_all = _log_choose(num_rows, batch)
    expected = below = 0.0
    covered = 0
    for length, rows in pairs:
        covered += rows
        upto = math.exp(_log_choose(covered, batch) - log_all) if covered >= batch else 0.0
        expected += length * (upto - below)
        below = upto
    return expected


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)


def count_packed_rows(rows_by_length: Mapping[int, int], seq_len: int) -> int:
    """Sequences of `seq_len` that best-fit-decreasing packing makes of all rows.

    Rows of one length are placed together, so the work grows with the number
    of distinct lengths, not of rows; the result is the same as one by one.
    A row is never split; lengths above `seq_len` must be cut before.
    Source: Ding et al., "Fewer Truncations Improve Language Modeling", arXiv:2404.10830.
    """
    num_sequences = 0
    num_by_room: Counter[int] = Counter()
    """Sequences that are not full, by the room they have left."""
    rooms: list[int] = []  # the keys, sorted

    def add(room: int, number: int) -> None:
        if not room:
            return
        if room not in num_by_room:
            insort(rooms, room)
        num_by_room[room] += number

    for length in sorted(rows_by_length, reverse=True):
        if not 0 < length <= seq_len:
            raise ValueError(f"row length {length} is outside 1..{seq_len}")
        num_rows = rows_by_length[length]
        while num_rows:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                num_new = -(-num_rows // (seq_len // length))
                num_sequences += num_new
                add(seq_len, num_new)
            # The least room that suffices. Once a row is in, its sequence is an even tighter fit
            # for the next row of this length, so that it is filled before another is touched.
            room = rooms[at]
            num_each = min(room // length, num_rows)
            number = min(num_by_room[room], num_rows // num_each)
            num_by_room[room] -= number
            if not num_by_room[room]:
                del num_by_room[room], rooms[at]
            add(room - num_each * length, number)
            num_rows -= number * num_each
    return num_sequences


def describe_lengths(rows_by_length: Mapping[int, int], seq_len: int) -> dict[str, Any]:
    """What reports say of row lengths: percentiles, histogram, packed rows."""
    return {
        "percentiles": percentiles(rows_by_length),
        "histogram": buckets(rows_by_length),
        "num_packed_rows": count_packed_rows(rows_by_length, seq_len),
    }


def pack_best_fit(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Row indices per packed sequence, by best-fit-decreasing; the same input packs the same.

    As many sequences as `count_packed_rows` says. A row is never split; a row
    longer than `seq_len` is the caller's mistake.
    """
    sizes = [int(length) for length in lengths]
    if sizes and not (min(sizes) > 0 and max(sizes) <= seq_len):
        raise ValueError(f"row lengths {min(sizes)}..{max(sizes)} are outside 1..{seq_len}")
    packs: list[list[int]] = []
    rooms: list[int] = []
    packs_by_room: dict[int, list[int]] = {}
    for row in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        size = sizes[row]
        at = bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            waiting = packs_by_room[room]
            number = waiting.pop()
            if not waiting:
                del rooms[at]
            packs[number].append(row)
        else:
            room, number = seq_len, len(packs)
            packs.append([row])
        left = room - size
        if left:
            waiting = packs_by_room.setdefault(left, [])
            if not waiting:
                insort(rooms, left)
            waiting.append(number)
    return packs
