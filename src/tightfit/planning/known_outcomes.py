"""Outcomes of earlier runs on this hardware: what ran out of memory is not tried again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from tightfit.core.strategy import Strategy
from tightfit.core.units import render_bytes
from tightfit.estimation.memory import estimate_step_peak_bytes
from tightfit.hardware.types import Node
from tightfit.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownOutcome:
    """How one run ended."""

    model_name: str
    gpu_name: str
    strategy: Strategy
    status: Literal["finished", "out-of-memory"]
    peak_bytes: int | None
    """Measured, per GPU, where the run told it."""
    date: str
    """ISO 8601: later ones count more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownLimit:
    """A predicted need that is known to be too much on one kind of card."""

    need_bytes: int
    date: str

    def explain(self, gpu_name: str) -> str:
        return (
            f"a run predicted at {render_bytes(self.need_bytes)} ran out of memory on "
            f"{gpu_name} on {self.date[:10]}; these need as much or more"
        )


def find_known_limit(
    known: Iterable[KnownOutcome], spec: ModelSpec, node: Node
) -> KnownLimit | None:
    """The smallest predicted need that failed with this model on this card.

    A failure is forgotten where a later run finished with no smaller a need: the card
    may have been shared, or the software has changed.
    """
    is_cpu, context = node.gpu.is_cpu, node.gpu.measured_context_bytes
    predict = partial(estimate_step_peak_bytes, is_cpu=is_cpu, measured_context_bytes=context)
    reported = [
        (outcome, predict(spec, outcome.strategy))
        for outcome in known
        if outcome.model_name == spec.name
        and outcome.gpu_name == node.gpu.name
        and outcome.strategy.is_trained
    ]
    done = [(outcome.date, need) for outcome, need in reported if outcome.status == "finished"]
    failed = [
        KnownLimit(need_bytes=need, date=outcome.date)
        for outcome, need in reported
        if outcome.status == "out-of-memory"
        and not any(date > outcome.date and other >= need for date, other in done)
    ]
    return min(failed, key=lambda limit: (limit.need_bytes, limit.date), default=None)
