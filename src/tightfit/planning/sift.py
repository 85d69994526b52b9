"""Legality, then memory, then time: what is left of a strategy space, and why the rest is not."""

from __future__ import annotations

from dataclasses import dataclass, field

from tightfit.core.strategy import Strategy
from tightfit.core.units import render_bytes
from tightfit.estimate.job import estimate_job
from tightfit.estimate.memory import estimate_step_peak_bytes
from tightfit.estimate.result import Estimate, Verdict
from tightfit.hardware.types import Node
from tightfit.planning.plan import Exclusion
from tightfit.planning.ranking import Candidate
from tightfit.planning.request import JobRequest, describe_strategy, name_method
from tightfit.planning.rules import Case, Violation, find_first_violation
from tightfit.planning.space import Layout, enumerate_strategies, list_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """The nearest miss: the strategy that needs least of what the hardware lacks."""

    group: str
    strategy: Strategy
    need_bytes: int
    capacity_bytes: int
    gpu: str
    what: str = "per GPU"

    @property
    def sentence(self) -> str:
        missing = render_bytes(self.need_bytes - self.capacity_bytes)
        return (
            f"The smallest plan needs {render_bytes(self.need_bytes)} {self.what}; {self.gpu} has "
            f"{render_bytes(self.capacity_bytes)} ({missing} short)."
        )


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Strategies left out for one shared reason."""

    rule: str
    reason: str
    link: str
    example: str
    num_strategies: int = 0


@dataclass(slots=True, kw_only=True)
class Sieve:
    """Collects what passes, and tallies what does not. One per search."""

    request: JobRequest
    network_bytes_per_second: float | None = None
    is_coarse: bool = False
    candidates: list[Candidate] = field(default_factory=list)
    num_considered: int = 0
    nearest: Shortfall | None = None
    _tallies: dict[tuple[str, str], _Tally] = field(default_factory=dict)
    _misses: dict[tuple[str, str], tuple[int, int, Strategy]] = field(default_factory=dict)

    def sift(self, layout: Layout) -> None:
        """Judge every strategy of one layout."""
        too_big: set[Strategy] = set()
        for strategy in enumerate_strategies(self.request, layout, is_coarse=self.is_coarse):
            violation = find_first_violation(self._case(layout, strategy))
            if violation is not None:
                self._tally_rule(violation, strategy)
                continue
            sizes = list_micro_batches(self.request, strategy)
            self.num_considered += len(sizes)
            # Keeping activations needs more than recomputing them: no need to ask again.
            if strategy.model_copy(update={"checkpointing": True}) in too_big:
                self._tally_memory(layout, strategy, None)
                continue
            fitting = self._find_fitting(layout, strategy, sizes)
            if fitting:
                self._time(layout, strategy, fitting)
            else:
                too_big.add(strategy)

    def estimate(self, layout: Layout, strategy: Strategy) -> Estimate:
        return estimate_job(
            spec=self.request.spec,
            strategy=strategy,
            node=layout.group.node,
            network_bytes_per_second=self.network_bytes_per_second,
            profile=self.request.profile,
        )

    def list_exclusions(self) -> tuple[Exclusion, ...]:
        """Rules first, then memory; the commonest reason first among each."""
        found = sorted(
            self._tallies.values(),
            key=lambda tally: (tally.rule in ("memory", "host-memory"), -tally.num_strategies),
        )
        return tuple(
            Exclusion(
                rule=tally.rule,
                reason=tally.reason,
                num_strategies=tally.num_strategies,
                example=tally.example,
                link=tally.link,
            )
            for tally in found
        )

    def _case(self, layout: Layout, strategy: Strategy) -> Case:
        group = layout.group
        return Case(
            spec=self.request.spec, strategy=strategy, node=group.node, num_nodes=group.num_nodes
        )

    def _find_fitting(
        self, layout: Layout, strategy: Strategy, sizes: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The micro-batches whose step fits, by bisection: memory grows with the micro-batch."""
        capacity = capacity_of(layout.group.node)
        low, high = 0, len(sizes)
        smallest: int | None = None
        probe = 0  # the smallest first: most misses end here
        while low < high:
            sized = _sized(strategy, sizes[probe])
            peak = estimate_step_peak_bytes(self.request.spec, sized)
            if peak <= capacity:
                low = probe + 1
            else:
                high = probe
                smallest = peak if smallest is None else min(smallest, peak)
            # After the smallest try the largest, which most hits allow.
            probe = high - 1 if probe == 0 else (low + high) // 2
        if low == 0:
            self._tally_memory(layout, _sized(strategy, sizes[0]), smallest)
        return sizes[:low]

    def _time(self, layout: Layout, strategy: Strategy, fitting: list[tuple[int, int]]) -> None:
        """Time the largest micro-batch, and smaller ones while it is only a tight fit."""
        for size in reversed(fitting):
            sized = _sized(strategy, size)
            estimate = self.estimate(layout, sized)
            if estimate.verdict in (Verdict.FITS, Verdict.TIGHT):
                self.candidates.append(
                    Candidate(layout=layout, strategy=sized, estimate=estimate)
                )
            if estimate.verdict is Verdict.FITS:
                return
        if estimate.verdict is Verdict.DOES_NOT_FIT:
            self._tally_estimate(layout, sized, estimate)

    def _tally_rule(self, violation: Violation, strategy: Strategy) -> None:
        self.num_considered += 1
        tally = self._tallies.setdefault(
            (violation.rule, violation.reason),
            _Tally(
                rule=violation.rule,
                reason=violation.reason,
                link=violation.source,
                example=describe_strategy(strategy),
            ),
        )
        tally.num_strategies += 1

    def _tally_memory(self, layout: Layout, strategy: Strategy, peak: int | None) -> None:
        group, method = layout.group, name_method(strategy)
        gpu, capacity = group.node.gpu.name, capacity_of(group.node)
        key = (group.name, method)
        best, count, example = self._misses.get(key, (peak or 2**62, 0, strategy))
        if peak is not None and peak <= best:
            best, example = peak, strategy
        self._misses[key] = (best, count + 1, example)
        self._tallies[("memory", f"{group.name} {method}")] = _Tally(
            rule="memory",
            reason=f"{method} left out so needs at least {render_bytes(best)} per GPU; "
            f"{gpu} has {render_bytes(capacity)}",
            link="",
            example=describe_strategy(example),
            num_strategies=count + 1,
        )
        if peak is not None and (self.nearest is None or peak < self.nearest.need_bytes):
            self.nearest = Shortfall(
                group=group.name,
                strategy=strategy,
                need_bytes=peak,
                capacity_bytes=capacity,
                gpu=gpu,
            )

    def _tally_estimate(self, layout: Layout, strategy: Strategy, estimate: Estimate) -> None:
        """The step fits but something else does not: host memory, loading, saving."""
        key = ("host-memory", f"{layout.group.name} {name_method(strategy)}")
        tally = self._tallies.setdefault(
            key,
            _Tally(
                rule="host-memory",
                reason=estimate.reason,
                link="",
                example=describe_strategy(strategy),
            ),
        )
        tally.num_strategies += 1


def capacity_of(node: Node) -> int:
    """Bytes one process can hold on a card: what a probe saw free, else all of it."""
    return node.free_gpu_memory_bytes or node.gpu.memory_bytes


def _sized(strategy: Strategy, size: tuple[int, int]) -> Strategy:
    return strategy.model_copy(update={"micro_batch": size[0], "grad_accum": size[1]})
