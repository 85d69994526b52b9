"""Search: from a request and a cluster to the best few plans, and why the others lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from tightfit.core.optimizers import Optimizer
from tightfit.core.packages import __version__
from tightfit.core.settings import Loss, Method
from tightfit.core.units import render_bytes, render_seconds
from tightfit.estimation.activations import can_fuse_head_and_loss
from tightfit.estimation.communication import Exchange, exchange_seconds, find_links
from tightfit.estimation.result import Estimate, Verdict
from tightfit.hardware.rates import measured_update_seconds
from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.planning.describe import count_examples, name_example, name_method
from tightfit.planning.filter import (
    KnownOutcome,
    Shortfall,
    StrategyFilter,
    assume_host,
    describe_assumption,
    find_known_limit,
    name_memory_share,
    resize,
)
from tightfit.planning.plan import Exclusion, Plan, PlanHardware, estimate_cost
from tightfit.planning.ranking import LEVERS, Candidate, measure_seconds, rank
from tightfit.planning.request import JobRequest
from tightfit.planning.rules import Case, find_warnings
from tightfit.planning.space import (
    LEAST_SLICE_TOKENS,
    Layout,
    list_context_sizes,
    list_layouts,
    list_micro_batches,
)

NUM_PLANS = 5
_NUM_REFINED = 12
"""Families whose smaller micro-batches are timed too: short rows can make them faster."""
_NUM_FULL_LAYOUTS = 4
"""Layouts searched with every lever; further ones only with those that nearly always win."""


class GroupBest(NamedTuple):
    """A group and the best plan found for it; None where nothing fits."""

    group: NodeGroup
    plan: Plan | None

    @property
    def can_start_now(self) -> bool | None:
        """Whether as much is free as the plan takes. None: not known, or no plan."""
        group, plan = self.group, self.plan
        if plan is None or group.num_free_nodes is None:
            return None
        wanted = plan.strategy
        if wanted.num_nodes == 1 and wanted.gpus_per_node < group.node.num_gpus:
            return (group.num_free_gpus or 0) >= wanted.gpus_per_node
        return group.num_free_nodes >= wanted.num_nodes

    @property
    def exceeds_limit(self) -> bool:
        """Whether the run takes longer than the partition lets a job run."""
        plan = self.plan
        return plan is not None and bool(warn_of_limit(self.group, plan.estimate, plan.num_epochs))


def warn_of_limit(group: NodeGroup, estimate: Estimate, num_epochs: float) -> tuple[str, ...]:
    """A run that its partition would cut off."""
    seconds, limit = estimate.time.run_seconds(num_epochs), group.max_seconds
    if seconds is None or not limit or seconds <= limit:
        return ()
    takes, allowed = render_seconds(seconds), render_seconds(limit)
    return (
        f"takes about {takes}, and {group.name} stops jobs after {allowed}: it has to be queued "
        "again and resume",
    )


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
    The plans are different ideas (method, sharding, offload, nodes); one of each method that
    fits is among the first NUM_PLANS. Fewer plans are the first of more.
    A coarse search has fewer levers and gives no reasons. An exhaustive one tells apart every
    setting of every lever, also those that another is surely better than. What is `known` to have
    run out of memory here is left out, and all that needs as much.
    """
    found = StrategyFilter(
        request=request,
        network_bytes_per_second=cluster.network_bytes_per_second,
        keeps_beaten=is_exhaustive,
        limits={
            group.name: limit
            for group in cluster.groups
            if (limit := find_known_limit(known, request.spec, group.node)) is not None
        },
    )
    layouts: list[Layout] = []
    for group in cluster.groups:
        assumed = group.model_copy(update={"node": assume_host(group.node)})
        layouts += list_layouts(assumed, request, is_coarse=is_coarse)
    # Whole groups and single nodes first, then the steps between.
    layouts.sort(key=lambda layout: 1 < layout.num_nodes < layout.group.num_nodes)
    for order, layout in enumerate(layouts):
        found.filter(layout, is_coarse=is_coarse or order >= _NUM_FULL_LAYOUTS)
    _share_rows(found, layouts, is_coarse=is_coarse)
    if is_exhaustive:
        # The best candidates, each at its own fastest micro-batch, however alike they are.
        best = sorted(found.candidates, key=rank)[:num_plans]
        ordered = chosen = sorted((_refine(found, candidate) for candidate in best), key=rank)
    else:
        best = _drop_needless_quantization(found, _best_of_families(found.candidates))
        count = num_plans if is_coarse else _NUM_REFINED
        refined = [_refine(found, candidate) for candidate in best[:count]]
        ordered = sorted([*refined, *best[count:]], key=rank)
        chosen = _choose_different(ordered, num_plans)
    return SearchResult(
        plans=tuple(
            _make_plan(found, candidate, cluster, is_explained=not is_coarse)
            for candidate in chosen
        ),
        excluded=found.list_exclusions(),
        num_considered=found.num_considered,
        shortfall=None if chosen else found.nearest or found.nearest_host,
        wanted_batch=request.effective_batch,
        by_group=() if is_coarse else _best_by_group(found, ordered, cluster),
        barrier=found.barrier,
        fixed=frozenset(request.fixed),
    )


