"""Search: from a request and a cluster to the best few plans, and why the others lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tightfit.core.strategy import Loss, Method, Optimizer
from tightfit.core.units import render_seconds
from tightfit.core.version import __version__
from tightfit.estimation.loss import can_fuse_head_and_loss
from tightfit.estimation.result import Estimate, Verdict
from tightfit.hardware.rates import measured_update_seconds
from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.planning.explain import explain_choice, measure_levers, warn_of_slow_settings
from tightfit.planning.filter import Shortfall, StrategyFilter, resize
from tightfit.planning.judge import assume_host, describe_assumption
from tightfit.planning.known_outcomes import KnownOutcome, find_known_limit
from tightfit.planning.plan import Exclusion, Plan, PlanHardware, estimate_cost
from tightfit.planning.ranking import Candidate, measure_seconds, rank
from tightfit.planning.request import JobRequest, name_method
from tightfit.planning.rules import Case, find_warnings
from tightfit.planning.space import Layout, list_layouts, list_micro_batches

# A cluster's groups beside each other: the best plan of each, and whether it can start now.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBest:
    """A group and the best that was found for it; None where nothing fits."""

    group: NodeGroup
    plan: Plan | None

    @property
    def can_start_now(self) -> bool | None:
        """Whether as much is free as the plan takes. None: not told, or no plan."""
        group, plan = self.group, self.plan
        if plan is None or group.num_free_nodes is None:
            return None
        wanted = plan.strategy
        if wanted.num_nodes == 1 and wanted.gpus_per_node < group.node.num_gpus:
            return (group.num_free_gpus or 0) >= wanted.gpus_per_node
        return group.num_free_nodes >= wanted.num_nodes

    @property
    def exceeds_limit(self) -> bool:
        """The run takes longer than the partition lets a job run."""
        limit, plan = self.group.max_seconds, self.plan
        seconds = None if plan is None else find_run_seconds(plan.estimate, plan.num_epochs)
        return bool(limit and seconds and seconds > limit)


def find_run_seconds(estimate: Estimate, num_epochs: float) -> float | None:
    """None where the run's length is not known (no dataset given)."""
    epoch = estimate.time.seconds_per_epoch
    return None if epoch is None else epoch * num_epochs


def warn_of_limit(group: NodeGroup, estimate: Estimate, num_epochs: float) -> tuple[str, ...]:
    """A run that its partition would cut off."""
    seconds, limit = find_run_seconds(estimate, num_epochs), group.max_seconds
    if seconds is None or not limit or seconds <= limit:
        return ()
    takes, allowed = render_seconds(seconds), render_seconds(limit)
    return (
        f"takes about {takes}, and {group.name} stops jobs after {allowed}: it has to be queued "
        "again and resume",
    )


# The last choice of a plan: wide slices for the fused loss, where memory is left for them.

LARGE_CHUNK_FACTOR = 4
"""As fast as wider ones, or nearly. Head and loss of 8192 tokens on one H200, 4096 wide, 128,256
words, bf16, at factors 1, 2, 4 and 8: 27.0, 25.8, 24.4 and 24.6 ms with a frozen head, 52.7, 42.1,
38.3 and 37.1 ms with a trained one (benchmarks/results/h200_fused_kernels.json)."""


def enlarge_loss_chunks(sieve: StrategyFilter, candidate: Candidate) -> Candidate:
    """The candidate with wide slices where they fit and gain time, else as it was.

    They are worth less than any layer that need not be recomputed: a plan that recomputes has no
    memory to give away.
    """
    strategy = candidate.strategy
    is_sliced = strategy.loss is Loss.FUSED and can_fuse_head_and_loss(sieve.request.spec)
    is_open = "loss_chunk_factor" not in sieve.request.fixed
    if not is_sliced or not is_open or strategy.checkpointing:
        return candidate
    wide = strategy.model_copy(update={"loss_chunk_factor": LARGE_CHUNK_FACTOR})
    if sieve.is_known_to_fail(candidate.layout, wide):
        return candidate
    outline = sieve.outline(candidate.layout, wide)
    is_faster = measure_seconds(outline) < measure_seconds(candidate.outline)
    if not is_faster or outline.verdict is not Verdict.FITS:
        return candidate
    return replace(candidate, strategy=wide, outline=outline)


# The last choice of a full tuning: AdamW in our kernel, where `calibrate` found it faster here.


def use_adamw_kernel(sieve: StrategyFilter, candidate: Candidate) -> Candidate:
    """The candidate with that kernel where it is legal and gains time, else as it was.

    Only on a device where it was measured in this dtype: `calibrate` also holds its update
    against torch's there.
    Adapters are too few for a kernel to matter.
    """
    strategy, layout = candidate.strategy, candidate.layout
    measured = layout.group.node.gpu.measured
    is_open = "optimizer" not in sieve.request.fixed and strategy.optimizer is Optimizer.ADAMW
    if strategy.method is not Method.FULL or not is_open:
        return candidate
    value_bytes = strategy.weights.value_bytes
    if measured_update_seconds(measured, Optimizer.ADAMW_KERNEL, value_bytes=value_bytes) is None:
        return candidate
    ours = strategy.model_copy(update={"optimizer": Optimizer.ADAMW_KERNEL})
    if sieve.find_violation(layout, ours) is not None:
        return candidate
    outline = sieve.outline(layout, ours)
    is_faster = measure_seconds(outline) < measure_seconds(candidate.outline)
    return replace(candidate, strategy=ours, outline=outline) if is_faster else candidate


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
    sieve = StrategyFilter(
        request=request,
        network_bytes_per_second=cluster.network_bytes_per_second,
        keeps_beaten=is_exhaustive,
        limits={
            group.name: limit
            for group in cluster.groups
            if (limit := find_known_limit(known, request.spec, group.node)) is not None
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
    sieve: StrategyFilter, ordered: Sequence[Candidate], cluster: Cluster
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


def _refine_first(sieve: StrategyFilter, count: int) -> list[Candidate]:
    """The best of each family in order, the first few of them refined."""
    best = _best_of_families(sieve.candidates)
    refined = [_refine(sieve, candidate) for candidate in best[:count]]
    return sorted([*refined, *best[count:]], key=rank)


def _refine(sieve: StrategyFilter, candidate: Candidate) -> Candidate:
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
    return use_adamw_kernel(sieve, enlarge_loss_chunks(sieve, best))


def _choose_all(sieve: StrategyFilter, num_plans: int) -> list[Candidate]:
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


def _make_plan(
    sieve: StrategyFilter, candidate: Candidate, cluster: Cluster, *, is_told: bool
) -> Plan:
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
    asked = warn_of_slow_settings(request.fixed, effects)
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


# Settings that leave no plan


def find_conflicting_settings(
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
