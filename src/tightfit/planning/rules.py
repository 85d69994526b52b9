"""Legality rules as data: what cannot work whatever the memory, each with reason and source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UsageError
from tightfit.core.strategy import (
    ALL_LINEAR,
    Attention,
    Loss,
    Method,
    Offload,
    Sharding,
    Strategy,
)
from tightfit.core.suggest import did_you_mean
from tightfit.estimation.loss import can_fuse_head_and_loss
from tightfit.estimation.weights import is_dora, is_lora_target
from tightfit.hardware.types import Gpu, Node
from tightfit.models.attention import (
    FLASH,
    AttentionNeeds,
    find_flash_problem,
    find_sdpa_problem,
    find_varlen_problem,
    needs_flash_attn,
    needs_of,
)
from tightfit.models.families.registry import find_family
from tightfit.models.family import Family
from tightfit.models.spec import ModelSpec

# Case, Rule, Violation: what a legality rule looks at, is, and says.


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a rule looks at."""

    spec: ModelSpec
    strategy: Strategy
    node: Node
    num_nodes: int
    """Nodes there are; the strategy says how many of them it uses."""

    @property
    def gpu(self) -> Gpu:
        return self.node.gpu

    @property
    def is_cpu(self) -> bool:
        return self.node.gpu.is_cpu

    @property
    def family(self) -> Family:
        return find_family(self.spec.model_type)

    @property
    def needs(self) -> AttentionNeeds:
        """What the model needs of an attention kernel."""
        return needs_of(self.spec)

    @property
    def is_flash(self) -> bool:
        return self.strategy.attention is Attention.FLASH

    @property
    def is_sdpa(self) -> bool:
        return self.strategy.attention is Attention.SDPA

    @property
    def flash_problem(self) -> str | None:
        """Why flash attention cannot run this model, whatever is installed."""
        return find_flash_problem(self.needs, is_packed=self.strategy.packing)

    @property
    def has_varlen(self) -> bool:
        """Whether packed documents are computed one by one, without a mask: as the runtime
        chooses it for sdpa and flash."""
        return (
            self.strategy.attention is not Attention.EAGER
            and self.strategy.compute in FLASH.computes
            and not self.is_cpu
            and not self.is_below(*FLASH.min_capability)
            and find_varlen_problem(self.needs) is None
        )

    @property
    def capability(self) -> str:
        """As people write it: `7.5`; `not NVIDIA` for other makes."""
        found = self.node.gpu.compute_capability
        return f"{found[0]}.{found[1]}" if found else "not NVIDIA"

    def is_below(self, major: int, minor: int = 0) -> bool:
        """An NVIDIA card older than this compute capability."""
        found = self.node.gpu.compute_capability
        return found is not None and found < (major, minor)

    @property
    def lacks_grouped_kernel(self) -> bool:
        """SDPA has a fused kernel for grouped heads in 16 bit on Ampere and later alone."""
        is_grouped = self.spec.num_kv_heads < self.spec.num_heads
        is_nvidia = self.node.gpu.compute_capability is not None
        is_wide = self.strategy.compute is Dtype.FP32
        return is_grouped and is_nvidia and (is_wide or self.is_below(8))

    @property
    def has_learned_positions(self) -> bool:
        """A table row per position. T5's buckets and rotary models have none."""
        longest = self.spec.max_positions
        return longest is not None and self.spec.position_params >= longest * self.spec.hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that does not work. `reason` is filled with c (case), s (strategy), m (model)."""

    name: str
    reason: str
    source: str
    """A link or a version: where to look when the world may have changed."""
    violated: Callable[[Case], bool]
    severity: Literal["illegal", "warning"] = "illegal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that one case breaks, its reason with the case's values."""

    rule: str
    reason: str
    source: str


def uses_bf16(case: Case) -> bool:
    """Whether anything is stored or computed in bf16."""
    s = case.strategy
    stored = (s.weights, s.compute, s.adapter_dtype if s.method is Method.LORA else s.compute)
    return Dtype.BF16 in stored


def needs_triton(case: Case) -> bool:
    """Whether kernels are written or compiled for the card."""
    s = case.strategy
    has_kernels = s.fused_kernels or s.optimizer.record.needs_triton
    return has_kernels or s.loss is Loss.FUSED or s.compile


# What sharding, offload and the optimizers cannot be combined with.

