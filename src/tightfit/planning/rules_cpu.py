"""What a CPU cannot do, or does to no purpose."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.strategy import Attention, Loss, Offload, Optimizer
from tightfit.planning.case import Rule, is_halved

CPU_RULES: tuple[Rule, ...] = (
    Rule(
        name="cpu-kernels",
        reason="fused kernels are written in Triton, which runs on GPUs: use the plain or chunked "
        "loss on a CPU",
        source="https://github.com/linkedin/Liger-Kernel (needs triton and a GPU)",
        violated=lambda c: (
            c.is_cpu and (c.strategy.fused_kernels or c.strategy.loss in (Loss.FUSED, Loss.KERNEL))
        ),
    ),
    Rule(
        name="cpu-adamw-kernel",
        reason="adamw-kernel is written in Triton, which runs on GPUs; adamw is torch's own",
        source="tightfit.runtime.adamw_kernels",
        violated=lambda c: c.is_cpu and c.strategy.optimizer is Optimizer.ADAMW_KERNEL,
    ),
    Rule(
        name="cpu-flash",
        reason="flash attention over packed rows runs on GPUs; sdpa has a fused kernel for CPUs",
        source="torch.nn.attention.varlen, torch 2.13",
        violated=lambda c: c.is_cpu and c.strategy.attention is Attention.FLASH,
    ),
    Rule(
        name="cpu-fp16",
        reason="CPUs have no fast fp16, and it would need a gradient scaler: use fp32 or bf16",
        source="https://docs.pytorch.org/docs/stable/amp.html",
        violated=lambda c: (
            c.is_cpu and Dtype.FP16 in (c.strategy.compute, c.strategy.adapter_dtype)
        ),
    ),
    Rule(
        name="cpu-bf16",
        reason="{c.gpu.name} has no bf16 units (avx512_bf16, amx_bf16): use fp32",
        source="/proc/cpuinfo",
        violated=lambda c: c.is_cpu and not c.gpu.supports_bf16 and is_halved(c),
    ),
    Rule(
        name="cpu-paged",
        reason="a paged optimizer moves its state between a GPU and the host; on a CPU it is "
        "adamw-8bit",
        source="bitsandbytes 0.50, functional.get_paged",
        violated=lambda c: c.is_cpu and c.strategy.optimizer is Optimizer.ADAMW_PAGED_8BIT,
        severity="warning",
    ),
    Rule(
        name="cpu-offload",
        reason="offload on a CPU saves nothing: the host's memory is where everything is already",
        source="the hardware given",
        violated=lambda c: c.is_cpu and c.strategy.offload is not Offload.NONE,
        severity="warning",
    ),
    Rule(
        name="cpu-compile",
        reason="compiling for a CPU takes about three minutes and gains 2 to 7%",
        source="measured with torch 2.13 on 2 cores, SmolLM2-135M LoRA",
        violated=lambda c: c.is_cpu and c.strategy.compile,
        severity="warning",
    ),
    Rule(
        name="cpu-quantized",
        reason="{s.weights.value} weights are unpacked for every product, which is slow on a CPU",
        source="bitsandbytes 0.50 on CPUs",
        violated=lambda c: (
            c.is_cpu and c.strategy.weights.is_quantized and not c.strategy.unpacked_base
        ),
        severity="warning",
    ),
)
