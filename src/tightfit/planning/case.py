"""Case, Rule, Violation: what a legality rule looks at, is, and says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Loss, Method, Optimizer, Strategy
from tightfit.hardware.types import Gpu, Node
from tightfit.models.spec import ModelSpec

T5_TYPES = frozenset({"t5", "mt5", "umt5", "longt5"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a rule looks at."""

    spec: ModelSpec
    strategy: Strategy
    node: Node
    num_nodes: int
    """Nodes there are; the strategy says how many of them it uses."""

    @property
    def gpu(self) -> Gpu:
        return self.node.gpu

    @property
    def is_cpu(self) -> bool:
        return self.node.gpu.is_cpu

    @property
    def capability(self) -> str:
        """As people write it: `7.5`; `not NVIDIA` for other makes."""
        found = self.node.gpu.compute_capability
        return f"{found[0]}.{found[1]}" if found else "not NVIDIA"

    def is_below(self, major: int, minor: int = 0) -> bool:
        """An NVIDIA card older than this compute capability."""
        found = self.node.gpu.compute_capability
        return found is not None and found < (major, minor)

    @property
    def lacks_grouped_kernel(self) -> bool:
        """SDPA has a fused kernel for grouped heads in 16 bit on Ampere and later alone."""
        is_grouped = self.spec.num_kv_heads < self.spec.num_heads
        is_nvidia = self.node.gpu.compute_capability is not None
        is_wide = self.strategy.compute is Dtype.FP32
        return is_grouped and is_nvidia and (is_wide or self.is_below(8))

    @property
    def has_learned_positions(self) -> bool:
        """A table row per position. T5's buckets and rotary models have none."""
        longest = self.spec.max_positions
        return longest is not None and self.spec.position_params >= longest * self.spec.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that does not work. `reason` is filled with c (case), s (strategy), m (model)."""

    name: str
    reason: str
    source: str
    """A link or a version: where to look when the world may have changed."""
    violated: Callable[[Case], bool]
    severity: Literal["illegal", "warning"] = "illegal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that one case breaks, its reason with the case's values."""

    rule: str
    reason: str
    source: str


def is_halved(case: Case) -> bool:
    """Whether anything is stored or computed in bf16."""
    s = case.strategy
    stored = (s.weights, s.compute, s.adapter_dtype if s.method is Method.LORA else s.compute)
    return Dtype.BF16 in stored


def wants_triton(case: Case) -> bool:
    """Whether kernels are written or compiled for the card."""
    s = case.strategy
    has_kernels = s.fused_kernels or s.optimizer is Optimizer.ADAMW_KERNEL
    return has_kernels or s.loss is Loss.FUSED or s.compile