_DEEPSPEED = "https://www.deepspeed.ai/docs/config-json/"
_FSDP2 = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
_PEFT_FSDP = "https://huggingface.co/docs/peft/accelerate/fsdp"
_PEFT_ZERO = "https://huggingface.co/docs/peft/accelerate/deepspeed"

SHARDING_RULES: tuple[Rule, ...] = (
    # Sharding and offload
    Rule(
        name="single-many",
        reason="sharding `single` runs on one GPU; {s.world_size} were asked for",
        source="tightfit's launcher",
        violated=lambda c: c.strategy.sharding is Sharding.SINGLE and c.strategy.world_size > 1,
    ),
    Rule(
        name="needless-sharding",
        reason="{s.sharding.value} on one GPU shards nothing; use single",
        source="https://arxiv.org/abs/1910.02054",
        violated=lambda c: (
            c.strategy.world_size == 1
            and c.strategy.sharding is not Sharding.SINGLE
            and c.strategy.offload is Offload.NONE
        ),
        severity="warning",
    ),
    Rule(
        name="hybrid-one-node",
        reason="fsdp-hybrid replicates between nodes; there is one node: use fsdp",
        source=_FSDP2,
        violated=lambda c: c.strategy.sharding is Sharding.FSDP_HYBRID and c.strategy.num_nodes < 2,
    ),
    Rule(
        name="offload-unsharded",
        reason="{s.sharding.value} keeps all state on the GPU; offload needs fsdp or zero "
        "(or a paged optimizer)",
        source=_DEEPSPEED,
        violated=lambda c: (
            c.strategy.offload is not Offload.NONE and not c.strategy.sharding.shards_optimizer
        ),
    ),
    Rule(
        name="fsdp-partial-offload",
        reason="FSDP offloads weights, gradients and optimizer together; `{s.offload.value}` alone "
        "is not possible: use all",
        source=_FSDP2,
        violated=lambda c: (
            c.strategy.sharding.is_fsdp
            and c.strategy.offload in (Offload.OPTIMIZER, Offload.PARAMS)
        ),
    ),
    Rule(
        name="zero-param-offload",
        reason="weights are offloaded with zero3 only, not with {s.sharding.value}",
        source=_DEEPSPEED,
        violated=lambda c: (
            c.strategy.sharding in (Sharding.ZERO1, Sharding.ZERO2)
            and c.strategy.offload.moves_params
        ),
    ),
    Rule(
        name="int8-sharded",
        reason="int8 weights cannot be sharded: only 4-bit weights can be stored as floats for "
        "{s.sharding.value}",
        source=_PEFT_FSDP,
        violated=lambda c: c.strategy.weights is Dtype.INT8 and c.strategy.sharding.shards_weights,
    ),
    Rule(
        name="gptq-sharded",
        reason="GPTQ weights are packed integers, which {s.sharding.value} cannot shard",
        source=_PEFT_FSDP,
        violated=lambda c: c.strategy.weights is Dtype.GPTQ4 and c.strategy.sharding.shards_weights,
    ),
    Rule(
        name="nf4-zero3-offload",
        reason="nf4 weights with zero3 work without offload; offload them with fsdp",
        source=_PEFT_ZERO,
        violated=lambda c: (
            c.strategy.weights is Dtype.NF4
            and c.strategy.sharding is Sharding.ZERO3
            and c.strategy.offload.moves_params
        ),
    ),
    # The optimizer
    Rule(
        name="optimizer-fsdp",
        reason="{s.optimizer.record.fsdp_problem}",
        source="tightfit/core/optimizers.py",
        violated=lambda c: (
            c.strategy.sharding.is_fsdp and bool(c.strategy.optimizer.record.fsdp_problem)
        ),
    ),
    Rule(
        name="optimizer-zero",
        reason="{s.optimizer.record.zero_problem}",
        source="tightfit/core/optimizers.py; deepspeed/runtime/zero/stage_1_and_2.py, 0.19",
        violated=lambda c: (
            c.strategy.sharding.is_zero and bool(c.strategy.optimizer.record.zero_problem)
        ),
    ),
    Rule(
        name="optimizer-offload",
        reason="{s.optimizer.record.offload_problem}",
        source=_DEEPSPEED,
        violated=lambda c: (
            c.strategy.offload.moves_optimizer and bool(c.strategy.optimizer.record.offload_problem)
        ),
    ),
)


