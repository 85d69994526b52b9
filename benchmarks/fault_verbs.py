"""Every verb that writes on a full, failing, read-only or slow disk, and under a clock that jumps.

    nice -n 19 python benchmarks/fault_verbs.py [--trials 10] [--verbs merge,farm] [--fresh]

A library under the file system (tests/support/faults.c) lets the n-th change of a file fail, or
all from there on. The verb has to end with one error that names the folder, and where there is no
room how much there is; or well, with the right result. The same command without the fault then
ends as if nothing had been, and leaves nothing else. Seeded, and gone on with by the next call.
"""

from __future__ import annotations

import sys

from _verb_trials import ROOT, Counts, run_trials
from fault_trials import FAULTS, try_fault
from kill_trials import Undisturbed
from verb_lab import Verb, VerbLab

RESULT = ROOT / "benchmarks" / "results" / "faults.json"
_BY_NAME = {fault.name: fault for fault in FAULTS}


def try_one(
    lab: VerbLab, verb: Verb, undisturbed: Undisturbed, kind: str, number: int
) -> tuple[Counts, str, tuple[str, ...]]:
    trial = try_fault(lab, verb, undisturbed, _BY_NAME[kind], number)
    return {"refused": int(trial.code != 0)}, f"exit {trial.code}", trial.problems


if __name__ == "__main__":
    about = __doc__ or ""
    sys.exit(
        run_trials(
            "benchmarks/fault_verbs.py", RESULT, tuple(_BY_NAME), try_one, default=10, about=about
        )
    )
