"""How slow this machine is just now, for tests that allow work a number of seconds.

Machines that are shared take up to five times as long for the same work, from one minute to the
next, in processor time as well.
"""

from __future__ import annotations

import resource
import time

USUAL_SECONDS = 0.15
"""About what the loop below takes on a good day of a 2.5 GHz Xeon; no limit was set by it."""


def allow(seconds: float) -> float:
    """The limit for a machine of usual pace, in seconds of this one."""
    started = time.process_time()
    sum(number * number for number in range(1_000_000))
    return seconds * max(1.0, (time.process_time() - started) / USUAL_SECONDS)


def allow_waiting(seconds: float) -> float:
    """The same by the clock, for what runs beside everything else that this machine does."""
    started = time.perf_counter()
    sum(number * number for number in range(1_000_000))
    return seconds * max(1.0, (time.perf_counter() - started) / USUAL_SECONDS)


def children_seconds() -> float:
    """Processor time of the processes that this one has waited for, so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
