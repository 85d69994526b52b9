"""Where nothing works: which of the user's own settings stands in the way."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tightfit.hardware.types import Cluster
from tightfit.planning.known import KnownOutcome
from tightfit.planning.request import JobRequest
from tightfit.planning.search import search


def find_hindrance(
    request: JobRequest,
    cluster: Cluster,
    names: Sequence[str],
    *,
    instead: Mapping[str, object] = MappingProxyType({}),
    known: Sequence[KnownOutcome] = (),
) -> tuple[str, ...]:
    """Those of `names`, fixed by the request, without which it has a plan.

    A field that is left out takes its value from `instead`, if it has one there, else any.
    No more than it takes: with any one of them put back there is none. Of several that would do,
    what is named first. Nothing where they are not to blame.
    """

    def has_plan(left_out: Collection[str]) -> bool:
        rest = {name: value for name, value in request.fixed.items() if name not in left_out}
        rest |= {name: instead[name] for name in left_out if name in instead}
        return bool(search(replace(request, fixed=rest), cluster, num_plans=1, known=known).plans)

    blamed = [name for name in names if name in request.fixed]
    if not blamed or not has_plan(blamed):
        return ()
    for name in reversed(blamed.copy()):
        others = [other for other in blamed if other != name]
        if others and has_plan(others):
            blamed = others
    return tuple(blamed)
