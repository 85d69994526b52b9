"""Growth: the recording of a deep model from recordings of shallow ones, event by event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightfit.estimate.trace.depth_match import (
    Addition,
    CannotExtend,
    Run,
    Stream,
    find_runs,
    make_streams,
    sort_ends,
    split_module,
)
from tightfit.estimate.trace.recording import Allocation, Recording

__all__ = ["BASE_LAYERS", "NUM_ADDED", "CannotExtend", "DepthPlan", "Growth", "plan_depths"]

BASE_LAYERS = 3
"""Layers of one kind in the shallow model: a first, one like all in between, a last."""
NUM_ADDED = 2
"""Layers more in the deeper model: the second must follow from the first, which is the check."""

Columns = tuple[list[int], list[int], list[int]]
"""An event's numbers, all events below each other: link, layer, number in the module's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthPlan:
    """Which depths to trace for a model whose layers are of one kind or of several in a row."""

    base: tuple[int, ...]
    """Layers of each kind in the shallow model."""
    grown: tuple[tuple[int, ...], ...]
    """The deeper models, each with more layers of one kind."""
    num_more: tuple[int, ...]
    """Layers that the wanted model has beyond `base`, one number for each of `grown`."""

    @property
    def additions(self) -> list[Addition]:
        """Which layers each of `grown` has more of."""
        found = []
        for counts in self.grown:
            kind = next(k for k, count in enumerate(counts) if count != self.base[k])
            start = sum(self.base[:kind])
            layers = range(start, start + self.base[kind])
            found.append(Addition(num_added=counts[kind] - self.base[kind], kind=layers))
        return found


