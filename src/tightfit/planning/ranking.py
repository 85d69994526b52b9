"""Levers, one record each, and which of two strategies is better: it fits, then it is faster, then
it asks for less trouble.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import Loss, Method, Offload, Sharding
from tightfit.core.strategy import Strategy
from tightfit.estimation.result import TRACED, Estimate, EstimateSummary, Verdict
from tightfit.planning.describe import count_examples, describe_method, name_method
from tightfit.planning.space import Layout

if TYPE_CHECKING:
    from tightfit.planning.plan import Plan


class Lever(NamedTuple):
    """One choice of the strategy that makes a plan faster or smaller, and how to turn it back."""

    name: str
    is_pulled: Callable[[Strategy], bool]
    turned_back: dict[str, Any]
    """Fields of the strategy without it. The first asks for it, the rest only depend on it."""
    is_plain: bool = True
    """False: of two plans that are as good, the one without it comes first."""
    handicap: float = 1.0
    """How much faster it must make a plan before the plan is preferred to one without it."""
    is_for_memory: bool = False
    """Pulled to make room: any speed-up beside it comes from elsewhere and is not its merit."""
    details: tuple[str, ...] = ()
    """Further fields that ask for it."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields of the strategy that ask for it."""
        return (next(iter(self.turned_back)), *self.details)


def _uses(optimizer: Optimizer, strategy: Strategy) -> bool:
    return strategy.optimizer is optimizer


# Offload ties up pinned host memory and the bus.
_offload = partial(
    Lever, "offload to host memory", is_plain=False, handicap=1.3, is_for_memory=True
)

LEVERS: tuple[Lever, ...] = (
    Lever("no recomputation", lambda s: not s.checkpointing, {"checkpointing": True}),
    Lever(
        "recomputing activations",
        lambda s: s.checkpointing,
        {
            "checkpointing": False,
            "recomputed_layers": None,
            "offloaded_inputs": 0,
            "mlp_tiles": 1,
        },
        is_plain=False,
        details=("recomputed_layers",),
    ),
    Lever(
        "MLPs in tiles",
        lambda s: s.mlp_tiles > 1,
        {"mlp_tiles": 1},
        is_plain=False,
        is_for_memory=True,
        handicap=1.01,
    ),
    Lever(
        "layers' inputs in host memory",
        lambda s: s.offloaded_inputs > 0,
        {"offloaded_inputs": 0},
        is_plain=False,
        is_for_memory=True,
        handicap=1.05,
    ),
    Lever("fused kernels", lambda s: s.fused_kernels, {"fused_kernels": False}, is_plain=False),
    Lever("fused LoRA", lambda s: s.fused_lora, {"fused_lora": False}),
    Lever("fp8 products", lambda s: s.fp8, {"fp8": False}),
    Lever("fp8 gradients", lambda s: s.fp8_gradients, {"fp8_gradients": False}),
    Lever(
        "dequantized base",
        lambda s: s.dequantized_base,
        {"dequantized_base": False},
        is_plain=False,
    ),
    Lever(
        "loss in chunks of tokens",
        lambda s: s.loss is not Loss.PLAIN,
        {"loss": Loss.PLAIN, "loss_chunk_factor": 1},
    ),
    Lever(
        "large loss chunks",
        lambda s: s.loss_chunk_factor > 1,
        {"loss_chunk_factor": 1},
        is_plain=False,
    ),
    # A trace cannot follow it. What compiling takes before the first step counts by itself.
    Lever(
        "compiled layers", lambda s: s.compile, {"compile": False}, is_plain=False, handicap=1.05
    ),
    Lever(
        "reference before training",
        lambda s: s.precompute_reference,
        {"precompute_reference": False},
        is_plain=False,
    ),
    Lever(
        "reference in each step",
        lambda s: s.runs_reference,
        {"precompute_reference": True},
    ),
    Lever("packing", lambda s: s.packing, {"packing": False}, is_plain=False),
    Lever(
        "flash attention",
        lambda s: s.attention is Attention.FLASH,
        {"attention": Attention.SDPA},
        handicap=1.01,
    ),
    Lever(
        "flex attention",
        lambda s: s.attention is Attention.FLEX,
        {"attention": Attention.EAGER},
        handicap=1.01,
    ),
    *(
        Lever(optimizer.record.lever, partial(_uses, optimizer), {"optimizer": Optimizer.ADAMW})
        for optimizer in Optimizer
        if optimizer.record.lever
    ),
    Lever(
        "bf16 adapters",
        lambda s: s.method is Method.LORA and s.adapter_dtype is Dtype.BF16,
        {"adapter_dtype": Dtype.FP32, "fused_lora": False},
    ),
    _offload(
        lambda s: s.offload is not Offload.NONE and s.world_size > 1, {"offload": Offload.NONE}
    ),
    _offload(
        lambda s: s.offload is not Offload.NONE and s.world_size == 1,
        {"offload": Offload.NONE, "sharding": Sharding.SINGLE},
    ),
    Lever(
        "rows shared by GPUs",
        lambda s: s.context_parallel > 1,
        {"context_parallel": 1},
        is_plain=False,
        handicap=1.05,
        is_for_memory=True,
    ),
    Lever(
        "sharding over the GPUs",
        lambda s: s.sharding.shards_optimizer and s.world_size > 1 and s.offload is Offload.NONE,
        {"sharding": Sharding.DDP},
    ),
)


