"""`kill -9` at random moments of every verb that writes, then the same command again.

    nice -n 19 python benchmarks/kill_verbs.py [--trials 50] [--verbs merge,farm] [--fresh]

Half of the moments are before a change of a file (write, fsync, rename, ...), half at a random
share of the CPU time; half kill all processes, half a single one. Afterwards the same command has
to end with the same result, byte for byte, and leave no other file, process or port than one that
nobody disturbed. The moments are seeded. The result file is written after each, and the next call
goes on behind the last one. One model of two layers; imports are done before.
"""

from __future__ import annotations

import sys

from _verb_trials import ROOT, Counts, run_trials
from kill_trials import Undisturbed, draw_moment, try_moment
from verb_lab import Verb, VerbLab

RESULT = ROOT / "benchmarks" / "results" / "kills.json"


def try_kill(
    lab: VerbLab, verb: Verb, undisturbed: Undisturbed, kind: str, number: int
) -> tuple[Counts, str, tuple[str, ...]]:
    """`running`: it had not ended yet; `went_on`: to its end, with one of its processes killed."""
    del kind
    moment = draw_moment(verb, undisturbed, number)
    trial = try_moment(lab, verb, undisturbed, moment)
    counts = {
        "running": int(trial.was_running),
        "all_killed": int(trial.was_running and moment.kills_all),
        "went_on": int(trial.went_on),
    }
    return counts, moment.describe(), trial.problems


if __name__ == "__main__":
    about = __doc__ or ""
    sys.exit(
        run_trials(
            "benchmarks/kill_verbs.py", RESULT, ("kill -9",), try_kill, default=50, about=about
        )
    )
