"""Recording: every allocation of a traced job and its end, in order; its peak, its timeline and the
peak of each stage. Imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from tightfit.core.profiles import Peak, PeakTensor
from tightfit.trace.caching_allocator import CachingAllocator, find_peak, round_block
from tightfit.trace.result import OperationLog, Timeline, TracedStage

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
ACTIVATIONS = "activations"
LOGITS = "logits"
COMMUNICATION = "communication"
KV_CACHE = "kv cache"
INPUTS = "inputs"
LOAD_RESERVE = "load reserve"
"""transformers allocates the size of all weights once and frees it, to reserve the blocks."""
TEMPORARY = "temporary"
CATEGORIES = (
    WEIGHTS,
    GRADIENTS,
    OPTIMIZER,
    ACTIVATIONS,
    LOGITS,
    COMMUNICATION,
    KV_CACHE,
    INPUTS,
    LOAD_RESERVE,
    TEMPORARY,
)
"""Categories of allocations, in the order in which charts stack them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One allocation of device memory."""

    num_bytes: int
    """As requested; the allocator rounds up."""
    op: str
    """`aten.mm`, `bitsandbytes.dequantize_4bit`; empty for tensors that existed before."""
    module: str
    """`model.layers.3.mlp.down_proj`; empty where no module was running."""
    stage: str
    """`load`, `forward`, `backward`, `update`, `eval`, `generate`, `save` or `resume`."""
    step: int
    """The training step it was made in, from 1; 0 outside of steps."""
    layer: int | None
    """The decoder layer it belongs to."""
    shape: tuple[int, ...]
    dtype: str
    category: str
    stream: int = 0
    """CUDA stream; free blocks of one stream are not used by others. 0 is the compute stream."""


@dataclass(slots=True, kw_only=True)
class Recording:
    """Allocations, and the order of their beginnings and ends.

    An event `i + 1` makes `allocations[i]`, an event `-(i + 1)` ends it. What is never
    ended stays to the end of the job.
    """

    allocations: list[Allocation] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    operations: OperationLog | None = field(default=None, compare=False)
    """Operations of the last step. None where an operation was not understood."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each allocation, as the allocator model takes them."""
        return [allocation.num_bytes for allocation in self.allocations]

    @property
    def streams(self) -> list[int]:
        """The device stream of each allocation."""
        return [allocation.stream for allocation in self.allocations]

    def walk(self) -> Iterator[tuple[Allocation, bool]]:
        """Each event as its allocation, and whether it begins."""
        for event in self.events:
            yield self.allocations[abs(event) - 1], event > 0


def repeat_events(
    events: Sequence[int], *, first: int, may_stay: Collection[int] = ()
) -> list[int] | None:
    """The same events once more, for allocations numbered from `first`.

    None where an allocation other than `may_stay` was not freed, or an older one was: a
    repetition would then start from another state.
    """
    numbers: dict[int, int] = {}
    live: set[int] = set()
    again = []
    for event in events:
        if event > 0:
            numbers[event] = first + len(numbers)
            live.add(event)
        elif -event not in numbers:
            return None
        live.discard(-event)
        again.append(numbers[event] if event > 0 else -numbers[-event])
    return again if live.issubset(may_stay) else None


# Summaries

MOST_TENSORS = 12
"""Groups of similar tensors that a peak lists."""
MOST_POINTS = 1200
MOST_MOMENTS = 40
"""Stage marks in a timeline; with more (many micro-batches), a step is one mark."""
LAST_STEP = 2
"""Later steps are identical."""
LOAD_SHARE = 8
"""Memory only grows while loading, so it gets at most one column per this many others."""

OTHER_PROCESSES = ("generate", "resume")
"""Stages that run in processes of their own after training, with an empty cache."""

_STEP_STAGES = ("forward", "backward", "update")
_STAGE_ORDER = ("load", "first step", "steady step", "eval", "save", "generate", "resume")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def name_stage(allocation: Allocation) -> str:
    """`load`, `first step`, `steady step`, `eval` and so on: a `TracedStage`'s name."""
    if allocation.stage not in _STEP_STAGES:
        return allocation.stage
    return "first step" if allocation.step < LAST_STEP else "steady step"


def name_moment(allocation: Allocation) -> str:
    """`load`, `first step, backward`: the stage, and which part of a step."""
    stage = name_stage(allocation)
    return stage if stage == allocation.stage else f"{stage}, {allocation.stage}"


def name_op(op: str) -> str:
    """`aten.mm` for `aten.mm.default`: the name without the overload."""
    return ".".join(op.split(".")[:2])


def describe_peak(recording: Recording) -> Peak:
    """The moment of most live bytes, in blocks of 512, with the tensors alive then."""
    sizes = [round_block(size) for size in recording.sizes]
    if not recording.events:
        return Peak(stage="", op="", module="", components={}, tensors=())
    _, at = find_peak(sizes, recording.events)
    live: dict[int, None] = {}
    for event in recording.events[: at + 1]:
        if event > 0:
            live[event - 1] = None
        else:
            live.pop(-event - 1, None)
    last = recording.allocations[abs(recording.events[at]) - 1]
    sums: Counter[str] = Counter()
    for index in live:
        sums[recording.allocations[index].category] += sizes[index]
    return Peak(
        stage=name_moment(last),
        op=name_op(last.op),
        module=last.module,
        components={name: sums[name] for name in _order(sums) if sums[name]},
        tensors=_group([(recording.allocations[index], sizes[index]) for index in live]),
    )