# The order of candidates

METHOD_HANDICAPS = {"lora": 1.0, "full": 1.25, "qlora": 1.2, "lora-int8": 1.2, "lora-gptq4": 1.2}
"""How much faster than 16-bit LoRA a method must be before `auto` puts it first.

Quantized base weights cost quality (and time to merge); full tuning costs a whole
model per run. These are a policy, not a measurement: `docs/decisions/0002-search.md`.
"""
MANY_NODES_HANDICAP = 1.02
"""A network is one more part that can fail."""
_VERDICT_ORDER = {Verdict.FITS: 0, Verdict.TIGHT: 1}


class Candidate(NamedTuple):
    """A legal strategy, and what is predicted of it."""

    layout: Layout
    strategy: Strategy
    summary: EstimateSummary
    wanted_batch: int = 1
    num_steps: float | None = None
    """Optimizer steps of the run; None where its length is not known."""

    @property
    def fits(self) -> bool:
        return self.summary.verdict is Verdict.FITS

    @property
    def family(self) -> tuple[object, ...]:
        """Two candidates of one family are the same idea with other details."""
        s = self.strategy
        where = (self.layout.group.name, s.num_nodes, s.gpus_per_node, s.context_parallel)
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
        return (*kind, *self.family[1:5], spread, s.offload, s.dequantized_base)


def find_overshoot(strategy: Strategy, wanted_batch: int) -> float:
    """How many times the wanted batch one step takes, where the GPUs outnumber it."""
    return max(1.0, strategy.examples_per_step / wanted_batch)


def measure_seconds(
    estimate: Estimate | EstimateSummary, *, num_steps: float | None = None
) -> float:
    """Seconds per epoch where the data is known, else per million real tokens.

    With their share of what is done before the first of `num_steps`: compiling, and the reference
    of every row. Of data that is not known one epoch is taken.
    """
    time = estimate.time
    if time.seconds_per_epoch is None:
        seconds = 1e6 / time.tokens_per_second if time.tokens_per_second > 0 else float("inf")
    else:
        seconds = time.seconds_per_epoch
    if not time.seconds_per_step:
        return seconds
    before = 0.0
    num_epochs = 1.0
    if num_steps:
        before = time.compile_seconds / num_steps
        num_epochs = num_steps / (time.steps_per_epoch or num_steps)
    before += time.reference_seconds_per_step / num_epochs
    return seconds * (1 + before / time.seconds_per_step)


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
    overshoot = find_overshoot(candidate.strategy, candidate.wanted_batch)
    return rank_estimate(
        candidate.strategy,
        candidate.summary,
        overshoot=overshoot,
        num_steps=candidate.num_steps,
    )


