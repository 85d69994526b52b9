"""What the plots draw: losses and memory by step, smoothed and thinned, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import isfinite

from tightfit.ledger.measured import mean
from tightfit.ledger.past_run import PastRun, read_run
from tightfit.ledger.report import RunReport, is_cpu_plan, report_run
from tightfit.ledger.run_folder import RunFolder

MOST_POINTS = 600
"""More than a screen has columns for; a run of a million steps still makes a small page."""
LARGEST_LOSS = 1e9
"""One that has exploded past this would flatten every other."""
LEAST_SPAN_FRACTION = 1e-12
"""Of its ends, that a range must span to be divided: steps of it are then floats of their own."""
COLOURS = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#0099bb", "#b8860b", "#666666", "#994455")
"""One per run, told apart with the common colour blindnesses; after Paul Tol's bright set."""

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCurves:
    """One run, ready to be drawn."""

    name: str
    colour: str
    loss: Points
    smooth_loss: Points
    eval_loss: Points
    nonfinite_steps: tuple[int, ...]
    """Steps whose loss was NaN, infinite or beyond all drawing."""
    allocated: Points
    """In bytes, the greatest of the steps that one point stands for."""
    reserved: Points
    predicted_peak_bytes: float
    """Of what `reserved` measures: without the CUDA context."""
    capacity_bytes: float
    is_cpu: bool
    report: RunReport


def make_curves(past: PastRun, report: RunReport, *, place: int = 0) -> RunCurves:
    """`place`: which of several runs this is; decides its colour."""
    finite = [(float(r.step), r.loss) for r in past.steps if is_drawn(r.loss)]
    gpu = past.plan.estimate.gpu
    is_cpu = is_cpu_plan(past.plan)
    evals = [(float(r.step), r.loss) for r in past.evals if is_drawn(r.loss)]
    allocated = [(float(r.step), float(r.gpu_allocated_bytes)) for r in past.steps]
    reserved = [(float(r.step), float(r.gpu_reserved_bytes)) for r in past.steps]
    return RunCurves(
        name=past.name,
        colour=COLOURS[place % len(COLOURS)],
        loss=thin(finite, mean),
        smooth_loss=thin(smooth(finite), mean),
        eval_loss=thin(evals, mean),
        nonfinite_steps=tuple(r.step for r in past.steps if not is_drawn(r.loss)),
        allocated=thin(allocated, max),
        reserved=() if is_cpu else thin(reserved, max),
        predicted_peak_bytes=gpu.peak_reserved_bytes - (0 if is_cpu else gpu.context_bytes),
        capacity_bytes=gpu.capacity_bytes,
        is_cpu=is_cpu,
        report=report,
    )


def is_drawn(loss: float) -> bool:
    return abs(loss) < LARGEST_LOSS  # False for NaN too


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Mean over about a thirtieth of the run around each step.

    Even-sided at the start, where a loss falls steeply and a lagging mean would stand above it.
    """
    half = max(1, len(points) // 60)
    sums = [0.0, *accumulate(y for _, y in points)]
    found = []
    for place, (x, _) in enumerate(points):
        reach = min(half, place)
        low, high = place - reach, min(len(points), place + reach + 1)
        found.append((x, (sums[high] - sums[low]) / (high - low)))
    return found


def thin(points: Sequence[tuple[float, float]], pick: Callable[[Sequence[float]], float]) -> Points:
    """At most `MOST_POINTS`, each for a stretch of equally many: its last x and the picked y."""
    size = -(-len(points) // MOST_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    found = ((group[-1][0], pick([y for _, y in group])) for group in groups)
    return tuple((x, y) for x, y in found if isfinite(y))


def pick_ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Round numbers inside the range, evenly apart; one, where floats cannot tell more apart."""
    span = high - low
    if not isfinite(span) or span <= LEAST_SPAN_FRACTION * max(abs(low), abs(high)):
        return [low]
    step = 10.0 ** _floor_log10(span / most)
    step *= next((factor for factor in (1, 2, 5) if span / (step * factor) <= most), 10)
    start = -int(-low // step)
    return [round(place * step, 12) for place in range(start, int(high // step) + 1)]


def _floor_log10(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldRun:
    """A run with all that is said and drawn of it."""

    past: PastRun
    report: RunReport
    curves: RunCurves


def tell_runs(folders: Iterable[RunFolder]) -> tuple[ToldRun, ...]:
    """Read each run once; a name that occurs twice gets its parent folder in front."""
    pasts = [read_run(folder) for folder in folders]
    names = Counter(past.name for past in pasts)
    told = []
    for place, past in enumerate(pasts):
        report = report_run(past)
        curves = make_curves(past, report, place=place)
        if names[past.name] > 1:
            parent = past.folder.path.resolve().parent.name
            curves = replace(curves, name=f"{parent}/{past.name}")
        told.append(ToldRun(past=past, report=report, curves=curves))
    return tuple(told)
