"""A saved plan given as the job: read back and shown, not searched again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tightfit.cli.flags.plan import PlanFlags
from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.planning.plan import Plan
from tightfit.planning.search import SearchResult

_MARKS = {"strategy", "estimate", "hardware", "model"}
MAX_FILE_BYTES = 64 * 2**20


def read_saved_plans(name: str) -> SearchResult | None:
    """What `--save` or `plan --json` wrote; None where the name is no such file."""
    path = Path(name).expanduser() if name.lower().endswith(".json") else None
    document = None if path is None else _read_json(path)
    if not isinstance(document, dict):
        return None
    held = document.get("plans", [document])
    if not isinstance(held, list) or not held or not all(map(_is_plan, held)):
        return None
    try:
        plans = tuple(Plan.model_validate_json(json.dumps(plan)) for plan in held)
    except ValidationError as fault:
        maker = held[0].get("tightfit_version", "another version")
        raise InvalidInputError(
            f"{name} is a plan that this version cannot read (written by tightfit {maker}).",
            remedy="plan the model again: tightfit plan MODEL --on HARDWARE --save plan.json",
        ) from fault
    return SearchResult(plans=plans, excluded=(), num_considered=0, shortfall=None)


def refuse_new_wishes(flags: PlanFlags, plan: Plan) -> None:
    """Options that would ask for another plan than the saved one."""
    given = {
        "--on": flags.on,
        "--network": flags.network,
        "--seq-len": flags.seq_len,
        "--data": flags.data,
        "--method": flags.method,
        "--epochs": flags.epochs,
        "--effective-batch": flags.effective_batch,
        "--set": flags.settings or None,
        "--buy": flags.buy or None,
        "--explain": flags.explain or None,
    }
    option = next((name for name, value in given.items() if value is not None), None)
    if option is not None:
        raise UsageError(
            f"{flags.job} is a saved plan, which {option} cannot change.",
            remedy=f"tightfit plan {plan.model.name} with the same options    (plans it anew)",
        )


def _read_json(path: Path) -> Any:
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # whoever reads it as a model says what is wrong with it


def _is_plan(document: Any) -> bool:
    return isinstance(document, dict) and document.keys() >= _MARKS
