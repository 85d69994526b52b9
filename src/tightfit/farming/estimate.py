"""Estimate of a farm before it starts: rate, time and cost of each type of node.

Based on measured rates of earlier runs where there are any, otherwise on a prediction.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from math import ceil
from typing import TYPE_CHECKING

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Strategy
from tightfit.engines.transformers.rows import count_gpu_slots
from tightfit.estimation.inference import (
    WHOLE_HOST,
    HostShare,
    InferenceJob,
    add_host_time,
    estimate_inference,
    kv_row_bytes,
)
from tightfit.estimation.weights import estimate_weight_bytes
from tightfit.farming.bounds import Bounds
from tightfit.farming.worker_pool import (
    NodeType,
    WorkerBackend,
    WorkerGroup,
    make_local_group,
    share_threads,
)
from tightfit.hardware.machine import read_machine
from tightfit.hardware.types import Gpu
from tightfit.models.spec import ModelSpec
from tightfit.runs.store import AnswerRate, read_calibration, read_rates, record_rate
from tightfit.serving.generate.prediction import InferencePrediction, share_cores
from tightfit.serving.generate.run import count_threads

if TYPE_CHECKING:
    from tightfit.farming.statistics import FarmStatistics


# The prediction for this machine, adapted to the devices of the workers.

BF16_SINCE = (8, 0)
"""Compute capability."""


def calibrated_gpu(group: WorkerGroup, gpu: Gpu, threads: int | None) -> Gpu | None:
    """This machine's device with the rates that `tightfit calibrate` found; None: it found none.

    It measures with all cores of this machine: it says nothing about other
    hosts or fewer threads.
    """
    is_whole = not gpu.is_cpu or count_threads(threads) >= read_machine().num_usable_cores
    if group.kind is not WorkerBackend.LOCAL or not is_whole:
        return None
    found = read_calibration(gpu.name).calibration
    return None if found is None else found.apply(gpu)


def count_equivalent_workers(
    kind: NodeType, prediction: InferencePrediction, threads: int | None
) -> float:
    """How many predicted workers these workers equal in speed.

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


def adapt_job_to_gpu(prediction: InferencePrediction, gpu: Gpu) -> InferenceJob:
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
    return replace(
        job,
        weight_bytes=size,
        compute=compute,
        num_slots=count_gpu_slots(gpu.memory_bytes - size, each),
        kv_value_bytes=compute.value_bytes,
        expands_heads=False,
        replays_steps=prediction.choice.engine == "transformers",
        compute_fraction=1.0,
    )


# Measured rates of earlier runs of `generate` and `farm`.

LAST_RUNS = 5
"""Machines, drivers and libraries change: older runs are not used."""
MIN_TOKENS = 256
MIN_SECONDS = 1.0
"""Of a run that says something about the next."""
PROCESS_SECONDS = 1.0
"""From a worker's start to its first word, before its own clock runs."""


class EstimateBasis(str, Enum):
    """What an estimate rests on."""

    MEASURED = "measured"
    """Earlier runs of this model on such devices."""
    CALIBRATED = "calibrated"
    """Closed forms, with the rates that `tightfit calibrate` found for this machine."""
    PREDICTED = "predicted"
    """Closed forms and data sheets."""
    MIXED = "partly measured"
    UNKNOWN = "unknown"


def work_key(spec: ModelSpec, engine: str, job: InferenceJob) -> str:
    """The same for every copy of a model with the same weights in the same engine."""
    facts = f"{spec.num_params} {spec.num_layers} {spec.hidden_size} {spec.vocab_size}"
    # With the version of the closed forms: what runs reached is kept as a share of these.
    facts += f" {job.weight_bytes} {job.compute.value} 2"
    return f"{engine}-{hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()}"


def group_key(group: WorkerGroup) -> str:
    if group.kind is WorkerBackend.LOCAL:
        return f"local:{socket.gethostname()}"
    return f"{group.kind.value}:{group.name}"


def find_measured_rates(work: str, *, group: str, device: str) -> Sequence[AnswerRate]:
    """Rates of the last runs in the same group; for a GPU without any, those anywhere."""
    alike = [rate for rate in read_rates(work) if rate.device == device]
    here = [rate for rate in alike if rate.place == group]
    if not here and device != "CPU":
        here = alike
    return here[-LAST_RUNS:]


