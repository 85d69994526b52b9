"""Depth extrapolation: recording and operations of a deep model from traces of shallow ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from tightfit.trace.recording import Allocation, Recording
from tightfit.trace.result import UPDATE, Operation, OperationLog, from_totals, list_totals

BASE_LAYERS = 3
"""Layers of one kind in the shallow model: a first, one like all in between, a last."""
NUM_ADDED = 2
"""Layers more in the deeper model: the second must follow from the first, which is the check."""
NO_LAYER = -1
MAX_GUESSES = 500
"""Run lengths to try before two recordings are considered different."""


class CannotExtend(Exception):  # noqa: N818  an outcome, not an error: the caller then traces all layers
    """A deeper model cannot be derived from these recordings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthPlan:
    """Which depths to trace for a model whose layers are of one kind or of several in a row."""

    base: tuple[int, ...]
    """Layers of each kind in the shallow model."""
    grown: tuple[tuple[int, ...], ...]
    """The deeper models, each with `NUM_ADDED` more layers of one kind."""
    num_more: tuple[int, ...]
    """Layers that the wanted model has beyond `base`, one number for each of `grown`."""

    @property
    def kinds(self) -> list[range]:
        """The shallow model's layers of the kind that each of `grown` has more of."""
        found = []
        for counts in self.grown:
            kind = next(k for k, count in enumerate(counts) if count != self.base[k])
            start = sum(self.base[:kind])
            found.append(range(start, start + self.base[kind]))
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


# A recording as a stream of integers

Columns = tuple[list[int], list[int], list[int]]
"""Of each event: the position of the allocation that it frees; its layer, `NO_LAYER` outside of
layers; the first number in its module's name. From layer to layer they change by equal steps."""


class EventStream(NamedTuple):
    """A recording as columns of integers, one entry per event."""

    tokens: list[int]
    """Equal for similar allocations, whatever their layer; negative for their ends."""
    columns: Columns
    sizes: list[int]
    """Bytes, for a beginning."""

    @property
    def layers(self) -> list[int]:
        return self.columns[1]


