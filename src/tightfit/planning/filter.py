"""Judge one strategy; filter a space of them by legality, memory and time, with reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from tightfit.core.optimizers import Optimizer
from tightfit.core.profiles import DataProfile
from tightfit.core.settings import Loss, Offload, Sharding
from tightfit.core.strategy import Strategy
from tightfit.core.units import render_bytes
from tightfit.estimation.job import LOAD, estimate_job, estimate_job_summary, exceeds_host_memory
from tightfit.estimation.memory import (
    BatchIndependentBytes,
    estimate_batch_independent_bytes,
    estimate_step_peak_bytes,
    find_error_fraction,
)
from tightfit.estimation.result import Estimate, EstimateSummary, Verdict
from tightfit.hardware.types import Node, NodeGroup
from tightfit.models.spec import ModelSpec
from tightfit.planning.describe import describe_strategy, name_method
from tightfit.planning.plan import Exclusion
from tightfit.planning.ranking import Candidate
from tightfit.planning.request import JobRequest
from tightfit.planning.rules import (
    Case,
    Violation,
    find_first_violation,
    find_violations,
    find_warnings,
)
from tightfit.planning.space import (
    Layout,
    enumerate_strategies,
    list_long_row_levers,
    list_micro_batches,
)

# Judge one strategy: assume the host memory that was not stated, check the rules, estimate.

# What the planner takes for granted where the hardware was given as mere words.

HOST_BYTES_PER_GPU_BYTE = 2
"""Host memory of an unstated node, by the memory of its GPUs together.

Rented nodes have 0.7x (g5.xlarge) to 4x (g5.48xlarge, p3.8xlarge); 2x is a2-highgpu-1g.
Without an assumption, offload would seem to fit any model on any card.
"""


def assume_host(node: Node) -> Node:
    """The node with its host memory filled in, where it was not stated."""
    if node.host_memory_bytes is not None:
        return node
    assumed = HOST_BYTES_PER_GPU_BYTE * node.num_gpus * node.gpu.memory_bytes
    return node.model_copy(update={"host_memory_bytes": assumed})


def describe_assumption(stated: Node, assumed: Node) -> tuple[str, ...]:
    """The sentence that says so, where something was assumed."""
    if stated.host_memory_bytes is not None or assumed.host_memory_bytes is None:
        return ()
    size = render_bytes(assumed.host_memory_bytes)
    return (f"host memory was not stated: {size} per node is assumed (twice the GPUs' memory)",)


def judge_strategy(
    *,
    spec: ModelSpec,
    strategy: Strategy,
    node: Node,
    num_nodes: int = 1,
    network_bytes_per_second: float | None = None,
    profile: DataProfile | None = None,
) -> Estimate:
    """The estimate of one strategy, `illegal` with its reasons where a rule forbids it.

    An illegal strategy keeps its memory figures: people want to see what they asked for.
    Warnings join the assumptions, in the same order as in `rules.py`.
    """
    assumed = assume_host(node)
    estimate = estimate_job(
        spec=spec,
        strategy=strategy,
        node=assumed,
        network_bytes_per_second=network_bytes_per_second,
        profile=profile,
    )
    case = Case(spec=spec, strategy=strategy, node=node, num_nodes=num_nodes)
    update: dict[str, object] = {}
    violations = find_violations(case)
    if violations:
        update["verdict"] = Verdict.ILLEGAL
        update["reason"] = "; ".join(violation.reason for violation in violations)
    warnings = tuple(warning.reason for warning in find_warnings(case))
    warnings = (*describe_assumption(node, assumed), *warnings)
    if warnings:
        update["assumptions"] = (*estimate.assumptions, *warnings)
    return estimate.model_copy(update=update) if update else estimate


# Outcomes of earlier runs on this hardware: what ran out of memory is not tried again


class KnownOutcome(NamedTuple):
    """How one run ended."""

    model_name: str
    gpu_name: str
    strategy: Strategy
    status: Literal["finished", "out-of-memory"]
    peak_bytes: int | None
    """Measured, per GPU, where the run reported it."""
    date: str
    """ISO 8601: later ones count more."""


class KnownLimit(NamedTuple):
    """A predicted need that is known to be too much on one kind of card."""

    need_bytes: int
    date: str

    def explain(self, gpu_name: str) -> str:
        return (
            f"a run predicted at {render_bytes(self.need_bytes)} ran out of memory on "
            f"{gpu_name} on {self.date[:10]}; these need as much or more"
        )


def find_known_limit(
    known: Iterable[KnownOutcome], spec: ModelSpec, node: Node
) -> KnownLimit | None:
    """The smallest predicted need that failed with this model on this card.

    A failure is forgotten where a later run finished with no smaller a need: the card
    may have been shared, or the software has changed.
    """
    is_cpu, context = node.gpu.is_cpu, node.gpu.measured_context_bytes
    predict = partial(estimate_step_peak_bytes, is_cpu=is_cpu, measured_context_bytes=context)
    reported = [
        (outcome, predict(spec, outcome.strategy))
        for outcome in known
        if outcome.model_name == spec.name
        and outcome.gpu_name == node.gpu.name
        and outcome.strategy.is_trained
    ]
    done = [(outcome.date, need) for outcome, need in reported if outcome.status == "finished"]
    failed = (
        KnownLimit(need, outcome.date)
        for outcome, need in reported
        if outcome.status == "out-of-memory"
        and not any(date > outcome.date and other >= need for date, other in done)
    )
    return min(failed, default=None)


class Shortfall(NamedTuple):
    """The nearest miss: the strategy that needs least of what the hardware lacks."""

    group: str
    strategy: Strategy
    need_bytes: int
    capacity_bytes: int
    owner: str
    """Who lacks it: the card, or the node."""
    what: str = "per GPU"

    @property
    def sentence(self) -> str:
        missing = render_bytes(self.need_bytes - self.capacity_bytes)
        return (
            f"The smallest plan needs {render_bytes(self.need_bytes)} {self.what}; "
            f"{self.owner} has {render_bytes(self.capacity_bytes)} ({missing} short)."
        )


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Strategies left out for one reason; `reason` of those too big follows from the smallest."""

    rule: str
    reason: str = ""
    link: str = ""
    example: Strategy
    need_bytes: int = 2**62
    num_strategies: int = 0