# What adapters beyond plain LoRA, and folded ones, cannot be combined with.

_DORA_SHARDED = "https://github.com/huggingface/peft/issues/1731"
_FUSED_LORA = "tightfit/runtime/kernels/fused_lora.py"


def _adapts_bare_weights(case: Case) -> bool:
    return any(
        not part.is_module and is_lora_target(part, case.strategy.lora_targets)
        for block in case.spec.blocks
        for part in block.linears
    )


FUSED_LORA_RULES: tuple[Rule, ...] = (
    Rule(
        name="folded-method",
        reason="there are no adapters to fold: `{s.method.value}` trains none",
        source=_FUSED_LORA,
        violated=lambda c: c.strategy.fused_lora and c.strategy.method is not Method.LORA,
    ),
    Rule(
        name="folded-dropout",
        reason="fused LoRA read the input that their matrix reads, which dropout would change",
        source=_FUSED_LORA,
        violated=lambda c: c.strategy.fused_lora and c.strategy.lora_dropout > 0,
    ),
    Rule(
        name="folded-dora",
        reason="DoRA divides by a norm between the two products, so they cannot be one",
        source=_FUSED_LORA,
        violated=lambda c: c.strategy.fused_lora and is_dora(c.strategy),
    ),
    Rule(
        name="folded-base",
        reason="fused LoRA unpack the base matrix themselves, and {s.weights.value} has "
        "kernels of its own",
        source=_FUSED_LORA,
        violated=lambda c: (
            c.strategy.fused_lora and c.strategy.weights in (Dtype.INT8, Dtype.GPTQ4)
        ),
    ),
    Rule(
        name="folded-dtype",
        reason="fused LoRA multiply in one number format: adapters are "
        "{s.adapter_dtype.value}, arithmetic is {s.compute.value}",
        source=_FUSED_LORA,
        violated=lambda c: (
            c.strategy.fused_lora and c.strategy.adapter_dtype is not c.strategy.compute
        ),
    ),
    Rule(
        name="folded-autocast",
        reason="autocast casts what each product reads, and fused LoRA cast nothing",
        source=_FUSED_LORA,
        violated=lambda c: c.strategy.fused_lora and c.strategy.is_autocast,
    ),
    Rule(
        name="folded-zero3",
        reason="zero3 gathers a matrix when its own module is called, and fused LoRA read it "
        "from outside: use fsdp, ddp or zero2",
        source="deepspeed 0.19, runtime/zero/parameter_offload.py",
        violated=lambda c: c.strategy.fused_lora and c.strategy.sharding is Sharding.ZERO3,
    ),
)

ADAPTER_RULES: tuple[Rule, ...] = (
    *FUSED_LORA_RULES,
    Rule(
        name="dora-method",
        reason="DoRA is a kind of adapter; `{s.method.value}` has none",
        source="https://arxiv.org/abs/2402.09353",
        violated=lambda c: c.strategy.dora and c.strategy.method is Method.FULL,
    ),
    Rule(
        name="dora-experts",
        reason="DoRA does not take the experts of {m.name}, which are bare parameters: name "
        "modules with --set lora_targets=",
        source="peft 0.21, lora/layer.py ParamWrapper",
        violated=lambda c: is_dora(c.strategy) and _adapts_bare_weights(c),
    ),
    Rule(
        name="dora-zero3",
        reason="DoRA reads the base weights outside their own module, where zero3 has already "
        "let go of them: use fsdp, ddp or zero2",
        source=_DORA_SHARDED,
        violated=lambda c: is_dora(c.strategy) and c.strategy.sharding is Sharding.ZERO3,
    ),
    Rule(
        name="dora-sharded-quantized",
        reason="DoRA on sharded {s.weights.value} weights fails when adapters are made: it copies "
        "the packed base",
        source=_DORA_SHARDED,
        violated=lambda c: (
            is_dora(c.strategy)
            and c.strategy.weights in (Dtype.NF4, Dtype.INT8)
            and c.strategy.sharding.shards_weights
        ),
        severity="warning",
    ),
)


# What a base that is unpacked once cannot be combined with.

_DEQUANTIZED = "tightfit/runtime/layers.py"

