"""Estimates follow what was measured of a device, part by part, and only that part."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_calibrations import (
    make_attention,
    make_calibration,
    make_collectives,
    make_host_times,
    make_matmuls,
    make_traffic,
)
from tightfit.core.dtypes import Dtype
from tightfit.core.profiles import DataProfile
from tightfit.core.strategy import Quirks, Strategy
from tightfit.estimation.communication import find_links
from tightfit.estimation.inference import InferenceJob, estimate_inference
from tightfit.estimation.job import estimate_job
from tightfit.estimation.result import Estimate
from tightfit.hardware.calibration import AttentionTime, Calibration
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.rates import MatmulTable, attention_rates, bandwidth_at
from tightfit.hardware.resolve import resolve_hardware
from tightfit.hardware.types import Node
from tightfit.models.resolve import resolve_model
from tightfit.planning.request import JobRequest
from tightfit.planning.search import search

SPEC = resolve_model("Llama-2-7b")
GPU = find_gpu("H200-SXM")


def predict(found: Calibration | None, /, **options: Any) -> Estimate:
    num_gpus = options.pop("num_gpus", 1)
    gpu = GPU if found is None else found.apply(GPU)
    strategy = Strategy(**{"micro_batch": 4, "seq_len": 2048, "gpus_per_node": num_gpus, **options})
    node = Node(gpu=gpu, num_gpus=num_gpus)
    return estimate_job(spec=SPEC, strategy=strategy, node=node)


def parts(found: Calibration | None, /, **options: Any) -> dict[str, float]:
    return predict(found, **options).time.components


def changed(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {
        name: after[name] / before[name]
        for name in before
        if before[name] and after[name] != pytest.approx(before[name], rel=1e-9)
    }


def test_twice_the_rate_of_products_halves_their_part() -> None:
    """Bandwidth without bound leaves the rate alone."""
    traffic = make_traffic(1e30)
    slow = make_calibration(matmuls=make_matmuls(300e12), traffic=traffic)
    fast = make_calibration(matmuls=make_matmuls(600e12), traffic=traffic)
    options = {"method": "full", "checkpointing": False, "weights": "bf16"}

    reported = changed(parts(slow, **options), parts(fast, **options))

    assert reported.pop("matmul") == pytest.approx(0.5, rel=1e-3)
    assert set(reported) <= {"launch"}


def test_products_at_one_rate_take_the_flops_over_it() -> None:
    """3 x 2 x weights x tokens: forward, gradients of inputs and of weights."""
    found = make_calibration(traffic=make_traffic(1e30))
    seconds = parts(found, method="full", checkpointing=False, weights="bf16")["matmul"]
    num_weights = sum(
        block.num_layers * part.in_features * part.out_features
        for block in SPEC.blocks
        for part in block.linears
    )
    flops = 6.0 * 4 * 2048 * (num_weights + SPEC.hidden_size * SPEC.vocab_size)

    assert seconds == pytest.approx(flops / 400e12, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "part", "factor"),
    [
        ({"attention": make_attention(400e12)}, "attention", 0.5),
        ({"nf4_weights_per_second": 200e9}, "dequantize", 0.5),
    ],
)
def test_each_measured_rate_moves_its_own_part(
    changes: dict[str, Any], part: str, factor: float
) -> None:
    options = {"weights": "nf4", "checkpointing": False}

    reported = changed(
        parts(make_calibration(), **options), parts(make_calibration(**changes), **options)
    )

    assert reported.pop(part) == pytest.approx(factor, rel=1e-3)
    assert set(reported) <= {"launch"}


def test_adamw_takes_the_measured_seconds_per_value() -> None:
    options = {"method": "full", "weights": "bf16", "optimizer": "adamw"}

    seconds = parts(make_calibration(), **options)["optimizer"]

    assert seconds == pytest.approx(SPEC.num_params * 0.010 / 1e9, rel=1e-6)
    foreach = parts(make_calibration(), **options | {"optimizer": "adamw-foreach"})["optimizer"]
    assert foreach > 2 * seconds


def test_a_slower_host_is_waited_for_only_where_kernels_are_short() -> None:
    slow = make_calibration(host_times=make_host_times(3.0))
    small = {"micro_batch": 1, "seq_len": 128, "checkpointing": True}
    quick, long = make_calibration(), {"micro_batch": 8, "seq_len": 4096, "checkpointing": True}

    assert parts(slow, **small)["launch"] > 2.5 * parts(quick, **small)["launch"]
    assert parts(slow, **long)["launch"] == pytest.approx(parts(quick, **long)["launch"], rel=1e-6)


def test_attention_that_writes_its_scores_takes_their_measured_seconds() -> None:
    """4 x 32 heads x 2048 x 2048 scores in each of 32 layers, both directions."""
    rows = tuple(
        AttentionTime(
            kind=kind, dtype="bfloat16", batch=1, heads=32, length=1024, head_dim=128,
            is_causal=False, forward_seconds=forward * 32 * 1024**2,
            backward_seconds=2e-11 * 32 * 1024**2,
        )
        for kind, forward in (("eager", 1e-11), ("math", 3e-11))
    )  # fmt: skip
    found = make_calibration(attention=(*make_attention(200e12), *rows))
    options = {"checkpointing": False, "method": "full", "weights": "bf16"}

    eager = parts(found, attention="eager", **options)
    fused = parts(found, attention="sdpa", **options)

    assert eager["attention"] == pytest.approx(32 * 4 * 32 * 2048**2 * 3e-11, rel=1e-3)
    assert fused["attention"] == parts(make_calibration(), attention="sdpa", **options)["attention"]
    # In fp32 one head of keys for all sends SDPA to the kernel that writes them, twice as wide.
    falcon = resolve_model("falcon-7b")
    whole = {"weights": "fp32", "compute": "fp32"}
    strategy = Strategy(**{"micro_batch": 4, "seq_len": 2048, **options, **whole})
    node = Node(gpu=found.apply(GPU), num_gpus=1)
    reported = estimate_job(spec=falcon, strategy=strategy, node=node).time.components["attention"]
    scores = falcon.num_layers * 4 * falcon.num_heads * 2048**2
    assert reported == pytest.approx(2 * scores * 5e-11, rel=1e-3)


def test_attention_in_another_width_or_kernel_is_not_what_was_measured() -> None:
    fast, slow = (make_calibration(attention=make_attention(rate)) for rate in (400e12, 100e12))
    for options in ({"weights": "fp32", "compute": "fp32"}, {"attention": "flash"}):
        assert parts(fast, **options)["attention"] == parts(slow, **options)["attention"]
    assert parts(fast)["attention"] < parts(slow)["attention"]


def test_lora_costs_the_host_what_was_measured_of_it() -> None:
    small = {"micro_batch": 1, "seq_len": 64, "checkpointing": False, "adapter_dtype": "bf16"}
    times = make_host_times(1.0)
    cheap, dear = (
        make_calibration(
            host_times=times.model_copy(
                update={"adapter_forward_seconds": cost, "adapter_backward_seconds": cost}
            )
        )
        for cost in (100e-6, 300e-6)
    )

    more = parts(dear, **small)["launch"] - parts(cheap, **small)["launch"]

    assert more == pytest.approx(2 * 200e-6 * 7 * SPEC.num_layers, rel=1e-3)


def test_the_context_is_the_measured_one_wherever_memory_is_counted() -> None:
    plain, measured = predict(None), predict(make_calibration(context_bytes=2**30))

    assert measured.gpu.context_bytes == 2**30
    assert measured.gpu.components["cuda_context"] == 2**30
    less = measured.gpu.peak_reserved_bytes - plain.gpu.peak_reserved_bytes
    assert less == 2**30 - plain.gpu.context_bytes
    assert {phase.components["cuda_context"] for phase in measured.phases} == {2**30}
    several = predict(make_calibration(context_bytes=2**30), num_gpus=4, sharding="fsdp")
    assert several.gpu.context_bytes > 2**30, "NCCL's own buffers come on top"


def test_links_are_the_measured_ones() -> None:
    found = make_calibration(collectives=make_collectives(100e9), num_gpus=4)
    node = Node(gpu=found.apply(GPU), num_gpus=4)

    links = find_links(node, network_bytes_per_second=None)

    assert links.inside == pytest.approx(100e9, rel=1e-3)
    assert links.inside_latency == pytest.approx(30e-6, rel=0.01)
    assert links.host == 10e9, "the slower direction"


def test_answering_uses_the_measured_bandwidth() -> None:
    job = InferenceJob(
        weight_bytes=14 * 10**9, compute=Dtype.BF16, num_slots=1, num_columns=64,
        prompt_tokens=16, new_tokens=16, pass_tokens=64,
    )  # fmt: skip
    half, whole = (
        estimate_inference(SPEC, job, make_calibration(traffic=make_traffic(rate)).apply(GPU))
        for rate in (1e12, 2e12)
    )

    assert half.pass_seconds == pytest.approx(2 * whole.pass_seconds, rel=1e-3)


def test_the_estimate_says_that_its_rates_were_measured() -> None:
    line = "rates measured here on 2026-11-15 by tightfit calibrate"

    assert line in predict(make_calibration()).assumptions
    assert not any("calibrate" in reported for reported in predict(None).assumptions)


def _attention_times(kind: str, flops_per_second: float) -> tuple[AttentionTime, ...]:
    plain = make_attention(flops_per_second)
    return tuple(one.model_copy(update={"kind": kind}) for one in plain)


def _profile(**changes: Any) -> DataProfile:
    """Documents of 128 tokens, and half as many of 512."""
    return DataProfile(
        source="made up", format="chat", num_rows=3000, num_tokens=768_000,
        num_trained_tokens=768_000, mean_tokens=256.0, max_tokens=512, percentiles={},
        histogram=((128, 2000), (512, 1000)), num_truncated=0, seq_len=2048, tokenizer="none",
        is_exact=True, padding_waste_fraction={"4": 0.5}, packing_waste_fraction=0.0,
        num_packed_rows=375, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_packed_documents_take_the_rate_of_their_mean_length(attention: str) -> None:
    """Pairs are those inside of documents: a token's own is 384 tokens long on average."""
    (one, *_) = _attention_times("varlen", 100e12)
    slow, fast = (
        one.model_copy(update={"length": length, "forward_seconds": at, "backward_seconds": at})
        for length, at in ((256, 1e-3), (384, 1e-9))
    )
    found = make_calibration(attention=(*make_attention(200e12), slow, fast))
    options = {"checkpointing": False, "packing": True, "attention": attention}
    node = Node(gpu=found.apply(GPU), num_gpus=1)
    strategy = Strategy(**{"micro_batch": 4, "seq_len": 2048, **options})

    reported = estimate_job(spec=SPEC, strategy=strategy, node=node, profile=_profile())

    pairs = SPEC.num_layers * 4 * 2048 * 385 / 2
    flops = 4.0 * pairs * SPEC.num_heads * SPEC.head_dim
    forward, backward = slow.forward_flops / 1e-3, 2.5 * slow.forward_flops / 1e-3
    expected = flops / forward + 2.5 * flops / backward
    assert reported.time.components["attention"] == pytest.approx(expected, rel=1e-3)