def list_stage_peaks(recording: Recording, allocator: CachingAllocator) -> tuple[TracedStage, ...]:
    """The most that was allocated and reserved in each stage, in the order of a job.

    `allocator` is a fresh model of torch's, without a limit. What earlier stages left live
    or reserved counts, as on the GPU, until another process begins.
    """
    allocated: dict[str, int] = {}
    reserved: dict[str, int] = {}
    live, stage = 0, ""
    for event in recording.events:
        index = abs(event) - 1
        size = recording.allocations[index].num_bytes
        if event < 0:
            live -= round_block(size)
            allocator.free(index)
            continue
        before, stage = stage, name_stage(recording.allocations[index])
        if stage != before and stage in OTHER_PROCESSES:
            allocator.release_cached()
        live += round_block(size)
        allocator.allocate(index, size, stream=recording.allocations[index].stream)
        allocated[stage] = max(allocated.get(stage, 0), live)
        reserved[stage] = max(reserved.get(stage, 0), allocator.reserved_bytes)
    known = [name for name in _STAGE_ORDER if name in allocated]
    return tuple(
        TracedStage(
            name=name, peak_allocated_bytes=allocated[name], peak_reserved_bytes=reserved[name]
        )
        for name in (*known, *(name for name in allocated if name not in known))
    )


def build_timeline(recording: Recording, *, max_points: int = MOST_POINTS) -> Timeline:
    """Allocated bytes by category, in blocks of 512, as at most `max_points` columns.

    Columns follow the order of events, not time. A column covers several events and shows
    the fullest of them, so no peak is lost. Steps after the second are left out.
    """
    sizes = [round_block(size) for size in recording.sizes]
    moments = list(_list_moments(recording))
    places = [place for place, moment in enumerate(moments) if moment]
    if sum(1 for _ in groupby(moments[place] for place in places)) > MOST_MOMENTS:
        moments = [moment.partition(",")[0] for moment in moments]
    totals = list(accumulate(sizes[e - 1] if e > 0 else -sizes[-e - 1] for e in recording.events))
    kept: list[int] = []
    stages: list[tuple[int, str]] = []
    for moment, column in _downsample(places, moments, totals, max_points=max_points):
        if not stages or stages[-1][1] != moment:
            stages.append((len(kept), moment))
        kept.append(column)
    categories = _order(Counter(allocation.category for allocation in recording.allocations))
    rows = _fill(recording, sizes, kept, categories)
    shown = [place for place, row in enumerate(rows) if any(row)]
    return Timeline(
        categories=tuple(categories[place] for place in shown),
        bytes=tuple(tuple(rows[place]) for place in shown),
        stages=tuple(stages),
    )


def _group(live: Sequence[tuple[Allocation, int]]) -> tuple[PeakTensor, ...]:
    """The largest groups of similar tensors, whatever their layer."""
    sums: Counter[tuple[str, str, tuple[int, ...], str, str]] = Counter()
    counts = sums.copy()
    for allocation, size in live:
        module = _NUMBER.sub("*", allocation.module)
        key = (
            name_op(allocation.op),
            module,
            allocation.shape,
            allocation.dtype,
            allocation.category,
        )
        sums[key] += size
        counts[key] += 1
    largest = [(key, size) for key, size in sums.most_common(MOST_TENSORS) if size]
    return tuple(
        PeakTensor(
            num_bytes=size,
            count=counts[key],
            category=key[4],
            op=key[0],
            module=key[1],
            shape=key[2],
            dtype=key[3],
        )
        for key, size in largest
    )


def _order(found: Counter[str]) -> list[str]:
    """Known categories as charts stack them, then the others."""
    return [*(c for c in CATEGORIES if c in found), *(c for c in found if c not in CATEGORIES)]


def _list_moments(recording: Recording) -> Iterator[str]:
    """Each event's moment; a free belongs to the last allocation. Empty: not shown."""
    moment = ""
    for allocation, begins in recording.walk():
        if begins:
            is_late = allocation.stage in _STEP_STAGES and allocation.step > LAST_STEP
            moment = "" if is_late else name_moment(allocation)
        yield moment


def _downsample(
    places: Sequence[int], moments: Sequence[str], totals: Sequence[int], *, max_points: int
) -> Iterator[tuple[str, int]]:
    """The fullest event of each column, with its moment; no column spans two moments."""
    spans = [(moment, list(group)) for moment, group in groupby(places, key=lambda at: moments[at])]
    num_others = sum(len(span) for moment, span in spans if moment != "load")
    num_load = len(places) - num_others
    # Each span may end with a short column.
    room = max(1, max_points - len(spans))
    load_room = max(1, min(num_load, min(room, num_others or room) // LOAD_SHARE or 1))
    if not num_others:
        load_room = room
    width = max(1, -(-num_others // max(1, room - load_room)))
    load_width = max(1, -(-num_load // load_room))
    for moment, span in spans:
        wide = load_width if moment == "load" else width
        for start in range(0, len(span), wide):
            yield moment, max(span[start : start + wide], key=lambda at: totals[at])


def _fill(
    recording: Recording, sizes: Sequence[int], kept: Sequence[int], categories: Sequence[str]
) -> list[list[int]]:
    """One row per category: its live bytes after each kept event."""
    rows: list[list[int]] = [[] for _ in categories]
    row_of = {name: row for row, name in enumerate(categories)}
    live = [0] * len(categories)
    wanted = iter(kept)
    following = next(wanted, None)
    for place, event in enumerate(recording.events):
        index = abs(event) - 1
        size = sizes[index] if event > 0 else -sizes[index]
        live[row_of[recording.allocations[index].category]] += size
        if place == following:
            for row, num_bytes in zip(rows, live, strict=True):
                row.append(num_bytes)
            following = next(wanted, None)
    return rows
