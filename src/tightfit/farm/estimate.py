"""Before anything starts: what each kind of node is expected to do, how long it takes, the rent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from tightfit.estimate.inference import (
    HOST_KERNEL_SECONDS,
    HOST_KERNELS_PER_LAYER,
    InferenceJob,
    estimate_inference,
)
from tightfit.farm.bounds import Bounds, span, sum_bounds
from tightfit.farm.devices import count_machines, find_calibrated, job_on
from tightfit.farm.measured import Basis, find_rates, name_place, name_work, record
from tightfit.farm.places import NodeType, Place, local_place
from tightfit.hardware.types import Gpu

if TYPE_CHECKING:
    from tightfit.serve.generate.plan import Prediction

HOST_TOKEN_SECONDS = 150e-6
"""Choosing, decoding and handing on one token: 0.1 ms greedy and 0.17 ms drawn, in an engine of
ours with 2 layers on a CPU; it explains half of what a card with 64 slots falls short by."""
PREDICTED_FRACTIONS = Bounds(0.4, 1.25)
"""What runs reached of a prediction: 0.41 to 0.60 on our H200 (benchmarks/results,
h200_generation.json), 0.5 to 1.3 with small models on two cores that others used too."""
MEASURED_FRACTIONS = Bounds(0.8, 1.2)
"""Between two runs of the same, on machines that are not ours alone."""
START_SECONDS = Bounds(4.0, 30.0)
"""A process that imports torch and the rest: from a warm cache, and from a slow shared disk."""
LOAD_BYTES_PER_SECOND = Bounds(0.2e9, 4e9)
"""From a busy file server, and from the page cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeEstimate:
    """Workers of one kind in one place."""

    place: str
    name: str
    num_workers: int
    usd_per_hour: float | None
    work: str | None = None
    """The model as such a device holds it: what runs are remembered by."""
    remembered_as: str = ""
    predicted_tokens_per_second: float | None = None
    """By the closed forms alone."""
    new_tokens_per_second: Bounds | None = None
    """Of all of them together; None: nothing is known of such a device."""
    start_seconds: Bounds | None = None
    basis: Basis = Basis.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmEstimate:
    """The whole, with every answer as long as it may be."""

    num_answers: int
    types: tuple[TypeEstimate, ...]
    new_tokens_per_second: Bounds | None = None
    start_seconds: Bounds | None = None
    seconds: Bounds | None = None
    """From the start of the workers to the last answer."""
    usd: Bounds | None = None
    basis: Basis = Basis.UNKNOWN

    @property
    def usd_per_hour(self) -> float | None:
        prices = [kind.usd_per_hour for kind in self.types if kind.usd_per_hour]
        return sum(prices) if prices else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """What is to be answered."""

    num_answers: int
    num_new_tokens: int
    threads: int | None = None
    """Of each worker on a CPU; None: as many as there are."""


def estimate_farm(
    places: Sequence[Place], prediction: Prediction | None, amount: Amount
) -> FarmEstimate:
    """By what earlier runs reached where there are any, else from a prediction for this machine's
    CPU, carried over to the cluster's devices.

    Leaves out waiting in the queue, and answers that end early.
    """
    types = tuple(
        _estimate_type(place, kind, prediction, amount) for place in places for kind in _cut(place)
    )
    known = [kind for kind in types if kind.new_tokens_per_second is not None]
    rate = sum_bounds(kind.new_tokens_per_second for kind in known if kind.new_tokens_per_second)
    starts = [kind.start_seconds for kind in known if kind.start_seconds is not None]
    if not known or rate.low <= 0:
        return FarmEstimate(num_answers=amount.num_answers, types=types)
    start = Bounds(min(one.low for one in starts), max(one.high for one in starts))
    seconds = start + rate.seconds_for(amount.num_new_tokens)
    bases = {kind.basis for kind in known}
    found = FarmEstimate(
        num_answers=amount.num_answers,
        types=types,
        new_tokens_per_second=rate,
        start_seconds=start,
        seconds=seconds,
        basis=bases.pop() if len(bases) == 1 else Basis.MIXED,
    )
    rent = found.usd_per_hour
    return found if rent is None else replace(found, usd=seconds.scaled(rent / 3600))


