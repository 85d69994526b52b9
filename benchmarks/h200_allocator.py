"""The allocator model against the card: real allocations and frees, replayed.

    .venv/bin/python benchmarks/h200_allocator.py            # table, and the result file
    .venv/bin/python benchmarks/h200_allocator.py --check    # fails if it got worse

`measure_trace.py` recorded the events of whole jobs on one H200 (loading and two steps), what
torch had reserved at most, and, for some, the smallest memory fraction in which they survive.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _provenance import check_total, write_result
from tightfit.core.units import GIB
from tightfit.trace.caching_allocator import AllocatorSettings, find_smallest_capacity, replay

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = RESULTS / "h200_trace_dev.json"
EVENTS = RESULTS / "h200_trace_dev_events.jsonl.gz"
RESULT = RESULTS / "h200_allocator.json"
NOISE = 0.0005


def read_events() -> Iterator[dict[str, Any]]:
    with gzip.open(EVENTS, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def compare(job: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
    """One job's reserve and smallest capacity, by the model and on the card."""
    settings = AllocatorSettings(expandable_segments=job["expandable_segments"])
    sizes, events, streams = recorded["sizes"], recorded["events"], recorded["streams"]
    replayed = replay(sizes, events, settings, streams=streams)
    assert replayed is not None, "nothing runs out of memory without a limit"
    reserved = recorded["max_memory_reserved_bytes"]
    row = {
        "name": job["name"],
        "events": len(events),
        "allocated_bytes": recorded["max_memory_allocated_bytes"],
        "replayed_allocated_bytes": replayed.peak_allocated_bytes,
        "reserved_bytes": reserved,
        "replayed_reserved_bytes": replayed.peak_reserved_bytes,
        "reserved_error": round(replayed.peak_reserved_bytes / reserved - 1, 5),
    }
    if "surviving" in job:
        found = find_smallest_capacity(sizes, events, settings, streams=streams)
        row |= _compare_capacity(found, job["surviving"])
    return row


def _compare_capacity(found: int, tried: dict[str, Any]) -> dict[str, Any]:
    """The card was asked in steps: the true capacity lies between a failure and a survival."""
    failed, survived = tried["largest_failing_bytes"] or 0, tried["smallest_surviving_bytes"]
    outside = max(failed - found, found - survived, 0)
    return {
        "failing_bytes": failed,
        "surviving_bytes": survived,
        "replayed_capacity_bytes": found,
        "capacity_error": round(outside / survived, 5),
    }


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    reserved = [abs(row["reserved_error"]) for row in rows]
    capacities = [row["capacity_error"] for row in rows if "capacity_error" in row]
    return {
        "jobs": len(rows),
        "events": sum(row["events"] for row in rows),
        "worst_reserved_error": max(reserved),
        "exact_reserved": sum(error == 0 for error in reserved),
        "jobs_with_capacity": len(capacities),
        "worst_capacity_error": max(capacities),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed result")
    arguments = parser.parse_args()
    jobs = {job["name"]: job for job in json.loads(MEASURED.read_text())["jobs"]}
    rows = [compare(jobs[recorded["name"]], recorded) for recorded in read_events()]
    for row in rows:
        outside = f"{row['capacity_error']:7.2%}" if "capacity_error" in row else "      -"
        print(
            f"{row['reserved_bytes'] / GIB:7.3f} {row['replayed_reserved_bytes'] / GIB:7.3f} "
            f"{row['reserved_error']:+7.2%} capacity {outside} {row['name']}"
        )
    total = summarise(rows)
    print(json.dumps(total))
    if arguments.check:
        return check_total(total, RESULT, count="jobs", noise=NOISE, what="allocator")
    write_result(RESULT, "benchmarks/h200_allocator.py", total=total, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