@lru_cache(maxsize=65_536)
def split_module(name: str) -> tuple[str, int | None, str]:
    """Split a module's name into the part before its first number, the number, and the rest."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            head = "".join(f"{word}." for word in parts[:place])
            return head, int(part), "".join(f".{word}" for word in parts[place + 1 :])
    return name, None, ""


_LAYERED = ("module", "layer", "shape", "num_bytes")
_ALIKE = attrgetter(*(one.name for one in fields(Allocation) if one.name not in _LAYERED))


def _key(allocation: Allocation) -> tuple[object, ...]:
    head, _, tail = split_module(allocation.module)
    is_outside, size = allocation.layer is None, (allocation.shape, allocation.num_bytes)
    return (head, tail, is_outside, *_ALIKE(allocation), *size)


def make_streams(recordings: Sequence[Recording]) -> list[EventStream]:
    """Streams with comparable tokens.

    A size that occurs at one depth only depends on the number of layers (the stacked norms of all
    gradients, for example): its token ignores the size.
    """
    everywhere = set.intersection(*(set(map(_key, one.allocations)) for one in recordings))
    ids: dict[object, int] = {}

    def token(allocation: Allocation) -> int:
        key = _key(allocation)
        if key not in everywhere:
            key = (*key[:-2], len(allocation.shape))
        return ids.setdefault(key, len(ids) + 1)

    return [_make_stream(one, list(map(token, one.allocations))) for one in recordings]


def _make_stream(recording: Recording, names: list[int]) -> EventStream:
    begun = [0] * len(names)
    stream = EventStream(tokens=[], columns=([], [], []), sizes=[])
    links, layers, numbers = stream.columns
    for position, event in enumerate(recording.events):
        index = abs(event) - 1
        if event > 0:
            allocation = recording.allocations[index]
            begun[index] = position
            layers.append(NO_LAYER if allocation.layer is None else allocation.layer)
            numbers.append(split_module(allocation.module)[1] or 0)
            stream.sizes.append(allocation.num_bytes)
        else:
            layers.append(layers[begun[index]])
            numbers.append(0)
            stream.sizes.append(0)
        stream.tokens.append(names[index] if event > 0 else -names[index])
        links.append(0 if event > 0 else begun[index])
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


# Runs that the deeper recording repeats


class RepeatedRun(NamedTuple):
    """A position at which the deeper recording repeats a run of events once per added layer.

    `[grown_at - period, grown_at)` is the run that both have; its repetitions follow.
    """

    base_at: int
    """Position in the shallow recording before which the repetitions come."""
    grown_at: int
    period: int


def find_runs(base: EventStream, grown: EventStream, kind: range) -> list[RepeatedRun]:
    """Where `grown` repeats events of `base`; it has more layers of `kind`.

    Each run is found where the two recordings diverge, which is after the last layer that they
    share, and then moved back to where its repetitions differ by equal steps.
    """
    settled: list[RepeatedRun] = []
    end = 0
    for run in _match(base.tokens, grown.tokens):
        settled.append(_settle(run, base, grown, kind, not_before=end))
        end = settled[-1].grown_at + NUM_ADDED * run.period
    return settled


def _match(base: Sequence[int], grown: Sequence[int]) -> list[RepeatedRun]:
    """The deeper tokens as the shallow ones with runs repeated."""
    if len(grown) < len(base):
        raise CannotExtend("the deeper model has fewer allocations")
    start = _count_equal(base, 0, grown, 0)
    furthest = 0
    # A run is guessed at each divergence; a stack, since there are too many for recursion.
    open_guesses: list[tuple[list[RepeatedRun], int, int]] = [([], start, start)]
    for _ in range(MAX_GUESSES + 1):
        if not open_guesses:
            break
        runs, at, other = open_guesses.pop()
        furthest = max(furthest, at)
        if at == len(base) and other == len(grown):
            return runs
        found = []
        for period in _list_periods(base, at, grown, other):
            resumed = other + period * NUM_ADDED
            equal = _count_equal(base, at, grown, resumed)
            run = RepeatedRun(base_at=at, grown_at=other, period=period)
            found.append((equal, period, ([*runs, run], at + equal, resumed + equal)))
        # The last one explains most of the rest.
        open_guesses.extend(guess for *_, guess in sorted(found, key=lambda one: one[:2]))
    raise CannotExtend(f"layers are not equal: event {furthest} of {len(base)} has no counterpart")


def _list_periods(base: Sequence[int], at: int, grown: Sequence[int], other: int) -> Iterator[int]:
    """Lengths of runs that may be repeated here."""
    missing = len(grown) - other - (len(base) - at)
    if missing < NUM_ADDED:
        return
    for period in range(1, min(missing // NUM_ADDED, other) + 1):
        start, length = other - period, period * NUM_ADDED
        is_candidate = grown[start] == grown[other]
        if is_candidate and grown[start : start + length] == grown[other : other + length]:
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


def _settle(
    run: RepeatedRun, base: EventStream, grown: EventStream, kind: range, *, not_before: int
) -> RepeatedRun:
    """The run moved back to where its repetitions differ by equal steps.

    Equal tokens may belong to different layers: the ends of gradients, for example, have equal
    tokens for layers of two kinds, but their allocations are elsewhere.
    """
    period, length = run.period, run.period * NUM_ADDED

    def is_misplaced(position: int, *, by: int) -> bool:
        """Whether an event cannot be the deeper model's event `by` positions later."""
        layer = base.layers[position - run.grown_at + run.base_at]
        other = grown.layers[position + by]
        if layer == NO_LAYER or layer < kind.start:
            return other != layer
        if layer >= kind.stop:
            return other != layer + NUM_ADDED
        return other not in (layer, layer + NUM_ADDED)

    def is_even(position: int) -> bool:
        """Whether the columns of all repetitions have one step between them, and sizes none."""
        repeated = slice(position, position + length + 1, period)
        steps = [
            {after - before for before, after in pairwise(column[repeated])}
            for column in grown.columns
        ]
        return len(set(grown.sizes[repeated])) == 1 and all(len(step) == 1 for step in steps)

    tokens, start = grown.tokens, run.grown_at
    while start > not_before and tokens[start - 1] == tokens[start - 1 + period]:
        start -= 1
    shared = range(start, run.grown_at)
    # Events before the run keep their position; those after it move by all repetitions.
    num_misplaced = sum(is_misplaced(position, by=0) for position in shared)
    num_even = 0
    for position in reversed(shared):
        num_even = num_even + 1 if is_even(position) else 0
        place = position + period
        if place < run.grown_at:
            num_misplaced -= is_misplaced(place, by=0)
            num_misplaced += is_misplaced(place, by=length)
        if num_even >= period and not num_misplaced:
            return RepeatedRun(run.base_at - (run.grown_at - place), place, period)
    raise CannotExtend("identical layers do not follow each other by equal steps")


