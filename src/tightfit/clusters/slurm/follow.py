"""Follow a Slurm job: its state in the queue, and the records and log lines of its run folder."""

from __future__ import annotations

import time
from collections.abc import Callable

from tightfit.clusters.follow import RunFollower
from tightfit.clusters.protocol import RunObserver
from tightfit.clusters.slurm.queue import JobState, JobStatus, read_jobs
from tightfit.core.errors import UserError
from tightfit.hardware.commands import RunCommand, run_command
from tightfit.runs.run_folder import RunFolder

TICK_SECONDS = 0.3
FIRST_POLL_SECONDS = 1.0
MAX_POLL_SECONDS = 10.0
"""Slurm is asked ever less often: its controller serves everybody."""
NUM_LOOKS = 3
"""Times that an end must be seen where Slurm may yet queue the job again, or has lost sight."""
MAX_SILENCE_SECONDS = 600.0
"""Of Slurm itself, before following is given up."""
_UNSURE = (
    JobState.UNKNOWN,
    JobState.PREEMPTED,
    JobState.NODE_FAIL,
    JobState.REQUEUED,
)


class SlurmFollower:
    """Follows one job to its end; an exception out of `wait` leaves the job as it is."""

    def __init__(
        self,
        run: RunFolder,
        job_id: str,
        observer: RunObserver,
        *,
        ask: RunCommand = run_command,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._job_id, self._observer = job_id, observer
        self._ask, self._sleep = ask, sleep
        self._news = RunFollower(run, observer, shows_last_step=True)
        self._described = ""
        self._num_looks = 0

    def wait(self) -> JobStatus:
        """The job's last status."""
        pause, silent_since = FIRST_POLL_SECONDS, None
        while True:
            try:
                status = read_jobs([self._job_id], run=self._ask)[0]
                silent_since = None
            except UserError:
                now = time.monotonic()
                silent_since = silent_since or now
                if now - silent_since > MAX_SILENCE_SECONDS:
                    raise
            else:
                self._describe(status)
                if self._is_last(status):
                    self._news.report()
                    return status
            self._tick_for(pause)
            pause = min(pause * 1.2, MAX_POLL_SECONDS)

    def _is_last(self, status: JobStatus) -> bool:
        is_unsure = status.state in _UNSURE
        if not status.state.is_over and not is_unsure:
            self._num_looks = 0
            return False
        self._num_looks += 1
        return self._num_looks >= (NUM_LOOKS if is_unsure else 1)

    def _describe(self, status: JobStatus) -> None:
        text = describe_status(status)
        if text != self._described:
            self._described = text
            self._observer.say(text)

    def _tick_for(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while True:
            self._news.report()
            left = ends - time.monotonic()
            if left <= 0:
                return
            self._sleep(min(TICK_SECONDS, left))


def describe_status(status: JobStatus) -> str:
    """`job 12 waits (Resources)`, `job 12 runs on gpu[01-02]`."""
    name = f"job {status.job_id}"
    again = f", restart {status.num_restarts}" if status.num_restarts else ""
    if status.state is JobState.PENDING:
        why = f" ({status.reason})" if status.reason else ""
        return f"{name} waits{why}{again}"
    if status.state is JobState.RUNNING:
        return f"{name} runs on {status.nodes or 'its nodes'}{again}"
    if status.state is JobState.COMPLETING:
        return f"{name} is ending"
    if status.state is JobState.UNKNOWN:
        return f"{name} is not known to Slurm"
    word = status.state.value.lower().replace("_", " ")
    return f"{name}: {word}{again}"
