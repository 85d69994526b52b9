"""Full tuning updates in our kernel where calibration found it faster, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
from planning_cases import make_cluster, make_request

from made_calibrations import make_calibration
from tightfit.core.optimizers import Optimizer
from tightfit.hardware.calibration import OptimizerTime
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.types import Gpu
from tightfit.planning.plan import Plan
from tightfit.planning.search import search

TORCH = OptimizerTime(dtype="bf16", num_params=10**9, seconds=24e-3)
KERNEL = TORCH.model_copy(update={"by": "kernel", "seconds": 4e-3})


def _measured(*optimizers: OptimizerTime, name: str = "H200") -> Gpu:
    gpu = find_gpu(name)
    return make_calibration(gpu.name, optimizers=optimizers).apply(gpu)


def _plan(gpu: Gpu, *, count: int = 1, method: str = "full", **fixed: Any) -> Plan:
    fixed = {"weights": "bf16"} | fixed if method == "full" else fixed
    request = make_request("Llama-3.2-1B", method=method, seq_len=2048, fixed=fixed)
    return search(request, make_cluster((count, gpu))).plans[0]


def test_the_faster_kernel_is_chosen_and_told_of() -> None:
    plan = _plan(_measured(TORCH, KERNEL))
    plain = _plan(_measured(TORCH))
    assert plan.strategy.optimizer is Optimizer.ADAMW_KERNEL
    assert plain.strategy == plan.strategy.model_copy(update={"optimizer": Optimizer.ADAMW})
    [why] = [line for line in plan.why if line.startswith("clipping in the optimizer:")]
    assert "x faster" in why
    saved = plain.estimate.time.seconds_per_step - plan.estimate.time.seconds_per_step
    assert saved == pytest.approx(20e-12 * plan.model.num_params, rel=1e-6)


@pytest.mark.parametrize(
    ("gpu", "more"),
    [
        (find_gpu("H200"), {}),  # never measured
        (_measured(TORCH, KERNEL.model_copy(update={"seconds": 30e-3})), {}),  # slower
        (_measured(TORCH, KERNEL), {"optimizer": Optimizer.ADAMW}),  # asked for
        (_measured(TORCH, KERNEL), {"method": "lora"}),  # adapters are few
        (_measured(TORCH, KERNEL), {"weights": "fp32"}),  # not torch's update in this dtype
    ],
)
def test_elsewhere_torch_updates(gpu: Gpu, more: dict[str, Any]) -> None:
    assert _plan(gpu, **more).strategy.optimizer is Optimizer.ADAMW


def test_shards_are_updated_by_torch() -> None:
    gpu = _measured(TORCH, KERNEL)
    assert _plan(gpu, count=4, sharding="fsdp").strategy.optimizer is Optimizer.ADAMW
    assert _plan(gpu, count=4, sharding="ddp").strategy.optimizer is Optimizer.ADAMW_KERNEL
