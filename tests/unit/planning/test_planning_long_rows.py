"""The levers for long rows: pulled where one row does not fit otherwise, and then only."""

from __future__ import annotations

from typing import Any

import pytest
from planning_cases import make_cluster, make_request

from tightfit.core.units import GIB
from tightfit.estimation.job import exceeds_host_memory
from tightfit.estimation.result import Verdict
from tightfit.hardware.catalogue import find_gpu
from tightfit.planning.longest import find_longest_rows
from tightfit.planning.plan import Plan
from tightfit.planning.search import search


def _plan(
    seq_len: int, *, gib: int | None = None, host_gib: int | None = None, **fixed: Any
) -> Plan:
    gpu = find_gpu("H200")
    if gib is not None:
        gpu = gpu.model_copy(update={"memory_bytes": gib * GIB})
    cluster = make_cluster((1, gpu))
    if host_gib is not None:
        [group] = cluster.groups
        node = group.node.model_copy(update={"host_memory_bytes": host_gib * GIB})
        groups = (group.model_copy(update={"node": node}),)
        cluster = cluster.model_copy(update={"groups": groups})
    request = make_request("Llama-3.1-8B", method="qlora", seq_len=seq_len, fixed=fixed)
    return search(request, cluster, num_plans=1).plans[0]


def test_each_lever_comes_when_those_before_it_do_not_suffice() -> None:
    short, middle, long = (_plan(length, gib=24) for length in (2048, 49_152, 98_304))
    assert (short.strategy.offloaded_inputs, short.strategy.mlp_tiles) == (0, 1)
    assert (middle.strategy.offloaded_inputs, middle.strategy.mlp_tiles) == (31, 1)
    assert (long.strategy.offloaded_inputs, long.strategy.mlp_tiles) == (31, 8)
    words = " ".join(long.why)
    assert "layers' inputs in host memory: " in words
    assert "MLPs in tiles: " in words
    # 31 inputs of 98,304 rows of 4,096 values of two bytes.
    assert long.estimate.host.components["offloaded_inputs"] == 31 * 98_304 * 4096 * 2


def test_the_longest_row_fits_and_a_longer_one_does_not() -> None:
    """By the search itself: what `--longest` says of a length, `plan` with it finds too."""
    gpu = find_gpu("H200").model_copy(update={"memory_bytes": 24 * GIB})
    rows = find_longest_rows(make_request("Llama-3.1-8B", method="qlora"), make_cluster((1, gpu)))
    lengths = [row.seq_len for row in rows]
    assert lengths == sorted(lengths)
    assert len(set(lengths[:4])) == 4, "every lever makes room"
    tiled = rows[3]
    assert tiled.strategy is not None
    assert tiled.summary is not None
    longer = tiled.seq_len * 21 // 20
    for length, verdict in ((tiled.seq_len, Verdict.FITS), (longer, Verdict.TIGHT)):
        plan = _plan(length, gib=24, sharding="single", offload="none")
        assert plan.estimate.verdict is verdict
    rate = tiled.summary.time.tokens_per_second
    assert tiled.seconds_per_row == pytest.approx(tiled.seq_len / rate)


def test_no_more_inputs_than_the_host_has_room_for() -> None:
    plan = _plan(131_072, gib=48, host_gib=24, mlp_tiles=8)
    assert 0 < plan.strategy.offloaded_inputs < 31
    assert not exceeds_host_memory(plan.estimate.host)


def test_the_measured_step_is_predicted() -> None:
    """benchmarks/results/h200_long_rows.json: 131,072 tokens took 18.8 GiB and 48.0 s."""
    long_row = {"offloaded_inputs": 31, "mlp_tiles": 8, "micro_batch": 1, "grad_accum": 1}
    plan = _plan(131_072, dequantized_base=False, **long_row)
    allocated = plan.estimate.gpu.peak_allocated_bytes
    assert 18.8 * GIB < allocated < 1.2 * 18.8 * GIB
    assert 48.0 < plan.estimate.time.seconds_per_step < 1.15 * 48.0
