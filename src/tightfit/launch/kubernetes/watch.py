"""From one look after the other to news: how pods start, wait and end, and the run's records."""

from __future__ import annotations

import time
from collections.abc import Callable

from tightfit.core.errors import EnvironmentFaultError
from tightfit.launch.follow import Follower
from tightfit.launch.kubernetes.connect import Cluster
from tightfit.launch.kubernetes.follow import JobPhase, JobView, PodState, read_view
from tightfit.launch.kubernetes.pod import Document
from tightfit.launch.local import Watch
from tightfit.ledger.run_folder import RunFolder

POLL_SECONDS = 3.0
TICK_SECONDS = 0.25
MAX_FAULTS = 20
"""Looks in a row that the API server may leave unanswered: it is updated while jobs run."""


class JobWatch:
    """Tells a job's news until it is over."""

    def __init__(
        self,
        cluster: Cluster,
        leader: Document,
        *,
        run: RunFolder | None,
        watch: Watch,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cluster = cluster
        self._leader = leader
        self._watch = watch
        self._sleep = sleep
        self._records = None if run is None else Follower(run.metrics_path, skip_existing=True)
        self._told: dict[str, str] = {}
        self._phase: JobPhase | None = None

    def wait(self) -> JobView:
        """The last look."""
        num_faults = 0
        while True:
            try:
                view = read_view(self._cluster, self._leader)
                num_faults = 0
            except EnvironmentFaultError as fault:
                num_faults += 1
                if num_faults > MAX_FAULTS:
                    raise
                if num_faults == 1:
                    self._watch.say(f"{fault.problem} Asking again.")
            else:
                self._tell(view)
                if view.phase.is_over:
                    self._tell_records()
                    return view
            self._pause()

    def _pause(self) -> None:
        for _ in range(round(POLL_SECONDS / TICK_SECONDS)):
            self._tell_records()
            self._watch.tick()
            self._sleep(TICK_SECONDS)

    def _tell_records(self) -> None:
        for record in [] if self._records is None else self._records.read():
            self._watch.record(record)

    def _tell(self, view: JobView) -> None:
        if view.phase is not self._phase:
            self._phase = view.phase
            if view.phase is JobPhase.SUSPENDED:
                self._watch.say("waiting in the queue; no pods yet")
        for pod in view.pods:
            text = describe_pod(pod)
            if self._told.get(pod.name) != text:
                self._told[pod.name] = text
                self._watch.say(text)


def describe_pod(pod: PodState) -> str:
    """`pod 0 is running on gpu-3`."""
    who = f"pod {pod.name if pod.index is None else pod.index}"
    where = f" on {pod.node}" if pod.node else ""
    if pod.phase == "Running" and not pod.why:
        return f"{who} is running{where}"
    if pod.phase == "Succeeded":
        return f"{who} is done"
    if pod.phase == "Failed":
        code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
        return f"{who} ended{code}{where}" + (f": {pod.why}" if pod.why else "")
    if pod.is_stuck:
        return f"{who} cannot start{where}: {pod.why}"
    what = "is being made ready" if pod.node else "waits for a node"
    return f"{who} {what}{where}" + (f": {pod.why}" if pod.why else "")
