"""`tightfit estimate --trace`: one trace, the advice that follows from it, and their telling."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tightfit.cli.tracing import ModelTracer, choose_tracer
from tightfit.core.errors import EnvironmentFaultError, UsageError
from tightfit.estimate.host import PROCESS_BYTES, estimate_loading_bytes_by_rank
from tightfit.estimate.result import Estimate, GpuMemory, StepTime
from tightfit.estimate.trace.op_seconds import estimate_traced_time
from tightfit.estimate.trace.operations import OperationLog
from tightfit.estimate.trace.result import TracedMemory
from tightfit.estimate.trace.step_time import with_traced_time
from tightfit.estimate.trace.time_result import TracedTime
from tightfit.planning.advice import Advice
from tightfit.planning.case import Case
from tightfit.planning.traced import Wish, apply_trace
from tightfit.train.tracing.job import find_obstacle


@dataclass(frozen=True, kw_only=True)
class TracedEstimate:
    """One traced configuration. Without slots, so that the advice is traced once."""

    case: Case
    tracer: ModelTracer
    room_bytes: int
    """What the card leaves to torch's allocator."""
    traced: TracedMemory
    operations: OperationLog | None = None

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Traced when it is asked for, which takes longer than all the rest."""
        return self.tracer.advise(self.case, self.traced, room_bytes=self.room_bytes)

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

    def describe(self, closed_form: Estimate) -> dict[str, Any]:
        """What `--json` adds to the estimate."""
        time = self._time_stages()
        return {
            "totals": self._describe_totals(closed_form.gpu),
            "closed_form": closed_form.model_dump(
                mode="json", include={"verdict", "reason", "gpu", "time"}
            ),
            "trace": self.traced.model_dump(mode="json"),
            "traced_time": None if time is None else time.model_dump(mode="json"),
            "advice": [one.model_dump(mode="json") for one in self.advice],
            "host_loading": {
                "process_bytes": PROCESS_BYTES,
                "weight_bytes_by_rank": self._list_loading(),
            },
        }

    def _describe_totals(self, closed_form: GpuMemory) -> dict[str, Any]:
        """The same figures of both tiers under the same names, the context out and in."""
        traced, context = self.traced, closed_form.context_bytes
        torch_alone = {
            "peak_allocated_bytes": traced.peak_allocated_bytes,
            "peak_reserved_bytes": traced.peak_reserved_bytes,
            "smallest_capacity_bytes": traced.smallest_capacity_bytes,
        }
        return {
            "context_bytes": context,
            "traced_without_context": torch_alone,
            "traced_with_context": {name: size + context for name, size in torch_alone.items()},
            "closed_form_without_context": {
                "peak_allocated_bytes": closed_form.peak_allocated_bytes,
                "peak_reserved_bytes": closed_form.peak_reserved_bytes - context,
            },
            "closed_form_with_context": {
                "peak_allocated_bytes": closed_form.peak_allocated_bytes + context,
                "peak_reserved_bytes": closed_form.peak_reserved_bytes,
            },
        }

    def show(self, closed_form: Estimate) -> None:
        """All but the advice, which is not traced yet."""
        from tightfit.cli.render.trace import show_trace
        from tightfit.cli.render.traced_time import show_traced_time

        show_trace(
            self.traced,
            gpu=self.case.node.gpu,
            context_bytes=closed_form.gpu.context_bytes,
            closed_form=closed_form,
            loading_bytes=self._list_loading(),
        )
        stages, step = self._time_stages(), self._time_step(closed_form.time)
        if stages is not None and step is not None:
            show_traced_time(stages, step=step, closed_form=closed_form.time)

    def show_advice(self) -> None:
        from tightfit.cli.render.trace import show_advice

        show_advice(self.advice)

    def draw(self, path: Path, closed_form: Estimate) -> None:
        from tightfit.cli.charts.trace import make_strategy_panel, write_trace_panels

        case = self.case
        panel = make_strategy_panel(case.strategy, case.node.gpu, closed_form, self.traced)
        write_trace_panels(case.spec.name, (panel,), path)


def trace_estimate(case: Case, judged: Estimate) -> TracedEstimate:
    """Trace one configuration. Raises where it cannot be traced: it was asked for."""
    obstacle = find_obstacle(case.strategy)
    if obstacle:
        raise UsageError(
            f"This job cannot be traced: {obstacle}.",
            remedy="leave --trace out; the formulas speak of it all the same",
        )
    tracer = choose_tracer(case.spec, case.node, asked=True)
    assert isinstance(tracer, ModelTracer), "asked for, a tracer comes or an error is raised"
    room = max(1, judged.gpu.capacity_bytes - judged.gpu.context_bytes)
    found = tracer.trace([Wish(strategy=case.strategy, node=case.node, room_bytes=room)])[0]
    if found.traced is None:
        raise EnvironmentFaultError(
            f"This job cannot be traced: {found.problem}.",
            remedy=found.remedy or "leave --trace out; the formulas speak of it all the same",
        )
    return TracedEstimate(
        case=case,
        tracer=tracer,
        room_bytes=room,
        traced=found.traced,
        operations=found.operations,
    )
