"""The DeepSpeed config of a plan, whole, and read back by DeepSpeed's own parser."""

from __future__ import annotations

from typing import Any

import pytest

from tightfit.core.dtypes import Dtype
from tightfit.core.settings import Offload, Sharding
from tightfit.core.strategy import Strategy, Training
from tightfit.estimation.job import estimate_job
from tightfit.estimation.state import estimate_buffer_bytes
from tightfit.hardware.resolve import parse_hardware
from tightfit.hardware.types import Node
from tightfit.models.catalogue import list_models, load_row
from tightfit.models.spec import ModelSpec
from tightfit.planning.plan import Plan, PlanHardware
from tightfit.training.zero import make_zero_config

HIDDEN = 4096
HALF_PRECISION = {
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "fp16": {
        "enabled": False,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 2000,
        "hysteresis": 1,
        "min_loss_scale": 1,
    },
    "data_types": {"grad_accum_dtype": "bf16"},
}
PINNED = {"device": "cpu", "pin_memory": True}


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return load_row(next(row for row in list_models() if row.model == "meta-llama/Llama-2-7b-hf"))


def make_plan(
    spec: ModelSpec, *, is_cpu: bool = False, clip: float | None = 1.0, **fields: Any
) -> Plan:
    strategy = Strategy(micro_batch=2, grad_accum=8, gpus_per_node=4, **fields)
    node = parse_hardware("4xA100-80GB").groups[0].node
    if is_cpu:
        node = Node(gpu=node.gpu.model_copy(update={"is_cpu": True}), num_gpus=4)
    return Plan(
        tightfit_version="0",
        model=spec,
        strategy=strategy,
        hardware=PlanHardware(group="a", node=node, num_nodes=1, source="words"),
        data=None,
        num_epochs=1.0,
        effective_batch=64,
        estimate=estimate_job(spec=spec, strategy=strategy, node=node),
        cost=None,
        training=Training(model_path="m", learning_rate=1e-4, max_grad_norm=clip),
        why=(),
    )


def test_zero2_with_its_optimizer_in_host_memory(spec: ModelSpec) -> None:
    plan = make_plan(spec, sharding=Sharding.ZERO2, offload=Offload.OPTIMIZER)

    assert make_zero_config(plan) == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
        **HALF_PRECISION,
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 200_000_000,
            "allgather_bucket_size": 200_000_000,
            "contiguous_gradients": True,
            "overlap_comm": False,
            "reduce_scatter": True,
            "offload_optimizer": PINNED,
        },
    }


def test_zero3_with_everything_in_host_memory(spec: ModelSpec) -> None:
    plan = make_plan(spec, sharding=Sharding.ZERO3, offload=Offload.ALL)

    assert make_zero_config(plan)["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": HIDDEN**2,
        "stage3_prefetch_bucket_size": HIDDEN**2,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "stage3_param_persistence_threshold": 10 * HIDDEN,
        "sub_group_size": 1_000_000_000,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "offload_optimizer": PINNED,
        "offload_param": PINNED,
    }


def test_plain_zero1_moves_nothing(spec: ModelSpec) -> None:
    zero = make_zero_config(make_plan(spec, sharding=Sharding.ZERO1))["zero_optimization"]

    assert zero["stage"] == 1
    assert not any(key.startswith("offload") for key in zero)


def test_nothing_is_pinned_without_a_gpu(spec: ModelSpec) -> None:
    plan = make_plan(spec, sharding=Sharding.ZERO3, offload=Offload.ALL, is_cpu=True)
    zero = make_zero_config(plan)["zero_optimization"]

    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": False}


def test_no_clipping_is_written_as_deepspeed_writes_it(spec: ModelSpec) -> None:
    plan = make_plan(spec, sharding=Sharding.ZERO1, clip=None)

    assert make_zero_config(plan)["gradient_clipping"] == 0.0


@pytest.mark.parametrize("compute", [Dtype.FP32, Dtype.BF16, Dtype.FP16])
def test_at_most_one_half_precision_is_on(spec: ModelSpec, compute: Dtype) -> None:
    config = make_zero_config(
        make_plan(spec, sharding=Sharding.ZERO2, compute=compute, weights=compute)
    )

    is_on = {name for name in ("bf16", "fp16") if config[name]["enabled"]}
    assert is_on == ({compute.value} & {"bf16", "fp16"})
    assert config["data_types"]["grad_accum_dtype"] == compute.value


def test_buckets_are_those_of_the_estimate(spec: ModelSpec) -> None:
    """What the estimate adds for communication is what the config lets DeepSpeed allocate."""
    plan = make_plan(spec, sharding=Sharding.ZERO2)
    zero = make_zero_config(plan)["zero_optimization"]
    buffers = estimate_buffer_bytes(spec, plan.strategy)

    num_buckets = 2 if zero["overlap_comm"] else 1
    assert buffers.backward == num_buckets * zero["reduce_bucket_size"] * 2


@pytest.mark.parametrize("sharding", [Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3])
def test_deepspeed_understands_every_key(spec: ModelSpec, sharding: Sharding) -> None:
    """Its own model of the section refuses keys that it does not know."""
    zero_config = pytest.importorskip(
        "deepspeed.runtime.zero.config", reason="to run it: pip install 'tightfit[zero]'"
    )
    offload = Offload.ALL if sharding is Sharding.ZERO3 else Offload.OPTIMIZER
    zero = make_zero_config(make_plan(spec, sharding=sharding, offload=offload))[
        "zero_optimization"
    ]

    read = zero_config.DeepSpeedZeroConfig(**zero)
    assert read.stage == zero["stage"]
    assert read.reduce_bucket_size == zero["reduce_bucket_size"]
    assert read.overlap_comm == zero["overlap_comm"]
    assert read.offload_optimizer.pin_memory is True
