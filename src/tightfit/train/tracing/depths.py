"""Recordings of a job at any depth, from as few traced layers as will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tightfit.estimate.trace.depth import CannotExtend, DepthPlan, Growth, plan_depths
from tightfit.estimate.trace.depth_config import find_depth_refusal, read_depth, with_depth
from tightfit.estimate.trace.op_depth import extend_log, list_kinds
from tightfit.estimate.trace.operations import OperationLog
from tightfit.estimate.trace.recording import Recording
from tightfit.train.tracing.beside import fork_beside
from tightfit.train.tracing.job import TraceJob
from tightfit.train.tracing.libraries import import_libraries
from tightfit.train.tracing.run import record_job


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shallow:
    """What was learnt from a few layers."""

    growth: Growth
    logs: list[OperationLog]
    """Operations of the shallowest model and of the deeper ones; none where one has no log."""

    def extend(self, plan: DepthPlan) -> Recording:
        recording = self.growth.extend(plan.num_more)
        if self.logs:
            recording.operations = _extend_log(plan, self.logs)
        return recording


def _extend_log(plan: DepthPlan, logs: Sequence[OperationLog]) -> OperationLog | None:
    """Memory stands without it: then the closed form speaks of the time."""
    base, *grown = logs
    try:
        return extend_log(base, grown, list_kinds(plan))
    except CannotExtend:
        return None


def _learn(plan: DepthPlan, recordings: Sequence[Recording]) -> _Shallow:
    base, *grown = recordings
    logs = [one.operations for one in recordings if one.operations is not None]
    is_whole = len(logs) == len(recordings)
    return _Shallow(growth=Growth(plan, base, grown), logs=logs if is_whole else [])


class DepthTracer:
    """One job with any number of its layers recomputed; what was traced is kept."""

    def __init__(self, job: TraceJob) -> None:
        self._job = job
        self.num_layers = read_depth(job.config) or 0
        self.num_traced = 0
        """Layers of the deepest model that ran."""
        self.refusal = "asked for" if job.is_full_depth else find_depth_refusal(job.config)
        self._known: dict[tuple[object, ...], _Shallow] = {}

    def record(self, num_recomputed: int) -> Recording:
        """The whole job, this many layers of it recomputed, counted from the first."""
        kinds = self._split(num_recomputed)
        if not self.refusal:
            try:
                return self._extend(kinds, is_recomputed=num_recomputed > 0)
            except CannotExtend as fault:
                self.refusal = str(fault)
        return self._run(kinds, is_recomputed=num_recomputed > 0)

    def _split(self, num_recomputed: int) -> tuple[int, ...]:
        """Layers of each kind: recomputed ones, then the others."""
        if 0 < num_recomputed < self.num_layers:
            return (num_recomputed, self.num_layers - num_recomputed)
        return (self.num_layers,)

    def _extend(self, kinds: tuple[int, ...], *, is_recomputed: bool) -> Recording:
        plan = plan_depths(kinds)
        if not plan.grown:
            return self._run(kinds, is_recomputed=is_recomputed)
        key = (is_recomputed, plan.base, plan.grown)
        if key not in self._known:
            depths = (plan.base, *plan.grown)
            self._known[key] = _learn(plan, self._run_all(depths, is_recomputed=is_recomputed))
        return self._known[key].extend(plan)

    def _run_all(
        self, depths: Sequence[tuple[int, ...]], *, is_recomputed: bool
    ) -> list[Recording]:
        """Each depth once: the first here, the others beside it in processes of their own."""
        self.num_traced = max(self.num_traced, *map(sum, depths))
        jobs = [self._job_of(kinds, is_recomputed=is_recomputed) for kinds in depths]
        import_libraries()
        with fork_beside(len(jobs) - 1) as others:
            waiting = [others.submit(record_job, job, job.config) for job in jobs[1:]]
            return [record_job(jobs[0], jobs[0].config), *(one.result() for one in waiting)]

    def _run(self, kinds: tuple[int, ...], *, is_recomputed: bool) -> Recording:
        self.num_traced = max(self.num_traced, sum(kinds))
        job = self._job_of(kinds, is_recomputed=is_recomputed)
        return record_job(job, job.config)

    def _job_of(self, kinds: tuple[int, ...], *, is_recomputed: bool) -> TraceJob:
        depth = sum(kinds)
        strategy = self._job.strategy.model_copy(
            update={
                "checkpointing": is_recomputed,
                "recomputed_layers": kinds[0] if len(kinds) > 1 else None,
            }
        )
        config = self._job.config
        if depth != self.num_layers:
            config = with_depth(config, depth)
        return self._job.model_copy(update={"strategy": strategy, "config": config})
