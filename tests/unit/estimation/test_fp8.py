"""fp8 products in memory and time: what is halved, what is cast, and what stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from made_calibrations import make_calibration, make_matmuls
from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB
from tightfit.estimation.job import estimate_job
from tightfit.estimation.result import Estimate, Verdict
from tightfit.hardware.calibration import MatmulTime
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.rates import FP8_SUSTAINED_FRACTION, sustained_fp8_flops
from tightfit.hardware.types import Gpu, Node
from tightfit.models.resolve import resolve_model
from tightfit.trace.operation_work import describe_operation
from tightfit.trace.result import FORWARD, MATMUL, Operation
from tightfit.trace.traced_time import DeviceSeconds

H200 = find_gpu("H200-SXM")
LLAMA = resolve_model("Llama-2-7b")
LORA: dict[str, Any] = {"method": "lora", "fused_lora": True}
FULL: dict[str, Any] = {"method": "full"}


def estimate(fields: dict[str, Any], *, fp8: bool, gpu: Gpu = H200, model: Any = LLAMA) -> Estimate:
    plain: dict[str, Any] = {"micro_batch": 4, "checkpointing": False, "fused_kernels": True}
    strategy = Strategy(**(plain | fields | {"fp8": fp8}))
    return estimate_job(spec=model, strategy=strategy, node=Node(gpu=gpu, num_gpus=1))


def weights(one: Estimate) -> int:
    return one.gpu.components["weights"]


def phase(one: Estimate, name: str) -> int:
    (found,) = (p.peak_allocated_bytes for p in one.phases if p.name == name)
    return found


def seconds(one: Estimate) -> float:
    return one.time.seconds_per_step


def test_frozen_matrices_weigh_half_and_trained_ones_what_they_did() -> None:
    plain = LORA | {"fused_kernels": False}  # else bf16 matrices have spare columns
    lora = [weights(estimate(plain, fp8=fp8)) for fp8 in (False, True)]
    full = [weights(estimate(FULL, fp8=fp8)) for fp8 in (False, True)]
    assert lora[0] - lora[1] == LLAMA.linear_params
    assert full[0] == full[1]


def test_loading_needs_bf16_first_and_answers_need_it_last() -> None:
    lora = LORA | {"fused_kernels": False}
    plain, found = (estimate(lora, fp8=fp8) for fp8 in (False, True))
    assert phase(found, "load") > phase(plain, "load")
    assert phase(found, "save") < phase(plain, "save")
    assert phase(found, "inference") == phase(plain, "inference")


@pytest.mark.parametrize(("fields", "least", "most"), [(LORA, 1.15, 2.0), (FULL, 1.03, 1.5)])
def test_a_step_gains_less_than_twice_and_less_where_weights_are_trained(
    fields: dict[str, Any], least: float, most: float
) -> None:
    gain = seconds(estimate(fields, fp8=False)) / seconds(estimate(fields, fp8=True))
    assert least < gain < most


def test_gradients_alone_gain_less_than_both_passes() -> None:
    plain, both = (seconds(estimate(FULL, fp8=fp8)) for fp8 in (False, True))
    found = seconds(estimate(FULL | {"fp8_gradients": True}, fp8=False))
    assert both < found < plain


def test_gradients_alone_cast_nothing_before_the_backward_pass() -> None:
    plain, both = (estimate(FULL, fp8=fp8) for fp8 in (False, True))
    found = estimate(FULL | {"fp8_gradients": True}, fp8=False)
    for name in ("forward", "eval"):
        assert phase(found, name) == phase(plain, name) < phase(both, name)
    assert phase(found, "backward") == phase(both, "backward") > phase(plain, "backward")


def test_gradients_alone_are_two_of_three_products() -> None:
    """On a card that was measured, and on one that was not."""
    measured = (*make_matmuls(400e12), *make_matmuls(1000e12, "fp8"))
    for gpu in (H200, make_calibration(matmuls=measured).apply(H200)):
        plain, both, found = (
            estimate(FULL | {"fp8_gradients": one}, fp8=two, gpu=gpu).time.components["matmul"]
            for one, two in ((False, False), (False, True), (True, False))
        )
        assert (plain - found) / (plain - both) == pytest.approx(2 / 3, rel=0.02)


def test_casts_are_traffic() -> None:
    plain, found = (estimate(LORA, fp8=fp8).time.components for fp8 in (False, True))
    assert found["memory_bound"] > plain["memory_bound"]
    assert found["matmul"] < plain["matmul"]
    assert found["attention"] == plain["attention"]


def test_a_measured_card_multiplies_as_it_did_when_it_was_measured() -> None:
    matmuls = make_matmuls(400e12)

    def measured(rate: float | None) -> Estimate:
        rows = (*matmuls, *(make_matmuls(rate, "fp8") if rate else ()))
        return estimate(LORA, fp8=True, gpu=make_calibration(matmuls=rows).apply(H200))

    slow, fast = measured(500e12), measured(1000e12)
    assert fast.time.components["matmul"] < slow.time.components["matmul"]
    untold = measured(None)
    assert untold.time.components["matmul"] < slow.time.components["matmul"], "the catalogue's rate"


def test_the_backward_pass_sums_as_it_did_when_it_was_measured() -> None:
    """Two of three products of full tuning keep every bit of their sums."""
    rows = (*make_matmuls(400e12), *make_matmuls(1000e12, "fp8"))

    def measured(*exact: MatmulTime) -> float:
        gpu = make_calibration(matmuls=(*rows, *exact)).apply(H200)
        return estimate(FULL, fp8=True, gpu=gpu).time.components["matmul"]

    assert measured(*make_matmuls(1000e12, "fp8-exact")) == measured()
    slower = measured(*make_matmuls(500e12, "fp8-exact")) / measured()
    assert slower == pytest.approx(1 + 2 / 3, rel=0.1)


def test_experts_that_are_bare_parameters_gain_nothing() -> None:
    mixtral = resolve_model("mixtral-8x7b")
    targets = LORA | {"lora_targets": ("q_proj",)}
    plain, found = (estimate(targets, fp8=fp8, model=mixtral) for fp8 in (False, True))
    assert weights(plain) - weights(found) == mixtral.linear_params
    gain = plain.time.components["matmul"] / found.time.components["matmul"]
    assert 1.0 < gain < 1.15


def test_rates_without_measurements_are_of_the_card_s_peak() -> None:
    assert sustained_fp8_flops(H200) == FP8_SUSTAINED_FRACTION * H200.peak_flops["fp8"]


# The traced tier


def test_a_traced_product_has_its_flops_and_its_narrow_operands() -> None:
    m, n, k = 32, 48, 64
    left, right = (torch.ones(rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
    multiply = torch.ops.aten._scaled_mm.default
    args = (left, right.t(), torch.ones(m, 1), torch.ones(1, n))
    for is_fast, dtype in ((True, "fp8"), (False, "fp8-exact")):
        kwargs = {"out_dtype": torch.bfloat16, "use_fast_accum": is_fast}
        work = describe_operation(multiply, args, kwargs, multiply(*args, **kwargs))
        assert (work.kind, work.dtype, work.shape) == (MATMUL, dtype, (m, n, k, 1))
        assert work.flops == 2 * m * n * k
        assert work.num_bytes == m * k + n * k + 2 * m * n


def test_a_base_that_fits_only_once_it_is_fp8_does_not_fit() -> None:
    """All of it is there in bf16 before the first matrix is cast: short rows train with less."""
    small = LORA | {"seq_len": 128, "micro_batch": 1}
    plain, found = (estimate(small, fp8=fp8) for fp8 in (False, True))
    load = phase(found, "load")
    assert max(phase(found, name) for name in ("forward", "backward")) < 9 * GIB < 12 * GIB < load
    assert found.gpu.peak_phase == "load"
    assert found.gpu.peak_allocated_bytes == load
    assert plain.gpu.peak_phase != "load"
    little = H200.model_copy(update={"memory_bytes": 11 * GIB})
    assert estimate(small, fp8=True, gpu=little).verdict is Verdict.DOES_NOT_FIT


def test_a_traced_product_takes_the_card_s_fp8_rate() -> None:
    strategy = Strategy(**LORA, fp8=True)
    m = n = k = 4096

    def took(dtype: str, gpu: Gpu) -> float:
        name = "aten::_scaled_mm" if dtype.startswith("fp8") else "aten::mm"
        one = Operation(
            name=name, kind=MATMUL, stage=FORWARD, dtype=dtype, shape=(m, n, k, 1),
            flops=2.0 * m * n * k, num_kernels=1,
        )  # fmt: skip
        return DeviceSeconds(gpu, strategy).of(one)

    assert took("fp8", H200) == pytest.approx(2.0 * m * n * k / sustained_fp8_flops(H200))
    assert took("fp8", H200) < took("bf16", H200)
    assert took("fp8-exact", H200) == took("fp8", H200)
    rows = (*make_matmuls(400e12), *make_matmuls(1000e12, "fp8"))
    gpu = make_calibration(matmuls=rows).apply(H200)
    assert took("bf16", gpu) / took("fp8", gpu) == pytest.approx(2.5, rel=0.3)
    assert took("fp8-exact", gpu) == took("fp8", gpu)
    report = make_calibration(matmuls=(*rows, *make_matmuls(500e12, "fp8-exact"))).apply(H200)
    assert took("fp8-exact", report) / took("fp8", report) == pytest.approx(2.0, rel=0.3)
