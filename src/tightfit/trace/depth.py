"""Depth extrapolation: the recording and operations of a deep model from traces of shallow ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import groupby, pairwise
from operator import attrgetter

from tightfit.trace.operations import UPDATE, Operation, OperationLog, from_totals, list_totals
from tightfit.trace.recording import Allocation, Recording

NO_LAYER = -1
MAX_GUESSES = 500
"""Run lengths to try before two recordings are considered different."""


class CannotExtend(Exception):  # noqa: N818  an outcome, not an error: the caller then traces all layers
    """A deeper model cannot be derived from these recordings."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStream:
    """A recording as columns of integers, one entry per event.

    An event's token is what it has in common with the same event of other layers; the other
    columns change from layer to layer by equal steps.
    """

    tokens: list[int]
    """Equal for similar allocations, whatever their layer; negative for their ends."""
    links: list[int]
    """For an end, the position of the allocation."""
    layers: list[int]
    """The layer of the allocation that begins or ends; `NO_LAYER` outside of layers."""
    numbers: list[int]
    """The first number in the module's name."""

    sizes: list[int]
    """Bytes, for a beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedLayers:
    """The layers that the deeper recording has in addition."""

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
class RepeatedRun:
    """A position at which the deeper recording repeats a run of events once per added layer.

    `[grown_at - period, grown_at)` is the run that both have; its repetitions follow.
    """

    base_at: int
    """Position in the shallow recording before which the repetitions come."""
    grown_at: int
    period: int


@lru_cache(maxsize=65_536)
def split_module(name: str) -> tuple[str, int | None, str]:
    """Split a module's name into the part before its first number, the number, and the rest."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            before, after = parts[:place], parts[place + 1 :]
            head = "".join(f"{word}." for word in before)
            return head, int(part), "".join(f".{word}" for word in after)
    return name, None, ""


class _Naming:
    """The token of each allocation, over several recordings.

    A size that occurs at one depth only depends on the number of layers (the stacked norms of all
    gradients, for example): its token ignores the size.
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


def make_streams(recordings: Sequence[Recording]) -> list[EventStream]:
    """Streams with comparable tokens."""
    naming = _Naming(recordings)
    return [_make_stream(recording, naming) for recording in recordings]


def _make_stream(recording: Recording, naming: _Naming) -> EventStream:
    names = [naming.name(allocation) for allocation in recording.allocations]
    begun = [0] * len(names)
    stream = EventStream(tokens=[], links=[], layers=[], numbers=[], sizes=[])
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
    """The same, with consecutive ends sorted by their beginnings.

    Sets and hash tables free their entries in any order (autocast its casts, ZeRO its gathered
    weights). The allocator merges free neighbours, so the order makes no difference to it.
    """
    events: list[int] = []
    for is_end, group in groupby(recording.events, key=lambda event: event < 0):
        together = list(group)
        events.extend(sorted(together, reverse=True) if is_end else together)
    return Recording(allocations=recording.allocations, events=events)


def find_runs(base: EventStream, grown: EventStream, addition: AddedLayers) -> list[RepeatedRun]:
    """Where `grown` repeats events of `base`.

    Each run is found where the two recordings diverge, which is after the last layer that they
    share, and then moved back to where its repetitions differ by equal steps.
    """
    runs = _Matcher(base.tokens, grown.tokens, addition.num_added).match()
    settled: list[RepeatedRun] = []
    end = 0
    for run in runs:
        settled.append(_Settler(run, base, grown, addition).settle(not_before=end))
        end = settled[-1].grown_at + addition.num_added * run.period
    return settled


class _Matcher:
    """Matches the deeper stream as the shallow one with runs repeated."""

    def __init__(self, base: Sequence[int], grown: Sequence[int], num_added: int) -> None:
        self._base, self._grown, self._num_added = base, grown, num_added
        self._guesses_left = MAX_GUESSES
        self._furthest = 0

    def match(self) -> list[RepeatedRun]:
        if len(self._grown) < len(self._base):
            raise CannotExtend("the deeper model has fewer allocations")
        start = _count_equal(self._base, 0, self._grown, 0)
        # A run is guessed at each divergence; a stack, since there are too many for recursion.
        open_guesses: list[tuple[list[RepeatedRun], int, int]] = [([], start, start)]
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
            f"layers are not equal: event {self._furthest} of {len(self._base)} has no counterpart"
        )

    def _list_guesses(
        self, runs: list[RepeatedRun], at: int, other: int
    ) -> Iterable[tuple[list[RepeatedRun], int, int]]:
        """Possible repetitions here; the last explains most of the rest."""
        found = []
        for period in self._list_periods(at, other):
            resumed = other + period * self._num_added
            equal = _count_equal(self._base, at, self._grown, resumed)
            run = RepeatedRun(base_at=at, grown_at=other, period=period)
            found.append((equal, period, ([*runs, run], at + equal, resumed + equal)))
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


def _count_equal(base: Sequence[int], at: int, grown: Sequence[int], other: int) -> int:
    """Length of the common prefix, by steps that double until one fails, then halve."""
    total = min(len(base) - at, len(grown) - other)
    equal, width, has_failed = 0, 64, False
    while equal < total and width:
        width = min(width, total - equal)
        here, there = at + equal, other + equal
        if base[here : here + width] == grown[there : there + width]:
            equal += width
            width = width if has_failed else 2 * width
        else:
            has_failed = True
            width //= 2
    return equal


class _Settler:
    """Moves a run back to where its repetitions differ by equal steps.

    Equal tokens may belong to different layers: the ends of gradients, for example, have equal
    tokens for layers of two kinds, but their allocations are elsewhere.
    """

    def __init__(
        self, run: RepeatedRun, base: EventStream, grown: EventStream, addition: AddedLayers
    ) -> None:
        self._run, self._base, self._grown, self._addition = run, base, grown, addition

    def settle(self, *, not_before: int) -> RepeatedRun:
        run, tokens = self._run, self._grown.tokens
        start = run.grown_at
        while start > not_before and tokens[start - 1] == tokens[start - 1 + run.period]:
            start -= 1
        shared = range(start, run.grown_at)
        # Events before the run keep their position; those after it move by all repetitions.
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
                return RepeatedRun(base_at=run.base_at - back, grown_at=place, period=run.period)
        raise CannotExtend("identical layers do not follow each other by equal steps")

    @property
    def _length(self) -> int:
        return self._run.period * self._addition.num_added

    def _may_move(self, position: int, *, by: int) -> bool:
        """Whether an event may correspond to the deeper model's event `by` positions later."""
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


