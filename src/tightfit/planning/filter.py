"""Filter a strategy space by legality, memory and time, and count why the rest is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tightfit.core.strategy import Loss, Offload, Optimizer, Sharding, Strategy
from tightfit.core.units import render_bytes
from tightfit.estimation.job import LOAD, estimate_job, estimate_job_summary, exceeds_host_memory
from tightfit.estimation.memory import (
    MODEL_ERROR_FRACTION,
    BatchIndependentBytes,
    estimate_batch_independent_bytes,
    estimate_step_peak_bytes,
)
from tightfit.estimation.result import Estimate, EstimateSummary, Verdict
from tightfit.hardware.types import Node, NodeGroup
from tightfit.planning.known_outcomes import KnownLimit
from tightfit.planning.plan import Exclusion
from tightfit.planning.ranking import Candidate
from tightfit.planning.request import JobRequest, describe_strategy, name_method
from tightfit.planning.rules import Case, Violation, find_first_violation, find_violations
from tightfit.planning.space import Layout, enumerate_strategies, list_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
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
class _ExclusionCount:
    """Strategies left out for one shared reason."""

    rule: str
    reason: str
    link: str
    example: Strategy
    num_strategies: int = 0

    def as_exclusion(self) -> Exclusion:
        return Exclusion(
            rule=self.rule,
            reason=self.reason,
            num_strategies=self.num_strategies,
            example=describe_strategy(self.example),
            link=self.link,
        )


@dataclass(slots=True, kw_only=True)
class _TooBig:
    """Strategies of one method that are too big for one group's cards."""

    group: NodeGroup
    example: Strategy
    need_bytes: int
    num_strategies: int = 0

    def as_tally(self) -> _ExclusionCount:
        gpu, capacity = self.group.node.gpu.name, capacity_of(self.group.node)
        return _ExclusionCount(
            rule="memory",
            reason=f"{name_method(self.example)} in these ways needs "
            f"{render_bytes(self.need_bytes)} or more {name_memory_share(self.group.node)}; {gpu} "
            f"has {render_bytes(capacity)}",
            link="",
            example=self.example,
            num_strategies=self.num_strategies,
        )


class _Fit(NamedTuple):
    """The largest (micro-batch, accumulation) that fits; a roomy fit exceeds a tight one."""

    is_roomy: bool
    size: tuple[int, int]