def test_a_padding_mask_takes_a_rate_of_its_own_over_all_pairs() -> None:
    found = make_calibration(
        attention=(*make_attention(200e12), *_attention_times("masked", 100e12))
    )
    node = Node(gpu=found.apply(GPU), num_gpus=1)
    strategy = Strategy(micro_batch=4, seq_len=2048, checkpointing=False)

    padded, masked, equal = (
        estimate_job(spec=SPEC, strategy=one, node=node, profile=profile).time.components
        for one, profile in (
            (strategy, _profile()),
            (strategy.model_copy(update={"quirks": Quirks(padding_mask=True)}), _profile()),
            (strategy.model_copy(update={"seq_len": 512}), None),
        )
    )

    # Ours have no mask. With one: twice the pairs, but for the diagonal, at half the rate.
    assert padded["attention"] == pytest.approx(equal["attention"])
    assert masked["attention"] == pytest.approx(4 * equal["attention"], rel=0.01)


def test_products_take_longer_by_what_the_power_limit_leaves() -> None:
    """Alone by all of it; what the traffic of the others takes is made up for."""
    rested = make_matmuls(400e12)[1]
    hot = rested.model_copy(update={"seconds": rested.seconds / 0.8})
    options = {"method": "full", "checkpointing": False, "weights": "bf16"}
    cool, limited = (
        parts(make_calibration(sustained=sustained), **options) for sustained in (None, hot)
    )

    reported = changed(cool, limited)

    device = sum(cool[name] for name in ("matmul", "attention", "memory_bound"))
    share = (cool["matmul"] + cool["attention"]) / device
    assert reported.pop("matmul") == pytest.approx(1 + share / 4)
    assert reported.pop("attention") == pytest.approx(1 + share / 4)
    assert set(reported) <= {"launch"}