DEQUANTIZED_RULES: tuple[Rule, ...] = (
    Rule(
        name="unpacked-weights",
        reason="only a frozen nf4 base can be unpacked once, and this is `{s.method.value}` over "
        "{s.weights.value} weights",
        source=_DEQUANTIZED,
        violated=lambda c: (
            c.strategy.dequantized_base
            and (c.strategy.method is not Method.LORA or c.strategy.weights is not Dtype.NF4)
        ),
    ),
    Rule(
        name="unpacked-family",
        reason="transformers packs none of {m.model_type}'s layers, so that none can be unpacked",
        source="transformers 5.22: replace_with_bnb_linear, FalconLinear",
        violated=lambda c: c.strategy.dequantized_base and not c.family.quantizes_linears,
    ),
    Rule(
        name="unpacked-sharding",
        reason="an dequantized base lies whole on every GPU, and {s.sharding.value} spreads packed "
        "weights: use ddp",
        source=_DEQUANTIZED,
        violated=lambda c: c.strategy.dequantized_base and c.strategy.sharding.shards_optimizer,
    ),
    Rule(
        name="unpacked-upcast",
        reason="packed matrices answer in the fp32 of raised norms, which unpacked ones would not",
        source=_DEQUANTIZED,
        violated=lambda c: c.strategy.dequantized_base and c.strategy.upcast_unquantized,
    ),
)


def without_dequantized_base(strategy: Strategy) -> dict[str, Any]:
    """What keeps an nf4 base packed: fp8 products are made of unpacked matrices alone."""
    return {"dequantized_base": False} | ({"fp8": False} if strategy.fp8 else {})


# What fp8 products need, and cannot be combined with.

_FP8 = "tightfit/runtime/kernels/fp8.py"


def _is_bf16(case: Case) -> bool:
    """Whether matrices are bf16 once they are plain, and everything else is."""
    s = case.strategy
    has_bf16 = s.weights in (Dtype.BF16, Dtype.NF4) and s.compute is Dtype.BF16
    return has_bf16 and not s.is_autocast


FP8_RULES: tuple[Rule, ...] = (
    Rule(
        name="fp8-capability",
        reason="fp8 products need compute capability 8.9; {c.gpu.name} is {c.capability}",
        source="torch._scaled_mm, torch 2.13",
        violated=lambda c: (
            c.strategy.has_fp8
            and not c.is_cpu
            and (c.gpu.compute_capability is None or c.is_below(8, 9))
        ),
    ),
    Rule(
        name="fp8-cpu",
        reason="CPUs have no fp8 units: products would be slower than in bf16",
        source="torch._scaled_mm on CPUs, torch 2.13",
        violated=lambda c: c.strategy.has_fp8 and c.is_cpu,
    ),
    Rule(
        name="fp8-method",
        reason="fp8 products are for training: `{s.method.value}` trains nothing",
        source=_FP8,
        violated=lambda c: c.strategy.has_fp8 and c.strategy.method is Method.LOAD,
    ),
    Rule(
        name="fp8-dtype",
        reason="fp8 products are made of plain bf16 weights and activations: weights are "
        "{s.weights.value}, arithmetic is {s.compute.value}",
        source=_FP8,
        violated=lambda c: c.strategy.has_fp8 and not _is_bf16(c),
    ),
    Rule(
        name="fp8-packed",
        reason="fp8 products are made of matrices that are unpacked once, and these stay packed in "
        "nf4: --set dequantized_base=true",
        source=_FP8,
        violated=lambda c: (
            c.strategy.fp8 and c.strategy.weights is Dtype.NF4 and not c.strategy.dequantized_base
        ),
    ),
    Rule(
        name="fp8-family",
        reason="linear layers of {m.model_type} are of a class of their own, which has no fp8 "
        "products",
        source="transformers 5.22: Conv1D of gpt2, FalconLinear",
        violated=lambda c: c.strategy.has_fp8 and not c.family.has_fp8_linears,
    ),
    Rule(
        name="fp8-frozen-family",
        reason="{m.model_type} casts what a matrix reads to the format that it is kept in, which "
        "would be fp8 under LoRA",
        source="transformers 5.22: T5DenseActDense.forward",
        violated=lambda c: c.strategy.stores_fp8 and c.family.casts_to_weight_dtype,
    ),
    Rule(
        name="fp8-adapters",
        reason="adapters beside fp8 weights must be folded: --set fused_lora=true",
        source=_FP8,
        violated=lambda c: c.strategy.stores_fp8 and not c.strategy.fused_lora,
    ),
    Rule(
        name="fp8-gradients-method",
        reason="fp8 gradients are for full tuning: LoRA leaves the matrices frozen",
        source=_FP8,
        violated=lambda c: c.strategy.fp8_gradients and c.strategy.method is Method.LORA,
    ),
    Rule(
        name="fp8-twice",
        reason="fp8 covers the backward pass already: set fp8 or fp8_gradients, not both",
        source=_FP8,
        violated=lambda c: c.strategy.fp8 and c.strategy.fp8_gradients,
    ),
    Rule(
        name="fp8-sharded",
        reason="{s.sharding.value} cuts weights into shards in their own format, which fp8 copies "
        "are not made for yet: use single or ddp",
        source=_FP8,
        violated=lambda c: c.strategy.has_fp8 and c.strategy.sharding.shards_optimizer,
    ),
)


