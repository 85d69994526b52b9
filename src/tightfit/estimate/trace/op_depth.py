"""The operations of a deep model from those of shallow ones. Knows no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tightfit.estimate.trace.depth import NUM_ADDED, DepthPlan
from tightfit.estimate.trace.depth_match import CannotExtend
from tightfit.estimate.trace.operations import (
    UPDATE,
    Operation,
    OperationLog,
    from_totals,
    list_totals,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Layers of one kind in two traced depths, and how many the job has."""

    interior: int
    """A layer of the shallow model that is like all in between."""
    num_added: int
    """Layers that the deeper model has more."""
    num_more: int
    """Layers that the job has more."""


def list_kinds(plan: DepthPlan) -> list[Kind]:
    """Of a plan's deeper models, one each."""
    found = []
    for deeper, num_more in zip(plan.grown, plan.num_more, strict=True):
        place = next(k for k, count in enumerate(deeper) if count != plan.base[k])
        interior = sum(plan.base[:place]) + 1
        found.append(Kind(interior=interior, num_added=NUM_ADDED, num_more=num_more))
    return found


def extend_log(
    base: OperationLog, grown: Sequence[OperationLog], kinds: Sequence[Kind]
) -> OperationLog:
    """The log at full depth: each kind's interior layer as often as the job has more layers.

    The deeper logs must follow from the shallow one, else `CannotExtend`.
    """
    for place, deeper in enumerate(grown):
        like = [kind.num_added * (place == number) for number, kind in enumerate(kinds)]
        if list(_calls(_repeat(base, kinds, like))) != list(_calls(deeper)):
            if len(grown) == 1:
                return _extend_deeper(base, deeper, kinds[0])
            raise CannotExtend(_UNLIKE)
    extended = _repeat(base, kinds, [kind.num_more for kind in kinds])
    return _grow_update(extended, base, grown, [kind.num_more / kind.num_added for kind in kinds])


_UNLIKE = "the deeper of two traced models computes something else"


def _extend_deeper(base: OperationLog, deeper: OperationLog, kind: Kind) -> OperationLog:
    """Where the last layers of a pass are not like the others: FSDP gathers a layer ahead.

    Then the layer before them is repeated, which must be what the deeper model has more of.
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
    extended = _repeat(deeper, [further], [more])
    return _grow_update(extended, base, [deeper], [more / kind.num_added])


def _repeat(log: OperationLog, kinds: Sequence[Kind], num_more: Sequence[int]) -> OperationLog:
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
    """An update takes all parameters together: its sums are linear in the number of layers."""
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