def _share_rows(found: StrategyFilter, layouts: Sequence[Layout], *, is_coarse: bool) -> None:
    """Let as few GPUs share a row as it takes, where nothing fits otherwise; and where there are
    more GPUs than sequences, so many that none is idle."""
    request = found.request
    if "context_parallel" in request.fixed or request.trainer is not None:
        return
    is_too_big = not any(candidate.fits for candidate in found.candidates)
    length = request.longest_batch_len
    for order, layout in enumerate(layouts):
        if layout.world_size > 1 and length >= 2 * LEAST_SLICE_TOKENS:
            sizes = list_context_sizes(layout)
            is_short = is_coarse or order >= _NUM_FULL_LAYOUTS
            share = partial(found.filter, layout, is_coarse=is_short)
            if is_too_big:
                _find_least(found, share, sizes)
            elif layout.world_size > request.effective_batch:
                wanted = -(-layout.world_size // request.effective_batch)
                least = next((size for size in sizes if size >= wanted), None)
                if least is not None and length >= least * LEAST_SLICE_TOKENS:
                    share(context_parallel=least)


def _find_least(found: StrategyFilter, share: Callable[..., None], sizes: Sequence[int]) -> None:
    for size in sizes:
        before = len(found.candidates)
        share(context_parallel=size)
        if any(candidate.fits for candidate in found.candidates[before:]):
            return


def _best_by_group(
    found: StrategyFilter, ordered: Sequence[Candidate], cluster: Cluster
) -> tuple[GroupBest, ...]:
    """Partitions differ in more than speed (what is free, how long a job may run): one of each."""
    if len(cluster.groups) < 2:
        return ()
    first: dict[str, Candidate] = {}
    for candidate in ordered:
        first.setdefault(candidate.layout.group.name, candidate)
    plans = {
        name: _make_plan(found, candidate, cluster, is_explained=True)
        for name, candidate in first.items()
    }
    return tuple(GroupBest(group=group, plan=plans.get(group.name)) for group in cluster.groups)


def _best_of_families(candidates: list[Candidate]) -> list[Candidate]:
    found: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        best = found.get(candidate.family)
        if best is None or rank(candidate) < rank(best):
            found[candidate.family] = candidate
    return sorted(found.values(), key=rank)


def _drop_needless_quantization(found: StrategyFilter, ordered: list[Candidate]) -> list[Candidate]:
    """Without quantized plans that the same plan over 16-bit weights beats in memory and in time:
    small models save less by packing than packed products keep beside them."""
    if found.request.method != "auto" or "weights" in found.request.fixed:
        return ordered

    def describe(candidate: Candidate) -> tuple[object, ...]:
        s = candidate.strategy
        where = (candidate.layout.group.name, s.num_nodes, s.gpus_per_node)
        return (*where, s.sharding, s.offload, s.micro_batch, s.checkpointing)

    rivals = {
        describe(candidate): candidate
        for candidate in reversed(ordered)
        if name_method(candidate.strategy) == "lora"
    }
    kept = []
    for candidate in ordered:
        method, rival = name_method(candidate.strategy), rivals.get(describe(candidate))
        is_beaten = (
            candidate.strategy.weights.is_quantized
            and rival is not None
            and rival.summary.gpu.peak_reserved_bytes <= candidate.summary.gpu.peak_reserved_bytes
            and not _is_faster(candidate, rival)
        )
        if is_beaten:
            reason = f"{method} saves no memory and no time here over the same plan with lora"
            found.leave_out("needless-quantization", reason, candidate.strategy)
        else:
            kept.append(candidate)
    return kept


def _choose_different(ordered: list[Candidate], num_plans: int) -> list[Candidate]:
    """The first `num_plans` of one fixed order: fewer plans are a prefix of more.

    First NUM_PLANS by rank, with the best of every method among them; then the further ideas.
    """
    by_idea: dict[tuple[object, ...], Candidate] = {}
    by_method: dict[str, Candidate] = {}
    for candidate in ordered:
        by_idea.setdefault(candidate.idea, candidate)
        by_method.setdefault(name_method(candidate.strategy), candidate)
    head = {candidate.idea: candidate for candidate in by_method.values()}
    for idea, candidate in by_idea.items():
        if len(head) >= NUM_PLANS:
            break
        head.setdefault(idea, candidate)
    rest = [candidate for idea, candidate in by_idea.items() if idea not in head]
    return [*sorted(head.values(), key=rank), *rest][:num_plans]


# The last choices of a plan


def _refine(found: StrategyFilter, candidate: Candidate) -> Candidate:
    """The same strategy at the micro-batch that is fastest, which need not be the largest; then
    with large loss chunks and our AdamW kernel, where they gain time."""
    best = candidate
    for size in list_micro_batches(found.request, candidate.strategy):
        if size[0] >= candidate.strategy.micro_batch:
            continue
        strategy = resize(candidate.strategy, size)
        summary = found.summarize(candidate.layout, strategy)
        other = candidate._replace(strategy=strategy, summary=summary)
        if summary.verdict in (Verdict.FITS, Verdict.TIGHT) and rank(other) < rank(best):
            best = other
    return use_adamw_kernel(found, enlarge_loss_chunks(found, best))


LARGE_CHUNK_FACTOR = 4
"""As fast as larger ones, or nearly. Head and loss of 8192 tokens on one H200, 4096 wide, 128,256
words, bf16, at factors 1, 2, 4 and 8: 27.0, 25.8, 24.4 and 24.6 ms with a frozen head, 52.7, 42.1,
38.3 and 37.1 ms with a trained one (benchmarks/results/h200_fused_kernels.json)."""


def enlarge_loss_chunks(found: StrategyFilter, candidate: Candidate) -> Candidate:
    """The candidate with the fused loss in large chunks where they fit and gain time, else as it
    was: the loss in chunks of tokens can be faster than the fused one in small chunks alone.

    They are worth less than any layer that need not be recomputed: a plan that recomputes has no
    memory to give away.
    """
    strategy, fixed = candidate.strategy, found.request.fixed
    is_swapped = strategy.loss is Loss.CHUNKED and strategy.compile and "loss" not in fixed
    is_chunked = strategy.loss is Loss.FUSED or is_swapped
    is_open = "loss_chunk_factor" not in fixed and can_fuse_head_and_loss(found.request.spec)
    if not is_chunked or not is_open or strategy.checkpointing:
        return candidate
    change = {"loss": Loss.FUSED, "loss_chunk_factor": LARGE_CHUNK_FACTOR}
    larger = strategy.model_copy(update=change)
    if is_swapped and found.find_violation(candidate.layout, larger) is not None:
        return candidate
    if found.is_known_to_fail(candidate.layout, larger):
        return candidate
    other = candidate._replace(strategy=larger, summary=found.summarize(candidate.layout, larger))
    return other if _is_faster(other, candidate) and other.fits else candidate


def use_adamw_kernel(found: StrategyFilter, candidate: Candidate) -> Candidate:
    """A full tuning with our AdamW kernel where it is legal and gains time, else as it was.

    Only on a device where `calibrate` measured it in this dtype: it also compares its update with
    torch's there. Adapters are too few for a kernel to matter.
    """
    strategy, layout = candidate.strategy, candidate.layout
    is_open = "optimizer" not in found.request.fixed and strategy.optimizer is Optimizer.ADAMW
    if strategy.method is not Method.FULL or not is_open:
        return candidate
    seconds = measured_update_seconds(
        layout.group.node.gpu.measured,
        Optimizer.ADAMW_KERNEL,
        value_bytes=strategy.weights.value_bytes,
    )
    ours = strategy.model_copy(update={"optimizer": Optimizer.ADAMW_KERNEL})
    if seconds is None or found.find_violation(layout, ours) is not None:
        return candidate
    other = candidate._replace(strategy=ours, summary=found.summarize(layout, ours))
    return other if _is_faster(other, candidate) else candidate


def _is_faster(one: Candidate, other: Candidate) -> bool:
    seconds, others = (
        measure_seconds(candidate.summary, num_steps=candidate.num_steps)
        for candidate in (one, other)
    )
    return seconds < others


def _make_plan(
    found: StrategyFilter, candidate: Candidate, cluster: Cluster, *, is_explained: bool
) -> Plan:
    """`is_explained`: with the effect of each lever, estimated again without it."""
    request, strategy, group = found.request, candidate.strategy, candidate.layout.group
    stated = next(one.node for one in cluster.groups if assume_host(one.node) == group.node)
    estimate = found.estimate(candidate.layout, strategy)
    assumptions = (*describe_assumption(stated, group.node), *estimate.assumptions)
    estimate = estimate.model_copy(update={"assumptions": assumptions})
    case = Case(spec=request.spec, strategy=strategy, node=group.node, num_nodes=group.num_nodes)
    num_epochs = request.count_epochs(estimate)
    effects = list(measure_levers(found, candidate)) if is_explained else []
    why = [effect.sentence for effect in effects]
    if is_explained:
        why += [
            *_explain_reference(estimate),
            *_explain_exchange(found, candidate),
            *_explain_batch(request, candidate),
            *_explain_nodes(candidate),
        ]
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
        effective_batch=strategy.examples_per_step,
        estimate=estimate,
        cost=estimate_cost(
            gpu=group.node.gpu,
            num_gpus=strategy.world_size,
            estimate=estimate,
            num_epochs=num_epochs,
        ),
        training=request.training.get(strategy.method),
        why=tuple(why),
        warnings=(
            *warn_of_slow_settings(request.fixed, effects),
            *(warning.reason for warning in find_warnings(case)),
            *warn_of_limit(group, estimate, num_epochs),
        ),
    )


