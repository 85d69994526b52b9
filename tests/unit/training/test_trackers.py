"""Trackers: a record is all that `log_to` and a run need."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from tightfit.core.errors import SetupError
from tightfit.core.strategy import Training
from tightfit.core.trackers import TRACKERS, TrackerRecord
from tightfit.training.run_logger import open_trackers


class ListTracker:
    """A toy: keeps what it is given."""

    def __init__(self, run: Any, plan: Any) -> None:
        self.made_with = (run, plan)

    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def make_training(name: str) -> Training:
    return Training(model_path="/m", learning_rate=1e-4, log_to=(name,))


def test_a_registered_tracker_is_accepted_and_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    toys = ModuleType("toys")
    vars(toys)["ListTracker"] = ListTracker
    monkeypatch.setitem(sys.modules, "toys", toys)
    monkeypatch.setitem(TRACKERS, "toy", TrackerRecord(factory="toys:ListTracker", package="toys"))
    run: Any = object()
    plan: Any = object()

    (tracker,) = open_trackers(make_training("toy").log_to, run, plan)

    assert isinstance(tracker, ListTracker)
    assert tracker.made_with == (run, plan)


def test_an_unknown_tracker_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="tensorboard, wandb or mlflow"):
        make_training("wanbd")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        TRACKERS, "toy", TrackerRecord(factory="no_such_module:Toy", package="toy-tracker")
    )
    nothing: Any = None
    with pytest.raises(SetupError) as caught:
        open_trackers(("toy",), nothing, nothing)
    assert "pip install toy-tracker" in caught.value.remedy
