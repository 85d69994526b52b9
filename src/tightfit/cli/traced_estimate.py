"""`tightfit estimate --trace`: one trace, the advice that follows from it, and their telling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.cli.tracing import ModelTracer, choose_tracer
from tightfit.core.errors import EnvironmentFaultError
from tightfit.estimate.host import PROCESS_BYTES, estimate_loading_bytes_by_rank
from tightfit.estimate.result import Estimate, StepTime
from tightfit.estimate.trace.op_seconds import estimate_traced_time
from tightfit.estimate.trace.operations import OperationLog
from tightfit.estimate.trace.result import TracedMemory
from tightfit.estimate.trace.step_time import with_traced_time
from tightfit.estimate.trace.time_result import TracedTime
from tightfit.planning.advice import Advice
from tightfit.planning.case import Case
from tightfit.planning.traced import Wish, apply_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedEstimate:
    """One traced configuration."""

    case: Case
    traced: TracedMemory
    advice: tuple[Advice, ...]
    operations: OperationLog | None = None

    def apply(self, closed_form: Estimate) -> Estimate:
        return apply_trace(
            closed_form, self.traced, self.case.node, self._time_step(closed_form.time)
        )

    def _time_step(self, closed: StepTime) -> StepTime | None:
        if self.operations is None:
            return None
        return with_traced_time(closed, self.operations, self.case.node.gpu, self.case.strategy)

    def _time_stages(self) -> TracedTime | None:
        if self.operations is None:
            return None
        return estimate_traced_time(self.operations, self.case.node.gpu, self.case.strategy)

    def _list_loading(self) -> list[int]:
        return estimate_loading_bytes_by_rank(self.case.spec, self.case.strategy)

    def describe(self) -> dict[str, Any]:
        """What `--json` adds to the estimate."""
        time = self._time_stages()
        return {
            "trace": self.traced.model_dump(mode="json"),
            "traced_time": None if time is None else time.model_dump(mode="json"),
            "advice": [one.model_dump(mode="json") for one in self.advice],
            "host_loading": {
                "process_bytes": PROCESS_BYTES,
                "weight_bytes_by_rank": self._list_loading(),
            },
        }

    def show(self, closed_form: Estimate) -> None:
        from tightfit.cli.render_trace import show_trace
        from tightfit.cli.render_traced_time import show_traced_time

        show_trace(
            self.traced,
            gpu=self.case.node.gpu,
            context_bytes=closed_form.gpu.context_bytes,
            closed_form=closed_form,
            advice=self.advice,
            loading_bytes=self._list_loading(),
        )
        stages, step = self._time_stages(), self._time_step(closed_form.time)
        if stages is not None and step is not None:
            show_traced_time(stages, step=step, closed_form=closed_form.time)

    def draw(self, path: Path, closed_form: Estimate) -> None:
        from tightfit.cli.trace_chart import make_strategy_panel, write_trace_panels

        case = self.case
        panel = make_strategy_panel(case.strategy, case.node.gpu, closed_form, self.traced)
        write_trace_panels(case.spec.name, (panel,), path)


def trace_estimate(case: Case, judged: Estimate) -> TracedEstimate:
    """Trace one configuration, and every change that could lower its peak.

    Raises where it cannot be traced: it was asked for.
    """
    tracer = choose_tracer(case.spec, case.node, asked=True)
    assert isinstance(tracer, ModelTracer), "asked for, a tracer comes or an error is raised"
    room = max(1, judged.gpu.capacity_bytes - judged.gpu.context_bytes)
    found = tracer.trace([Wish(strategy=case.strategy, node=case.node, room_bytes=room)])[0]
    if found.traced is None:
        raise EnvironmentFaultError(
            f"This job cannot be traced: {found.problem}.",
            remedy=found.remedy or "leave --trace out: the formulas speak of it all the same",
        )
    advice = tracer.advise(case, found.traced, room_bytes=room)
    return TracedEstimate(
        case=case, traced=found.traced, advice=advice, operations=found.operations
    )