# Why a plan looks as it does: each lever turned back, estimated again, and put in a sentence

LEAST_SLOWDOWN = 1.02
"""Less is not worth a warning."""


class LeverEffect(NamedTuple):
    """This plan against the same plan without the lever."""

    name: str
    fields: tuple[str, ...]
    """Of the strategy, that ask for it."""
    speedup: float
    """Time without the lever over time with it; above 1 the lever is faster."""
    added_bytes: int
    """Peak per GPU with the lever less the peak without it; negative saves memory."""
    verdict_without: Verdict
    share: str = "per GPU"
    """Whose memory `added_bytes` are."""

    @property
    def sentence(self) -> str:
        parts = []
        if self.speedup >= 1.005:
            parts.append(f"{self.speedup:.2f}x faster")
        elif self.speedup <= 0.995:
            parts.append(f"{1 / self.speedup:.2f}x slower")
        if abs(self.added_bytes) >= 2**26:
            sign = "+" if self.added_bytes > 0 else "-"
            parts.append(f"{sign}{render_bytes(abs(self.added_bytes))} {self.share}")
        if self.verdict_without is Verdict.DOES_NOT_FIT:
            parts.append("without it the job does not fit")
        elif self.verdict_without is Verdict.TIGHT:
            parts.append("without it the fit is tight")
        elif self.added_bytes > 2**26:
            parts.append("still fits")
        return f"{self.name}: " + (", ".join(parts) if parts else "no difference here")


