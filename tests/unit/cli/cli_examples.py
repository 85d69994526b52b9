"""An estimate, plans and offers with made-up numbers: what is shown does not move with formulas."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.settings import Loss, Offload, Sharding
from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB, MIB
from tightfit.estimation.result import (
    DiskSpace,
    Estimate,
    GpuMemory,
    HostMemory,
    ParameterCounts,
    Phase,
    StepTime,
    Verdict,
)
from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.resolve import resolve_model
from tightfit.planning.buying import Offer
from tightfit.planning.plan import Cost, Exclusion, Plan, PlanHardware
from tightfit.planning.search import SearchResult

SPEC = resolve_model("Llama-2-7b")
CLUSTER = resolve_hardware("4xV100-32GB")
GROUP = CLUSTER.groups[0]
STRATEGY = Strategy(
    weights=Dtype.FP16,
    compute=Dtype.FP16,
    adapter_dtype=Dtype.FP32,
    sharding=Sharding.DDP,
    gpus_per_node=4,
    micro_batch=2,
    grad_accum=2,
    loss=Loss.FUSED,
    fused_kernels=True,
)
OFFLOADED = STRATEGY.model_copy(
    update={"sharding": Sharding.ZERO3, "offload": Offload.ALL, "weights": Dtype.NF4}
)


def phase(name: str, *, activations: int = 0) -> Phase:
    components = {
        "weights": 13 * GIB,
        "optimizer": 300 * MIB,
        "activations": activations,
        "allocator_slack": 500 * MIB,
        "cuda_context": 768 * MIB,
    }
    total = sum(components.values())
    return Phase(
        name=name,
        peak_allocated_bytes=total - 1268 * MIB,
        peak_reserved_bytes=total,
        components=components,
    )


def make_estimate(*, verdict: Verdict = Verdict.FITS, activations: int = 9 * GIB) -> Estimate:
    phases = (phase("load"), phase("backward_end", activations=activations), phase("save"))
    peak = phases[1]
    return Estimate(
        verdict=verdict,
        reason="needs some of the card [not markup]; the card has more",
        parameters=ParameterCounts(total=6_738_415_616, trainable=39_976_960, active=6_738_415_616),
        gpu=GpuMemory(
            peak_phase=peak.name,
            peak_allocated_bytes=peak.peak_allocated_bytes,
            peak_reserved_bytes=peak.peak_reserved_bytes,
            context_bytes=768 * MIB,
            capacity_bytes=32 * GIB,
            components=peak.components,
        ),
        host=HostMemory(
            peak_bytes=30 * GIB,
            capacity_bytes=256 * GIB,
            components={"loading": 20 * GIB, "processes": 10 * GIB},
        ),
        disk=DiskSpace(bytes=26 * GIB, components={"base_model": 25 * GIB, "checkpoints": GIB}),
        time=StepTime(
            seconds_per_step=5.0,
            seconds_per_step_low=4.0,
            seconds_per_step_high=8.0,
            tokens_per_second=6553.6,
            flops_per_step=1e15,
            mfu_fraction=0.31,
            components={"compute": 5.0},
        ),
        phases=phases,
        assumptions=("the host was not looked at [really], so it is assumed to have 256 GiB",),
    )


def make_plan(strategy: Strategy, estimate: Estimate) -> Plan:
    return Plan(
        tightfit_version="0.0.0",
        model=SPEC,
        strategy=strategy,
        hardware=PlanHardware(group=GROUP.name, node=GROUP.node, num_nodes=1, source="words"),
        data=None,
        num_epochs=1.0,
        effective_batch=16,
        estimate=estimate,
        cost=Cost(usd_per_hour=9.2, usd_per_run=None, source="made up"),
        why=("fused kernels: 1.10x faster, -2.5 GiB per GPU", "packing: 1.4x faster"),
        warnings=("this card's wheels will end",),
    )


def make_result() -> SearchResult:
    tight = make_estimate(verdict=Verdict.TIGHT, activations=16 * GIB)
    return SearchResult(
        plans=(make_plan(STRATEGY, make_estimate()), make_plan(OFFLOADED, tight)),
        excluded=(
            Exclusion(
                rule="int8-capability",
                reason="int8 needs compute capability 7.5; Tesla V100-SXM2-32GB is 7.0",
                num_strategies=1234,
                example="lora-int8 int8/fp16, single on 1 GPU, micro-batch 1 x 1, checkpointing",
                link="https://example.org/a/long/address/that/cannot/be/broken/at/a/space/anywhere",
            ),
            Exclusion(
                rule="memory",
                reason="full in these ways needs 37.5 GiB or more per GPU; the card has 31.7 GiB",
                num_strategies=90,
                example="full fp32/fp16, fsdp on 1 x 4 GPUs",
            ),
        ),
        num_considered=2052,
        shortfall=None,
    )


def make_offers() -> list[Offer]:
    found = make_plan(STRATEGY, make_estimate())
    return [
        Offer(
            gpu=GROUP.node.gpu,
            num_gpus=4,
            plan=found,
            usd_per_hour=usd,
            usd_per_run=None,
            usd_per_million_tokens=usd / 20,
            usd_per_month=usd * 730,
            price_source="made up",
            stages={},
        )
        for usd in (9.2, 31.25)
    ]
