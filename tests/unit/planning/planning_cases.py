"""Requests, clusters and a dataset in few words, for the tests of this folder."""

from __future__ import annotations

from typing import Any

from tightfit.core.profiles import DataProfile
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Cluster, Gpu, Node, NodeGroup
from tightfit.models.resolve import resolve_model
from tightfit.planning.request import JobRequest


def make_cluster(*groups: tuple[int, str | Gpu], num_nodes: int = 1, **node: Any) -> Cluster:
    found = []
    for count, name in groups:
        gpu = find_gpu(name) if isinstance(name, str) else name
        found.append(
            NodeGroup(
                name=f"{count}x{gpu.name}",
                node=Node(gpu=gpu, num_gpus=count, **node),
                num_nodes=num_nodes,
            )
        )
    return Cluster(groups=tuple(found), source="words")


def make_request(model: str = "Llama-2-7b", **fields: Any) -> JobRequest:
    return JobRequest(spec=resolve_model(model), **fields)


SHORT_ROWS = DataProfile(
    source="rows.jsonl",
    format="alpaca",
    num_rows=10_000,
    num_tokens=2_000_000,
    num_trained_tokens=1_000_000,
    mean_tokens=200.0,
    max_tokens=1900,
    percentiles={"p50": 150, "p90": 400, "p95": 600, "p99": 1200},
    histogram=((128, 4000), (256, 3500), (512, 2000), (2048, 500)),
    num_truncated=0,
    seq_len=2048,
    tokenizer="guessed",
    is_exact=False,
    padding_waste_fraction={"1": 0.0, "2": 0.3, "4": 0.5, "8": 0.65, "16": 0.75},
    packing_waste_fraction=0.02,
    num_packed_rows=1000,
)
"""Rows of about 200 tokens under a limit of 2048: padding and packing matter."""
