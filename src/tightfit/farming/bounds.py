"""A range in which a rate, a time or a cost is expected."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """A range: an estimate between `low` and `high`."""

    low: float
    high: float

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.low + other.low, self.high + other.high)

    def scaled(self, factor: float) -> Bounds:
        return Bounds(self.low * factor, self.high * factor)

    def seconds_for(self, amount: float) -> Bounds:
        """The seconds that an amount takes at this rate."""
        return Bounds(amount / self.high, amount / self.low)