def record_farm_rates(estimate: FarmEstimate, facts: FarmStatistics) -> None:
    """Record each group whose workers are all of one node type and worked to the end."""
    kinds: dict[str, list[NodeTypeEstimate]] = {}
    for kind in estimate.types:
        kinds.setdefault(kind.group, []).append(kind)
    for group, (kind, *others) in kinds.items():
        nodes = [node for node in facts.nodes if node.partition == group]
        is_whole = sum(node.num_workers for node in nodes) == kind.num_workers
        if not others and is_whole and not any(node.num_lost_workers for node in nodes):
            load = sum(node.load_seconds for node in nodes) / kind.num_workers
            record_node_rate(
                kind,
                num_new=sum(node.num_new_tokens for node in nodes),
                rate=sum(node.new_tokens_per_second or 0.0 for node in nodes),
                start_seconds=load + PROCESS_SECONDS,
            )


def record_node_rate(
    kind: NodeTypeEstimate, *, num_new: int, rate: float, start_seconds: float | None = None
) -> None:
    """Record a rate, unless the run was too short to be representative."""
    is_long = num_new >= MIN_TOKENS and rate > 0 and num_new / rate >= MIN_SECONDS
    if not is_long or kind.work is None or not kind.predicted_tokens_per_second:
        return
    record_rate(
        kind.work,
        AnswerRate(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            place=kind.remembered_as,
            device=kind.name,
            num_workers=kind.num_workers,
            new_tokens_per_second=rate,
            predicted_new_tokens_per_second=kind.predicted_tokens_per_second,
            start_seconds=start_seconds,
        ),
    )