# The recording of a deep model from recordings of shallow ones


class _LayerGrowth(NamedTuple):
    """Change of the shallow model's events per added layer of a kind."""

    runs: list[RepeatedRun]
    rates: list[list[int]]
    """Added to each event's columns."""
    sizes: dict[int, list[int]]
    """Bytes and dimensions added, by position, where a size depends on the number of layers."""


class _RepeatedStretch(NamedTuple):
    """Events that a deeper model repeats: the last `period` before `at` in the shallow model."""

    at: int
    period: int
    steps: list[list[int]]
    """Added to the columns of each repetition."""
    kinds: list[int]
    """Kinds of layers that add a repetition."""


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
            _compare((self._base, self._stream), (recording, stream), kind)
            for recording, stream, kind in zip(grown, others, plan.kinds, strict=True)
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
        likes, (links, layers, numbers) = self._lay_out(num_more)
        sizes = self._grow_sizes(num_more)
        tokens = self._stream.tokens
        made = Recording()
        live: dict[int, int] = {}
        for position, like in enumerate(likes):
            if tokens[like] > 0:
                made.allocations.append(
                    self._make(like, layers[position], numbers[position], sizes.get(like))
                )
                live[position] = len(made.allocations)
                made.events.append(len(made.allocations))
                continue
            begun = links[position]
            index = live.pop(begun, 0)
            if not index or tokens[likes[begun]] != -tokens[like]:
                raise CannotExtend(f"event {position} would free what is not there")
            made.events.append(-index)
        return made

    def _lay_out(self, num_more: Sequence[int]) -> tuple[list[int], Columns]:
        """The deep model's events: which event of the shallow model each is like, and its
        columns."""
        shared = list(self._stream.columns)
        for kind, times in zip(self._kinds, num_more, strict=True):
            if times:
                shared = [
                    [value + times * rate for value, rate in zip(column, rates, strict=True)]
                    for column, rates in zip(shared, kind.rates, strict=True)
                ]
        likes: list[int] = []
        columns: Columns = ([], [], [])
        done = 0
        for stretch in self._stretches:
            start, at = stretch.at - stretch.period, stretch.at
            likes.extend(range(done, at))
            for target, source in zip(columns, shared, strict=True):
                target.extend(source[done:at])
            done = at
            for again in range(1, sum(num_more[kind] for kind in stretch.kinds) + 1):
                likes.extend(range(start, at))
                for target, source, steps in zip(columns, shared, stretch.steps, strict=True):
                    values = zip(source[start:at], steps, strict=True)
                    target.extend([value + again * step for value, step in values])
        likes.extend(range(done, len(self._stream.tokens)))
        for target, source in zip(columns, shared, strict=True):
            target.extend(source[done:])
        return likes, columns

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

    def _make(self, like: int, layer: int, number: int, sizes: list[int] | None) -> Allocation:
        index = self._base.events[like] - 1
        model = self._base.allocations[index]
        head, numbered, tail = self._names[index]
        if model.layer is None and numbered is None and sizes is None:
            return model
        return replace(
            model,
            num_bytes=model.num_bytes if sizes is None else sizes[0],
            module=model.module if numbered is None else f"{head}{number}{tail}",
            layer=None if model.layer is None else layer,
            shape=model.shape if sizes is None else tuple(sizes[1:]),
        )


