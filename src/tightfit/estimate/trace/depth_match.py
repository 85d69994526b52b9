"""Two recordings of one job at different depths: where the deeper has its additional layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import groupby, pairwise
from operator import attrgetter

from tightfit.estimate.trace.recording import Allocation, Recording

NO_LAYER = -1
MAX_GUESSES = 500
"""Run lengths that are tried before two recordings count as unlike."""


class CannotExtend(Exception):  # noqa: N818  an answer, not a fault: the caller traces every layer
    """The recordings do not say what a deeper model does."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A recording as columns of whole numbers, one entry per event.

    What is alike in every layer makes an event's token; what changes from layer to
    layer is a number beside it, and grows by equal steps.
    """

    tokens: list[int]
    """Equal for alike allocations, whatever their layer; negative for their ends."""
    links: list[int]
    """For an end, the position of its beginning."""
    layers: list[int]
    """The layer of the allocation that begins or ends; `NO_LAYER` outside of layers."""
    numbers: list[int]
    """The first number in the module's name."""

    sizes: list[int]
    """Bytes, for a beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """Which layers the deeper recording has more of."""

    num_added: int
    kind: range
    """The shallow model's layers of the kind that was added to."""

    def may_become(self, layer: int, other: int) -> bool:
        """Whether a layer of the shallow model can be `other` in the deeper one."""
        if layer == NO_LAYER or layer < self.kind.start:
            return other == layer
        if layer >= self.kind.stop:
            return other == layer + self.num_added
        return other in (layer, layer + self.num_added)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A place at which the deeper recording repeats a stretch of events once more per layer.

    `[grown_at - period, grown_at)` is the stretch that both have; its repetitions follow.
    """

    base_at: int
    """Position in the shallow recording before which the repetitions come."""
    grown_at: int
    period: int


@lru_cache(maxsize=65_536)
def split_module(name: str) -> tuple[str, int | None, str]:
    """What stands before the first number of a module's name, that number, and the rest."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            before, after = parts[:place], parts[place + 1 :]
            head = "".join(f"{word}." for word in before)
            return head, int(part), "".join(f".{word}" for word in after)
    return name, None, ""


