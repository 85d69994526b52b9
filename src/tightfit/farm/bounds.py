"""A number that is known only roughly: the least and the most it is expected to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """From `low` to `high`."""

    low: float
    high: float

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.low + other.low, self.high + other.high)

    def scaled(self, factor: float) -> Bounds:
        return Bounds(self.low * factor, self.high * factor)

    def seconds_for(self, amount: float) -> Bounds:
        """What an amount takes at this rate: the quicker the sooner."""
        return Bounds(amount / self.high, amount / self.low)


def sum_bounds(parts: Iterable[Bounds]) -> Bounds:
    return sum(parts, Bounds(0.0, 0.0))


def span(values: Iterable[float]) -> Bounds:
    """All of them; at least one."""
    found = sorted(values)
    return Bounds(found[0], found[-1])