def _compare(
    shallow: tuple[Recording, EventStream], deeper: tuple[Recording, EventStream], kind: range
) -> _LayerGrowth:
    """Change per added layer of the events that both depths have."""
    (base, stream), (grown, other) = shallow, deeper
    runs = find_runs(stream, other, kind)
    twins: list[int] = []
    shift = 0
    for run in runs:
        twins.extend(range(len(twins) + shift, run.base_at + shift))
        shift += NUM_ADDED * run.period
    twins.extend(range(len(twins) + shift, len(stream.tokens) + shift))

    def grow(position: int, twin: int) -> list[int]:
        """Bytes and dimensions that one more layer adds to an allocation."""
        before = base.allocations[base.events[position] - 1]
        after = grown.allocations[grown.events[twin] - 1]
        changes = [new - old for new, old in zip(after.shape, before.shape, strict=True)]
        if sum(change != 0 for change in changes) > 1:
            raise CannotExtend(f"an allocation of {before.op} grows with depth in two dimensions")
        return [_per_layer(c) for c in (after.num_bytes - before.num_bytes, *changes)]

    return _LayerGrowth(
        runs=runs,
        rates=[
            [_per_layer(there[twin] - here[place]) for place, twin in enumerate(twins)]
            for here, there in zip(stream.columns, other.columns, strict=True)
        ],
        sizes={
            position: grow(position, twin)
            for position, twin in enumerate(twins)
            if stream.sizes[position] != other.sizes[twin]
        },
    )


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
            start, at, end = run.grown_at - run.period, run.grown_at, run.grown_at + run.period
            steps = [
                [after - before for before, after in zip(c[start:at], c[at:end], strict=True)]
                for c in stream.columns
            ]
            known = stretches.setdefault(
                run.base_at, _RepeatedStretch(run.base_at, run.period, steps, [])
            )
            if (known.period, known.steps) != (run.period, steps):
                raise CannotExtend("two kinds of layers meet in one place")
            known.kinds.append(place)
    return [stretches[at] for at in sorted(stretches)]


# The operations of a deep model from those of shallow ones

_UNLIKE = "the deeper of two traced models computes something else"


def extend_operation_log(
    base: OperationLog, grown: Sequence[OperationLog], plan: DepthPlan
) -> OperationLog:
    """The log at full depth: each kind's interior layer is repeated for the job's other layers.

    The deeper logs must follow from the shallow one, else `CannotExtend`.
    """
    # The second layer of a kind is between its first and its last.
    interiors = [kind.start + 1 for kind in plan.kinds]
    for interior, deeper in zip(interiors, grown, strict=True):
        if list(_calls(_repeat_layers(base, {interior: NUM_ADDED}))) != list(_calls(deeper)):
            if len(grown) == 1:
                return _extend_deeper(base, deeper, interior + 1, plan.num_more[0])
            raise CannotExtend(_UNLIKE)
    extended = _repeat_layers(base, dict(zip(interiors, plan.num_more, strict=True)))
    return _grow_update(extended, base, grown, [count / NUM_ADDED for count in plan.num_more])


def _extend_deeper(
    base: OperationLog, deeper: OperationLog, inside: int, num_more: int
) -> OperationLog:
    """For jobs whose last layers differ from the others: FSDP prefetches the next layer.

    Then layer `inside`, before them, is repeated; it must account for the deeper model's
    additions.
    """
    rows = [one.operations for one in deeper.stretches if one.layer == inside]
    once = Counter(deeper.operations[place] for row in rows for place in row)
    added = Counter(_calls(deeper))
    added.subtract(_calls(base))
    times = {one: NUM_ADDED * count for one, count in once.items()}
    if {one: count for one, count in added.items() if count} != times:
        raise CannotExtend(_UNLIKE)
    more = num_more - NUM_ADDED
    extended = _repeat_layers(deeper, {inside: more})
    return _grow_update(extended, base, [deeper], [more / NUM_ADDED])


def _repeat_layers(log: OperationLog, more: dict[int, int]) -> OperationLog:
    """Some layers repeated so many times more."""
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
    before, *deeper = (
        {(one.name, one.kind, one.dtype): one for one in log.operations if one.stage == UPDATE}
        for log in (base, *grown)
    )
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


# A config.json at another depth, and models whose depth must not be extrapolated

