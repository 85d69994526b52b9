"""kill -9 at a moment of a verb, then the same command again: what is there and what is left."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from random import Random

from faults import STOP
from tightfit.core.errors import UsageError
from tiny_jobs import PATIENCE_SECONDS, list_tree
from verb_lab import POLL_SECONDS, Outcome, Running, Verb, VerbLab, is_gone, kill

IS_THERE = "is there already"
IGNORED = re.compile(r"tmp/torchinductor_\w+|run/log\.txt")
"""torch's own cache folder, which stays empty, and what is there where something was said."""
_VARYING = re.compile(r"[0-9a-f]{16,}|(?<=local-)\w+-\d+-[0-9a-f]{6}")
"""Times, process ids with what makes them unique, and what a cache names by a file's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When a command is killed, and how much of it."""

    operation: int = 0
    """Before this change of a file; 0: at `share`."""
    share: float = 0.0
    """Of the CPU time that the whole command takes."""
    kills_all: bool = True
    """Or a single process, drawn by chance."""

    def describe(self) -> str:
        when = f"at file operation {self.operation}" if self.operation else f"at {self.share:.0%}"
        return f"{'all' if self.kills_all else 'one process'} {when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    outcome: Outcome
    num_operations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    moment: Moment
    was_running: bool
    """At the moment of the kill; otherwise it had ended already."""
    went_on: bool
    """After one of its processes was killed, to the end."""
    problems: tuple[str, ...]


def run_undisturbed(lab: VerbLab, verb: Verb) -> Undisturbed:
    lab.clear()
    lab.faults.set()
    outcome = lab.run(verb)
    assert outcome.code == 0, f"{verb.name}: {outcome.said[-3000:]}"
    assert any(outcome.digest.values()), verb.name
    assert not outcome.left, outcome.left
    return Undisturbed(outcome=outcome, num_operations=lab.faults.read("operations"))


def draw_moment(verb: Verb, undisturbed: Undisturbed, number: int) -> Moment:
    """The same for the same number; half of them where files are written, half at any time."""
    rng = Random(f"{verb.name} {number}")
    kills_all = rng.random() < 0.5
    if number % 2:
        return Moment(share=rng.random(), kills_all=kills_all)
    return Moment(operation=rng.randint(1, undisturbed.num_operations), kills_all=kills_all)


def try_moment(lab: VerbLab, verb: Verb, undisturbed: Undisturbed, moment: Moment) -> Trial:
    """Kill at the moment, run the same command again, compare with the undisturbed one."""
    lab.clear()
    last = moment.operation
    lab.faults.set(first=last, last=last, error=STOP)
    running = lab.start(verb)
    was_running = _wait_and_kill(lab, running, moment, undisturbed)
    lab.faults.set()
    first = lab.finish(verb, running)
    problems = [f"left after the kill: {name}" for name in first.left]
    went_on = first.code == 0
    problems += _check_words("killed", first)
    last_outcome = first
    if not went_on or verb.is_server:
        last_outcome = lab.run(verb)
        problems += _check_words("again", last_outcome)
        is_there = last_outcome.code == UsageError.exit_code and IS_THERE in last_outcome.said
        if last_outcome.code != 0 and not is_there:  # killed when the result had its name already
            problems.append(f"the same command ended with {last_outcome.code}")
    problems += compare(last_outcome, undisturbed.outcome)
    return Trial(
        moment=moment,
        was_running=was_running,
        went_on=went_on and was_running,
        problems=tuple(problems),
    )


def compare(outcome: Outcome, expected: Outcome) -> list[str]:
    """What differs from the undisturbed command."""
    problems = [f"left: {name}" for name in outcome.left]
    names = sorted(expected.digest.keys() | outcome.digest.keys())
    problems += [
        f"{name} differs" for name in names
        if outcome.digest.get(name) != expected.digest.get(name)
    ]  # fmt: skip
    ours, theirs = _names(outcome), _names(expected)
    problems += [f"stray {name}" for name in sorted(ours - theirs)]
    problems += [f"missing {name}" for name in sorted(theirs - ours)]
    return problems


def _names(outcome: Outcome) -> set[str]:
    return {_VARYING.sub("#", name) for name in outcome.files if not IGNORED.match(name)}


def _check_words(when: str, outcome: Outcome) -> list[str]:
    if "Traceback" not in outcome.said:
        return []
    return [f"{when}: a traceback: {outcome.said[-300:]}"]


def _wait_and_kill(
    lab: VerbLab, running: Running, moment: Moment, undisturbed: Undisturbed
) -> bool:
    """False where the command ended before."""
    cpu_seconds = moment.share * undisturbed.outcome.cpu_seconds
    end = time.monotonic() + PATIENCE_SECONDS
    victim = 0
    while not is_gone(running.pid):
        if moment.operation:
            victim = lab.faults.read("stopped")
            if victim:
                break
        elif lab.cpu_seconds(running) >= cpu_seconds:
            break
        if time.monotonic() > end:
            break
        time.sleep(POLL_SECONDS)
    else:
        return False
    pids = [process.pid for process in lab.list_marked()]
    if not moment.kills_all:
        # The one that was about to write, or any of them.
        pids = [victim or Random(repr(moment)).choice(sorted(pids))] if pids else []
    kill(pids or list_tree(running.pid))
    return True