# What a CPU cannot do, or does to no purpose.

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
        name="cpu-optimizer",
        reason="{s.optimizer.record.cpu_problem}",
        source="tightfit/core/optimizers.py",
        violated=lambda c: c.is_cpu and bool(c.strategy.optimizer.record.cpu_problem),
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
        violated=lambda c: c.is_cpu and not c.gpu.supports_bf16 and uses_bf16(c),
    ),
    Rule(
        name="cpu-paged",
        reason="a paged optimizer moves its state between a GPU and the host; on a CPU it is "
        "adamw-8bit",
        source="bitsandbytes 0.50, functional.get_paged",
        violated=lambda c: c.is_cpu and c.strategy.optimizer.record.is_paged,
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
            c.is_cpu and c.strategy.weights.is_quantized and not c.strategy.dequantized_base
        ),
        severity="warning",
    ),
)


_BNB = "https://huggingface.co/docs/bitsandbytes/main/en/installation"
_FLASH = "https://github.com/Dao-AILab/flash-attention#nvidia-cuda-support"
_VARLEN = "torch.nn.attention.varlen of torch 2.10 on, else the flash-attn package; " + _FLASH
_LIGER = "https://github.com/linkedin/Liger-Kernel (monkey_patch.py, 0.8)"
_LOSS_CHUNKS = "tightfit/training/model.py; liger-kernel 0.8.5, fused_linear_cross_entropy.py"
_SCALER = "https://huggingface.co/docs/peft/developer_guides/troubleshooting"
_WHEELS = "https://github.com/pytorch/pytorch/issues/190385"

MAX_TOKENS_PER_MICRO_BATCH = 2**24


def find_violations(case: Case) -> list[Violation]:
    """Every rule that makes the case illegal, in the file's order."""
    return [_describe(rule, case) for rule in _ILLEGAL if rule.violated(case)]


def find_first_violation(case: Case) -> Violation | None:
    """The first of them: enough to leave a strategy out."""
    return next((_describe(rule, case) for rule in _ILLEGAL if rule.violated(case)), None)


def find_warnings(case: Case) -> list[Violation]:
    """What works but deserves a word."""
    return [_describe(rule, case) for rule in _WARNINGS if rule.violated(case)]


def check_lora_targets(spec: ModelSpec, targets: tuple[str, ...]) -> None:
    """Raise where a target is no module of this model: adapters would silently be missing."""
    known = spec.module_names
    for target in targets:
        if target != ALL_LINEAR and target not in known:
            raise UsageError(
                f"{spec.name} has no module `{target}`.{did_you_mean(target, known)}",
                remedy=f"--set lora_targets={ALL_LINEAR}, or some of {','.join(known)}",
            )


def _describe(rule: Rule, case: Case) -> Violation:
    reason = rule.reason.format(c=case, s=case.strategy, m=case.spec)
    return Violation(rule=rule.name, reason=reason, source=rule.source)


