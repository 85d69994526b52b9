"""Where nothing works: which of the user's own settings stands in the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tightfit.hardware.types import Cluster
from tightfit.planning.known import KnownOutcome
from tightfit.planning.request import JobRequest
from tightfit.planning.search import search


def find_hindrance(
    request: JobRequest,
    cluster: Cluster,
    names: Sequence[str],
    *,
    known: Sequence[KnownOutcome] = (),
) -> tuple[str, ...]:
    """Those of `names`, fixed by the request, without which it has a plan.

    One alone where that is enough, else all of them; nothing where they are not to blame.
    """
    given = tuple(name for name in names if name in request.fixed)
    alone = [(name,) for name in given]
    for left_out in [*alone, given] if len(given) > 1 else alone:
        rest = {name: value for name, value in request.fixed.items() if name not in left_out}
        if search(replace(request, fixed=rest), cluster, num_plans=1, known=known).plans:
            return left_out
    return ()
