"""A prediction for this machine, carried over to the devices that will do the work."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Strategy
from tightfit.engines.transformers.sizes import KEPT_FRACTION, MOST_SLOTS
from tightfit.estimate.inference import InferenceJob, kv_row_bytes
from tightfit.estimate.weights import estimate_weight_bytes
from tightfit.farm.places import NodeType, Place, PlaceKind
from tightfit.hardware.machine import read_machine
from tightfit.hardware.types import Gpu
from tightfit.ledger.calibrations import read_calibration
from tightfit.serve.generate.meter import count_threads

if TYPE_CHECKING:
    from tightfit.serve.generate.plan import Prediction

BF16_SINCE = (8, 0)
"""Compute capability."""


def find_calibrated(place: Place, gpu: Gpu, threads: int | None) -> Gpu | None:
    """This machine's device with the rates that `tightfit calibrate` found; None: it found none.

    It measures with all cores of this machine: of other places, or of fewer threads, it says
    nothing.
    """
    is_whole = not gpu.is_cpu or count_threads(threads) >= read_machine().num_usable_cores
    if place.kind is not PlaceKind.LOCAL or not is_whole:
        return None
    found = read_calibration(gpu.name).calibration
    return None if found is None else found.apply(gpu)


def count_machines(kind: NodeType, prediction: Prediction, threads: int | None) -> float:
    """How many of the predicted worker all of them are worth.

    On a CPU it was predicted for `threads` of this machine's cores: here they share these, and a
    node elsewhere has its own.
    """
    if not prediction.gpu.is_cpu or (kind.gpu is not None and not kind.gpu.is_cpu):
        return float(min(kind.num_workers, kind.num_devices or kind.num_workers))
    used = min(count_threads(threads), read_machine().num_usable_cores)
    if kind.num_devices is not None:
        return min(float(kind.num_workers), read_machine().num_usable_cores / used)
    if kind.num_cores is None or threads is not None:
        return float(kind.num_workers)
    return kind.num_workers * kind.num_cores / used


def job_on(prediction: Prediction, gpu: Gpu) -> InferenceJob:
    """The same job with the weights, slots and arithmetic that such a device would get."""
    job, spec = prediction.job, prediction.spec
    if gpu.is_cpu or not prediction.gpu.is_cpu:
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
