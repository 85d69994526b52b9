"""From a request and a cluster to the best few plans, and the reasons the rest lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tightfit import __version__
from tightfit.estimate.result import Verdict
from tightfit.hardware.types import Cluster
from tightfit.planning.assume import assume_host, describe_assumption
from tightfit.planning.by_group import GroupBest, warn_of_limit
from tightfit.planning.case import Case
from tightfit.planning.cost import estimate_cost
from tightfit.planning.kernel_update import update_in_kernel
from tightfit.planning.known import KnownOutcome, find_limit
from tightfit.planning.plan import Exclusion, Plan, PlanHardware
from tightfit.planning.ranking import Candidate, rank
from tightfit.planning.request import JobRequest, name_method
from tightfit.planning.rules import find_warnings
from tightfit.planning.sift import Shortfall, Sieve, resize
from tightfit.planning.space import Layout, list_layouts, list_micro_batches
from tightfit.planning.why import explain_choice, measure_levers, warn_of_asked
from tightfit.planning.wide_slices import widen_slices

NUM_PLANS = 5
_NUM_REFINED = 12
"""Families whose smaller micro-batches are timed too: short rows can make them faster."""

_NUM_FULL_LAYOUTS = 4
"""Layouts searched with every lever; further ones only with those that nearly always win."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Plans best first; why the others are not there; the nearest miss where nothing fits."""

    plans: tuple[Plan, ...]
    excluded: tuple[Exclusion, ...]
    num_considered: int
    """Strategies decided upon: each illegal one, and each legal one at each micro-batch."""
    shortfall: Shortfall | None
    wanted_batch: int | None = None
    """Sequences per step that were asked for, over all ranks."""
    by_group: tuple[GroupBest, ...] = ()
    """The best plan of each group, where there are several."""
    barrier: str | None = None
    """The reason that forbids every strategy, where there is one."""
    fixed: frozenset[str] = frozenset()
    """Fields of the strategy that were asked for, and stay as they are."""

    @property
    def failure(self) -> str | None:
        """Why there is no plan, in one sentence; None where there is one."""
        if self.plans:
            return None
        if self.shortfall is not None:
            return self.shortfall.sentence
        if self.excluded:
            return f"No strategy is possible: {self.barrier or self.excluded[0].reason}."
        return "The request leaves no strategy to try."


def search(
    request: JobRequest,
    cluster: Cluster,
    *,
    num_plans: int = NUM_PLANS,
    is_coarse: bool = False,
    is_exhaustive: bool = False,
    known: Sequence[KnownOutcome] = (),
) -> SearchResult:
    """Plan the request on every group of the cluster; one job runs inside one group.

    Order: `fits` before `tight`, then by time under the handicaps of `ranking.py`.
    The plans are different ideas (method, sharding, offload, nodes), at least one
    of each method that fits. A coarse search has fewer levers and tells no reasons.
    An exhaustive one tells apart every setting of every lever, also those that another is
    surely better than. What is `known` to have run out of memory here is left out, and all
    that needs as much.
    """
    sieve = Sieve(
        request=request,
        network_bytes_per_second=cluster.network_bytes_per_second,
        keeps_beaten=is_exhaustive,
        limits={
            group.name: limit
            for group in cluster.groups
            if (limit := find_limit(known, request.spec, group.node)) is not None
        },
    )
    for order, layout in enumerate(_list_all_layouts(request, cluster, is_coarse=is_coarse)):
        sieve.sift(layout, is_coarse=is_coarse or order >= _NUM_FULL_LAYOUTS)
    if is_exhaustive:
        ordered = chosen = _choose_all(sieve, num_plans)
    else:
        ordered = _refine_first(sieve, num_plans if is_coarse else _NUM_REFINED)
        chosen = _choose_different(ordered, num_plans)
    return SearchResult(
        plans=tuple(
            _make_plan(sieve, candidate, cluster, is_told=not is_coarse) for candidate in chosen
        ),
        excluded=sieve.list_exclusions(),
        num_considered=sieve.num_considered,
        shortfall=None if chosen else sieve.nearest or sieve.nearest_host,
        wanted_batch=request.effective_batch,
        by_group=() if is_coarse else _best_by_group(sieve, ordered, cluster),
        barrier=sieve.barrier,
        fixed=frozenset(request.fixed),
    )


def _best_by_group(
    sieve: Sieve, ordered: Sequence[Candidate], cluster: Cluster
) -> tuple[GroupBest, ...]:
    """Partitions differ in more than speed (what is free, how long a job may run): one of each."""
    if len(cluster.groups) < 2:
        return ()
    first: dict[str, Candidate] = {}
    for candidate in ordered:
        first.setdefault(candidate.layout.group.name, candidate)
    plans = {
        name: _make_plan(sieve, candidate, cluster, is_told=True)
        for name, candidate in first.items()
    }
    return tuple(GroupBest(group=group, plan=plans.get(group.name)) for group in cluster.groups)


