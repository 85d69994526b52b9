"""The levers whose losses are compared, as data, and when two loss curves count as the same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from tightfit.core.dtypes import Dtype
from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import Loss, Method
from tightfit.core.strategy import Strategy

NUM_LAST = 50
"""Steps at the end over which curves are compared."""
MOST_BEYOND_PLAIN = 1.25
"""A lever's gradients may be so much further from fp32's than those of the plain 16-bit run."""
MOST_FP32_ERROR = 1e-3
"""Of a lever's own gradients in fp32, where all that may differ is the order of sums."""

PLAIN = "plain"
SEEDS, ORDERS = ("adapters 1", "adapters 2"), ("order 1", "order 2")
AGAIN = "once more"
FULL, FULL_HALVES = "full tuning", "full tuning in half batches"
FULL_ORDERS = ("full tuning in order 1", "full tuning in order 2")
FULL_RATE = 0.25
"""Of the adapters' learning rate."""
CUDA = "cuda"
"""Requirements of a case other than packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """Runs without a lever: what luck alone changes where all, or adapters alone, are trained."""

    plain: str
    lucky: tuple[str, ...]
    """With other adapters or another order of rows. Full tuning draws nothing: there, two half
    batches stand for one, whose sums are rounded otherwise."""
    again: str | None = None
    """The plain one once more."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.plain, *self.lucky, self.again)))


