"""Best-fit-decreasing packing: which rows share a sequence, and how many sequences that makes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence


def count_packed_rows(rows_by_length: Mapping[int, int], seq_len: int) -> int:
    """Sequences of `seq_len` that best-fit-decreasing packing makes of all rows.

    Rows of one length are placed together, so the work grows with the number
    of distinct lengths, not of rows; the result is the same as one by one.
    A row is never split; lengths above `seq_len` must be cut before.
    Source: Ding et al., "Fewer Truncations Improve Language Modeling", arXiv:2404.10830.
    """
    bins = _Bins(seq_len)
    for length in sorted(rows_by_length, reverse=True):
        if not 0 < length <= seq_len:
            raise ValueError(f"row length {length} is outside 1..{seq_len}")
        bins.place(length, rows_by_length[length])
    return bins.num_bins


class _Bins:
    """Partly filled sequences, counted by the room they have left."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_by_room: dict[int, int] = {}
        self._rooms: list[int] = []
        self.num_bins = 0

    def place(self, length: int, num_rows: int) -> None:
        """Put rows where they leave the least room, opening new sequences for the rest.

        Once a row is in, its sequence is an even tighter fit for the next row of
        the same length, so a sequence is filled up before another is touched.
        """
        while num_rows:
            at = bisect_left(self._rooms, length)
            if at == len(self._rooms):
                break
            room = self._rooms[at]
            num_rows -= self._fill(room, self._num_by_room[room], length, num_rows)
        per_bin = self._size // length
        num_new = -(-num_rows // per_bin)
        if num_new:
            self.num_bins += num_new
            self._add(self._size, num_new)
            self._fill(self._size, num_new, length, num_rows)

    def _fill(self, room: int, num_bins: int, length: int, num_rows: int) -> int:
        """Place up to `num_rows` into sequences with this room; returns how many went in."""
        per_bin = room // length
        num_full = min(num_bins, num_rows // per_bin)
        placed = num_full * per_bin
        self._take(room, num_full)
        self._add(room - per_bin * length, num_full)
        rest = num_rows - placed
        if num_full < num_bins and rest:  # rest < per_bin: one last sequence takes it
            self._take(room, 1)
            self._add(room - rest * length, 1)
            placed += rest
        return placed

    def _add(self, room: int, num_bins: int) -> None:
        if room and num_bins:
            if room not in self._num_by_room:
                insort(self._rooms, room)
            self._num_by_room[room] = self._num_by_room.get(room, 0) + num_bins

    def _take(self, room: int, num_bins: int) -> None:
        if not num_bins:
            return
        left = self._num_by_room[room] - num_bins
        if left:
            self._num_by_room[room] = left
        else:
            del self._num_by_room[room]
            del self._rooms[bisect_left(self._rooms, room)]


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