# The recording of a deep model from recordings of shallow ones


BASE_LAYERS = 3
"""Layers of one kind in the shallow model: a first, one like all in between, a last."""
NUM_ADDED = 2
"""Layers more in the deeper model: the second must follow from the first, which is the check."""

Columns = tuple[list[int], list[int], list[int]]
"""Columns of all events: link, layer, number in the module's name."""


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
    def additions(self) -> list[AddedLayers]:
        """Which layers each of `grown` has more of."""
        found = []
        for counts in self.grown:
            kind = next(k for k, count in enumerate(counts) if count != self.base[k])
            start = sum(self.base[:kind])
            layers = range(start, start + self.base[kind])
            found.append(AddedLayers(num_added=counts[kind] - self.base[kind], kind=layers))
        return found


def plan_depths(num_layers: Sequence[int]) -> DepthPlan:
    """The plan for `num_layers` of each kind; kinds with fewer than `BASE_LAYERS` are traced whole.

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
class _LayerGrowth:
    """Change of the shallow model's events per added layer of a kind."""

    runs: list[RepeatedRun]
    rates: Columns
    """Added to each event's columns."""
    sizes: dict[int, tuple[int, ...]]
    """Bytes and dimensions added, by position, where a size depends on the number of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RepeatedStretch:
    """Events that a deeper model repeats: the last `period` before `at` in the shallow model."""

    at: int
    period: int
    steps: Columns
    """Added to the columns of each repetition."""
    kinds: list[int]
    """Kinds of layers that add a repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """A deep model's events: the corresponding event of the shallow model, and the columns."""

    likes: list[int]
    columns: Columns


