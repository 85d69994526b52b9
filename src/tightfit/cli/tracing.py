"""Tracing for the verbs that plan: whether to, with what, and the wait for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tightfit.cli.require import TRACING, require_packages
from tightfit.cli.terminal.harmless import harmless
from tightfit.cli.terminal.output import write_err
from tightfit.cli.terminal.progress_bar import Report, progress_bar
from tightfit.core.errors import UsageError
from tightfit.core.workload import DataProfile
from tightfit.estimate.trace.ask import Answer, Tracer, has_torch
from tightfit.estimate.trace.result import TracedMemory
from tightfit.hardware.types import Node
from tightfit.models.source_config import read_source_config
from tightfit.models.spec import ModelSpec
from tightfit.planning.advice import Advice, judge_alternatives, list_alternatives
from tightfit.planning.case import Case
from tightfit.planning.traced import Found, Wish
from tightfit.planning.traced_time import find_document_len
from tightfit.train.tracing.job import TraceJob, find_obstacle

WORKER = "tightfit.train.tracing.worker"
NUM_TRACED = 3
"""Plans that are traced: the first and what may yet take its place."""
VARIABLE = "TIGHTFIT_TRACE"
"""`0` keeps verbs from tracing unasked, as on a login node where seconds of CPU are unwelcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTracer:
    """Traces strategies of one model."""

    spec: ModelSpec
    config: dict[str, Any]
    profile: DataProfile | None = None

    def trace(self, wishes: Sequence[Wish]) -> list[Found]:
        """All in one process, which takes seconds to start. The `Trace` that planning asks for."""
        obstacles = [find_obstacle(wish.strategy) for wish in wishes]
        possible = [wish for wish, why in zip(wishes, obstacles, strict=True) if not why]
        answers = iter(self._ask(possible))
        return [Found(traced=None, problem=why) if why else next(answers) for why in obstacles]

    def _ask(self, wishes: Sequence[Wish]) -> list[Found]:
        jobs = [self._job(wish).model_dump(mode="json") for wish in wishes]
        tracer = Tracer(module=WORKER)
        try:
            with progress_bar() as report:
                tell = None if report is None else partial(_tell, report, len(jobs))
                if tell is not None:
                    tell(0)
                answers = tracer.ask(jobs, tell)
        except KeyboardInterrupt:
            write_err("interrupted: tracing was stopped\n")
            raise
        _note_losses(tracer.faults)
        return [_read(answer) for answer in answers]

    def advise(self, case: Case, traced: TracedMemory, *, room_bytes: int) -> tuple[Advice, ...]:
        """Single changes that lower the peak, each traced."""
        alternatives = list_alternatives(case, traced.peak)
        wishes = [
            Wish(strategy=found.strategy, node=case.node, room_bytes=room_bytes)
            for found in alternatives
        ]
        known = {
            found.strategy: answer.traced
            for found, answer in zip(alternatives, self.trace(wishes), strict=True)
        }
        return judge_alternatives(
            alternatives, known.__getitem__, before=traced, capacity_bytes=room_bytes
        )

    def _job(self, wish: Wish) -> TraceJob:
        return TraceJob(
            config=self.config,
            strategy=wish.strategy,
            compute_capability=wish.node.gpu.compute_capability,
            document_len=find_document_len(self.profile, wish.strategy),
            room_bytes=wish.room_bytes if wish.wants_fewest_recomputed else None,
        )


def choose_tracer(
    spec: ModelSpec, node: Node, *, asked: bool | None, profile: DataProfile | None = None
) -> ModelTracer | None:
    """The tracer, where one was asked for or can be had; None where formulas must do.

    Raises where a trace was asked for and cannot be had.
    """
    if asked is False or (asked is None and os.environ.get(VARIABLE) == "0"):
        return None
    config = None if node.gpu.is_cpu else read_source_config(spec)
    if config is None:
        if asked:
            reason = _describe_obstacle(spec, node)
            raise UsageError(f"This cannot be traced: {reason}.", remedy="leave --trace out")
        return None
    if asked:
        require_packages("Tracing", *TRACING)
    return ModelTracer(spec=spec, config=config, profile=profile) if has_torch() else None


def _describe_obstacle(spec: ModelSpec, node: Node) -> str:
    if node.gpu.is_cpu:
        return "a trace is of a GPU's memory, and this job runs on the CPU"
    return f"{spec.name} has no config.json that transformers could build"


def _tell(report: Report, of: int, done: int) -> None:
    report("tracing the step", done, of)


def _note_losses(faults: Sequence[str]) -> None:
    """Once a command: everything that is asked again is then traced again."""
    if faults and not _NOTED:
        _NOTED.append(faults[0])
        why = harmless(faults[0].rstrip("."))
        write_err(
            f"note: traces cannot be kept, so each is made anew ({why}); TIGHTFIT_CACHE names "
            "another folder\n"
        )


_NOTED: list[str] = []


def _read(answer: Answer) -> Found:
    return Found(
        traced=answer.traced,
        fewest_recomputed=answer.fewest_recomputed,
        operations=answer.operations,
        problem=answer.problem,
        remedy=answer.remedy,
    )