def test_what_was_not_measured_stays_as_it_was() -> None:
    """A calibration of nothing changes nothing."""
    nothing = make_calibration(
        context_bytes=None, matmuls=(), attention=(), traffic=(), optimizers=(),
        nf4_weights_per_second=None, host_times=None, host_link=None,
    )  # fmt: skip
    for options in ({"weights": "nf4"}, {"method": "full", "weights": "fp32"}):
        plain, measured = predict(None, **options), predict(nothing, **options)
        assert measured.time == plain.time
        assert measured.gpu == plain.gpu


def test_a_plan_keeps_the_rates_it_was_made_with_and_stays_small() -> None:
    cluster = resolve_hardware("H200")
    (group,) = cluster.groups
    node = group.node.model_copy(update={"gpu": make_calibration().apply(group.node.gpu)})
    measured = cluster.model_copy(update={"groups": (group.model_copy(update={"node": node}),)})
    (plan,) = search(JobRequest(spec=SPEC), measured, num_plans=1).plans

    again = type(plan).model_validate_json(plan.model_dump_json())

    assert again == plan
    assert again.hardware.node.gpu.measured == make_calibration().rates()
    (without,) = search(JobRequest(spec=SPEC), cluster, num_plans=1).plans
    assert "measured" not in without.model_dump(mode="json")["hardware"]["node"]["gpu"]