_RULES: tuple[Rule, ...] = (
    # The job itself: first, because these forbid every strategy alike
    Rule(
        name="torch-wheels",
        reason="torch is built for compute capability 5.0 on; {c.gpu.name} is {c.capability}",
        source=_WHEELS,
        violated=lambda c: c.is_below(5),
    ),
    Rule(
        name="learned-positions",
        reason="{m.name} has {m.max_positions} learned positions; {s.seq_len} were asked for",
        source="the model's config.json",
        violated=lambda c: (
            c.has_learned_positions and c.strategy.seq_len > (c.spec.max_positions or 0)
        ),
    ),
    Rule(
        name="absurd-batch",
        reason="{s.micro_batch} x {s.seq_len} tokens in a micro-batch is more than any card takes",
        source="more than 2^24 tokens",
        violated=lambda c: c.strategy.tokens_per_micro_batch > MAX_TOKENS_PER_MICRO_BATCH,
    ),
    Rule(
        name="more-than-there-is",
        reason="{s.num_nodes} x {s.gpus_per_node} GPUs were asked for; there are {c.num_nodes} "
        "x {c.node.num_gpus}",
        source="the hardware given",
        violated=lambda c: (
            c.strategy.gpus_per_node > c.node.num_gpus or c.strategy.num_nodes > c.num_nodes
        ),
    ),
    # The card
    Rule(
        name="legacy-wheels",
        reason="{c.gpu.name} ({c.capability}) needs torch's CUDA 12.6 wheels, which end with 2.14",
        source=_WHEELS,
        violated=lambda c: c.is_below(7, 5) and not c.is_below(5),
        severity="warning",
    ),
    Rule(
        name="fp16-capability",
        reason="fp16 arithmetic needs compute capability 5.3; {c.gpu.name} is {c.capability}",
        source="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions",
        violated=lambda c: c.strategy.compute is Dtype.FP16 and c.is_below(5, 3),
    ),
    Rule(
        name="bf16-capability",
        reason="bf16 needs compute capability 8.0; {c.gpu.name} is {c.capability}",
        source="torch.cuda.is_bf16_supported(including_emulation=False), torch 2.13",
        violated=lambda c: not c.gpu.supports_bf16 and not c.is_cpu and uses_bf16(c),
    ),
    Rule(
        name="int8-capability",
        reason="int8 needs compute capability 7.5; {c.gpu.name} is {c.capability}",
        source=_BNB,
        violated=lambda c: c.strategy.weights is Dtype.INT8 and c.is_below(7, 5),
    ),
    Rule(
        name="nf4-capability",
        reason="nf4 needs compute capability 6.0; {c.gpu.name} is {c.capability}",
        source=_BNB,
        violated=lambda c: c.strategy.weights is Dtype.NF4 and c.is_below(6),
    ),
    Rule(
        name="optimizer-capability",
        reason="{s.optimizer.value} needs a newer card; {c.gpu.name} is of compute capability "
        "{c.capability}",
        source=_BNB,
        violated=lambda c: c.is_below(*c.strategy.optimizer.record.min_capability),
    ),
    Rule(
        name="triton-capability",
        reason="fused kernels and torch.compile need compute capability 7.0 (Triton); "
        "{c.gpu.name} is {c.capability}",
        source="torch/_inductor/scheduler.py and torch/utils/_triton.py, torch 2.13",
        violated=lambda c: needs_triton(c) and c.is_below(7),
    ),
    # Number formats
    Rule(
        name="quantized-full",
        reason="{s.weights.value} weights take no gradient, so full tuning cannot train them; "
        "train adapters on them instead",
        source="https://arxiv.org/abs/2305.14314",
        violated=lambda c: c.strategy.method is Method.FULL and c.strategy.weights.is_quantized,
    ),
    Rule(
        name="packed-arithmetic",
        reason="arithmetic and adapters are fp32, bf16 or fp16; {s.compute.value} and "
        "{s.adapter_dtype.value} were asked for",
        source="https://arxiv.org/abs/2305.14314",
        violated=lambda c: c.strategy.compute.is_quantized or c.strategy.adapter_dtype.is_quantized,
    ),
    Rule(
        name="autocast-up",
        reason="autocast lowers precision, it never raises it: {s.weights.value} weights do not "
        "compute in fp32; store fp32 weights",
        source="https://docs.pytorch.org/docs/stable/amp.html",
        violated=lambda c: (
            c.strategy.compute is Dtype.FP32 and c.strategy.weights in (Dtype.BF16, Dtype.FP16)
        ),
    ),
    Rule(
        name="fp16-trained-weights",
        reason="the gradient scaler refuses fp16 gradients, so trained weights stay fp32 under "
        "fp16 arithmetic; these are fp16",
        source=_SCALER,
        # DeepSpeed keeps its own fp32 copy and its own scaler.
        violated=lambda c: (
            c.strategy.method is Method.FULL
            and c.strategy.weights is Dtype.FP16
            and not c.strategy.sharding.is_zero
        ),
    ),
    Rule(
        name="fp16-adapters",
        reason="the gradient scaler of fp16 arithmetic takes fp32 gradients only; the adapters "
        "are {s.adapter_dtype.value}",
        source=_SCALER,
        violated=lambda c: (
            c.strategy.method is Method.LORA
            and c.strategy.compute is Dtype.FP16
            and c.strategy.adapter_dtype is not Dtype.FP32
            and not c.strategy.sharding.is_zero
        ),
    ),
    Rule(
        name="fp16-overflow",
        reason="activations of {m.model_type} exceed fp16's range (65504) and become infinite",
        source="https://github.com/huggingface/transformers/pull/36832",
        violated=lambda c: c.strategy.compute is Dtype.FP16 and c.family.overflows_fp16,
    ),
    Rule(
        name="fp16-overflow-t5",
        reason="{m.model_type} was trained in bf16 and can overflow in fp16; watch for a nan loss",
        source="https://github.com/huggingface/transformers/issues/9295",
        violated=lambda c: c.strategy.compute is Dtype.FP16 and c.family.may_overflow_fp16,
        severity="warning",
    ),
    Rule(
        name="bf16-updates",
        reason="bf16 weights round away small updates, and their Adam moments are bf16 too: "
        "--set weights=fp32 keeps full precision, at twice the state and without fp8",
        source="https://arxiv.org/abs/2010.06192",
        violated=lambda c: (
            c.strategy.method is Method.FULL
            and c.strategy.weights is Dtype.BF16
            and not c.strategy.sharding.is_zero
        ),
        severity="warning",
    ),
    # Attention, kernels, lengths
    Rule(
        name="flash-capability",
        reason="flash attention over packed rows needs compute capability 8.0; {c.gpu.name} is "
        "{c.capability}",
        source=_VARLEN,
        violated=lambda c: c.is_flash and c.is_below(*FLASH.min_capability),
    ),
    Rule(
        name="flash-dtype",
        reason="flash attention computes in fp16 or bf16, not {s.compute.value}",
        source=_VARLEN,
        violated=lambda c: c.is_flash and c.strategy.compute not in FLASH.computes,
    ),
    Rule(
        name="flash-head-dim",
        reason="flash attention takes heads up to 256 wide, in steps of 8; {m.name} has "
        "{m.head_dim}",
        source=_VARLEN,
        violated=lambda c: c.is_flash and not FLASH.takes_head_dim(c.spec.head_dim),
    ),
    Rule(
        name="flash-family",
        reason="flash attention cannot run {m.model_type}: {c.flash_problem}",
        source="tightfit/models/attention.py; transformers 5.22",
        violated=lambda c: (
            c.is_flash and FLASH.takes_head_dim(c.spec.head_dim) and c.flash_problem is not None
        ),
    ),
    Rule(
        name="flash-package",
        reason="torch's own flash attention cannot run {m.name}, which the flash-attn package can",
        source="torch.nn.attention.varlen, torch 2.13",
        violated=lambda c: c.is_flash and needs_flash_attn(c.needs),
        severity="warning",
    ),
    Rule(
        name="recomputed-layers",
        reason="recomputing {s.recomputed_layers} layers needs checkpointing, which is off",
        source="tightfit's training step",
        violated=lambda c: (
            c.strategy.recomputed_layers is not None and not c.strategy.checkpointing
        ),
    ),
    Rule(
        name="recomputed-layers-there",
        reason="{m.name} has {m.num_layers} layers, and not {s.recomputed_layers} to recompute",
        source="tightfit's training step",
        violated=lambda c: (c.strategy.recomputed_layers or 0) > c.spec.num_layers,
    ),
    Rule(
        name="sdpa-softcap",
        reason="sdpa cannot cap attention logits as {m.name} does; use eager",
        source="transformers 5.22, integrations/sdpa_attention.py; "
        "https://github.com/huggingface/transformers/pull/32865",
        violated=lambda c: c.is_sdpa and c.spec.has_attention_softcap,
    ),
    Rule(
        name="sdpa-grouped-heads",
        reason="sdpa has no fused kernel for grouped heads in {s.compute.value} on {c.gpu.name} "
        "({c.capability}) and would hold the score matrix: set repeat_keys",
        source="torch 2.11, sdp_utils.cpp: the memory-efficient kernel does not take enable_gqa; "
        "benchmarks/results/h200_steps.json, Llama-3.2-1B in fp32",
        violated=lambda c: c.is_sdpa and c.lacks_grouped_kernel and not c.strategy.repeat_keys,
        severity="warning",
    ),
    Rule(
        name="sdpa-family",
        reason="transformers has no sdpa attention for {m.model_type}; use eager",
        source="_supports_sdpa in transformers 5.22",
        violated=lambda c: (
            c.is_sdpa
            and not c.spec.has_attention_softcap
            and find_sdpa_problem(c.needs) is not None
        ),
    ),
    Rule(
        name="fused-family",
        reason="Liger has no fused kernels for {m.model_type}; use the plain or chunked loss",
        source=_LIGER,
        violated=lambda c: (
            (c.strategy.fused_kernels or c.strategy.loss is Loss.FUSED) and not c.family.has_liger
        ),
    ),
    Rule(
        name="loss-slices",
        reason="only the fused loss walks in slices that can be widened, and this is the "
        "{s.loss.value} loss",
        source=_LOSS_CHUNKS,
        violated=lambda c: c.strategy.loss_chunk_factor > 1 and c.strategy.loss is not Loss.FUSED,
    ),
    Rule(
        name="loss-slices-family",
        reason="{m.model_type} makes all logits itself, so that the loss has no slices to widen",
        source=_LOSS_CHUNKS,
        violated=lambda c: c.strategy.loss_chunk_factor > 1 and not can_fuse_head_and_loss(c.spec),
    ),
    Rule(
        name="compile-over-fused",
        reason="torch.compile cannot see into Liger's norm and falls back: use one of the two",
        source="measured with torch 2.11 and liger-kernel 0.8",
        violated=lambda c: c.strategy.compile and c.strategy.fused_kernels,
        severity="warning",
    ),
    Rule(
        name="beyond-positions",
        reason="{s.seq_len} tokens exceed the {m.max_positions} that {m.name} was trained on; "
        "quality drops unless its rotary scaling is changed",
        source="the model's config.json",
        violated=lambda c: (
            c.spec.max_positions is not None
            and c.strategy.seq_len > c.spec.max_positions
            and not c.has_learned_positions
            and not c.spec.is_encoder_decoder
        ),
        severity="warning",
    ),
    Rule(
        name="packing-encoder-decoder",
        reason="packing joins documents of one stream; {m.name} has an encoder and a decoder",
        source="tightfit's packer",
        violated=lambda c: c.strategy.packing and c.spec.is_encoder_decoder,
    ),
    Rule(
        name="packing-family",
        reason="{m.model_type} models cannot keep packed documents apart: set packing=false",
        source="transformers 5.22: bloom and mpt take no positions, falcon's mask ignores them",
        violated=lambda c: (
            c.strategy.packing
            and not c.spec.is_encoder_decoder
            and not c.needs.can_pack(is_varlen=c.family.accepts_custom_attention)
        ),
    ),
    Rule(
        name="packing-opt",
        reason="{m.model_type} keeps packed documents apart by flash attention alone, which needs "
        "16-bit arithmetic and compute capability 8.0: set packing=false",
        source="transformers 5.22: modeling_opt.py makes its mask without positions",
        violated=lambda c: (
            c.strategy.packing
            and c.family.accepts_custom_attention
            and c.needs.can_pack(is_varlen=True)
            and not c.needs.can_pack(is_varlen=c.has_varlen)
        ),
    ),
    Rule(
        name="packing-mask",
        reason="packing without flash attention builds a block mask of {s.seq_len} x {s.seq_len}",
        source="torch.nn.attention.varlen needs compute capability 8.0",
        violated=lambda c: (
            c.strategy.packing
            and (c.strategy.attention is Attention.EAGER or c.is_below(8) or c.is_cpu)
        ),
        severity="warning",
    ),
)

RULES = (*_RULES, *SHARDING_RULES, *ADAPTER_RULES, *DEQUANTIZED_RULES, *FP8_RULES, *CPU_RULES)
_ILLEGAL = tuple(rule for rule in RULES if rule.severity == "illegal")
_WARNINGS = tuple(rule for rule in RULES if rule.severity == "warning")