def remember_alone(prediction: Prediction, amount: Amount, *, rate: float) -> None:
    """One engine on this machine that answered `amount` at `rate` new tokens a second."""
    gpu = None if prediction.gpu.is_cpu else prediction.gpu
    place = local_place(num_gpus=0 if gpu is None else 1, num_workers=1, gpu=gpu)
    (kind,) = estimate_farm([place], prediction, amount).types
    record(kind, num_new=amount.num_new_tokens, rate=rate)


def _cut(place: Place) -> list[NodeType]:
    """The kinds of a place, no more of them than workers are started."""
    left, kinds = place.num_workers, []
    for kind in place.types:
        count = min(left, kind.num_workers)
        if count:
            kinds.append(replace(kind, num_workers=count))
        left -= count
    return kinds


def _estimate_type(
    place: Place, kind: NodeType, prediction: Prediction | None, amount: Amount
) -> TypeEstimate:
    price = None if kind.gpu is None else kind.gpu.cheapest
    unknown = TypeEstimate(
        place=place.name,
        name=kind.name,
        num_workers=kind.num_workers,
        usd_per_hour=None if price is None else price.usd_per_gpu_hour * kind.num_workers,
    )
    if prediction is None or (kind.gpu is None and kind.name != "CPU"):
        return unknown
    gpu = prediction.gpu if kind.gpu is None else kind.gpu
    job = _fill(job_on(prediction, gpu), amount.num_answers, kind.num_workers)
    width = count_machines(kind, prediction, amount.threads)
    rate = width * predict_rate(prediction, job, gpu)
    if not rate:
        return unknown
    work = name_work(prediction.spec, prediction.choice.engine, job)
    remembered_as = name_place(place)
    rows = find_rates(work, place=remembered_as, device=kind.name)
    expected, basis = PREDICTED_FRACTIONS.scaled(rate), Basis.PREDICTED
    if rows:
        expected, basis = _widen(row.fraction * rate for row in rows), Basis.MEASURED
    elif (measured := find_calibrated(place, gpu, amount.threads)) is not None:
        rated = width * predict_rate(prediction, job, measured)
        expected, basis = PREDICTED_FRACTIONS.scaled(rated), Basis.CALIBRATED
    starts = [row.start_seconds for row in rows if row.start_seconds is not None]
    return replace(
        unknown,
        work=work,
        remembered_as=remembered_as,
        predicted_tokens_per_second=rate,
        new_tokens_per_second=expected,
        start_seconds=_widen(starts) if starts else _predict_start(job),
        basis=basis,
    )


def predict_rate(prediction: Prediction, job: InferenceJob, gpu: Gpu) -> float:
    """New tokens a second of one worker, the host's own time for them included; 0: no room."""
    estimate = estimate_inference(prediction.spec, job, gpu)
    if estimate.peak_bytes > gpu.memory_bytes and not gpu.is_cpu:
        return 0.0
    host = HOST_TOKEN_SECONDS
    if gpu.is_cpu and prediction.choice.engine == "transformers":
        layer = HOST_KERNELS_PER_LAYER * HOST_KERNEL_SECONDS
        host += prediction.spec.num_layers * layer / job.num_slots
    return 1 / (1 / estimate.new_tokens_per_second + host)


def _fill(job: InferenceJob, num_answers: int, num_workers: int) -> InferenceJob:
    """No more slots than there are answers for each worker: an empty one makes nothing faster."""
    return replace(job, num_slots=max(1, min(job.num_slots, ceil(num_answers / num_workers))))


def _widen(values: Iterable[float]) -> Bounds:
    found = span(values)
    return Bounds(found.low * MEASURED_FRACTIONS.low, found.high * MEASURED_FRACTIONS.high)


def _predict_start(job: InferenceJob) -> Bounds:
    return START_SECONDS + LOAD_BYTES_PER_SECOND.seconds_for(job.weight_bytes)
