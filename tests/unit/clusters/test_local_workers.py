"""The worker's command line and environment, word by word."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from local_cases import make_plan
from tightfit.clusters.local.workers import worker_command, worker_environment
from tightfit.clusters.nodes import Rendezvous, parse_endpoint
from tightfit.core.errors import UsageError
from tightfit.core.import_path import module_words
from tightfit.core.settings import Sharding
from tightfit.planning.plan import Plan

RUN = Path("/runs/a-run")


def spread(num_nodes: int, gpus_per_node: int) -> Plan:
    plan = make_plan()
    update = {
        "num_nodes": num_nodes,
        "gpus_per_node": gpus_per_node,
        "sharding": Sharding.DDP,
    }
    return plan.model_copy(update={"strategy": plan.strategy.model_copy(update=update)})


def test_one_process_is_plain_python() -> None:
    assert worker_command(make_plan(), RUN) == [
        sys.executable, *module_words("tightfit.training.worker"), "/runs/a-run",
    ]  # fmt: skip


def test_several_processes_meet_on_this_machine_at_a_free_port() -> None:
    assert worker_command(spread(1, 4), RUN) == [
        sys.executable, *module_words("torch.distributed.run"),
        "--nnodes", "1", "--nproc-per-node", "4",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "a-run-0",
        "--rdzv-conf", "join_timeout=3600", "--max-restarts", "0", "--local-addr", "127.0.0.1",
        "--no-python", sys.executable, *module_words("tightfit.clusters.local.workers"),
        "tightfit.training.worker", "/runs/a-run",
    ]  # fmt: skip


def test_several_nodes_meet_where_they_are_told() -> None:
    meet = Rendezvous(endpoint="node1:29500", local_address="10.0.0.2", max_restarts=7)
    assert worker_command(spread(2, 1), RUN, meet, attempt=3) == [
        sys.executable, *module_words("torch.distributed.run"),
        "--nnodes", "2", "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29500", "--rdzv-id", "a-run-3",
        "--rdzv-conf", "join_timeout=3600", "--max-restarts", "7", "--local-addr", "10.0.0.2",
        "--no-python", sys.executable, *module_words("tightfit.clusters.local.workers"),
        "tightfit.training.worker", "/runs/a-run",
    ]  # fmt: skip


def test_torchrun_understands_the_options() -> None:
    """Read by torchrun's own parser, so that a renamed option is seen here."""
    from torch.distributed.run import get_args_parser

    meet = Rendezvous(endpoint="node1:29500", local_address="10.0.0.2", max_restarts=7)
    words = worker_command(spread(2, 3), RUN, meet)
    read = get_args_parser().parse_args(words[1 + len(module_words("torch.distributed.run")) :])

    assert (read.nnodes, read.nproc_per_node, read.max_restarts) == ("2", "3", 7)
    assert (read.rdzv_backend, read.rdzv_endpoint, read.local_addr) == (
        "c10d", "node1:29500", "10.0.0.2",
    )  # fmt: skip
    assert read.no_python
    assert read.training_script == sys.executable
    assert read.training_script_args[-2:] == ["tightfit.training.worker", str(RUN)]


def test_environment_of_a_gpu_plan() -> None:
    made = worker_environment(spread(1, 4), mark="/runs/a-run/x", num_cores=18, inherited={})
    assert made == {
        "OMP_NUM_THREADS": "4",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TIGHTFIT_RUN": "/runs/a-run/x",
    }


def test_what_the_user_set_stays() -> None:
    theirs = {"OMP_NUM_THREADS": "1", "PYTORCH_ALLOC_CONF": "backend:native"}
    made = worker_environment(make_plan(), mark="x", num_cores=8, inherited=theirs)
    assert "OMP_NUM_THREADS" not in made
    assert "PYTORCH_CUDA_ALLOC_CONF" not in made


@pytest.mark.parametrize("has_limit", [False, True])
def test_a_limit_on_a_cpu_is_one_for_an_allocator_that_hoards(has_limit: bool) -> None:
    plan = make_plan()
    node = plan.hardware.node
    gpu = node.gpu.model_copy(update={"compute_capability": None})
    hardware = plan.hardware.model_copy(update={"node": node.model_copy(update={"gpu": gpu})})
    limit = {"TIGHTFIT_MEMORY_LIMIT_BYTES": "1000000000"} if has_limit else {}
    made = worker_environment(
        plan.model_copy(update={"hardware": hardware}), mark="x", num_cores=1, inherited=limit
    )
    assert ("MIMALLOC_DISALLOW_ARENA_ALLOC" in made) == has_limit


def test_the_network_device_is_named_only_where_it_was_given() -> None:
    meet = Rendezvous(endpoint="a:1", interface="ib0")
    made = worker_environment(make_plan(), meet, mark="x", num_cores=1, inherited={})
    assert (made["NCCL_SOCKET_IFNAME"], made["GLOO_SOCKET_IFNAME"]) == ("ib0", "ib0")
    assert made["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert made["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("node1", "node1:29500"), ("node1:1234", "node1:1234"), ("10.0.0.1:80", "10.0.0.1:80")],
)
def test_endpoints(text: str, expected: str) -> None:
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize("text", [":29500", "node1:", "node1:port", "node1:70000", ""])
def test_endpoints_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_endpoint(text)
