"""After an out-of-memory: the next plan takes the place of the one that failed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tightfit.core.errors import DoesNotFitError
from tightfit.core.files import write_atomic
from tightfit.core.units import render_bytes
from tightfit.launch.outcome import conclude_as, read_state
from tightfit.ledger.metrics import PLAN_CHANGE, EventRecord, append_record
from tightfit.ledger.run_folder import RunFolder, RunStatus
from tightfit.planning.plan import Plan

WAIT_SECONDS = 120.0
"""For another node to write the plan that both come to."""

ListFallbacks = Callable[[Plan], list[Plan]]


def take_next_plan(run: RunFolder, failed: Plan, list_fallbacks: ListFallbacks) -> Plan:
    """Write the next plan; the old one stays as plan.1.json, plan.2.json, ...

    Every node of a job comes here. Whoever keeps the old plan first writes the
    new one; the others wait for it.
    """
    found = list_fallbacks(failed)
    state = read_state(run)
    step = state.step if state else 0
    if not found:
        raise _nothing_left(failed, step)
    if not _keep(run, failed):
        return _wait_for_change(run, failed, found[0])
    run.write_plan(found[0])
    text = f"{PLAN_CHANGE}{failed.summary}; going on with {found[0].summary}"
    append_record(run.metrics_path, EventRecord(step=step, text=text))
    run.write_state(conclude_as(run, RunStatus.PREPARED, exit_code=0))
    return found[0]


def count_failed_plans(run: RunFolder) -> int:
    """Plans that have been left behind."""
    return len(_list_kept(run.path))


def _list_kept(folder: Path) -> list[Path]:
    return [path for path in folder.glob("plan.*.json") if path.name.split(".")[1].isdecimal()]


def _keep(run: RunFolder, failed: Plan) -> bool:
    """Whether this node is the one that keeps the old plan, and so writes the new one."""
    number = count_failed_plans(run) + 1
    if run.read_plan() != failed:
        return False  # another node was quicker
    path = run.path / f"plan.{number}.json"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        return False
    write_atomic(path, failed.model_dump_json(indent=2) + "\n")
    return True


def _wait_for_change(run: RunFolder, failed: Plan, expected: Plan) -> Plan:
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        found = run.read_plan()
        if found != failed:
            return found
        time.sleep(0.5)
    run.write_plan(expected)  # its writer died in between; all nodes come to the same plan
    return expected


def _nothing_left(failed: Plan, step: int) -> DoesNotFitError:
    node = failed.hardware.node
    capacity = failed.estimate.gpu.capacity_bytes or node.gpu.memory_bytes
    return DoesNotFitError(
        f"Out of memory at step {step}, and no smaller plan is left on {node.gpu.name} "
        f"({render_bytes(capacity)}).",
        remedy=f"a shorter --seq-len than {failed.strategy.seq_len}, or --method qlora",
    )