def plan_depths(num_layers: Sequence[int]) -> DepthPlan:
    """For so many layers of each kind; a kind with fewer than `BASE_LAYERS` is traced with all.

    Where `grown` is empty, `base` is the model itself. Models that differ only in how many
    layers beyond `BASE_LAYERS` are of which kind need the same traces.
    """
    if max(num_layers) <= BASE_LAYERS + NUM_ADDED:
        return DepthPlan(base=tuple(num_layers), grown=(), num_more=())
    base = tuple(min(count, BASE_LAYERS) for count in num_layers)
    kinds = [kind for kind, count in enumerate(num_layers) if count >= BASE_LAYERS]
    return DepthPlan(
        base=base,
        grown=tuple(
            tuple(count + NUM_ADDED * (place == kind) for place, count in enumerate(base))
            for kind in kinds
        ),
        num_more=tuple(num_layers[kind] - BASE_LAYERS for kind in kinds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What one more layer of a kind does to the shallow model's events."""

    runs: list[Run]
    rates: Columns
    """Added to each event's numbers."""
    sizes: dict[int, tuple[int, ...]]
    """Bytes and dimensions added, by position, where an allocation counts the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Events that a deeper model repeats: the last `period` before `at` in the shallow one."""

    at: int
    period: int
    steps: Columns
    """What each repetition adds to the numbers of the one before it."""
    kinds: list[int]
    """The kinds whose layers each add a repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """A deep model's events: which of the shallow model's each is like, and its own numbers."""

    likes: list[int]
    columns: Columns


class Growth:
    """What more layers of each kind add to a recording, learnt from recordings that have them.

    A job does the same in every layer but the first and the last: its events are stretches
    that come once per layer, between others that come once. From one repetition of a stretch
    to the next, layer numbers and the places of what is freed change by equal steps.
    """

    def __init__(self, plan: DepthPlan, base: Recording, grown: Sequence[Recording]) -> None:
        """The recordings are of the depths that `plan` names."""
        recordings = [base, *grown]
        try:
            self._learn(plan, recordings)
        except CannotExtend:
            self._learn(plan, [sort_ends(recording) for recording in recordings])

    def _learn(self, plan: DepthPlan, recordings: Sequence[Recording]) -> None:
        self._base, *grown = recordings
        self._names = [split_module(one.module) for one in self._base.allocations]
        self._stream, *others = make_streams(recordings)
        self._kinds = [
            _compare((self._base, self._stream), (recording, stream), addition)
            for recording, stream, addition in zip(grown, others, plan.additions, strict=True)
        ]
        self._stretches = _merge(self._kinds, others)
        for kind, recording in enumerate(grown):
            num_more = [NUM_ADDED * (kind == place) for place in range(len(grown))]
            if self.extend(num_more) != recording:
                raise CannotExtend("the deeper of two traced models does not follow from the other")

    def extend(self, num_more: Sequence[int]) -> Recording:
        """The recording with `num_more` layers of each kind beyond those of the shallow model.

        Linear in its events. `CannotExtend` where an event would free what is not there.
        """
        if len(num_more) != len(self._kinds) or min(num_more, default=0) < 0:
            raise ValueError(f"{num_more} is not a depth beyond the traced one")
        layout = self._lay_out(num_more)
        sizes = self._grow_sizes(num_more)
        tokens = self._stream.tokens
        made, events = Recording(), []
        live: dict[int, int] = {}
        for position, like in enumerate(layout.likes):
            if tokens[like] > 0:
                made.allocations.append(self._make(layout, position, sizes))
                live[position] = len(made.allocations)
                events.append(len(made.allocations))
                continue
            begun = layout.columns[0][position]
            index = live.pop(begun, 0)
            if not index or tokens[layout.likes[begun]] != -tokens[like]:
                raise CannotExtend(f"event {position} would free what is not there")
            events.append(-index)
        made.events = events
        return made

    def _lay_out(self, num_more: Sequence[int]) -> _Layout:
        stream = self._stream
        shared = [
            _add(column, [kind.rates[place] for kind in self._kinds], num_more)
            for place, column in enumerate((stream.links, stream.layers, stream.numbers))
        ]
        layout = _Layout(likes=[], columns=([], [], []))
        done = 0
        for stretch in self._stretches:
            start, at = stretch.at - stretch.period, stretch.at
            layout.likes.extend(range(done, at))
            for target, source in zip(layout.columns, shared, strict=True):
                target.extend(source[done:at])
            done = at
            for again in range(1, sum(num_more[kind] for kind in stretch.kinds) + 1):
                layout.likes.extend(range(start, at))
                for target, source, steps in zip(
                    layout.columns, shared, stretch.steps, strict=True
                ):
                    values = zip(source[start:at], steps, strict=True)
                    target.extend([value + again * step for value, step in values])
        layout.likes.extend(range(done, len(stream.tokens)))
        for target, source in zip(layout.columns, shared, strict=True):
            target.extend(source[done:])
        return layout

    def _grow_sizes(self, num_more: Sequence[int]) -> dict[int, list[int]]:
        """Bytes and dimensions by position, of the allocations that count the layers."""
        grown: dict[int, list[int]] = {}
        for kind, times in zip(self._kinds, num_more, strict=True):
            for position, rates in kind.sizes.items():
                allocation = self._base.allocations[self._base.events[position] - 1]
                sizes = grown.get(position) or [allocation.num_bytes, *allocation.shape]
                pairs = zip(sizes, rates, strict=True)
                grown[position] = [size + times * rate for size, rate in pairs]
        return grown

    def _make(self, layout: _Layout, position: int, sizes: dict[int, list[int]]) -> Allocation:
        like = layout.likes[position]
        index = self._base.events[like] - 1
        model = self._base.allocations[index]
        _, layers, numbers = layout.columns
        grown = sizes.get(like)
        if model.layer is None and self._names[index][1] is None and grown is None:
            return model
        head, number, tail = self._names[index]
        return replace(
            model,
            num_bytes=model.num_bytes if grown is None else grown[0],
            module=model.module if number is None else f"{head}{numbers[position]}{tail}",
            layer=None if model.layer is None else layers[position],
            shape=model.shape if grown is None else tuple(grown[1:]),
        )


def _add(column: list[int], rates: Sequence[list[int]], times: Sequence[int]) -> list[int]:
    """A column of the shallow model's numbers at another depth."""
    for rate, factor in zip(rates, times, strict=True):
        if factor:
            column = [value + factor * step for value, step in zip(column, rate, strict=True)]
    return column


def _compare(
    shallow: tuple[Recording, Stream], deeper: tuple[Recording, Stream], addition: Addition
) -> _Kind:
    """What one more layer adds to the events that both depths have."""
    (base, stream), (grown, other) = shallow, deeper
    runs = find_runs(stream, other, addition)
    twins: list[int] = []
    shift = 0
    for run in [*runs, None]:
        stop = len(stream.tokens) if run is None else run.base_at
        twins.extend(range(len(twins) + shift, stop + shift))
        shift += 0 if run is None else NUM_ADDED * run.period
    pairs = (
        (stream.links, other.links),
        (stream.layers, other.layers),
        (stream.numbers, other.numbers),
    )
    links, layers, numbers = (_find_rates(*pair, twins) for pair in pairs)
    return _Kind(
        runs=runs,
        rates=(links, layers, numbers),
        sizes={
            position: _compare_sizes(base, position, grown, twin)
            for position, twin in enumerate(twins)
            if stream.sizes[position] != other.sizes[twin]
        },
    )


def _find_rates(column: list[int], other: list[int], twins: list[int]) -> list[int]:
    grown = [other[twin] for twin in twins]
    return [_per_layer(after - before) for before, after in zip(column, grown, strict=True)]


def _compare_sizes(base: Recording, position: int, grown: Recording, twin: int) -> tuple[int, ...]:
    """Bytes and dimensions that one more layer adds to an allocation."""
    before = base.allocations[base.events[position] - 1]
    after = grown.allocations[grown.events[twin] - 1]
    changes = [new - old for new, old in zip(after.shape, before.shape, strict=True)]
    if sum(change != 0 for change in changes) > 1:
        raise CannotExtend(f"an allocation of {before.op} grows with depth in two dimensions")
    return tuple(_per_layer(c) for c in (after.num_bytes - before.num_bytes, *changes))


def _per_layer(difference: int) -> int:
    rate, rest = divmod(difference, NUM_ADDED)
    if rest:
        raise CannotExtend("two more layers do not change things twice as much as one")
    return rate


def _merge(kinds: Sequence[_Kind], grown: Sequence[Stream]) -> list[_Stretch]:
    """All kinds' runs in order. Where kinds look alike, they repeat one stretch together."""
    stretches: dict[int, _Stretch] = {}
    for place, (kind, stream) in enumerate(zip(kinds, grown, strict=True)):
        for run in kind.runs:
            found = _Stretch(
                at=run.base_at, period=run.period, steps=_find_steps(run, stream), kinds=[place]
            )
            known = stretches.setdefault(found.at, found)
            if known is found:
                continue
            if (known.period, known.steps) != (found.period, found.steps):
                raise CannotExtend("two kinds of layers meet in one place")
            known.kinds.append(place)
    return [stretches[at] for at in sorted(stretches)]


def _find_steps(run: Run, stream: Stream) -> Columns:
    start, at, end = run.grown_at - run.period, run.grown_at, run.grown_at + run.period
    links, layers, numbers = (
        [after - before for before, after in zip(column[start:at], column[at:end], strict=True)]
        for column in (stream.links, stream.layers, stream.numbers)
    )
    return links, layers, numbers
