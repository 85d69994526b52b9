"""Staging to four hosts on shaped links: every way measured, and the one that was chosen.

    python benchmarks/stage_links.py

Needs root: the hosts and a storage host are namespaces, their links shaped by tc. The model lies
on the storage host; the others mount it by FUSE, so that what they read crosses the links.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from _provenance import write_result

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "stage_links.json"
COMMAND = "benchmarks/stage_links.py"
WAYS = ("all-read", "chain", "tree")
sys.path.insert(0, str(ROOT / "tests" / "support"))

from stage_lab import MODEL_BYTES, NODES, SCENARIOS, Scenario, StageLab, open_lab  # noqa: E402


def measure(lab: StageLab, scenario: Scenario, num_times: int) -> dict[str, Any]:
    """The best of a few times of each way, since other work on the machine only adds to them."""
    lab.shape(scenario)
    measured = {way: min(take(lab, way) for _ in range(num_times)) for way in WAYS}
    done = lab.stage()
    lab.clean()
    best = min(measured, key=lambda way: measured[way])
    row = {
        "scenario": scenario.name,
        "storage_bytes_per_second": scenario.storage,
        "link_bytes_per_second": scenario.link,
        "measured_seconds": {way: round(value, 2) for way, value in measured.items()},
        "best": best,
        "chosen": done["how"],
        "chosen_over_best": round(measured[done["how"]] / measured[best], 3),
        "rates": {name: round(rate) for name, rate in done["rates"].items()},
        "predicted_seconds": {
            way: round(value, 2) for way, value in done["predicted_seconds"].items()
        },
        "measuring_seconds": round(done["measure_seconds"], 2),
        "seconds_after_measuring": round(done["measured_seconds"], 2),
        "why": done["why"],
    }
    print(row, flush=True)
    return row


def take(lab: StageLab, way: str) -> float:
    done = lab.stage("--how", way)
    lab.clean()
    return float(done["measured_seconds"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=2, help="measurements of each way")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open_lab(Path(folder)) as lab:
        rows = [measure(lab, scenario, arguments.times) for scenario in SCENARIOS]
    worst = max(row["chosen_over_best"] for row in rows)
    total = {"scenarios": len(rows), "worst_chosen_over_best": worst}
    write_result(
        RESULT, COMMAND, num_nodes=len(NODES), model_bytes=MODEL_BYTES, total=total, scenarios=rows
    )
    print(f"the chosen way takes at most {worst:.2f} times the best one; wrote {RESULT}")
    return 0 if worst <= 1.2 else 1


if __name__ == "__main__":
    raise SystemExit(main())
