"""Hostile files and flags through every reader, 10,000 of each kind.

    python benchmarks/fuzz.py                  # prints a table and writes the result file
    python benchmarks/fuzz.py --seconds 120    # no further cases of a kind after so long
    python benchmarks/fuzz.py --check          # prints it alone; fails where a case ended badly

TIGHTFIT_FUZZ_CASES sets another number of cases. The result is written after each file of tests,
and keeps the kinds that were not run. The cases are seeded: the same number gives the same ones.
Refused: one error with a remedy. A failure: a traceback, 10 s of CPU time, a wait of 40 s, or 1 GiB
of memory beside the command's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _provenance import write_result

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "hostile"
RESULT = ROOT / "benchmarks" / "results" / "fuzz.json"
DEFAULT_CASES = "10000"
LEAST_CASES = 50
"""Kinds with fewer are lists of what once failed."""
_HEAD = f"{'kind':<22}{'cases':>8}{'refused':>9}{'accepted':>9}{'failed':>8}{'s':>9}"
_HEAD += f"{'slowest s':>11}{'peak MiB':>10}"


def run_tests(file: Path, seconds: float) -> tuple[list[dict[str, Any]], int]:
    """What became of each kind's cases, and pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        cases = os.environ.get("TIGHTFIT_FUZZ_CASES", DEFAULT_CASES)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", str(file)],
            cwd=ROOT,
            env={
                **os.environ,
                "TIGHTFIT_FUZZ_CASES": cases,
                "TIGHTFIT_FUZZ_SECONDS": str(seconds),
                "TIGHTFIT_FUZZ_REPORT": str(report),
                "OMP_NUM_THREADS": "1",
            },
            check=False,
        )
        lines = report.read_text().splitlines() if report.exists() else []
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["cases"] >= LEAST_CASES], done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each kind")
    parser.add_argument("files", nargs="*", default=sorted(FOLDER.glob("test_*.py")), type=Path)
    options = parser.parse_args()
    kept = json.loads(RESULT.read_text())["kinds"] if RESULT.exists() else []
    rows: dict[str, dict[str, Any]] = {row["kind"]: row for row in kept}
    worst = 0
    print(_HEAD)
    for file in options.files:
        found, code = run_tests(file, options.seconds)
        worst = max(worst, code)
        for row in found:
            rows[row["kind"]] = row
            print(
                f"{row['kind']:<22}{row['cases']:>8,}{row['refused']:>9,}{row['accepted']:>9,}"
                f"{row['failures']:>8,}{row['seconds']:>9,.0f}{row['slowest_seconds']:>11.1f}"
                f"{row['peak_bytes'] / 2**20:>10,.0f}",
                flush=True,
            )
        if found and not options.check:
            write_result(RESULT, "benchmarks/fuzz.py", kinds=list(rows.values()))
    return worst


if __name__ == "__main__":
    sys.exit(main())