def measure_levers(found: StrategyFilter, candidate: Candidate) -> Iterator[LeverEffect]:
    """The effect of each pulled lever, in the order of `LEVERS`."""
    strategy, layout = candidate.strategy, candidate.layout
    for lever in LEVERS:
        if not lever.is_pulled(strategy):
            continue
        turned_back = strategy.model_copy(update=lever.turned_back)
        if found.find_violation(layout, turned_back) is not None:
            continue
        with_it, without = candidate.summary, found.summarize(layout, turned_back)
        seconds, others = (
            measure_seconds(one, num_steps=found.request.count_steps(one.time))
            for one in (with_it, without)
        )
        speedup = others / max(seconds, 1e-12)
        yield LeverEffect(
            name=lever.name,
            fields=lever.fields,
            speedup=min(speedup, 1.0) if lever.is_for_memory else speedup,
            added_bytes=with_it.gpu.peak_reserved_bytes - without.gpu.peak_reserved_bytes,
            verdict_without=without.verdict,
            share=name_memory_share(layout.group.node),
        )


def warn_of_slow_settings(fixed: Collection[str], effects: Sequence[LeverEffect]) -> Iterator[str]:
    """Levers that the user fixed, that cost time here, and that the job fits without."""
    for effect in effects:
        asked = [name for name in effect.fields if name in fixed]
        is_slow = effect.speedup < 1 / LEAST_SLOWDOWN
        if asked and is_slow and effect.verdict_without is Verdict.FITS:
            yield (
                f"{effect.name}: asked for, but without it the same plan fits and is predicted to "
                f"be {1 / effect.speedup:.2f}x faster: leave {' and '.join(asked)} out"
            )


