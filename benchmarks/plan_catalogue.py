"""`plan` and `estimate` of every model of the catalogue on every GPU of it.

    python benchmarks/plan_catalogue.py           # all pairs, and the result file: half an hour
    python benchmarks/plan_catalogue.py --check   # some pairs, other ones for each version

What may come is a plan, or one error that says why there is none. Anything else is counted as a
failure: another exception, a figure that is no finite number. Seconds are CPU time of a process
that has everything imported, as a second command in a notebook; `measure_cli_seconds.py` has those
of whole commands.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from _provenance import write_result
from tightfit.api.estimate import estimate
from tightfit.api.options.training import EstimateOptions, PlanOptions
from tightfit.api.plan import plan
from tightfit.core.errors import UserError
from tightfit.core.packages import __version__
from tightfit.hardware.catalogue import list_gpus
from tightfit.models.catalogue import list_models

RESULT = Path(__file__).parent / "results" / "plan_catalogue.json"
LIMIT_SECONDS = 1.0
NUM_CHECKED = 300
Pair = tuple[str, str]


def try_pair(pair: Pair) -> dict[str, Any]:
    """What came of both verbs, and how long they took."""
    model, gpu = pair
    verbs: dict[str, Callable[[], Any]] = {
        "plan": lambda: plan(PlanOptions(job=model, on=gpu)).search.plans[0].estimate,
        "estimate": lambda: estimate(EstimateOptions(model=model, on=gpu)).estimate,
    }
    found: dict[str, Any] = {"model": model, "gpu": gpu}
    for verb, run in verbs.items():
        started = time.process_time()
        try:
            made = run().model_dump()
            bad = list(find_bad_numbers(made))
            found[verb] = f"not a number: {bad[0]}" if bad else "made"
        except UserError as error:
            found[verb] = "refused" if error.remedy else f"no remedy: {error.problem}"
        except Exception as error:
            found[verb] = f"{type(error).__name__}: {error}"
        found[f"{verb}_seconds"] = time.process_time() - started
    return found


def find_bad_numbers(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from find_bad_numbers(part, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from find_bad_numbers(part, path)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path


def summarise(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    rows = list(rows)
    verbs = {}
    for verb in ("plan", "estimate"):
        seconds = sorted(row[f"{verb}_seconds"] for row in rows)
        slowest = max(rows, key=lambda row, verb=verb: float(row[f"{verb}_seconds"]))  # type: ignore[misc]
        verbs[verb] = {
            "made": sum(row[verb] == "made" for row in rows),
            "refused": sum(row[verb] == "refused" for row in rows),
            "failures": [row for row in rows if row[verb] not in ("made", "refused")],
            "median_seconds": round(seconds[len(seconds) // 2], 3),
            "worst_seconds": round(seconds[-1], 3),
            "slowest": f"{slowest['model']} on {slowest['gpu']}",
        }
    return {"pairs": len(rows), **verbs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="some pairs, and nothing is written")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    pairs = [(row.model, gpu.name) for row in list_models() for gpu in list_gpus()]
    if arguments.check:
        pairs = random.Random(__version__).sample(pairs, NUM_CHECKED)
    with Pool(arguments.workers) as pool:
        total = summarise(pool.imap_unordered(try_pair, pairs, chunksize=8))
    print(json.dumps(total, indent=1))
    failures = [*total["plan"]["failures"], *total["estimate"]["failures"]]
    slow = [verb for verb in ("plan", "estimate") if total[verb]["worst_seconds"] > LIMIT_SECONDS]
    if not arguments.check:
        write_result(
            RESULT, "benchmarks/plan_catalogue.py", limit_seconds=LIMIT_SECONDS, total=total
        )
    if failures:
        print(f"error: {len(failures)} pairs failed")
    if slow and not arguments.check:
        print(f"error: {' and '.join(slow)} took longer than {LIMIT_SECONDS:g} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
