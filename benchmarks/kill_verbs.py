"""`kill -9` at random moments of every verb that writes, then the same command again.

    nice -n 19 python benchmarks/kill_verbs.py [--moments 50] [--verbs merge,farm] [--fresh]

Half of the moments are before a change of a file (write, fsync, rename, ...), half at a random
share of the CPU time; half kill all processes, half a single one. Afterwards the same command has
to end with the same result, byte for byte, and leave no other file, process or port than one that
nobody disturbed. The moments are seeded. The result file is written after each, and the next call
goes on behind the last one. One model of two layers; imports are done before.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from _provenance import write_result  # noqa: E402
from kill_trials import draw_moment, run_undisturbed, try_moment  # noqa: E402
from verb_lab import VerbLab  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "kills.json"
_HEAD = f"{'verb':<16}{'moments':>8}{'running':>9}{'all':>6}{'one':>6}{'went on':>9}{'failed':>8}"


def read_rows() -> dict[str, dict[str, Any]]:
    if not RESULT.exists():
        return {}
    return {row["verb"]: row for row in json.loads(RESULT.read_text())["verbs"]}


def begin_row(verb: str) -> dict[str, Any]:
    """`running`: of the moments, those at which the command had not ended yet."""
    return {
        "verb": verb,
        "moments": 0,
        "running": 0,
        "all_killed": 0,
        "one_killed": 0,
        "went_on": 0,
        "failures": [],
    }


def render(row: dict[str, Any]) -> str:
    counts = (row["running"], row["all_killed"], row["one_killed"])
    return (
        f"{row['verb']:<16}{row['moments']:>8}{counts[0]:>9}{counts[1]:>6}{counts[2]:>6}"
        f"{row['went_on']:>9}{len(row['failures']):>8}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--verbs", default="", help="comma-separated; all of them by default")
    parser.add_argument("--home", type=Path, default=ROOT / "build" / "kills")
    parser.add_argument("--fresh", action="store_true", help="begin again with these verbs")
    parser.add_argument("--only", type=int, help="show one moment, and write nothing")
    given = parser.parse_args()
    lab = VerbLab(given.home)
    rows = read_rows()
    try:
        names = [name for name in given.verbs.split(",") if name] or list(lab.verbs)
        for name in names:
            verb = lab.verbs[name]
            row = begin_row(name) if given.fresh or name not in rows else rows[name]
            rows[name] = row
            numbers = range(row["moments"], given.moments)
            if given.only is not None:
                numbers = range(given.only, given.only + 1)
            if not numbers:
                continue
            undisturbed = run_undisturbed(lab, verb)
            for number in numbers:
                moment = draw_moment(verb, undisturbed, number)
                trial = try_moment(lab, verb, undisturbed, moment)
                print(name, number, moment.describe(), *trial.problems, sep="; ", flush=True)
                if given.only is not None:
                    continue
                row["moments"] += 1
                row["running"] += trial.was_running
                row["all_killed"] += trial.was_running and moment.kills_all
                row["one_killed"] += trial.was_running and not moment.kills_all
                row["went_on"] += trial.went_on
                if trial.problems:
                    said = "; ".join(trial.problems)[:500]
                    row["failures"].append(f"moment {number}, {moment.describe()}: {said}")
                ordered = [rows[verb] for verb in lab.verbs if verb in rows]
                write_result(RESULT, "benchmarks/kill_verbs.py", verbs=ordered)
    finally:
        lab.close()
    print(_HEAD)
    for name in lab.verbs:
        if name in rows:
            print(render(rows[name]))
    return 1 if any(row["failures"] for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
