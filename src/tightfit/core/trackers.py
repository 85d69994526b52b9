"""Experiment trackers: one record each. `--log-to`, the recipe's `log_to` and the worker read them.

A tracker's class is made with the run folder and the plan; it has `log(values, step)` and `close`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from pydantic_core import CoreSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerRecord:
    """What the program knows about one tracker."""

    factory: str
    """`module:name` of its class, imported only when a run logs to it."""
    package: str
    """What pip installs."""


TRACKERS = {
    "tensorboard": TrackerRecord(
        factory="tightfit.training.run_logger:TensorBoard", package="tensorboard"
    ),
    "wandb": TrackerRecord(factory="tightfit.training.run_logger:Wandb", package="wandb"),
    "mlflow": TrackerRecord(factory="tightfit.training.run_logger:Mlflow", package="mlflow"),
}


def _check_tracker(name: str) -> str:
    if name not in TRACKERS:
        from pydantic_core import PydanticKnownError

        *first, last = TRACKERS
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(first)} or {last}"})
    return name


class _OneOfTrackers:
    """For pydantic, which is not loaded here: `--help` reads the names."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(_check_tracker, handler(source))


TrackerName = Annotated[str, _OneOfTrackers()]