PREDICTED_FRACTIONS = Bounds(0.4, 1.25)
"""What runs reached of a prediction: 0.41 to 0.60 on our H200 (benchmarks/results,
h200_generation.json), 0.5 to 1.3 with small models on two cores that others used too."""
MEASURED_FRACTIONS = Bounds(0.8, 1.2)
"""Between two runs of the same, on machines that are not ours alone."""
START_SECONDS = Bounds(4.0, 30.0)
"""A process that imports torch and the rest: from a warm cache, and from a slow shared disk."""
IMPORT_SECONDS = 12.0
"""Of one core, for a start: 8 s of processor time were measured with a model of 2 layers."""
LOAD_BYTES_PER_SECOND = Bounds(0.2e9, 4e9)
"""From a busy file server, and from the page cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTypeEstimate:
    """The estimate for workers of one node type in one group."""

    group: str
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
    basis: EstimateBasis = EstimateBasis.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmEstimate:
    """The whole, with every answer as long as it may be."""

    num_answers: int
    types: tuple[NodeTypeEstimate, ...]
    new_tokens_per_second: Bounds | None = None
    start_seconds: Bounds | None = None
    seconds: Bounds | None = None
    """From the start of the workers to the last answer."""
    usd: Bounds | None = None
    basis: EstimateBasis = EstimateBasis.UNKNOWN

    @property
    def usd_per_hour(self) -> float | None:
        prices = [kind.usd_per_hour for kind in self.types if kind.usd_per_hour]
        return sum(prices) if prices else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmWorkload:
    """What is to be answered."""

    num_answers: int
    num_new_tokens: int
    threads: int | None = None
    """Of each worker on a CPU; None: as many as there are."""


def estimate_farm(
    groups: Sequence[WorkerGroup], prediction: InferencePrediction | None, amount: FarmWorkload
) -> FarmEstimate:
    """By what earlier runs reached where there are any, else from a prediction for this machine's
    CPU, carried over to the cluster's devices.

    Leaves out waiting in the queue, and answers that end early.
    """
    if not amount.num_answers:
        return FarmEstimate(num_answers=0, types=())
    types = tuple(
        _estimate_type(group, kind, prediction, amount)
        for group in groups
        for kind in _limit_node_types(group)
    )
    known = [kind for kind in types if kind.new_tokens_per_second is not None]
    rates = [kind.new_tokens_per_second for kind in known if kind.new_tokens_per_second]
    rate = sum(rates, Bounds(0.0, 0.0))
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
        basis=bases.pop() if len(bases) == 1 else EstimateBasis.MIXED,
    )
    rent = found.usd_per_hour
    return found if rent is None else replace(found, usd=seconds.scaled(rent / 3600))


def record_single_engine(
    prediction: InferencePrediction, amount: FarmWorkload, *, rate: float
) -> None:
    """One engine on this machine that answered `amount` at `rate` new tokens a second."""
    gpu = None if prediction.gpu.is_cpu else prediction.gpu
    group = make_local_group(num_gpus=0 if gpu is None else 1, num_workers=1, gpu=gpu)
    (kind,) = estimate_farm([group], prediction, amount).types
    record_node_rate(kind, num_new=amount.num_new_tokens, rate=rate)


def _limit_node_types(group: WorkerGroup) -> list[NodeType]:
    """The node types of a group, limited to the number of workers that are started."""
    left, kinds = group.num_workers, []
    for kind in group.types:
        count = min(left, kind.num_workers)
        if count:
            kinds.append(replace(kind, num_workers=count))
        left -= count
    return kinds


def _estimate_type(
    group: WorkerGroup, kind: NodeType, prediction: InferencePrediction | None, amount: FarmWorkload
) -> NodeTypeEstimate:
    price = None if kind.gpu is None else kind.gpu.cheapest
    unknown = NodeTypeEstimate(
        group=group.name,
        name=kind.name,
        num_workers=kind.num_workers,
        usd_per_hour=None if price is None else price.usd_per_gpu_hour * kind.num_workers,
    )
    if prediction is None or (kind.gpu is None and kind.name != "CPU"):
        return unknown
    gpu = prediction.gpu if kind.gpu is None else kind.gpu
    job = adapt_job_to_gpu(prediction, gpu)
    # No more slots than there are answers for each worker: an empty one makes nothing faster.
    most_slots = ceil(amount.num_answers / kind.num_workers)
    job = replace(job, num_slots=max(1, min(job.num_slots, most_slots)))
    width = count_equivalent_workers(kind, prediction, amount.threads) / kind.num_workers
    share = _share_host(group, gpu, amount.threads)
    rate = kind.num_workers * predict_rate(prediction, job, gpu, width=width, share=share)
    if not rate:
        return unknown
    work = work_key(prediction.spec, prediction.choice.engine, job)
    remembered_as = group_key(group)
    rows = find_measured_rates(work, group=remembered_as, device=kind.name)
    expected, basis = PREDICTED_FRACTIONS.scaled(rate), EstimateBasis.PREDICTED
    if rows:
        expected, basis = _widen(row.fraction * rate for row in rows), EstimateBasis.MEASURED
    elif (measured := calibrated_gpu(group, gpu, amount.threads)) is not None:
        rated = predict_rate(prediction, job, measured, width=width, share=share)
        rated *= kind.num_workers
        expected, basis = PREDICTED_FRACTIONS.scaled(rated), EstimateBasis.CALIBRATED
    starts = [row.start_seconds for row in rows if row.start_seconds is not None]
    return replace(
        unknown,
        work=work,
        remembered_as=remembered_as,
        predicted_tokens_per_second=rate,
        new_tokens_per_second=expected,
        start_seconds=_widen(starts)
        if starts
        else _expect_start(share) + LOAD_BYTES_PER_SECOND.seconds_for(job.weight_bytes),
        basis=basis,
    )


def _share_host(group: WorkerGroup, gpu: Gpu, threads: int | None) -> HostShare:
    """Of this machine's cores; a node elsewhere has its own, of which nothing is known here."""
    if group.kind is not WorkerBackend.LOCAL or not gpu.is_cpu:
        return WHOLE_HOST
    num_threads = threads or share_threads(group) or count_threads(None)
    return share_cores(num_threads, num_workers=group.num_workers)


def _expect_start(share: HostShare) -> Bounds:
    """Python imports with one thread: on cores that others want, it takes its turn."""
    waiting = IMPORT_SECONDS * (share.threads_per_core - 1)
    return Bounds(START_SECONDS.low, START_SECONDS.high + waiting)


def predict_rate(
    prediction: InferencePrediction,
    job: InferenceJob,
    gpu: Gpu,
    *,
    width: float,
    share: HostShare,
) -> float:
    """New tokens a second of one worker, the host's own time for them included; 0: no room.

    `width`: the share of the device that the worker has.
    """
    estimate = estimate_inference(prediction.spec, job, gpu)
    if estimate.peak_bytes > gpu.memory_bytes and not gpu.is_cpu:
        return 0.0
    return add_host_time(
        prediction.spec,
        job,
        width * estimate.new_tokens_per_second,
        drives_layers=gpu.is_cpu and prediction.choice.engine == "transformers",
        share=share,
    )


def _widen(values: Iterable[float]) -> Bounds:
    """The range of measured values, with the difference that two runs may have."""
    found = sorted(values)
    return Bounds(found[0] * MEASURED_FRACTIONS.low, found[-1] * MEASURED_FRACTIONS.high)