def rank_estimate(
    strategy: Strategy,
    estimate: Estimate | EstimateSummary,
    *,
    overshoot: float,
    num_steps: float | None = None,
) -> tuple[float, ...]:
    """Smaller is better. `fits` before `tight`, then handicapped time, headroom, simplicity.

    Sequences beyond the wanted batch count as no progress: more GPUs than sequences
    would train another job than the one asked for.
    """
    seconds = measure_seconds(estimate, num_steps=num_steps)
    seconds *= handicap_total(strategy) * overshoot
    return (
        _VERDICT_ORDER.get(estimate.verdict, 2),
        # Three digits: a closer race is decided by headroom and simplicity.
        float(f"{seconds:.3g}"),
        estimate.gpu.peak_reserved_bytes / max(1, estimate.gpu.capacity_bytes),
        count_levers(strategy),
    )


# Why a faster plan is ranked behind the first: the ranking's policy in one line.

LEAST_FACTOR = 1.01
"""A closer race is decided by headroom and simplicity, which the table shows."""


def explain_order(plans: Sequence[Plan]) -> str | None:
    """`2 is 1.17x faster, but ...` for the fastest plan that is not first; None where it is."""
    best = plans[0]
    timed = [n for n, plan in enumerate(plans, start=1) if plan.estimate.time.tier == TRACED]
    if 0 < len(timed) < len(plans):
        rows = f"row{'s' if len(timed) > 1 else ''} {', '.join(map(str, timed))}"
        return (
            f"Speeds do not compare: {rows} traced, the others by formula. All are ordered by "
            "formula."
        )
    found = [
        (factor, place, plan)
        for place, plan in enumerate(plans[1:], start=2)
        if (factor := _compare(plan, best)) >= LEAST_FACTOR
    ]
    if not found:
        return None
    factor, place, plan = max(found, key=lambda item: item[0])
    return f"{place} is {factor:.2f}x faster, but {_reason(plan, best)}."


def _compare(plan: Plan, other: Plan) -> float:
    """How many times as fast as the other."""
    seconds = measure_seconds(plan.estimate, num_steps=plan.num_steps)
    others = measure_seconds(other.estimate, num_steps=other.num_steps)
    return others / seconds if seconds > 0 else 0.0


def _reason(plan: Plan, best: Plan) -> str:
    is_tighter = plan.estimate.verdict is not best.estimate.verdict
    if is_tighter and plan.estimate.verdict is Verdict.TIGHT:
        return "it is tight: what fits with room comes first"
    if plan.effective_batch > best.effective_batch:
        taken = count_examples(plan.strategy, plan.effective_batch)
        return f"it takes {taken} a step, more than were asked for"
    if handicap_total(plan.strategy) <= handicap_total(best.strategy):
        return "it leaves less room or needs more levers"
    return next(_prices(plan.strategy, best.strategy), "it asks for more than its speed is worth")


def _prices(strategy: Strategy, best: Strategy) -> Iterator[str]:
    """What the strategy costs that the best does not, dearest first."""
    method = name_method(strategy)
    if METHOD_HANDICAPS.get(method, 1.0) > METHOD_HANDICAPS.get(name_method(best), 1.0):
        if method == "full":
            yield "full tuning makes a whole model per run: --method full plans it first"
        elif method == "qlora":
            yield "QLoRA costs quality: --method qlora plans it first"
        else:
            weights = strategy.weights.value
            yield (
                f"{describe_method(strategy)} over {weights} costs quality: "
                f"--set weights={weights} plans it first"
            )
    if strategy.offload is not Offload.NONE and best.offload is Offload.NONE:
        setting = f"--set offload={strategy.offload.value}"
        yield f"offload ties up host memory and the bus: {setting} plans it first"
    if strategy.compile and not best.compile:
        yield "compiling delays the first step: --set compile=true plans it first"
    is_exact = not strategy.optimizer.record.costs_quality
    if strategy.optimizer is not best.optimizer and not is_exact:
        name = strategy.optimizer.value
        yield f"{name} costs some quality: --set optimizer={name} plans it first"
    if strategy.sharding is not best.sharding:
        name = strategy.sharding.value
        yield f"{name} is one more part that can fail: --set sharding={name} plans it first"
    if strategy.num_nodes > best.num_nodes:
        yield "it needs more nodes, which is one more part that can fail"
