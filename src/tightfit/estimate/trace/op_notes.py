"""OperationNotes: collects the operations of a traced step. Uses torch's operations."""

from __future__ import annotations

from typing import Any, NamedTuple

from tightfit.estimate.trace.op_costs import NOTHING, describe
from tightfit.estimate.trace.op_work import Work
from tightfit.estimate.trace.operations import (
    ADAPTER,
    ADDED_PRODUCT,
    AGAIN,
    LOSS,
    MATMUL,
    MEMORY_BOUND,
    OPTIMIZER,
    RECOMPUTE,
    UPDATE,
    Operation,
    OperationLog,
    Stretch,
    sum_up,
)

_OF_TRACING = ("prim", "profiler")
"""Questions that only fake tensors are asked, and marks for a profiler."""
_FIRST_OF_ADAPTER = ".lora_A."
"""In the name of the module that a LoRA module calls first."""


class Moment(NamedTuple):
    """When an operation runs."""

    step: int
    stage: str
    layer: int | None
    module: str


class OperationNotes:
    """Collects the operations of a step; the last step's stay."""

    def __init__(self, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.problem = ""
        """The operation that was not understood; then there is no log."""
        self._start()

    def _start(self, step: int = 0) -> None:
        self._step, self._again = step, -1
        self._places: dict[Any, int] = {}
        self._table: list[Operation] = []
        self._stretches: list[tuple[int | None, list[int]]] = [(None, [])]
        self._update: list[Operation] = []

    def note(self, moment: Moment, call: tuple[Any, Any, Any, Any]) -> None:
        """One call: the operation, its arguments by place and by name, and what it returned."""
        func, args, kwargs, result = call
        if not moment.step or func.namespace in _OF_TRACING or self.problem:
            return
        try:
            work = describe(func, args, kwargs, result)
        except Exception as fault:  # memory is traced all the same
            self.problem = f"{func.name()}: {type(fault).__name__}"
            return
        self.add(moment, func.name(), work)

    def add(self, moment: Moment, name: str, work: Work) -> None:
        step, stage, layer, _ = moment
        if not step:
            return
        if step != self._step:
            self._start(step)
        work = work._replace(around=self._find_python(moment, name, work) or work.around)
        if work.shape and work.kind == MEMORY_BOUND:
            # Over the vocabulary: measured apart, since its kernels do not fit their rows.
            kind = LOSS if work.shape[-1] == self._vocab_size and stage != UPDATE else work.kind
            work = work._replace(kind=kind, shape=())
        if stage == UPDATE:
            is_reading = work.waits and work.kind != OPTIMIZER
            if is_reading and any(one.waits for one in self._update):
                work = NOTHING  # steps, which foreach optimizers count in host memory
            self._update.append(_make(name, stage, work))
            return
        key = (name, stage, work)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self._table)
            self._table.append(_make(name, stage, work))
        if layer is not None and layer != self._stretches[-1][0]:
            self._stretches.append((layer, []))
        self._stretches[-1][1].append(place)

    def find_place(self) -> tuple[int, int]:
        """Where the next operation will stand: the number of its stretch, and its place in it."""
        return len(self._stretches) - 1, len(self._stretches[-1][1])

    def repeat(self, since: tuple[int, int], times: int) -> bool:
        """The operations since that place as often again; False where another layer's turn came
        before them than comes before what follows, and nothing was done."""
        number, place = since
        layer, places = self._stretches[number]
        if layer != self._stretches[-1][0]:
            return False
        first = places[place:]
        others = [(turn, list(called)) for turn, called in self._stretches[number + 1 :]]
        for _ in range(times):
            self._stretches[-1][1].extend(first)
            self._stretches.extend((turn, list(called)) for turn, called in others)
        return True

    def _find_python(self, moment: Moment, name: str, work: Work) -> str:
        if moment.stage == RECOMPUTE and moment.layer is not None and moment.layer != self._again:
            self._again = moment.layer
            return AGAIN
        is_first = work.kind == MATMUL and _FIRST_OF_ADAPTER in moment.module
        return ADAPTER if is_first or name == ADDED_PRODUCT else ""

    def finish(self) -> OperationLog | None:
        """None where an operation was not understood, or no step was taken."""
        if self.problem or not self._step:
            return None
        update = sum_up(self._update)
        first = len(self._table)
        stretches = [
            Stretch(layer=layer, operations=tuple(places))
            for layer, places in self._stretches
            if places
        ]
        if update:
            places = tuple(range(first, first + len(update)))
            stretches.append(Stretch(operations=places))
        return OperationLog(operations=(*self._table, *update), stretches=tuple(stretches))


def _make(name: str, stage: str, work: Work) -> Operation:
    return Operation(name=name, stage=stage, **work._asdict())
