"""A verb on a disk that is full, failing, read-only or slow, and under a clock that jumps."""

from __future__ import annotations

import errno
import re
import time
from dataclasses import dataclass
from random import Random

from faults import FOREVER, Kind
from kill_trials import Undisturbed, compare
from tightfit.core.errors import EXIT_BUG
from verb_lab import POLL_SECONDS, Outcome, Verb, VerbLab, is_gone

_GROWING = Kind.WRITE | Kind.MAKE
DELAY_US = 5000
HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    name: str
    error: int = 0
    lasts: bool = False
    """From the first operation to the end; otherwise that one operation alone."""
    kinds: int = 0
    """Bits of `Kind`; 0: all."""
    delay_us: int = 0
    clock_ahead_s: int = 0


FAULTS = (
    Fault(name="full disk", error=errno.ENOSPC, lasts=True, kinds=_GROWING),
    Fault(name="quota", error=errno.EDQUOT, lasts=True, kinds=_GROWING | Kind.OPEN),
    Fault(name="read-only", error=errno.EROFS, lasts=True),
    Fault(name="failing disk", error=errno.EIO),
    Fault(name="slow disk", delay_us=DELAY_US),
    Fault(name="clock an hour on", clock_ahead_s=HOUR),
    Fault(name="clock an hour back", clock_ahead_s=-HOUR),
)
"""Of a seeded operation of the verb."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTrial:
    code: int
    problems: tuple[str, ...]


def try_fault(
    lab: VerbLab, verb: Verb, undisturbed: Undisturbed, fault: Fault, number: int
) -> FaultTrial:
    """One error or the right result; then the same command without the fault."""
    rng = Random(f"{verb.name} {fault.name} {number}")
    # Not all are of these kinds: rather the first ones.
    operation = max(1, int(undisturbed.num_operations * rng.random() ** 2))
    lab.clear()
    lab.faults.set(
        first=operation if fault.error else 0,
        last=FOREVER if fault.lasts else operation,
        error=fault.error,
        kinds=fault.kinds,
        delay_us=fault.delay_us,
    )
    running = lab.start(verb)
    if fault.clock_ahead_s:
        while lab.faults.read("operations") < operation and not is_gone(running.pid):
            time.sleep(POLL_SECONDS)
        lab.faults.set(clock_ahead_s=fault.clock_ahead_s)
    met = lab.finish(verb, running)
    lab.faults.set()
    problems = [
        f"{problem} (operation {operation})" for problem in _judge(lab, met, fault, undisturbed)
    ]
    if met.code == 0:
        problems += [f"ended well: {problem}" for problem in compare_results(met, undisturbed)]
    if met.code != 0 or verb.is_server:
        again = lab.run(verb)
        if again.code != 0:
            problems.append(f"the same command ended with {again.code}: {again.said[-300:]}")
        problems += [f"again: {problem}" for problem in compare(again, undisturbed.outcome)]
    return FaultTrial(code=met.code, problems=tuple(problems))


def compare_results(outcome: Outcome, undisturbed: Undisturbed) -> list[str]:
    """What a command that ended well has made; a cache may have been left out."""
    expected = undisturbed.outcome.digest
    return [f"{name} differs" for name in expected if outcome.digest.get(name) != expected[name]]


def _judge(lab: VerbLab, met: Outcome, fault: Fault, undisturbed: Undisturbed) -> list[str]:
    problems = [f"left: {name}" for name in met.left]
    if "Traceback" in met.said:
        problems.append(f"a traceback: {met.said[-300:]}")
    if met.code == 0:
        return problems
    if not fault.error or met.code == EXIT_BUG or met.code < 0:
        problems.append(f"exit {met.code}: {met.said[-300:]}")
    said = re.sub(r"\s+", " ", met.said)
    if said.count("error: ") != 1 or said.count(" try: ") != 1:
        problems.append(f"not one error: {met.said[-500:]}")
    elif str(lab.area) not in said[said.index("error: ") :]:
        problems.append(f"no folder is named: {met.said[-300:]}")
    elif fault.error in (errno.ENOSPC, errno.EDQUOT) and not re.search(r"needed|free\b", said):
        problems.append(f"no bytes are named: {met.said[-300:]}")
    # Of several files the first ones may have been finished, and then they are whole.
    problems += [
        f"half-written {name}" for name, digest in met.digest.items()
        if name.endswith(".gguf") and ".partial" not in name
        and digest != undisturbed.outcome.digest.get(name)
    ]  # fmt: skip
    return problems
