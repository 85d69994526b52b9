"""Before anything starts: what each kind of node is expected to do, how long it takes, the rent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Strategy
from tightfit.engines.transformers.sizes import KEPT_FRACTION, MOST_SLOTS
from tightfit.estimate.inference import InferenceJob, estimate_inference, kv_row_bytes
from tightfit.estimate.weights import estimate_weight_bytes
from tightfit.farm.places import NodeType, Place
from tightfit.hardware.types import Gpu

if TYPE_CHECKING:
    from tightfit.serve.generate.plan import Prediction

BF16_SINCE = (8, 0)
"""Compute capability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeEstimate:
    """Workers of one kind in one place."""

    place: str
    name: str
    num_workers: int
    new_tokens_per_second: float | None
    """Of all of them together; None: nothing is known of such a device."""
    usd_per_hour: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmEstimate:
    """The whole, at most: every answer as long as it may be."""

    types: tuple[TypeEstimate, ...]
    new_tokens_per_second: float | None
    seconds: float | None
    usd: float | None


def estimate_farm(
    places: Sequence[Place], prediction: Prediction | None, *, num_new_tokens: int
) -> FarmEstimate:
    """From a prediction for this machine's CPU, carried over to the cluster's devices.

    Leaves out waiting in the queue, loading, and answers that end early.
    """
    types = tuple(
        TypeEstimate(
            place=place.name,
            name=kind.name,
            num_workers=kind.num_workers,
            new_tokens_per_second=_rate(kind, prediction),
            usd_per_hour=_price(kind),
        )
        for place in places
        for kind in _cut(place)
    )
    known = [kind.new_tokens_per_second for kind in types if kind.new_tokens_per_second]
    rate = sum(known) if known else None
    seconds = None if rate is None else num_new_tokens / rate
    prices = [kind.usd_per_hour for kind in types if kind.usd_per_hour]
    usd = sum(prices) * seconds / 3600 if prices and seconds is not None else None
    return FarmEstimate(types=types, new_tokens_per_second=rate, seconds=seconds, usd=usd)


def _cut(place: Place) -> list[NodeType]:
    """The kinds of a place, no more of them than workers are started."""
    left, kinds = place.num_workers, []
    for kind in place.types:
        count = min(left, kind.num_workers)
        if count:
            kinds.append(replace(kind, num_workers=count))
        left -= count
    return kinds


def _price(kind: NodeType) -> float | None:
    price = None if kind.gpu is None else kind.gpu.cheapest
    return None if price is None else price.usd_per_gpu_hour * kind.num_workers


def _rate(kind: NodeType, prediction: Prediction | None) -> float | None:
    if prediction is None:
        return None
    gpu, job = kind.gpu, prediction.job
    if gpu is None and kind.name != "CPU":
        return None
    if gpu is None or gpu.is_cpu:
        share = 1.0
        if kind.num_cores and (cores := _cores_of(prediction)):
            share = kind.num_cores / cores
        return kind.num_workers * share * prediction.estimate.new_tokens_per_second
    job = _on_gpu(prediction, gpu)
    estimate = estimate_inference(prediction.spec, job, gpu)
    if estimate.peak_bytes > gpu.memory_bytes:
        return None
    return kind.num_workers * estimate.new_tokens_per_second


def _cores_of(prediction: Prediction) -> int | None:
    from tightfit.hardware.machine import read_machine

    return read_machine().num_usable_cores if prediction.gpu.is_cpu else None


def _on_gpu(prediction: Prediction, gpu: Gpu) -> InferenceJob:
    """The same job with the weights, slots and arithmetic that such a card would get."""
    job, spec = prediction.job, prediction.spec
    if not prediction.gpu.is_cpu:
        return job
    is_new = gpu.compute_capability is not None and gpu.compute_capability >= BF16_SINCE
    compute = Dtype.BF16 if is_new else Dtype.FP16
    size = job.weight_bytes
    if prediction.choice.engine != "llama.cpp":
        size = estimate_weight_bytes(spec, Strategy(weights=compute, compute=compute)).total
    each = kv_row_bytes(spec, max(1, job.num_columns), compute.value_bytes)
    free = max(0, gpu.memory_bytes - size)
    slots = max(1, min(MOST_SLOTS, int(free * KEPT_FRACTION // max(1, each))))
    return replace(
        job,
        weight_bytes=size,
        compute=compute,
        num_slots=slots,
        kv_value_bytes=compute.value_bytes,
        expands_heads=False,
        replays_steps=prediction.choice.engine == "transformers",
        compute_fraction=1.0,
    )