class _Fit(NamedTuple):
    """The largest (micro-batch, accumulation) that fits; a roomy fit exceeds a tight one."""

    is_roomy: bool
    size: tuple[int, int]


@dataclass(slots=True, kw_only=True)
class StrategyFilter:
    """Collects the strategies that pass, and counts the reasons of the others. One per search."""

    request: JobRequest
    network_bytes_per_second: float | None = None
    limits: Mapping[str, KnownLimit] = field(default_factory=dict)
    """By group: the need that is known to have been too much there."""
    keeps_beaten: bool = False
    """Keep strategies that another is surely better than: to measure whether it is."""
    candidates: list[Candidate] = field(default_factory=list)
    num_considered: int = 0
    nearest: Shortfall | None = None
    nearest_host: Shortfall | None = None
    _tallies: dict[tuple[str, str], _Tally] = field(default_factory=dict)
    """By rule and reason."""
    _misses: dict[tuple[str, str], tuple[NodeGroup, _Tally]] = field(default_factory=dict)
    """Too big for a group's cards, by group and method."""
    _barriers: dict[str, str] | None = None
    """By rule, the reason of what has forbidden every strategy so far; None before the first."""

    def filter(self, layout: Layout, *, is_coarse: bool = False, context_parallel: int = 1) -> None:
        """Judge every strategy of one layout: the best levers come first and settle the rest.

        `context_parallel`: how many GPUs share a row.
        """
        fitting: dict[Strategy, _Fit] = {}
        too_big: set[Strategy] = set()

        def count_needless(reason: str, strategy: Strategy) -> None:
            self.num_considered += 1
            self.leave_out("never-gains", reason, strategy)

        for strategy in enumerate_strategies(
            self.request,
            layout,
            is_coarse=is_coarse,
            context_parallel=context_parallel,
            on_needless=count_needless,
        ):
            sizes = list_micro_batches(self.request, strategy)
            lacks_room = self._place(layout, strategy, sizes, fitting, too_big)
            if not lacks_room or not strategy.checkpointing or is_coarse:
                continue
            # Of as few rows as there may be: more would not bring back the time they cost.
            few = resize(strategy, sizes[0])
            for longer in self._list_longer(layout, few):
                if not self._place(layout, longer, sizes[:1], fitting, too_big):
                    break
        for strategy, fit in fitting.items():
            if not self._is_beaten(strategy, fit, fitting):
                self._time(layout, resize(strategy, fit.size))

    def _place(
        self,
        layout: Layout,
        strategy: Strategy,
        sizes: list[tuple[int, int]],
        fitting: dict[Strategy, _Fit],
        too_big: set[Strategy],
    ) -> bool:
        """Put a strategy among those that fit or that do not. True where it is worth a try in less
        memory: it does not fit, or only just."""
        violation = self.find_violation(layout, strategy)
        self._narrow_barriers(layout, strategy)
        if violation is not None:
            self.num_considered += 1
            self._tally(violation.rule, violation.reason, strategy, link=violation.source)
            return False
        self.num_considered += len(sizes)
        if self._is_beaten(strategy, _Fit(is_roomy=True, size=sizes[-1]), fitting):
            return False
        if too_big and any(smaller in too_big for smaller in _list_smaller(strategy)):
            too_big.add(strategy)
            self._tally_memory(layout, strategy, None)
            return False
        fit = self._find_largest(layout, strategy, sizes)
        if fit is None:
            too_big.add(strategy)
        else:
            fitting[strategy] = fit
        return fit is None or not fit.is_roomy

    def _list_longer(self, layout: Layout, strategy: Strategy) -> Iterator[Strategy]:
        """The strategy with one lever for long rows more each time, as far as they are legal."""
        for fields in list_long_row_levers(self.request.spec, strategy, layout.group.node):
            longer = strategy.model_copy(update={**fields, **self.request.fixed})
            if longer != strategy and self.find_violation(layout, longer) is None:
                strategy = longer
                yield longer

    def find_violation(self, layout: Layout, strategy: Strategy) -> Violation | None:
        """Why the strategy cannot work on this layout; None where it can."""
        return find_first_violation(self._make_case(layout, strategy))

    @property
    def barrier(self) -> str | None:
        """Why no strategy at all is legal, where one rule forbids them all."""
        return next(iter((self._barriers or {}).values()), None)

    def summarize(self, layout: Layout, strategy: Strategy) -> EstimateSummary:
        """The parts of an estimate that decide between strategies."""
        return estimate_job_summary(strategy=strategy, **self._describe_job(layout))

    def estimate(self, layout: Layout, strategy: Strategy) -> Estimate:
        """The whole estimate, of a strategy that was chosen."""
        num_checkpoints = self.request.count_checkpoints(strategy.method)
        return estimate_job(
            strategy=strategy, num_checkpoints=num_checkpoints, **self._describe_job(layout)
        )

    def _describe_job(self, layout: Layout) -> dict[str, Any]:
        return {
            "spec": self.request.spec,
            "node": layout.group.node,
            "network_bytes_per_second": self.network_bytes_per_second,
            "profile": self.request.profile,
        }

    def is_known_to_fail(self, layout: Layout, strategy: Strategy) -> bool:
        """Whether a run that was predicted to need no more has run out of memory here."""
        limit = self.limits.get(layout.group.name)
        return limit is not None and self._estimate_peak(layout, strategy) >= limit.need_bytes

    def leave_out(self, rule: str, reason: str, strategy: Strategy) -> None:
        """Count a strategy that passed and that a comparison with others has ruled out."""
        self._tally(rule, reason, strategy)

    def list_exclusions(self) -> tuple[Exclusion, ...]:
        """Rules first, then memory; the commonest reason first among each."""
        rules: list[_Tally] = []
        memory: list[_Tally] = []
        for group, miss in self._misses.values():
            least, has = render_bytes(miss.need_bytes), render_bytes(capacity_of(group.node))
            miss.reason = (
                f"{name_method(miss.example)} in these ways needs {least} or more "
                f"{name_memory_share(group.node)}; {group.node.gpu.name} has {has}"
            )
            memory.append(miss)
        for tally in self._tallies.values():
            (memory if tally.rule == "host-memory" else rules).append(tally)
        return tuple(
            Exclusion(
                rule=tally.rule,
                reason=tally.reason,
                num_strategies=tally.num_strategies,
                example=describe_strategy(tally.example),
                link=tally.link,
            )
            for part in (rules, memory)
            for tally in sorted(part, key=lambda tally: -tally.num_strategies)
        )

    def _make_case(self, layout: Layout, strategy: Strategy) -> Case:
        group = layout.group
        return Case(
            spec=self.request.spec, strategy=strategy, node=group.node, num_nodes=group.num_nodes
        )

    def _narrow_barriers(self, layout: Layout, strategy: Strategy) -> None:
        """The first legal strategy leaves none, and none is looked for after it."""
        if self._barriers == {}:
            return
        found = {v.rule: v.reason for v in find_violations(self._make_case(layout, strategy))}
        before = found if self._barriers is None else self._barriers
        self._barriers = {rule: reason for rule, reason in before.items() if rule in found}

    def _is_beaten(self, strategy: Strategy, fit: _Fit, fitting: dict[Strategy, _Fit]) -> bool:
        """Whether another one is surely better: the same with one costly lever undone, at no
        smaller batch.

        Recomputing, offloading and unfused kernels only cost time, and 8-bit state
        only quality, once the memory they save is not needed.
        """
        if self.keeps_beaten or not fitting:
            return False
        changes: list[dict[str, object]] = []
        if strategy.checkpointing:
            changes.append({"checkpointing": False})
        if strategy.offload is not Offload.NONE:
            changes.append({"offload": Offload.NONE})
            changes.append({"offload": Offload.NONE, "sharding": Sharding.SINGLE})
        if strategy.optimizer.is_8bit:
            changes.append({"optimizer": Optimizer.ADAMW})
        rivals = [strategy.model_copy(update=change) for change in changes]
        if not strategy.fused_kernels and not strategy.compile:
            rivals += _list_smaller(strategy)
        return any(found >= fit for found in map(fitting.get, rivals) if found is not None)

    def _estimate_peak(
        self, layout: Layout, strategy: Strategy, independent: BatchIndependentBytes | None = None
    ) -> int:
        gpu = layout.group.node.gpu
        return estimate_step_peak_bytes(
            self.request.spec,
            strategy,
            is_cpu=gpu.is_cpu,
            measured_context_bytes=gpu.measured_context_bytes,
            independent=independent,
        )

    def _find_largest(
        self, layout: Layout, strategy: Strategy, sizes: list[tuple[int, int]]
    ) -> _Fit | None:
        """The largest micro-batch whose step fits, by bisection: memory grows with it.

        Where none fits with room to spare, the smallest may still be a tight fit.
        """
        node = layout.group.node
        capacity = capacity_of(node)
        low, high, probe = 0, len(sizes), 0  # the smallest first: most misses end here
        smallest, error = 0, find_error_fraction(strategy)
        limit = self.limits.get(layout.group.name)
        failed = capacity * 2 if limit is None else limit.need_bytes
        # Of one row, and of several: a lone row needs no padding mask and copies fewer keys.
        independent: dict[bool, BatchIndependentBytes] = {}
        while low < high:
            sized = resize(strategy, sizes[probe])
            has_several = sized.micro_batch > 1
            if has_several not in independent:
                independent[has_several] = estimate_batch_independent_bytes(
                    self.request.spec, sized, is_cpu=node.gpu.is_cpu
                )
            peak = self._estimate_peak(layout, sized, independent[has_several])
            smallest = smallest or peak
            if peak * (1 + error) <= capacity and peak < failed:
                low = probe + 1
            else:
                high = probe
            # After the smallest the largest, which most hits allow; then halve what is left.
            probe = high - 1 if low == 1 and high == len(sizes) else (low + high) // 2
        if low == 0 and smallest * (1 - error) > capacity:
            self._tally_memory(layout, resize(strategy, sizes[0]), smallest)
            return None
        if low == 0 and limit is not None and smallest >= limit.need_bytes:
            reason = limit.explain(node.gpu.name)
            self._tally("ran-out-before", reason, resize(strategy, sizes[0]))
            return None
        return _Fit(is_roomy=low > 0, size=sizes[max(low, 1) - 1])

    def _time(self, layout: Layout, strategy: Strategy) -> None:
        summary = self.summarize(layout, strategy)
        if summary.verdict is not Verdict.DOES_NOT_FIT:
            candidate = Candidate(
                layout=layout,
                strategy=strategy,
                summary=summary,
                wanted_batch=self.request.effective_batch,
                num_steps=self.request.count_steps(summary.time),
            )
            self.candidates.append(candidate)
            return
        # The step fits but something else does not: loading, or host memory.
        host = summary.host
        if summary.gpu.peak_phase == LOAD and not exceeds_host_memory(host):
            self._tally_memory(layout, strategy, summary.gpu.peak_reserved_bytes)
            return
        self._tally("host-memory", summary.reason, strategy)
        need, has = host.peak_bytes, host.capacity_bytes or 0
        if need > has and (self.nearest_host is None or need < self.nearest_host.need_bytes):
            self.nearest_host = Shortfall(
                group=layout.group.name,
                strategy=strategy,
                need_bytes=need,
                capacity_bytes=has,
                owner="the node",
                what="of host memory per node",
            )

    def _tally(self, rule: str, reason: str, strategy: Strategy, *, link: str = "") -> None:
        made = _Tally(rule=rule, reason=reason, link=link, example=strategy)
        self._tallies.setdefault((rule, reason), made).num_strategies += 1

    def _tally_memory(self, layout: Layout, strategy: Strategy, peak: int | None) -> None:
        """Count a miss; `peak` is None where a smaller relative already missed."""
        group = layout.group
        _, miss = self._misses.setdefault(
            (group.name, name_method(strategy)), (group, _Tally(rule="memory", example=strategy))
        )
        miss.num_strategies += 1
        if peak is None:
            return
        if peak < miss.need_bytes:
            miss.need_bytes, miss.example = peak, strategy
        # With everything offloaded a card lacks little and the host a lot: that is no near miss.
        is_near = self.nearest is None or peak < self.nearest.need_bytes
        if strategy.offload is Offload.NONE and is_near:
            self.nearest = Shortfall(
                group=group.name,
                strategy=strategy,
                need_bytes=peak,
                capacity_bytes=capacity_of(group.node),
                owner=group.node.gpu.name,
                what=name_memory_share(group.node),
            )


def capacity_of(node: Node) -> int:
    """Bytes one process can use on a card: what a probe found free, else all of it."""
    return node.free_gpu_memory_bytes or node.gpu.memory_bytes


def name_memory_share(node: Node) -> str:
    """Whose memory a plan is measured by."""
    return "per process" if node.gpu.is_cpu else "per GPU"


def _list_smaller(strategy: Strategy) -> list[Strategy]:
    """Strategies that surely need no more memory: fused kernels keep less than unfused ones."""
    changes: list[dict[str, object]] = []
    if strategy.compile:
        changes = [{"loss": Loss.FUSED}] if strategy.loss is Loss.CHUNKED else []
    elif not strategy.fused_kernels:
        changes = [{"fused_kernels": True, "loss": Loss.FUSED}]
        if strategy.loss is Loss.PLAIN:
            changes.append({"loss": Loss.CHUNKED})
    return [strategy.model_copy(update=change) for change in changes]


def resize(strategy: Strategy, size: tuple[int, int]) -> Strategy:
    return strategy.model_copy(update={"micro_batch": size[0], "grad_accum": size[1]})