DEPTH_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names of the depth field by family; a config may have several of them."""
_INNER_PARTS = ("text_config", "language_config", "llm_config")
"""Where multimodal configs keep the language model's settings."""
_ENCODER_FIELDS = ("encoder_layers", "decoder_layers", "num_decoder_layers")
_FIRST_LAYERS = (
    "first_k_dense_replace",
    "num_dense_layers",
    "moe_layer_start_index",
    "num_kv_shared_layers",
    "num_first_full_attention_layers",
    "num_last_full_attention_layers",
)
"""The first or last layers differ from the others."""
_EVERY_NTH = (
    "decoder_sparse_step",
    "moe_layer_freq",
    "moe_layer_interval",
    "interleave_moe_layer_step",
    "expert_layer_period",
    "attn_layer_period",
    "full_attention_interval",
    "sliding_window_pattern",
    "global_attn_every_n_layers",
    "no_rope_layer_interval",
    "cross_layer_interval",
    "cross_attention_frequency",
    "layer_group_size",
)
"""Every n-th layer differs from the others; 1 and 0 mean none or all."""
_WHERE_SET = ("attention_chunk_size", "attention_types", "layerdrop", "decoder_layerdrop")
"""Layers differ, or are dropped at random, where such a field is set."""
_LISTED = ("layer", "block", "pattern", "idxs", "indices", "indexes")
"""Words in the names of lists about layers."""
_UNRELATED_LISTS = ("architectures", "token_id", "token_ids")


def read_depth(config: dict[str, Any]) -> int | None:
    """The number of decoder layers; None where the config does not say."""
    text = _text_part(config)
    depths = [text[name] for name in DEPTH_FIELDS if name in text]
    return depths[0] if depths and isinstance(depths[0], int) else None


def with_depth(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The config with `num_layers` layers; lists with an entry per layer are cut."""
    depth = read_depth(config)
    text = dict(_text_part(config))
    for name, value in _text_part(config).items():
        if name in DEPTH_FIELDS:
            text[name] = num_layers
        elif isinstance(value, list) and len(value) == depth and not _is_unrelated(name):
            text[name] = [*value, *value[-1:] * num_layers][:num_layers]
    name_of_part = _inner_name(config)
    return text if name_of_part is None else {**config, name_of_part: text}


def fill_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The config as its class completes it: `layer_types` of hybrid families are often left out.

    Families that transformers does not know are returned as they are.
    """
    from transformers import AutoConfig

    try:
        filled: dict[str, Any] = AutoConfig.for_model(**config).to_dict()
    except (TypeError, ValueError):
        return config
    return filled


def find_extrapolation_obstacle(config: dict[str, Any]) -> str:
    """Why depth cannot be extrapolated; empty where it can. `config` has its defaults filled in."""
    return next(_list_obstacles(config), "")


def _list_obstacles(config: dict[str, Any]) -> Iterator[str]:
    text = _text_part(config)
    depth = read_depth(config)
    if config.get("is_encoder_decoder") or any(text.get(name) for name in _ENCODER_FIELDS):
        yield "an encoder and a decoder have different layers"
    if depth is None:
        yield "config.json does not say how many layers there are"
        return
    if depth <= BASE_LAYERS + NUM_ADDED:
        yield f"with {depth} layers there is nothing to leave out"
    yield from _list_differing_layers(text, depth)


def _list_differing_layers(text: dict[str, Any], depth: int) -> Iterator[str]:
    """Fields that make layers differ."""
    for name, value in text.items():
        is_telling_list = isinstance(value, list) and _tells_layers_apart(name, value, depth)
        if is_telling_list or (name in _WHERE_SET and value):
            yield f"its layers differ ({name})"
        elif name in _FIRST_LAYERS and value:
            yield f"its first or last layers differ ({name})"
        elif name in _EVERY_NTH and not isinstance(value, list) and value not in (None, 0, 1):
            yield f"its layers take turns ({name})"
    first_windowed = text.get("max_window_layers")
    if text.get("use_sliding_window") and first_windowed is not None and 0 < first_windowed < depth:
        yield "its first layers attend without a window (max_window_layers)"


def _tells_layers_apart(name: str, values: list[Any], depth: int) -> bool:
    """A list with an entry per layer that differ, or one with the numbers of some layers."""
    if _is_unrelated(name) or not values:
        return False
    if len(values) == depth:
        return any(value != values[0] for value in values)
    return any(word in name for word in _LISTED)


def _is_unrelated(name: str) -> bool:
    return name.endswith(_UNRELATED_LISTS)


def _inner_name(config: dict[str, Any]) -> str | None:
    """The nested config of the language model, if there is one."""
    if any(name in config for name in DEPTH_FIELDS):
        return None
    return next((name for name in _INNER_PARTS if isinstance(config.get(name), dict)), None)


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    name = _inner_name(config)
    part: dict[str, Any] = config if name is None else config[name]
    return part
