"""What the trials of verbs share: rows that are kept after each trial, and gone on with."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _provenance import write_result

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from kill_trials import Undisturbed, run_undisturbed  # noqa: E402
from verb_lab import Verb, VerbLab  # noqa: E402

Counts = dict[str, int]
Try = Callable[[VerbLab, Verb, Undisturbed, str, int], tuple[Counts, str, tuple[str, ...]]]
"""Lab, verb, undisturbed, kind, number to counts, words and problems."""


def run_trials(
    command: str, result: Path, kinds: tuple[str, ...], try_one: Try, *, default: int, about: str
) -> int:
    """Up to so many trials of each verb and kind; the exit code."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--trials", type=int, default=default, help="of each verb and kind")
    parser.add_argument("--verbs", default="", help="comma-separated; all of them by default")
    parser.add_argument("--home", type=Path, default=ROOT / "build" / "verb-trials")
    parser.add_argument("--fresh", action="store_true", help="begin again with these verbs")
    parser.add_argument("--only", type=int, help="show this trial alone, and write nothing")
    given = parser.parse_args()
    lab = VerbLab(given.home)
    kept = json.loads(result.read_text())["rows"] if result.exists() else []
    rows: dict[tuple[str, str], dict[str, Any]] = {(row["verb"], row["kind"]): row for row in kept}
    try:
        names = [name for name in given.verbs.split(",") if name] or list(lab.verbs)
        undisturbed: dict[str, Undisturbed] = {}
        for name, kind in itertools.product(names, kinds):
            if given.fresh or (name, kind) not in rows:
                rows[name, kind] = {"verb": name, "kind": kind, "trials": 0, "failures": []}
        while due := [
            (rows[name, kind]["trials"], place, name, kind)
            for place, (name, kind) in enumerate(itertools.product(names, kinds))
            if rows[name, kind]["trials"] < given.trials
        ]:
            # Those with the fewest trials: a run that is cut off has as many of each.
            fewest, _, name, kind = min(due)
            number, row = fewest if given.only is None else given.only, rows[name, kind]
            if name not in undisturbed:
                undisturbed[name] = run_undisturbed(lab, lab.verbs[name])
            began_s = time.monotonic()
            counts, words, problems = try_one(lab, lab.verbs[name], undisturbed[name], kind, number)
            seconds = f"{time.monotonic() - began_s:.0f} s"
            print(name, kind, number, words, seconds, *problems, sep="; ", flush=True)
            if given.only is not None:
                break
            row["trials"] += 1
            for key, count in counts.items():
                row[key] = row.get(key, 0) + count
            if problems:
                row["failures"].append(f"{number}, {words}: {'; '.join(problems)}"[:500])
            ordered = [
                rows[key] for key in itertools.product(lab.verbs, kinds)
                if rows.get(key, {}).get("trials")
            ]  # fmt: skip
            write_result(result, command, rows=ordered)
    finally:
        lab.close()
    for row in rows.values():
        shown = {key: value for key, value in row.items() if key != "failures"}
        print(*shown.values(), len(row["failures"]), sep="\t")
    return 1 if any(row["failures"] for row in rows.values()) else 0
