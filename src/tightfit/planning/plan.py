"""Plan: the contract between planning and everything that runs; its rent, stages and packages."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

from pydantic import NonNegativeFloat, PositiveInt

from tightfit.core.dtypes import Dtype
from tightfit.core.frozen import Frozen
from tightfit.core.profiles import DataProfile
from tightfit.core.strategy import Strategy, Training
from tightfit.estimation.result import Estimate, Phase
from tightfit.hardware.types import Gpu, Node, Price
from tightfit.models.spec import ModelSpec
from tightfit.planning.describe import describe_strategy

SCHEMA_VERSION = 1


class PlanHardware(Frozen):
    """The slice of the cluster that the plan runs on."""

    group: str
    node: Node
    num_nodes: PositiveInt
    network_bytes_per_second: NonNegativeFloat | None = None
    source: str


class Cost(Frozen):
    """Rent of the hardware for one run, at the catalogue's price."""

    usd_per_hour: NonNegativeFloat
    usd_per_run: NonNegativeFloat | None
    """None where the run's length is not known (no dataset given)."""
    source: str


class Plan(Frozen):
    """How one job will run, and what it is predicted to need. Later verbs read this, not flags."""

    schema_version: int = SCHEMA_VERSION
    tightfit_version: str
    model: ModelSpec
    strategy: Strategy
    hardware: PlanHardware
    data: DataProfile | None
    num_epochs: NonNegativeFloat
    effective_batch: PositiveInt
    """Sequences per optimizer step over all ranks."""
    estimate: Estimate
    cost: Cost | None
    training: Training | None = None
    """None for a plan that was only asked for, not prepared to run."""
    why: tuple[str, ...]
    """The levers pulled and what each brings, in plain words."""
    warnings: tuple[str, ...] = ()
    """What works but deserves a word: wheels that will end, positions beyond training."""

    @property
    def summary(self) -> str:
        """The strategy in one line."""
        return describe_strategy(self.strategy, is_cpu=self.hardware.node.gpu.is_cpu)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run, as planned; 0 where the data is not counted."""
        if self.training is not None and self.training.max_steps is not None:
            return self.training.max_steps
        per_epoch = self.estimate.time.steps_per_epoch
        return ceil(per_epoch * self.num_epochs) if per_epoch else 0


class Exclusion(Frozen):
    """Strategies that were left out, and the one reason they share."""

    rule: str
    reason: str
    num_strategies: PositiveInt
    example: str
    """One of them, described in a few words."""
    link: str = ""


# What a plan's hardware costs to rent, at the catalogue's prices.

HOURS_PER_MONTH = 730
"""As the clouds bill a month: 8760 / 12."""


def find_price(gpu: Gpu, *, clouds: frozenset[str] | None = None) -> Price | None:
    """The cheapest cloud by its own median on-demand price; only `clouds` where they are named."""
    return gpu.cheapest_at(clouds)


def estimate_cost(
    *,
    gpu: Gpu,
    num_gpus: int,
    estimate: Estimate,
    num_epochs: float,
    clouds: frozenset[str] | None = None,
) -> Cost | None:
    """Rent of `num_gpus` for the run. Leaves out host, disk, traffic and the time to set up."""
    price = find_price(gpu, clouds=clouds)
    if price is None:
        return None
    usd_per_hour = price.usd_per_gpu_hour * num_gpus
    seconds = estimate.time.run_seconds(num_epochs)
    return Cost(
        usd_per_hour=usd_per_hour,
        usd_per_run=None if seconds is None else usd_per_hour * seconds / 3600,
        source=f"{price.cloud}, {price.date}, median on demand: {price.source}",
    )


# Stages of a job

STAGES = {
    "load": "load",
    "reference": "forward",
    "forward": "forward",
    "loss": "forward",
    "backward": "backward",
    "recompute": "backward",
    "backward_end": "backward",
    "optimizer": "optimizer",
    "eval": "eval",
    "save": "save",
    "merge": "merge",
}
"""Moments of the estimate by the stage people know."""


def list_stages(estimate: Estimate) -> dict[str, int]:
    """Peak bytes per GPU by stage of the job, in the order they happen."""
    return {
        stage: phase.peak_reserved_bytes
        for stage, phase in fullest_phases(estimate).items()
        if stage in STAGES.values()
    }


def fullest_phases(estimate: Estimate) -> dict[str, Phase]:
    """The fullest moment of each stage; a moment that belongs to none is a stage of its own."""
    fullest: dict[str, Phase] = {}
    for phase in estimate.phases:
        stage = STAGES.get(phase.name, phase.name)
        held = fullest.get(stage)
        if held is None or phase.peak_reserved_bytes > held.peak_reserved_bytes:
            fullest[stage] = phase
    return fullest


# Packages that a strategy needs beyond those that all training needs.


class RequiredPackage(NamedTuple):
    """A package, and the extra of ours that brings it."""

    package: str
    extra: str
    is_wanted: Callable[[Strategy], bool]

    @property
    def command(self) -> str:
        return f"pip install 'tightfit[{self.extra}]'"


BITSANDBYTES = RequiredPackage(
    package="bitsandbytes",
    extra="bits",
    is_wanted=lambda s: (
        s.weights in (Dtype.NF4, Dtype.INT8) or s.optimizer.record.package == "bitsandbytes"
    ),
)
REQUIRED_PACKAGES = (
    BITSANDBYTES,
    RequiredPackage(
        package="liger-kernel",
        extra="kernels",
        is_wanted=lambda s: s.fused_kernels or s.uses_liger_loss,
    ),
    RequiredPackage(package="deepspeed", extra="zero", is_wanted=lambda s: s.sharding.is_zero),
)


def list_missing_packages(
    strategy: Strategy, read_version: Callable[[str], str | None]
) -> tuple[RequiredPackage, ...]:
    """What the strategy needs and `read_version` does not know."""
    return tuple(
        need
        for need in REQUIRED_PACKAGES
        if need.is_wanted(strategy) and read_version(need.package) is None
    )
