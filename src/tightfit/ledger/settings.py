"""The settings of a run as flat names and values, and what differs between runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.ledger.report import describe_hardware
from tightfit.planning.plan import Plan

NOT_SET = "-"


def list_settings(plan: Plan) -> dict[str, str]:
    """What was chosen, by the names that recipes and `--set` use."""
    found = {
        "model": plan.model.name,
        "hardware": describe_hardware(plan),
        "data": NOT_SET if plan.data is None else plan.data.source,
        "epochs": f"{plan.num_epochs:g}",
        "effective_batch": str(plan.effective_batch),
    }
    found |= _flatten(plan.strategy.model_dump(mode="json"))
    if plan.training is not None:
        found |= _flatten(plan.training.model_dump(mode="json", exclude={"data"}))
        found["data"] = ", ".join(source.path for source in plan.training.data) or found["data"]
    found["tightfit_version"] = plan.tightfit_version
    return found


def list_differing(plans: Sequence[Plan]) -> dict[str, tuple[str, ...]]:
    """Name to one value per plan, for names whose values are not all the same."""
    settings = [list_settings(plan) for plan in plans]
    names = dict.fromkeys(name for found in settings for name in found)
    rows = {name: tuple(found.get(name, NOT_SET) for found in settings) for name in names}
    return {name: values for name, values in rows.items() if len(set(values)) > 1}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = _render(value)
    return flat


def _render(value: Any) -> str:
    if value is None:
        return NOT_SET
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_render, value)) or NOT_SET
    return f"{value:g}" if isinstance(value, float) else str(value)