def _explain_reference(estimate: Estimate) -> Iterator[str]:
    """What the tokens per second of a plan leave out."""
    time = estimate.time
    each = time.reference_seconds_per_step
    if time.reference_seconds:
        before = render_seconds(time.reference_seconds)
        yield f"the reference takes {before} before the first step, which the tokens/s leave out"
    elif each:
        share = each / time.seconds_per_step
        yield (
            f"the reference takes {share:.2f} times an epoch's steps before the first one, which "
            "the tokens/s leave out"
        )


def _explain_exchange(found: StrategyFilter, candidate: Candidate) -> Iterator[str]:
    """What GPUs that share rows send to each other."""
    strategy, time = candidate.strategy, candidate.summary.time
    if strategy.context_parallel == 1:
        return
    node = candidate.layout.group.node
    links = find_links(node, network_bytes_per_second=found.network_bytes_per_second)
    seconds = exchange_seconds(strategy, links, Exchange(num_bytes=time.exchanged_bytes))
    yield (
        f"{strategy.context_parallel} GPUs share each row: each sends "
        f"{render_bytes(round(time.exchanged_bytes))} of heads and tokens to the others in a step, "
        f"{render_seconds(seconds)} by its links"
    )


def _explain_batch(request: JobRequest, candidate: Candidate) -> Iterator[str]:
    s, wanted = candidate.strategy, request.effective_batch
    got = s.examples_per_step
    if got > wanted:
        one = name_example(s)
        yield f"{s.world_size} GPUs take a {one} each at least: {got} per step, not {wanted}"
    elif got < wanted:
        gpus = "1 GPU" if s.world_size == 1 else f"{s.world_size} GPUs"
        if s.context_parallel > 1:
            gpus = f"{s.num_batches} x {s.context_parallel} GPUs"
        made_of = f"{gpus} x micro-batch {s.micro_batch} x {s.grad_accum}"
        yield f"{count_examples(s, got)} per step, not {wanted}: {made_of}"


def _explain_nodes(candidate: Candidate) -> Iterator[str]:
    free = candidate.layout.group.num_free_nodes
    wanted = candidate.strategy.num_nodes
    if free is not None and free < wanted:
        yield f"needs {wanted} nodes of {candidate.layout.group.name}; {free} are free now"


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