YARDSTICKS = {
    Method.LORA: Yardstick(plain=PLAIN, lucky=(*SEEDS, *ORDERS), again=AGAIN),
    Method.FULL: Yardstick(plain=FULL, lucky=(FULL_HALVES, *FULL_ORDERS)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: the plain one with a lever pulled, or with another seed."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the plain run's strategy."""
    against: str = PLAIN
    """The run with this lever turned back."""
    adapter_seed: int = 0
    order_seed: int = 0
    needs: tuple[str, ...] = ()
    divides_rows_by: int = 1
    """Micro-batches of one step."""
    recomputes_fraction: float | None = None
    """Of the layers; None leaves it to `changes`."""
    rounds_coarser: float = 1.0
    """Than bf16, which its gradients may be further from fp32's by: e4m3 has four bits less."""

    @property
    def method(self) -> Method:
        return Method(self.changes.get("method", Method.LORA))

    @property
    def yardstick(self) -> Yardstick:
        return YARDSTICKS[self.method]

    @property
    def is_plain(self) -> bool:
        return self.name == self.yardstick.plain

    @property
    def is_lever(self) -> bool:
        return self.name not in self.yardstick.names

    @property
    def rate_factor(self) -> float:
        return FULL_RATE if self.method is Method.FULL else 1.0


_BF16_ADAPTERS: dict[str, Any] = {"adapter_dtype": Dtype.BF16}
_FOLDED: dict[str, Any] = {**_BF16_ADAPTERS, "fused_lora": True}
_FULL: dict[str, Any] = {"method": Method.FULL}
_LIGER = (CUDA, "liger_kernel")

CASES: tuple[Case, ...] = (
    Case(name=PLAIN),
    Case(name="compiled layers", changes={"compile": True}),
    Case(name=SEEDS[0], adapter_seed=1),
    Case(name=SEEDS[1], adapter_seed=2),
    Case(name=ORDERS[0], order_seed=1),
    Case(name=ORDERS[1], order_seed=2),
    Case(name=AGAIN),
    Case(name="recomputing all layers", changes={"checkpointing": True}),
    Case(
        name="recomputing half the layers",
        changes={"checkpointing": True},
        recomputes_fraction=0.5,
    ),
    Case(
        name="layers' inputs in host memory",
        changes={"checkpointing": True, "offloaded_inputs": 4},
        against="recomputing all layers",
    ),
    Case(
        name="MLPs in tiles",
        changes={"checkpointing": True, "mlp_tiles": 4},
        against="recomputing all layers",
    ),
    Case(name="2 micro-batches", divides_rows_by=2),
    Case(name=FULL, changes=_FULL),
    Case(name=FULL_HALVES, changes=_FULL, divides_rows_by=2),
    Case(name=FULL_ORDERS[0], changes=_FULL, order_seed=1),
    Case(name=FULL_ORDERS[1], changes=_FULL, order_seed=2),
    Case(
        name="fp8 gradients",
        changes={**_FULL, "fp8_gradients": True},
        against=FULL,
        needs=(CUDA,),
        rounds_coarser=16.0,
    ),
    Case(
        name="fp8 products of full tuning",
        changes={**_FULL, "fp8": True},
        against=FULL,
        needs=(CUDA,),
        rounds_coarser=16.0,
    ),
    Case(name="bf16 adapters", changes=_BF16_ADAPTERS),
    Case(name="fused LoRA", changes=_FOLDED, against="bf16 adapters"),
    Case(
        name="fp8 products",
        changes={**_FOLDED, "fp8": True},
        against="fused LoRA",
        needs=(CUDA,),
        rounds_coarser=16.0,
    ),
    Case(
        name="spare columns",
        changes={**_FOLDED, "fused_kernels": True},
        against="fused LoRA",
        needs=_LIGER,
    ),
    Case(name="fused kernels", changes={"fused_kernels": True}, needs=_LIGER),
    Case(name="fused loss", changes={"loss": Loss.FUSED}, needs=_LIGER),
    Case(
        name="large loss chunks",
        changes={"loss": Loss.FUSED, "loss_chunk_factor": 4},
        against="fused loss",
        needs=_LIGER,
    ),
    Case(name="loss in one kernel", changes={"loss": Loss.KERNEL}, needs=_LIGER),
    Case(name="chunked loss", changes={"loss": Loss.CHUNKED}),
    Case(name="packing", changes={"packing": True}),
    Case(name="fused optimizer", changes={"optimizer": Optimizer.ADAMW}),
    Case(
        name="clipping in the optimizer",
        changes={"optimizer": Optimizer.ADAMW_KERNEL},
        against="fused optimizer",
        needs=(CUDA,),
    ),
    Case(
        name="8-bit optimizer",
        changes={"optimizer": Optimizer.ADAMW_8BIT},
        needs=(CUDA, "bitsandbytes"),
    ),
    Case(
        name="all of a fast plan",
        changes={
            **_FOLDED,
            "fused_kernels": True,
            "loss": Loss.FUSED,
            "packing": True,
            "optimizer": Optimizer.ADAMW,
        },
        needs=_LIGER,
    ),
)
"""The slowest come first. Sharding and offload need several GPUs or other engines, and flash
attention a package: they are not compared here. Nor is an dequantized base, whose losses are held
against those of packed weights by `tests/integration/train/test_unpacked_base.py`."""


def make_strategy(case: Case, *, num_rows: int, seq_len: int, num_layers: int) -> Strategy:
    """The plain run is peft's own: fp32 adapters, every pass by itself, everything kept."""
    recomputed = case.recomputes_fraction and max(1, round(num_layers * case.recomputes_fraction))
    return Strategy(
        **{
            "method": Method.LORA,
            "adapter_dtype": Dtype.FP32,
            "optimizer": Optimizer.ADAMW_FOREACH,
            "checkpointing": False,
            "micro_batch": max(1, num_rows // case.divides_rows_by),
            "grad_accum": case.divides_rows_by,
            "seq_len": seq_len,
            "recomputed_layers": recomputed,
            **case.changes,
        }
    )


def in_fp32(strategy: Strategy) -> Strategy:
    """The same levers, with every value in fp32."""
    wide = {"weights": Dtype.FP32, "compute": Dtype.FP32, "adapter_dtype": Dtype.FP32}
    return strategy.model_copy(update=wide)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far two runs are apart."""

    mean_step_difference: float | None
    """Mean of the steps' |differences| at the end; None where their rows are not the same."""
    held_out_difference: float
    """Of the loss on rows that neither run has seen, after the last step."""


def compare_runs(one: Mapping[str, Any], other: Mapping[str, Any]) -> Distance:
    """Runs as `_lever_runs.py` tells them: `losses`, `held_out_loss` and `order_seed`."""
    mean = None
    if one["order_seed"] == other["order_seed"]:
        pairs = zip(one["losses"], other["losses"], strict=True)
        mean = statistics.fmean([abs(a - b) for a, b in pairs][-NUM_LAST:])
    return Distance(
        mean_step_difference=mean,
        held_out_difference=abs(one["held_out_loss"] - other["held_out_loss"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What luck alone changes in the plain run."""

    mean_step_difference: float
    """Of two draws of the adapters on the same rows: the nearest two of the plain runs."""
    all_step_differences: tuple[float, ...]
    """Of every two of them, in order of size."""
    held_out_difference: float
    """Of two draws or orders of rows: the mean over all pairs of plain runs."""
    repeated: Distance | None
    """Of the same run twice: what the device's own sums do."""


def find_noise(runs: Mapping[str, Mapping[str, Any]], method: Method = Method.LORA) -> Noise | None:
    """Strict where luck differs: the least and the mean of what it did. None with too few runs."""
    report = YARDSTICKS[method]
    lucky = [runs[name] for name in (report.plain, *report.lucky) if name in runs]
    distances = [compare_runs(one, other) for one, other in combinations(lucky, 2)]
    steps = [d.mean_step_difference for d in distances if d.mean_step_difference is not None]
    if not steps:
        return None
    again = runs.get(report.again) if report.again and report.plain in runs else None
    return Noise(
        mean_step_difference=min(steps),
        all_step_differences=tuple(sorted(steps)),
        held_out_difference=statistics.fmean(d.held_out_difference for d in distances),
        repeated=None if again is None else compare_runs(runs[report.plain], again),
    )


def is_within(distance: Distance, noise: Noise) -> bool:
    """Whether a lever changes the curve, and what was learnt, by no more than luck does."""
    step = distance.mean_step_difference
    is_same_curve = step is None or step <= noise.mean_step_difference
    return is_same_curve and distance.held_out_difference <= noise.held_out_difference


def judge_levers(runs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per lever that ran and whose counterpart did."""
    noises = {method: find_noise(runs, method) for method in YARDSTICKS}
    rows = []
    for case in CASES:
        if not (case.is_lever and case.name in runs and case.against in runs):
            continue
        run, back = runs[case.name], runs[case.against]
        distance, noise = compare_runs(run, back), noises[case.method]
        rows.append(
            {
                "lever": case.name,
                "against": case.against,
                "mean_step_difference": distance.mean_step_difference,
                "held_out_difference": distance.held_out_difference,
                "last_loss": mean_last(run["losses"]),
                "last_loss_turned_back": mean_last(back["losses"]),
                "held_out_loss": run["held_out_loss"],
                "held_out_loss_turned_back": back["held_out_loss"],
                "is_within_noise": None if noise is None else is_within(distance, noise),
                **_judge_gradients(case, run, runs.get(case.yardstick.plain)),
            }
        )
    return rows


def mean_last(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-NUM_LAST:])


def _judge_gradients(
    case: Case, run: Mapping[str, Any], plain: Mapping[str, Any] | None
) -> dict[str, Any]:
    found = run.get("gradient_error")
    own = None if plain is None else plain.get("gradient_error")
    wide = run.get("fp32_gradient_error")
    is_precise = None
    if found is not None and own is not None:
        most = MOST_BEYOND_PLAIN * case.rounds_coarser * own
        is_precise = found <= most and (wide is None or wide <= MOST_FP32_ERROR)
    return {
        "gradient_error": found,
        "plain_gradient_error": own,
        "fp32_gradient_error": wide,
        "is_precise": is_precise,
    }


def relate(squares: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Relative error over all tensors, and that of the worst, from |difference|^2 and |truth|^2.

    A tensor whose true gradient is all but zero has no say of its own.
    """
    whole = sum(truth for _, truth in squares)
    error = math.sqrt(sum(difference for difference, _ in squares) / whole)
    least = whole / len(squares) * 1e-6
    worst = max(math.sqrt(d / truth) for d, truth in squares if truth > least)
    return error, worst
