"""In which order the plans of a sweep are measured, and which of them at all."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

FIRST, SWEEP, AGAIN = "first", "sweep", "again"
Row = dict[str, Any]
Turn = tuple[str, Row]
"""When in the sweep, and which plan."""


def order_turns(
    plans: Iterable[Row], *, within: float, is_compiled_last: bool = False
) -> list[Turn]:
    """First plans; then one of each job in turn, fastest predicted first; first plans again.

    Compiling takes up to a minute a plan, so compiled ones can be left to the end.
    """
    by_job: dict[str, list[Row]] = {}
    for plan in plans:
        by_job.setdefault(plan["job"], []).append(plan)
    firsts = [plan for rows in by_job.values() for plan in rows if plan["rank"] == 1]
    rounds = zip_longest(*(choose_swept(rows, within=within) for rows in by_job.values()))
    swept = [plan for plans in rounds for plan in plans if plan is not None]
    if is_compiled_last:
        swept.sort(key=lambda plan: bool(plan["strategy"].get("compile", False)))
    return [
        *((FIRST, plan) for plan in firsts),
        *((SWEEP, plan) for plan in swept),
        *((AGAIN, plan) for plan in firsts),
    ]


def choose_swept(plans: list[Row], *, within: float) -> list[Row]:
    """All but the first plan of one job, up to `within` times its fastest by formula."""
    limit = within * min(map(read_seconds, plans))
    chosen = [plan for plan in plans if plan["rank"] > 1 and read_seconds(plan) <= limit]
    return sorted(chosen, key=read_seconds)


def read_seconds(plan: Row) -> float:
    """By closed form where it is known, so that all plans are compared alike."""
    return float(plan["closed_form_seconds"] or plan["predicted_seconds"])


def list_missing(turns: Iterable[Turn], rows: Iterable[Row]) -> list[Turn]:
    """Turns that have no row yet; a plan that failed has one.

    After more of a job was measured its first plan is due again: the machine may be another.
    """
    known = {(row["when"], row["job"], row["rank"]) for row in rows}
    missing: list[Turn] = []
    for when, plan in turns:
        is_due = when == AGAIN and any(plan["job"] == other["job"] for _, other in missing)
        if is_due or (when, plan["job"], plan["rank"]) not in known:
            missing.append((when, plan))
    return missing


def must_stop(when: str, rows: Iterable[Row], *, seconds_left: float) -> bool:
    """Whether what is left is needed for the first plans, which are measured again in any case."""
    reserved = sum(row["wall_seconds"] for row in rows if row["when"] == FIRST)
    return when == SWEEP and seconds_left < reserved