class DepthExtrapolation:
    """Extends a recording to more layers, learnt from recordings at several depths.

    A job does the same in every layer but the first and the last: its events are runs that occur
    once per layer, between others that occur once. From one repetition of a run to the next,
    layer numbers and the positions of freed allocations change by equal steps.
    """

    def __init__(self, plan: DepthPlan, base: Recording, grown: Sequence[Recording]) -> None:
        """`base` and `grown` have the depths of `plan`."""
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

        Raises `CannotExtend` where an event would free an allocation that does not exist.
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
        """Bytes and dimensions of allocations whose size depends on the number of layers."""
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
    shallow: tuple[Recording, EventStream],
    deeper: tuple[Recording, EventStream],
    addition: AddedLayers,
) -> _LayerGrowth:
    """Change per added layer of the events that both depths have."""
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
    return _LayerGrowth(
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


def _merge(kinds: Sequence[_LayerGrowth], grown: Sequence[EventStream]) -> list[_RepeatedStretch]:
    """Runs of all kinds in order. Kinds with identical events share one run."""
    stretches: dict[int, _RepeatedStretch] = {}
    for place, (kind, stream) in enumerate(zip(kinds, grown, strict=True)):
        for run in kind.runs:
            found = _RepeatedStretch(
                at=run.base_at, period=run.period, steps=_find_steps(run, stream), kinds=[place]
            )
            known = stretches.setdefault(found.at, found)
            if known is found:
                continue
            if (known.period, known.steps) != (found.period, found.steps):
                raise CannotExtend("two kinds of layers meet in one place")
            known.kinds.append(place)
    return [stretches[at] for at in sorted(stretches)]


def _find_steps(run: RepeatedRun, stream: EventStream) -> Columns:
    start, at, end = run.grown_at - run.period, run.grown_at, run.grown_at + run.period
    links, layers, numbers = (
        [after - before for before, after in zip(column[start:at], column[at:end], strict=True)]
        for column in (stream.links, stream.layers, stream.numbers)
    )
    return links, layers, numbers


# The operations of a deep model from those of shallow ones


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Layers of one kind in two traced depths, and how many the job has."""

    interior: int
    """A layer of the shallow model between the first and the last of its kind."""
    num_added: int
    """Additional layers of the deeper model."""
    num_more: int
    """Additional layers of the job."""


def list_layer_kinds(plan: DepthPlan) -> list[LayerKind]:
    """One for each deeper model of the plan."""
    found = []
    for deeper, num_more in zip(plan.grown, plan.num_more, strict=True):
        place = next(k for k, count in enumerate(deeper) if count != plan.base[k])
        interior = sum(plan.base[:place]) + 1
        found.append(LayerKind(interior=interior, num_added=NUM_ADDED, num_more=num_more))
    return found


def extend_operation_log(
    base: OperationLog, grown: Sequence[OperationLog], kinds: Sequence[LayerKind]
) -> OperationLog:
    """The log at full depth: each kind's interior layer is repeated for the job's other layers.

    The deeper logs must follow from the shallow one, else `CannotExtend`.
    """
    for place, deeper in enumerate(grown):
        like = [kind.num_added * (place == number) for number, kind in enumerate(kinds)]
        if list(_calls(_repeat_layers(base, kinds, like))) != list(_calls(deeper)):
            if len(grown) == 1:
                return _extend_deeper(base, deeper, kinds[0])
            raise CannotExtend(_UNLIKE)
    extended = _repeat_layers(base, kinds, [kind.num_more for kind in kinds])
    return _grow_update(extended, base, grown, [kind.num_more / kind.num_added for kind in kinds])


_UNLIKE = "the deeper of two traced models computes something else"


def _extend_deeper(base: OperationLog, deeper: OperationLog, kind: LayerKind) -> OperationLog:
    """For jobs whose last layers differ from the others: FSDP prefetches the next layer.

    Then the layer before them is repeated; it must account for the deeper model's additions.
    """
    inside = kind.interior + 1
    rows = [one.operations for one in deeper.stretches if one.layer == inside]
    once = Counter(deeper.operations[place] for row in rows for place in row)
    added = Counter(_calls(deeper))
    added.subtract(_calls(base))
    times = {one: kind.num_added * count for one, count in once.items()}
    if {one: count for one, count in added.items() if count} != times:
        raise CannotExtend(_UNLIKE)
    more = kind.num_more - kind.num_added
    further = replace(kind, interior=inside)
    extended = _repeat_layers(deeper, [further], [more])
    return _grow_update(extended, base, [deeper], [more / kind.num_added])


def _repeat_layers(
    log: OperationLog, kinds: Sequence[LayerKind], num_more: Sequence[int]
) -> OperationLog:
    more = {kind.interior: number for kind, number in zip(kinds, num_more, strict=True)}
    return OperationLog(
        operations=log.operations,
        stretches=tuple(
            one
            if one.layer not in more
            else one.model_copy(update={"count": one.count + more[one.layer]})
            for one in log.stretches
        ),
    )


def _calls(log: OperationLog) -> Iterator[Operation]:
    return (one for one in log.walk() if one.stage != UPDATE)


def _grow_update(
    extended: OperationLog,
    base: OperationLog,
    grown: Sequence[OperationLog],
    shares: Sequence[float],
) -> OperationLog:
    """The sums of an update are linear in the number of layers."""
    before = _list_update(base)
    deeper = [_list_update(log) for log in grown]
    if any(log.keys() != before.keys() for log in deeper):
        raise CannotExtend("the update of a deeper model is another one")
    table = list(extended.operations)
    for place, one in enumerate(table):
        if one.stage == UPDATE:
            totals = list_totals(one)
            key = (one.name, one.kind, one.dtype)
            least = list_totals(before[key])
            for log, share in zip(deeper, shares, strict=True):
                totals = [
                    total + share * (there - here)
                    for total, there, here in zip(totals, list_totals(log[key]), least, strict=True)
                ]
            table[place] = from_totals(one, totals)
    return extended.model_copy(update={"operations": tuple(table)})


def _list_update(log: OperationLog) -> dict[tuple[str, str, str], Operation]:
    return {(one.name, one.kind, one.dtype): one for one in log.operations if one.stage == UPDATE}


# Selective activation checkpointing

_NUM_SECANTS = 2
"""Linear guesses before bisecting: memory is nearly linear in the number of recomputed layers."""


def find_fewest_recomputed(
    needed_bytes: Callable[[int], int], *, num_layers: int, room_bytes: int
) -> int | None:
    """The fewest layers, counted from the first, whose recomputation makes a job fit.

    `needed_bytes(n)` is the job's memory with `n` recomputed layers. It may rise where the peak
    is elsewhere, so the result is a number that fits while one fewer does not, and not always the
    smallest. None where the job does not fit even with all layers recomputed.
    """
    too_few, needed_at_most = 0, needed_bytes(0)
    if needed_at_most <= room_bytes:
        return 0
    # `num_layers - BASE_LAYERS` shares its traces with the numbers below; all layers need others.
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