def _list_all_layouts(request: JobRequest, cluster: Cluster, *, is_coarse: bool) -> list[Layout]:
    """Layouts of every group; whole groups and single nodes first, then the steps between."""
    found = []
    for group in cluster.groups:
        assumed = group.model_copy(update={"node": assume_host(group.node)})
        found += list_layouts(assumed, request, is_coarse=is_coarse)
    return sorted(found, key=lambda layout: 1 < layout.num_nodes < layout.group.num_nodes)


def _best_of_families(candidates: list[Candidate]) -> list[Candidate]:
    found: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        held = found.get(candidate.family)
        if held is None or rank(candidate) < rank(held):
            found[candidate.family] = candidate
    return sorted(found.values(), key=rank)


def _refine_first(sieve: Sieve, count: int) -> list[Candidate]:
    """The best of each family in order, the first few of them refined."""
    best = _best_of_families(sieve.candidates)
    refined = [_refine(sieve, candidate) for candidate in best[:count]]
    return sorted([*refined, *best[count:]], key=rank)


def _refine(sieve: Sieve, candidate: Candidate) -> Candidate:
    """The same strategy at the micro-batch that is fastest, which need not be the largest; then
    what is better wherever it can be had: a loss in wide slices, the update in our kernel."""
    best = candidate
    for size in list_micro_batches(sieve.request, candidate.strategy):
        if size[0] >= candidate.strategy.micro_batch:
            continue
        strategy = resize(candidate.strategy, size)
        outline = sieve.outline(candidate.layout, strategy)
        other = replace(candidate, strategy=strategy, outline=outline)
        if outline.verdict in (Verdict.FITS, Verdict.TIGHT) and rank(other) < rank(best):
            best = other
    return update_in_kernel(sieve, widen_slices(sieve, best))


def _choose_all(sieve: Sieve, num_plans: int) -> list[Candidate]:
    """The best candidates, each at its own fastest micro-batch, however alike they are."""
    best = sorted(sieve.candidates, key=rank)[:num_plans]
    return sorted((_refine(sieve, candidate) for candidate in best), key=rank)


def _choose_different(ordered: list[Candidate], num_plans: int) -> list[Candidate]:
    """The best, then the best of each other method, then the next best ideas."""
    chosen: dict[tuple[object, ...], Candidate] = {}
    methods: set[str] = set()
    for candidate in ordered:
        method = name_method(candidate.strategy)
        if method not in methods and len(chosen) < num_plans:
            methods.add(method)
            chosen[candidate.idea] = candidate
    for candidate in ordered:
        if len(chosen) >= num_plans:
            break
        chosen.setdefault(candidate.idea, candidate)
    return sorted(chosen.values(), key=rank)


def _make_plan(sieve: Sieve, candidate: Candidate, cluster: Cluster, *, is_told: bool) -> Plan:
    """`is_told`: with what its levers bring, each estimated again without it."""
    request, strategy, group = sieve.request, candidate.strategy, candidate.layout.group
    stated = next(one.node for one in cluster.groups if assume_host(one.node) == group.node)
    said = describe_assumption(stated, group.node)
    found = sieve.estimate(candidate.layout, strategy)
    estimate = found.model_copy(update={"assumptions": (*said, *found.assumptions)})
    case = Case(spec=request.spec, strategy=strategy, node=group.node, num_nodes=group.num_nodes)
    num_epochs = request.count_epochs(estimate)
    limit = warn_of_limit(group, estimate, num_epochs)
    effects = tuple(measure_levers(sieve, candidate)) if is_told else ()
    asked = warn_of_asked(request.fixed, effects)
    return Plan(
        tightfit_version=__version__,
        model=request.spec,
        strategy=strategy,
        hardware=PlanHardware(
            group=group.name,
            node=stated,
            num_nodes=strategy.num_nodes,
            network_bytes_per_second=cluster.network_bytes_per_second,
            source=cluster.source,
        ),
        data=request.profile,
        num_epochs=num_epochs,
        effective_batch=strategy.micro_batch * strategy.grad_accum * strategy.world_size,
        estimate=estimate,
        cost=estimate_cost(
            gpu=group.node.gpu,
            num_gpus=strategy.world_size,
            estimate=estimate,
            num_epochs=num_epochs,
        ),
        training=request.training.get(strategy.method),
        why=explain_choice(sieve, candidate, effects) if is_told else (),
        warnings=(*asked, *(warning.reason for warning in find_warnings(case)), *limit),
    )
