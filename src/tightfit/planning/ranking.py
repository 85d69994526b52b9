"""Which of two strategies is better: it fits, then it is faster, then it asks for less trouble."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tightfit.core.strategy import Method, Optimizer, Strategy
from tightfit.estimation.result import Estimate, EstimateSummary, Verdict
from tightfit.planning.levers import LEVERS
from tightfit.planning.request import name_method
from tightfit.planning.space import Layout

METHOD_HANDICAPS = {"lora": 1.0, "full": 1.25, "qlora": 1.2, "lora-int8": 1.2, "lora-gptq4": 1.2}
"""How much faster than 16-bit LoRA a method must be before `auto` puts it first.

Quantized base weights cost quality (and time to merge); full tuning costs a whole
model per run. These are a policy, not a measurement: `docs/decisions/0002-search.md`.
"""
MANY_NODES_HANDICAP = 1.02
"""A network is one more part that can fail."""
_VERDICT_ORDER = {Verdict.FITS: 0, Verdict.TIGHT: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A legal strategy, and what is predicted of it."""

    layout: Layout
    strategy: Strategy
    outline: EstimateSummary
    wanted_batch: int = 1

    @property
    def overshoot(self) -> float:
        """How many times the wanted batch one step takes, where the GPUs outnumber it."""
        return find_overshoot(self.strategy, self.wanted_batch)

    @property
    def family(self) -> tuple[object, ...]:
        """Two candidates of one family are the same idea with other details."""
        s = self.strategy
        where = (self.layout.group.name, s.num_nodes, s.gpus_per_node)
        return (*where, name_method(s), s.sharding, s.offload, s.dequantized_base)

    @property
    def idea(self) -> tuple[object, ...]:
        """Coarser still: adapters alike on DDP or ZeRO-1, weights alike over FSDP or ZeRO-3,
        and the same nodes alike under the names of two partitions."""
        s, node = self.strategy, self.layout.group.node
        spread = (
            s.sharding.shards_weights,
            s.method is Method.FULL and s.sharding.shards_optimizer,
        )
        kind = (node.gpu.name, node.num_gpus, node.host_memory_bytes, node.num_cores)
        return (*kind, *self.family[1:4], spread, s.offload, s.dequantized_base)


def find_overshoot(strategy: Strategy, wanted_batch: int) -> float:
    s = strategy
    return max(1.0, s.micro_batch * s.grad_accum * s.world_size / wanted_batch)


def measure_seconds(estimate: Estimate | EstimateSummary) -> float:
    """Seconds per epoch where the data is known, else per million real tokens."""
    if estimate.time.seconds_per_epoch is not None:
        return estimate.time.seconds_per_epoch
    speed = estimate.time.tokens_per_second
    return 1e6 / speed if speed > 0 else float("inf")


def handicap_of(strategy: Strategy) -> float:
    """How much speed the strategy's choices must bring to be worth their trouble."""
    levers = prod(lever.handicap for lever in LEVERS if lever.is_pulled(strategy))
    nodes = MANY_NODES_HANDICAP if strategy.num_nodes > 1 else 1.0
    return levers * nodes * strategy.sharding.handicap * strategy.optimizer.record.handicap


def handicap_total(strategy: Strategy) -> float:
    """The method's handicap and the levers' together."""
    return handicap_of(strategy) * METHOD_HANDICAPS.get(name_method(strategy), 1.0)


def count_levers(strategy: Strategy) -> int:
    """How many things are not plain: ties go to the simpler strategy."""
    s = strategy
    others = (
        s.sharding.shards_optimizer,
        s.optimizer is not Optimizer.ADAMW,
        s.num_nodes > 1,
    )
    return sum(others) + sum(not lever.is_plain and lever.is_pulled(s) for lever in LEVERS)


def rank(candidate: Candidate) -> tuple[float, ...]:
    """Smaller is better."""
    return rank_estimate(candidate.strategy, candidate.outline, overshoot=candidate.overshoot)


def rank_estimate(
    strategy: Strategy, estimate: Estimate | EstimateSummary, *, overshoot: float
) -> tuple[float, ...]:
    """Smaller is better. `fits` before `tight`, then handicapped time, headroom, simplicity.

    Sequences beyond the wanted batch count as no progress: more GPUs than sequences
    would train another job than the one asked for.
    """
    seconds = measure_seconds(estimate) * handicap_total(strategy) * overshoot
    return (
        _VERDICT_ORDER.get(estimate.verdict, 2),
        # Three digits: a closer race is decided by headroom and simplicity.
        float(f"{seconds:.3g}"),
        estimate.gpu.peak_reserved_bytes / max(1, estimate.gpu.capacity_bytes),
        count_levers(strategy),
    )
