"""Optimizers: one record each. Planner, estimates, tracer and training ask it.

Light on purpose: the command line lists the names before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tightfit.core.dtypes import RecordEnum

BLOCKWISE_STATE_BYTES = 2 + 2 * 4 / 256
"""Two 8-bit moments, each with an fp32 scale per 256 values. Source: arXiv:2110.02861."""
EIGHT_BIT_SECONDS_PER_PARAM = 30e-12
"""bitsandbytes' 8-bit AdamW is bound by arithmetic: 27 to 39e-12 s on H200 (h200_steps.json),
about 25e-12 s on A100 (torchtune README)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRecord:
    """Everything the program knows of one optimizer."""

    factory: str
    """`module:class`, imported when training begins."""
    options: Mapping[str, object] = field(default_factory=dict)
    package: str | None = None
    """What must be installed beyond torch."""
    transformers_name: str | None = None
    """What transformers' `OptimizerNames` calls it; None where trainers built on it lack it."""

    # Memory
    state_values: int = 2
    """Moments per trained value, each in its dtype."""
    state_bytes: float | None = None
    """Moments per trained value where their size does not follow its dtype."""
    is_paged: bool = False
    """The state lives in host memory and is paged to the GPU."""
    temporary: Literal["none", "all values", "largest parameter"] = "none"
    """What the step makes beside the state."""

    # Time
    update_bytes: tuple[float, float] | None = None
    """Traffic, or its equivalent in time, per parameter: fixed, and per byte of a value."""
    seconds_per_param: float | None = None
    """Where arithmetic binds it, and not memory."""

    # Where it runs
    min_capability: tuple[int, int] = (0, 0)
    needs_triton: bool = False
    fsdp_problem: str = ""
    """Why it cannot step on FSDP's shards; empty where it can."""
    fsdp_source: str = ""
    zero_problem: str = ""
    """The same of DeepSpeed's ZeRO."""
    offload_problem: str = ""
    """The same of state in host memory."""
    cpu_problem: str = ""

    # Learning: the peak rate where none is stated
    full_rate: float = 2e-5
    """Stanford Alpaca's full tuning of 7B (github.com/tatsu-lab/stanford_alpaca, README)."""
    lora_rate: float = 2e-4
    """QLoRA's for models up to 13B (arXiv:2305.14314, table 9)."""

    # Choosing
    handicap: float = 1.0
    """How much faster it must make a plan before it is preferred to AdamW."""
    lever: str = ""
    """What a plan gains by it, in words; empty for what the planner never chooses."""
    costs_quality: bool = False


_8BIT_FSDP = "8-bit optimizers fail on FSDP's sharded tensors (illegal memory access)"
_8BIT_FSDP_SOURCE = "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633"
_WHOLE_TENSORS = "adamw-kernel updates whole tensors on one GPU: use adamw for sharded state"


class Optimizer(RecordEnum):
    """The update rule and its implementation; the implementation decides the step's temporaries."""

    record: OptimizerRecord

    # AdamW took 6.0e-12 s per bf16 and 8.9e-12 s per fp32 parameter fused, 14.1 and 23.0e-12 s
    # foreach, on an H200 (h200_rates.json). A plain count is 7 values, which our kernel takes.
    ADAMW = (
        "adamw",
        OptimizerRecord(
            factory="torch.optim:AdamW",
            options={"fused": True},
            transformers_name="adamw_torch_fused",
            update_bytes=(13.0, 6.0),
        ),
    )
    ADAMW_KERNEL = (
        "adamw-kernel",
        OptimizerRecord(
            factory="tightfit.runtime.kernels.adamw:TritonAdamW",
            update_bytes=(0.0, 7.0),
            needs_triton=True,
            fsdp_problem=_WHOLE_TENSORS,
            fsdp_source="tightfit/runtime/kernels/adamw.py",
            zero_problem=_WHOLE_TENSORS,
            cpu_problem="adamw-kernel is written in Triton, which runs on GPUs; adamw is torch's "
            "own",
            lever="clipping in the optimizer",
        ),
    )
    ADAMW_FOREACH = (
        "adamw-foreach",
        OptimizerRecord(
            factory="torch.optim:AdamW",
            options={"foreach": True},
            transformers_name="adamw_torch",
            # The square root of all second moments at once: torch `_multi_tensor_adamw`.
            temporary="all values",
            update_bytes=(21.0, 18.0),
        ),
    )
    ADAMW_8BIT = (
        "adamw-8bit",
        OptimizerRecord(
            factory="bitsandbytes.optim:AdamW8bit",
            package="bitsandbytes",
            transformers_name="adamw_bnb_8bit",
            state_bytes=BLOCKWISE_STATE_BYTES,
            seconds_per_param=EIGHT_BIT_SECONDS_PER_PARAM,
            min_capability=(6, 0),
            fsdp_problem=_8BIT_FSDP,
            fsdp_source=_8BIT_FSDP_SOURCE,
            offload_problem="an offloaded optimizer steps on the CPU; adamw-8bit steps on the GPU",
            handicap=1.05,
            lever="8-bit optimizer state",
            costs_quality=True,
        ),
    )
    ADAMW_PAGED_8BIT = (
        "adamw-paged-8bit",
        OptimizerRecord(
            factory="bitsandbytes.optim:PagedAdamW8bit",
            package="bitsandbytes",
            transformers_name="paged_adamw_8bit",
            state_bytes=BLOCKWISE_STATE_BYTES,
            is_paged=True,
            seconds_per_param=EIGHT_BIT_SECONDS_PER_PARAM,
            min_capability=(6, 0),
            fsdp_problem=_8BIT_FSDP,
            fsdp_source=_8BIT_FSDP_SOURCE,
            offload_problem="an offloaded optimizer steps on the CPU; adamw-paged-8bit steps on "
            "the GPU",
            handicap=1.08,
            lever="8-bit optimizer state",
            costs_quality=True,
        ),
    )
    SGD_MOMENTUM = (
        "sgd-momentum",
        OptimizerRecord(
            factory="torch.optim:SGD",
            options={"momentum": 0.9},
            state_values=1,
            update_bytes=(0.0, 8.0),
            # Steps are as large as gradients, and AdamW's rates teach it nothing. LOMO tunes 7B by
            # SGD at 0.03 with gradients clipped to 1 (github.com/OpenLMLab/LOMO,
            # config/args_lomo.yaml); a momentum of 0.9 makes steps ten times as long.
            # For LoRA no published rate: one that moves weights about as far as AdamW's does.
            full_rate=3e-3,
            lora_rate=3e-2,
            costs_quality=True,
        ),
    )
    ADAFACTOR = (
        "adafactor",
        OptimizerRecord(
            factory="torch.optim:Adafactor",
            transformers_name="adafactor",
            # Row and column sums are three orders of magnitude smaller than the values.
            state_values=0,
            temporary="largest parameter",
            update_bytes=(60.0, 12.0),
            fsdp_problem="torch's Adafactor takes sums over rows and columns, which fail on FSDP's "
            "shards",
            fsdp_source="torch/optim/_adafactor.py, 2.13",
            zero_problem="ZeRO flattens weights, which leaves Adafactor no rows and columns",
            # A share of each matrix's root mean square. T5's for full tuning (arXiv:1910.10683,
            # section 3.1.2); LoRA's `B` begins at zero, where shares are those of 1e-3: no
            # published rate, but one that moves weights about as far as AdamW's does.
            full_rate=1e-3,
            lora_rate=5e-2,
            handicap=1.25,
            costs_quality=True,
        ),
    )

    @property
    def is_8bit(self) -> bool:
        return self.record.state_bytes is not None
