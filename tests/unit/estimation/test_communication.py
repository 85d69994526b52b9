"""Collectives and host copies: volumes that follow from the algorithms, and their order."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.core.settings import Method, Offload, Sharding
from tightfit.core.strategy import Strategy
from tightfit.estimation.communication import (
    BUCKET_BYTES,
    INSIDE_LATENCY_SECONDS,
    Links,
    Payload,
    count_exchanged_bytes,
    describe_network,
    estimate_offload,
    estimate_transfers,
    exchange_seconds,
    exposed_seconds,
    find_links,
    gather_seconds,
)
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Node
from tightfit.models.resolve import resolve_model

LINKS = Links(inside=100e9, network=10e9, host=20e9, host_memory=60e9)
PAYLOAD = Payload(
    weight_bytes=14e9, gradient_bytes=14e9, updated_bytes=14e9, num_trainable=7 * 10**9, num_units=1
)


def job(sharding: Sharding, **changes: Any) -> Strategy:
    options = {"method": Method.FULL, "sharding": sharding, "gpus_per_node": 8}
    return Strategy(**{**options, **changes})


def test_ring_moves_all_but_its_own_share() -> None:
    seconds = gather_seconds(8e9, LINKS, num_nodes=1, gpus_per_node=8)

    assert seconds == pytest.approx(7e9 / 100e9 + INSIDE_LATENCY_SECONDS)


def test_shared_rows_exchange_heads_for_tokens() -> None:
    """Llama-2-7B: 32 heads of 128 in 32 layers; of 8 GPUs each sends seven eighths of its slice of
    queries, keys, values and results, and of as many gradients."""
    spec = resolve_model("Llama-2-7b")
    shared = job(Sharding.FSDP, context_parallel=8)
    found = count_exchanged_bytes(spec, shared, tokens=1000, num_passes=2)

    assert found.num_bytes == 2 * 2 * 1000 * 32 * (4 * 32 * 128) * 7 / 8
    assert found.num_calls == 2 * 32 * 4
    latency = found.num_calls * INSIDE_LATENCY_SECONDS
    assert exchange_seconds(shared, LINKS, found) == pytest.approx(
        found.num_bytes / 100e9 + latency
    )
    # Over two nodes four of seven parts leave the node, those of its 4 GPUs through one network.
    apart = job(Sharding.FSDP, context_parallel=8, num_nodes=2, gpus_per_node=4)
    assert exchange_seconds(apart, LINKS, found) == pytest.approx(
        4 * found.num_bytes * 4 / 7 / 10e9, rel=0.03
    )
    # Grouped keys are repeated until each GPU has one: 16 GPUs make 16 of 8.
    grouped = resolve_model("Llama-3.1-8B")
    few, many = (
        count_exchanged_bytes(
            grouped, job(Sharding.FSDP, context_parallel=size), tokens=1000, num_passes=1
        )
        for size in (8, 16)
    )
    assert few.num_bytes == 2 * 1000 * 32 * (64 + 16) * 128 * 7 / 8
    assert many.num_bytes == 2 * 1000 * 32 * (64 + 32) * 128 * 15 / 16
    assert exchange_seconds(job(Sharding.FSDP), LINKS, found) == 0


def test_all_reduce_costs_two_gathers() -> None:
    payload = PAYLOAD._replace(gradient_bytes=BUCKET_BYTES / 2)
    ddp = estimate_transfers(job(Sharding.DDP, num_nodes=2, gpus_per_node=4), LINKS, payload)
    gathered = gather_seconds(BUCKET_BYTES / 2, LINKS, num_nodes=2, gpus_per_node=4)

    assert ddp.last_backward == 2 * gathered


def test_one_rank_sends_nothing() -> None:
    assert gather_seconds(8e9, LINKS, num_nodes=1, gpus_per_node=1) == 0.0
    assert estimate_transfers(job(Sharding.FSDP, gpus_per_node=1), LINKS, PAYLOAD).forward == 0.0


def test_slow_network_sets_the_pace() -> None:
    seconds = gather_seconds(16e9, LINKS, num_nodes=2, gpus_per_node=8)

    assert seconds == pytest.approx(15e9 / 10e9, rel=0.01)


def test_measured_all_gather_on_eight_h200() -> None:
    """16 GiB in all at 361.4e9 B/s of bus bandwidth: ml-engineering, network/README.md."""
    node = Node(gpu=find_gpu("H200-SXM"), num_gpus=8)
    links = find_links(node, network_bytes_per_second=None)
    seconds = gather_seconds(2**34, links, num_nodes=1, gpus_per_node=8)

    assert seconds == pytest.approx(2**34 * 7 / 8 / 361.4e9, rel=0.05)


def test_zero3_moves_half_as_much_again_as_ddp() -> None:
    """The paper's 3 against 2 model sizes: arXiv:1910.02054 section 7."""
    ddp = estimate_transfers(job(Sharding.DDP), LINKS, PAYLOAD)
    zero2 = estimate_transfers(job(Sharding.ZERO2), LINKS, PAYLOAD)
    zero3 = estimate_transfers(job(Sharding.ZERO3), LINKS, PAYLOAD)

    assert zero2.backward + zero2.update == pytest.approx(ddp.last_backward, rel=0.1)
    assert zero3.forward + zero3.backward == pytest.approx(1.5 * ddp.last_backward, rel=0.1)