@dataclass(slots=True, kw_only=True)
class StrategyFilter:
    """Collects what passes, and tallies what does not. One per search."""

    request: JobRequest
    network_bytes_per_second: float | None = None
    limits: Mapping[str, KnownLimit] = field(default_factory=dict)
    """By group: what is known to have been too much there."""
    keeps_beaten: bool = False
    """Also what another strategy is surely better than: to measure whether it is."""
    candidates: list[Candidate] = field(default_factory=list)
    num_considered: int = 0
    nearest: Shortfall | None = None
    nearest_host: Shortfall | None = None
    _tallies: dict[tuple[str, str], _ExclusionCount] = field(default_factory=dict)
    _misses: dict[tuple[str, str], _TooBig] = field(default_factory=dict)
    _barriers: dict[str, str] | None = None
    """By rule, the reason of what has forbidden every strategy so far; None before the first."""

    def sift(self, layout: Layout, *, is_coarse: bool = False) -> None:
        """Judge every strategy of one layout: the best levers come first and settle the rest."""
        fitting: dict[Strategy, _Fit] = {}
        too_big: set[Strategy] = set()
        for strategy in enumerate_strategies(self.request, layout, is_coarse=is_coarse):
            violation = self.find_violation(layout, strategy)
            self._narrow_barriers(layout, strategy)
            if violation is not None:
                self._tally_rule(violation, strategy)
                continue
            sizes = list_micro_batches(self.request, strategy)
            self.num_considered += len(sizes)
            most = _Fit(is_roomy=True, size=sizes[-1])
            if self._is_beaten(strategy, most, fitting):
                continue
            if any(smaller in too_big for smaller in _list_smaller(strategy)):
                too_big.add(strategy)
                self._tally_memory(layout, strategy, None)
                continue
            fit = self._find_largest(layout, strategy, sizes)
            if fit is None:
                too_big.add(strategy)
            else:
                fitting[strategy] = fit
        for strategy, fit in fitting.items():
            if not self._is_beaten(strategy, fit, fitting):
                self._time(layout, strategy, fit.size)

    def find_violation(self, layout: Layout, strategy: Strategy) -> Violation | None:
        """Why the strategy cannot work on this layout; None where it can."""
        return find_first_violation(self._make_case(layout, strategy))

    @property
    def barrier(self) -> str | None:
        """Why no strategy at all is legal, where one rule forbids them all."""
        return next(iter((self._barriers or {}).values()), None)

    def outline(self, layout: Layout, strategy: Strategy) -> EstimateSummary:
        """What decides between strategies."""
        return estimate_job_summary(
            spec=self.request.spec,
            strategy=strategy,
            node=layout.group.node,
            network_bytes_per_second=self.network_bytes_per_second,
            profile=self.request.profile,
        )

    def estimate(self, layout: Layout, strategy: Strategy) -> Estimate:
        """Everything, of a strategy that was chosen."""
        return estimate_job(
            spec=self.request.spec,
            strategy=strategy,
            node=layout.group.node,
            network_bytes_per_second=self.network_bytes_per_second,
            profile=self.request.profile,
            num_checkpoints=self.request.count_checkpoints(strategy.method),
        )

    def is_known_to_fail(self, layout: Layout, strategy: Strategy) -> bool:
        """Whether a run that was predicted to need no more has run out of memory here."""
        limit = self.limits.get(layout.group.name)
        return limit is not None and self._estimate_peak(layout, strategy) >= limit.need_bytes

    def list_exclusions(self) -> tuple[Exclusion, ...]:
        """Rules first, then memory; the commonest reason first among each."""
        found = [tally for tally in self._tallies.values() if tally.rule != "host-memory"]
        hosts = [tally for tally in self._tallies.values() if tally.rule == "host-memory"]
        misses = [miss.as_tally() for miss in self._misses.values()]
        parts = (found, [*misses, *hosts])
        return tuple(
            tally.as_exclusion()
            for part in parts
            for tally in sorted(part, key=lambda tally: -tally.num_strategies)
        )

    def _make_case(self, layout: Layout, strategy: Strategy) -> Case:
        group = layout.group
        return Case(
            spec=self.request.spec,
            strategy=strategy,
            node=group.node,
            num_nodes=group.num_nodes,
        )

    def _narrow_barriers(self, layout: Layout, strategy: Strategy) -> None:
        """The first legal strategy leaves none, and none is looked for after it."""
        if self._barriers == {}:
            return
        found = {v.rule: v.reason for v in find_violations(self._make_case(layout, strategy))}
        before = found if self._barriers is None else self._barriers
        self._barriers = {rule: reason for rule, reason in before.items() if rule in found}

    def _is_beaten(self, strategy: Strategy, fit: _Fit, fitting: dict[Strategy, _Fit]) -> bool:
        return not self.keeps_beaten and _is_beaten(strategy, fit, fitting)

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
        capacity = capacity_of(layout.group.node)
        low, high, probe = 0, len(sizes), 0  # the smallest first: most misses end here
        smallest = 0
        limit = self.limits.get(layout.group.name)
        failed = capacity * 2 if limit is None else limit.need_bytes
        is_cpu = layout.group.node.gpu.is_cpu
        independent = estimate_batch_independent_bytes(self.request.spec, strategy, is_cpu=is_cpu)
        while low < high:
            peak = self._estimate_peak(layout, resize(strategy, sizes[probe]), independent)
            smallest = smallest or peak
            if peak * (1 + MODEL_ERROR_FRACTION) <= capacity and peak < failed:
                low = probe + 1
            else:
                high = probe
            # After the smallest the largest, which most hits allow; then halve what is left.
            probe = high - 1 if low == 1 and high == len(sizes) else (low + high) // 2
        if low == 0 and smallest * (1 - MODEL_ERROR_FRACTION) > capacity:
            self._tally_memory(layout, resize(strategy, sizes[0]), smallest)
            return None
        if low == 0 and limit is not None and smallest >= limit.need_bytes:
            reason = limit.explain(layout.group.node.gpu.name)
            self._tally("ran-out-before", reason, resize(strategy, sizes[0]))
            return None
        return _Fit(is_roomy=low > 0, size=sizes[max(low, 1) - 1])

    def _time(self, layout: Layout, strategy: Strategy, size: tuple[int, int]) -> None:
        sized = resize(strategy, size)
        outline = self.outline(layout, sized)
        if outline.verdict is Verdict.DOES_NOT_FIT:
            self._tally_outline(layout, sized, outline)
        else:
            self.candidates.append(
                Candidate(
                    layout=layout,
                    strategy=sized,
                    outline=outline,
                    wanted_batch=self.request.effective_batch,
                )
            )

    def _tally_rule(self, violation: Violation, strategy: Strategy) -> None:
        self.num_considered += 1
        self._tally(violation.rule, violation.reason, strategy, link=violation.source)

    def _tally(self, rule: str, reason: str, strategy: Strategy, *, link: str = "") -> None:
        tally = self._tallies.get((rule, reason))
        if tally is None:
            tally = _ExclusionCount(rule=rule, reason=reason, link=link, example=strategy)
            self._tallies[rule, reason] = tally
        tally.num_strategies += 1

    def _tally_memory(self, layout: Layout, strategy: Strategy, peak: int | None) -> None:
        """Count a miss; `peak` is None where a smaller relative already missed."""
        group = layout.group
        key = (group.name, name_method(strategy))
        miss = self._misses.get(key)
        if miss is None:
            miss = _TooBig(group=group, example=strategy, need_bytes=peak or 2**62)
            self._misses[key] = miss
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

    def _tally_outline(self, layout: Layout, strategy: Strategy, outline: EstimateSummary) -> None:
        """The step fits but something else does not: loading, or host memory."""
        if outline.gpu.peak_phase == LOAD and not exceeds_host_memory(outline.host):
            self._tally_memory(layout, strategy, outline.gpu.peak_reserved_bytes)
            return
        self._tally("host-memory", outline.reason, strategy)
        need, has = outline.host.peak_bytes, outline.host.capacity_bytes or 0
        if need > has and (self.nearest_host is None or need < self.nearest_host.need_bytes):
            self.nearest_host = Shortfall(
                group=layout.group.name,
                strategy=strategy,
                need_bytes=need,
                capacity_bytes=has,
                owner="the node",
                what="of host memory per node",
            )