class _Naming:
    """The token of each allocation, over several recordings.

    A size that only one depth knows counts the layers (the stacked norms of all gradients, say):
    its token does not heed the size.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        seen = [set(map(_key, recording.allocations)) for recording in recordings]
        self._everywhere = set.intersection(*seen)
        self._ids: dict[object, int] = {}

    def name(self, allocation: Allocation) -> int:
        key: tuple[object, ...] = _key(allocation)
        if key not in self._everywhere:
            key = (*key[:-2], len(allocation.shape))
        return self._ids.setdefault(key, len(self._ids) + 1)


_LAYERED = ("module", "layer", "shape", "num_bytes")
_ALIKE = attrgetter(*(one.name for one in fields(Allocation) if one.name not in _LAYERED))


def _key(allocation: Allocation) -> tuple[object, ...]:
    head, _, tail = split_module(allocation.module)
    return (
        head,
        tail,
        allocation.layer is None,
        *_ALIKE(allocation),
        allocation.shape,
        allocation.num_bytes,
    )


def make_streams(recordings: Sequence[Recording]) -> list[Stream]:
    """Streams whose tokens can be compared with each other."""
    naming = _Naming(recordings)
    return [_make_stream(recording, naming) for recording in recordings]


def _make_stream(recording: Recording, naming: _Naming) -> Stream:
    names = [naming.name(allocation) for allocation in recording.allocations]
    begun = [0] * len(names)
    stream = Stream(tokens=[], links=[], layers=[], numbers=[], sizes=[])
    for position, event in enumerate(recording.events):
        index = abs(event) - 1
        if event > 0:
            allocation = recording.allocations[index]
            begun[index] = position
            stream.tokens.append(names[index])
            stream.links.append(0)
            stream.layers.append(NO_LAYER if allocation.layer is None else allocation.layer)
            stream.numbers.append(split_module(allocation.module)[1] or 0)
            stream.sizes.append(allocation.num_bytes)
        else:
            stream.tokens.append(-names[index])
            stream.links.append(begun[index])
            stream.layers.append(stream.layers[begun[index]])
            stream.numbers.append(0)
            stream.sizes.append(0)
    return stream


def sort_ends(recording: Recording) -> Recording:
    """The same with ends that follow each other in the order of their beginnings.

    Sets and hash tables free what they hold in any order (autocast its casts, ZeRO what it
    gathered). The allocator merges free neighbours, so the order leaves no trace in it.
    """
    events: list[int] = []
    for is_end, group in groupby(recording.events, key=lambda event: event < 0):
        together = list(group)
        events.extend(sorted(together, reverse=True) if is_end else together)
    return Recording(allocations=recording.allocations, events=events)


def find_runs(base: Stream, grown: Stream, addition: Addition) -> list[Run]:
    """Where `grown` repeats what `base` has.

    Each stretch is found where the two recordings part, which is after the last layer that
    they share, and then moved back to where its repetitions differ by equal steps.
    """
    runs = _Matcher(base.tokens, grown.tokens, addition.num_added).match()
    settled: list[Run] = []
    end = 0
    for run in runs:
        settled.append(_Settler(run, base, grown, addition).settle(not_before=end))
        end = settled[-1].grown_at + addition.num_added * run.period
    return settled


class _Matcher:
    """Explains the deeper stream as the shallow one with stretches repeated."""

    def __init__(self, base: Sequence[int], grown: Sequence[int], num_added: int) -> None:
        self._base, self._grown, self._num_added = base, grown, num_added
        self._guesses_left = MAX_GUESSES
        self._furthest = 0

    def match(self) -> list[Run]:
        if len(self._grown) < len(self._base):
            raise CannotExtend("the deeper model has fewer allocations")
        start = _count_alike(self._base, 0, self._grown, 0)
        # A stretch is guessed at each parting; a stack instead of recursion, for there are many.
        open_guesses: list[tuple[list[Run], int, int]] = [([], start, start)]
        while open_guesses:
            runs, at, other = open_guesses.pop()
            self._furthest = max(self._furthest, at)
            if at == len(self._base) and other == len(self._grown):
                return runs
            open_guesses.extend(self._list_guesses(runs, at, other))
            self._guesses_left -= 1
            if self._guesses_left < 0:
                break
        raise CannotExtend(
            f"layers are not alike: event {self._furthest} of {len(self._base)} has no counterpart"
        )

    def _list_guesses(
        self, runs: list[Run], at: int, other: int
    ) -> Iterable[tuple[list[Run], int, int]]:
        """What may be repeated here, the likeliest last: that which explains most of the rest."""
        found = []
        for period in self._list_periods(at, other):
            resumed = other + period * self._num_added
            alike = _count_alike(self._base, at, self._grown, resumed)
            run = Run(base_at=at, grown_at=other, period=period)
            found.append((alike, period, ([*runs, run], at + alike, resumed + alike)))
        return [guess for *_, guess in sorted(found, key=lambda one: one[:2])]

    def _list_periods(self, at: int, other: int) -> Iterable[int]:
        grown, times = self._grown, self._num_added
        missing = len(grown) - other - (len(self._base) - at)
        if missing < times:
            return
        token = grown[other]
        for period in range(1, min(missing // times, other) + 1):
            if grown[other - period] != token:
                continue
            length = period * times
            before = grown[other - period : other - period + length]
            if before == grown[other : other + length]:
                yield period


def _count_alike(base: Sequence[int], at: int, grown: Sequence[int], other: int) -> int:
    """How many tokens agree from here on: steps that double until one fails, then halve."""
    total = min(len(base) - at, len(grown) - other)
    alike, width, has_failed = 0, 64, False
    while alike < total and width:
        width = min(width, total - alike)
        here, there = at + alike, other + alike
        if base[here : here + width] == grown[there : there + width]:
            alike += width
            width = width if has_failed else 2 * width
        else:
            has_failed = True
            width //= 2
    return alike


class _Settler:
    """Moves a run back to where its repetitions differ by equal steps.

    Alike tokens may belong to unlike layers: the ends of gradients, for one, look alike
    for layers of two kinds, but what they end lies elsewhere.
    """

    def __init__(self, run: Run, base: Stream, grown: Stream, addition: Addition) -> None:
        self._run, self._base, self._grown, self._addition = run, base, grown, addition

    def settle(self, *, not_before: int) -> Run:
        run, tokens = self._run, self._grown.tokens
        start = run.grown_at
        while start > not_before and tokens[start - 1] == tokens[start - 1 + run.period]:
            start -= 1
        shared = range(start, run.grown_at)
        # Events before the run's place keep theirs; those behind it move by all repetitions.
        num_misplaced = sum(not self._may_move(position, by=0) for position in shared)
        num_even = 0
        for position in reversed(shared):
            num_even = num_even + 1 if self._is_even(position) else 0
            place = position + run.period
            if place < run.grown_at:
                num_misplaced -= not self._may_move(place, by=0)
                num_misplaced += not self._may_move(place, by=self._length)
            if num_even >= run.period and not num_misplaced:
                back = run.grown_at - place
                return Run(base_at=run.base_at - back, grown_at=place, period=run.period)
        raise CannotExtend("layers that look alike do not follow each other by equal steps")

    @property
    def _length(self) -> int:
        return self._run.period * self._addition.num_added

    def _may_move(self, position: int, *, by: int) -> bool:
        """Whether an event before the run may be the deeper model's event so much later."""
        layer = self._base.layers[position - self._run.grown_at + self._run.base_at]
        return self._addition.may_become(layer, self._grown.layers[position + by])

    def _is_even(self, position: int) -> bool:
        """Whether the numbers of all repetitions have one step between them, and sizes none."""
        stream, period = self._grown, self._run.period
        stop = position + self._length + 1
        sizes = stream.sizes[position:stop:period]
        if any(size != sizes[0] for size in sizes):
            return False
        for column in (stream.links, stream.layers, stream.numbers):
            values = column[position:stop:period]
            step = values[1] - values[0]
            if any(after - before != step for before, after in pairwise(values)):
                return False
        return True
