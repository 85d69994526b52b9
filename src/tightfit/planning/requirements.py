"""Packages that a strategy needs beyond those that all training needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Loss, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredPackage:
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
        is_wanted=lambda s: s.fused_kernels or s.loss is Loss.FUSED,
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