def capacity_of(node: Node) -> int:
    """Bytes one process can hold on a card: what a probe saw free, else all of it."""
    return node.free_gpu_memory_bytes or node.gpu.memory_bytes


def name_memory_share(node: Node) -> str:
    """Whose memory a plan is measured by."""
    return "per process" if node.gpu.is_cpu else "per GPU"


def _is_beaten(strategy: Strategy, fit: _Fit, fitting: dict[Strategy, _Fit]) -> bool:
    """Another one is surely better: the same with one costly lever undone, at no smaller batch.

    Recomputing, offloading and unfused kernels only cost time, and 8-bit state
    only quality, once the memory they save is not needed.
    """
    rivals = []
    if strategy.checkpointing:
        rivals.append(_with_fields(strategy, checkpointing=False))
    if strategy.offload is not Offload.NONE:
        rivals.append(_with_fields(strategy, offload=Offload.NONE))
        rivals.append(_with_fields(strategy, offload=Offload.NONE, sharding=Sharding.SINGLE))
    if strategy.optimizer.is_8bit:
        rivals.append(_with_fields(strategy, optimizer=Optimizer.ADAMW))
    if not strategy.fused_kernels and not strategy.compile:
        rivals += _list_smaller(strategy)
    return any(found >= fit for found in map(fitting.get, rivals) if found is not None)


def _list_smaller(strategy: Strategy) -> list[Strategy]:
    """Strategies that surely need no more memory: fused kernels keep less than unfused ones."""
    if strategy.compile:
        return [_with_fields(strategy, loss=Loss.FUSED)] if strategy.loss is Loss.CHUNKED else []
    if strategy.fused_kernels:
        return []
    smaller = [_with_fields(strategy, fused_kernels=True, loss=Loss.FUSED)]
    if strategy.loss is Loss.PLAIN:
        smaller.append(_with_fields(strategy, loss=Loss.CHUNKED))
    return smaller


def _with_fields(strategy: Strategy, **fields: object) -> Strategy:
    return strategy.model_copy(update=fields)


def resize(strategy: Strategy, size: tuple[int, int]) -> Strategy:
    return strategy.model_copy(update={"micro_batch": size[0], "grad_accum": size[1]})