def test_grad_op_sharding_gathers_once() -> None:
    full = estimate_transfers(job(Sharding.FSDP), LINKS, PAYLOAD)
    grad_op = estimate_transfers(job(Sharding.FSDP_GRAD_OP), LINKS, PAYLOAD)

    assert grad_op.forward == full.forward
    assert full.backward - grad_op.backward == pytest.approx(full.forward)


def test_hybrid_sharding_keeps_weights_off_the_network() -> None:
    nodes = {"num_nodes": 4}
    full = estimate_transfers(job(Sharding.FSDP, **nodes), LINKS, PAYLOAD)
    hybrid = estimate_transfers(job(Sharding.FSDP_HYBRID, **nodes), LINKS, PAYLOAD)

    assert hybrid.forward < full.forward / 5
    # Its gradients still cross: an all-reduce of one gradient per node.
    assert hybrid.backward > 2 * 14e9 * 3 / 4 / LINKS.network


def test_lora_under_fsdp_still_gathers_frozen_weights() -> None:
    adapters = Payload(
        weight_bytes=14e9,
        gradient_bytes=8e7,
        updated_bytes=8e7,
        num_trainable=4 * 10**7,
        num_units=1,
    )
    lora = estimate_transfers(job(Sharding.FSDP, method=Method.LORA), LINKS, adapters)
    full = estimate_transfers(job(Sharding.FSDP), LINKS, PAYLOAD)
    lora_ddp = estimate_transfers(job(Sharding.DDP, method=Method.LORA), LINKS, adapters)

    assert lora.forward == full.forward
    assert lora.backward < 0.6 * full.backward
    assert lora_ddp.last_backward < 0.02 * lora.forward


def test_offloaded_optimizer_pays_host_memory() -> None:
    moved = estimate_offload(
        job(Sharding.ZERO2, offload=Offload.OPTIMIZER, gpus_per_node=4), LINKS, PAYLOAD
    )

    assert moved.backward == pytest.approx(14e9 / 4 / 20e9)
    # Every parameter's fp32 weight, gradient and moments, read and written, by all ranks together.
    assert moved.update > 7e9 * 28 / 60e9


def test_offloaded_weights_come_up_for_every_pass() -> None:
    moved = estimate_offload(
        job(Sharding.ZERO3, offload=Offload.PARAMS, gpus_per_node=4), LINKS, PAYLOAD
    )

    assert moved.forward == moved.backward == pytest.approx(14e9 / 4 / 20e9)
    assert moved.update == 0.0


def test_compute_hides_most_but_never_all() -> None:
    assert 0 < exposed_seconds(1.0, compute=100.0) < 0.5
    assert exposed_seconds(1.0, compute=0.0) == 1.0
    assert exposed_seconds(10.0, compute=5.0) > 5.0


def test_nvlink_beats_pcie_and_a_stated_network_is_used() -> None:
    gpu = find_gpu("A100-SXM4-80GB")
    fast = find_links(Node(gpu=gpu, num_gpus=8), network_bytes_per_second=50e9)
    slow = find_links(Node(gpu=gpu, num_gpus=8, has_nvlink=False), network_bytes_per_second=None)

    assert fast.inside > 10 * slow.inside
    assert fast.network > 30 * slow.network


def test_more_cores_update_faster_up_to_the_memory_bus() -> None:
    gpu = find_gpu("T4")
    few, some, many = (
        find_links(
            Node(gpu=gpu, num_gpus=1, num_cores=cores), network_bytes_per_second=None
        ).host_memory
        for cores in (2, 8, 512)
    )

    assert few < some < many < 1e12


def test_an_assumed_network_is_said() -> None:
    several = job(Sharding.FSDP, num_nodes=2)

    assert "10 Gbit/s" in (describe_network(several, None) or "")
    assert describe_network(several, 1e9) is None
    assert describe_network(job(Sharding.FSDP), None) is None
