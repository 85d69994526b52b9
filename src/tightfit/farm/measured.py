"""What earlier runs of `generate` and `farm` reached, and what this one adds to that."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from datetime import datetime, timezone
from enum import Enum
from typing import TYPE_CHECKING

from tightfit.estimate.inference import InferenceJob
from tightfit.farm.places import Place, PlaceKind
from tightfit.ledger.answer_rates import AnswerRate, read_rates, record_rate
from tightfit.models.spec import ModelSpec

if TYPE_CHECKING:
    from tightfit.farm.estimate import FarmEstimate, TypeEstimate
    from tightfit.farm.statistics import FarmStatistics, NodeStatistics

LAST_RUNS = 5
"""Machines, drivers and libraries change: older ones are not asked."""
LEAST_TOKENS = 256
LEAST_SECONDS = 1.0
"""Of a run that says something about the next."""
PROCESS_SECONDS = 1.0
"""From a worker's start to its first word, before its own clock runs."""


class Basis(str, Enum):
    """What an estimate rests on."""

    MEASURED = "measured"
    """Earlier runs of this model on such devices."""
    CALIBRATED = "calibrated"
    """Closed forms, with the rates that `tightfit calibrate` found for this machine."""
    PREDICTED = "predicted"
    """Closed forms and data sheets."""
    MIXED = "partly measured"
    UNKNOWN = "unknown"


def name_work(spec: ModelSpec, engine: str, job: InferenceJob) -> str:
    """The same for every copy of a model with the same weights in the same engine."""
    told = f"{spec.num_params} {spec.num_layers} {spec.hidden_size} {spec.vocab_size}"
    told += f" {job.weight_bytes} {job.compute.value}"
    return f"{engine}-{hashlib.blake2b(told.encode(), digest_size=8).hexdigest()}"


def name_place(place: Place) -> str:
    if place.kind is PlaceKind.LOCAL:
        return f"local:{socket.gethostname()}"
    return f"{place.kind.value}:{place.name}"


def find_rates(work: str, *, place: str, device: str) -> Sequence[AnswerRate]:
    """Of the last runs in the same place; else, of a card, those of its like anywhere."""
    alike = [rate for rate in read_rates(work) if rate.device == device]
    here = [rate for rate in alike if rate.place == place]
    if not here and device != "CPU":
        here = alike
    return here[-LAST_RUNS:]


def record_farm(estimate: FarmEstimate, told: FarmStatistics) -> None:
    """Each place with workers of one kind, all of which worked to the end."""
    kinds: dict[str, list[TypeEstimate]] = {}
    for kind in estimate.types:
        kinds.setdefault(kind.place, []).append(kind)
    for place, (kind, *others) in kinds.items():
        nodes = [node for node in told.nodes if node.partition == place]
        is_whole = sum(node.num_workers for node in nodes) == kind.num_workers
        if not others and is_whole and not any(node.num_lost_workers for node in nodes):
            _record_place(kind, nodes)


def _record_place(kind: TypeEstimate, nodes: Sequence[NodeStatistics]) -> None:
    num_new = sum(node.num_new_tokens for node in nodes)
    rate = sum(node.new_tokens_per_second or 0.0 for node in nodes)
    load = sum(node.load_seconds for node in nodes) / kind.num_workers
    record(kind, num_new=num_new, rate=rate, start_seconds=load + PROCESS_SECONDS)


def record(
    kind: TypeEstimate, *, num_new: int, rate: float, start_seconds: float | None = None
) -> None:
    """Unless the run was too short to tell anything."""
    is_long = num_new >= LEAST_TOKENS and rate > 0 and num_new / rate >= LEAST_SECONDS
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