def make_table() -> MatmulTable:
    rows = [(m, n, k, 2.0 * m * n * k / 5e14 + 4e-6) for m, n, k in (
        (512, 4096, 4096), (2048, 4096, 4096), (8192, 4096, 4096), (2048, 16, 4096),
        (2048, 11008, 4096), (2048, 32000, 4096),
    )]  # fmt: skip
    return MatmulTable(rows, value_bytes=2, bytes_per_second=4e12)


def test_a_measured_product_is_told_as_measured() -> None:
    assert make_table().seconds(2048, 16, 4096) == pytest.approx(
        2.0 * 2048 * 16 * 4096 / 5e14 + 4e-6, rel=0.01
    )


SIDE = st.integers(min_value=1, max_value=300_000)


@given(m=SIDE, n=SIDE, k=SIDE)
def test_no_product_is_far_from_its_roofline(m: int, n: int, k: int) -> None:
    """Whatever the shape: between the least and the most that measured ones took beside theirs."""
    table = make_table()
    roofline = 2.0 * m * n * k / table.best_flops_per_second
    roofline += 2.0 * (m * n + m * k + n * k) / 4e12

    assert 0.5 * roofline < table.seconds(m, n, k) < 3.0 * roofline


def test_rates_between_and_beyond_the_measured_ones() -> None:
    rows = ((2**20, 1e12), (2**24, 4e12))

    assert bandwidth_at(rows, 2**22) == pytest.approx(2e12)
    assert bandwidth_at(rows, 1) == 1e12
    assert bandwidth_at(rows, 2**40) == 4e12
    attention = ((64, 1024, 200e12, 100e12), (128, 1024, 400e12, 300e12))
    assert attention_rates(attention, head_dim=96, seq_len=1024) == pytest.approx((300e12, 225e12))
    assert attention_rates(attention, head_dim=256, seq_len=1024) == (400e12, 300e12)
    assert attention_rates((), head_dim=96, seq_len=100) is None


def test_attention_beyond_the_measured_lengths_fills_up_as_kernels_do() -> None:
    """Half speed at 320 tokens: a third of the best at 160, two thirds at 640, 0.8 at 1280."""
    rows = ((128, 320, 100e12, 50e12), (128, 640, 140e12, 70e12))

    assert attention_rates(rows, head_dim=128, seq_len=1280) == pytest.approx((168e12, 84e12))
    assert attention_rates(rows, head_dim=128, seq_len=160) == pytest.approx(
        (200e12 / 3, 100e12 / 3)
    )
    assert attention_rates(rows, head_dim=128, seq_len=640) == pytest.approx((140e12, 70e12))
