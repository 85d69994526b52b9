"""Legality rules as data: combinations that cannot work whatever the memory, with their source."""
# ruff: noqa: ARG005  every check takes the case and its strategy, and most read one of them

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UsageError
from tightfit.core.objectives import Objective
from tightfit.core.settings import ALL_LINEAR, EMBEDDINGS, EXPERTS, Loss, Method, Offload, Sharding
from tightfit.core.strategy import Strategy
from tightfit.core.text import did_you_mean
from tightfit.core.trainers import find_trainer
from tightfit.estimation.activations import can_fuse_head_and_loss
from tightfit.estimation.flops import count_forward_only_passes
from tightfit.estimation.weights import is_dora, is_lora_target, packs_experts
from tightfit.hardware.types import Gpu, Node
from tightfit.models.attention import (
    AttentionNeeds,
    find_attention_problem,
    find_context_problem,
    find_sdpa_problem,
    needs_flash_attn,
    needs_of,
)
from tightfit.models.families.registry import check_takes_adapter, find_family
from tightfit.models.family import Family
from tightfit.models.spec import ModelSpec

MAX_TOKENS_PER_MICRO_BATCH = 2**24
_FLASH = Attention.FLASH.record


class Case(NamedTuple):
    """A strategy for a model on a kind of node: the input of every rule."""

    spec: ModelSpec
    strategy: Strategy
    node: Node
    num_nodes: int
    """Nodes that exist; the strategy says how many of them it uses."""

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
    def wrong_nf4_width(self) -> int | None:
        """The first width of the model's matrices that bitsandbytes dequantizes wrongly on CPUs."""
        linears = (p for b in self.spec.blocks for p in b.linears if p.is_module)
        widths = (p.in_features for p in (*linears, *self.spec.outer_linears))
        return next((width for width in widths if width % 16 == 0 and width % 64), None)

    @property
    def attention_problem(self) -> str | None:
        """Why the strategy's attention cannot run this model, whatever is installed."""
        kind, is_packed = self.strategy.attention, self.strategy.packing
        return find_attention_problem(kind, self.needs, is_packed=is_packed)

    @property
    def context_problem(self) -> str | None:
        """Why GPUs cannot share this model's rows."""
        return find_context_problem(self.needs)

    @property
    def attention_dtypes(self) -> str:
        return " or ".join(dtype.value for dtype in self.strategy.attention.record.computes)

    @property
    def attention_capability(self) -> str:
        return "{}.{}".format(*self.strategy.attention.record.min_capability)

    @property
    def trainer_problem(self) -> str | None:
        """What the strategy asks of another trainer that it does not have."""
        trainer = find_trainer(self.strategy.trainer)
        return trainer.find_lacking(self.strategy, self.spec.model_type)

    @property
    def capability(self) -> str:
        """As people write it: `7.5`; `not NVIDIA` for other makes."""
        found = self.gpu.compute_capability
        return f"{found[0]}.{found[1]}" if found else "not NVIDIA"

    def is_below(self, major: int, minor: int = 0) -> bool:
        """Whether this is an NVIDIA card older than a compute capability."""
        found = self.gpu.compute_capability
        return found is not None and found < (major, minor)

    @property
    def lacks_grouped_kernel(self) -> bool:
        """SDPA has a fused kernel for grouped heads only in 16 bit, on Ampere and later."""
        is_grouped = self.spec.num_kv_heads < self.spec.num_heads
        is_nvidia = self.gpu.compute_capability is not None
        is_wide = self.strategy.compute is Dtype.FP32
        return is_grouped and is_nvidia and (is_wide or self.is_below(8))

    @property
    def has_learned_positions(self) -> bool:
        """Whether there is a table row per position. T5's buckets and rotary models have none."""
        longest = self.spec.max_positions
        return longest is not None and self.spec.position_params >= longest * self.spec.hidden_size


class Rule(NamedTuple):
    """A combination that does not work. Reason and source are filled with c (case), s (strategy)
    and m (model)."""

    name: str
    check: Callable[[Case, Strategy], bool]
    """Whether the case violates it."""
    reason: str
    source: str = ""
    """A link or a version: where to look when the world may have changed."""
    is_warning: bool = False
    """It works, but deserves a word."""


class Violation(NamedTuple):
    """A rule that one case violates, its reason with the case's values."""

    rule: str
    reason: str
    source: str


class RuleGroup(NamedTuple):
    """Rules that concern only the cases that `applies` picks out: a search asks that once."""

    applies: Callable[[Case, Strategy], bool]
    rules: tuple[Rule, ...]


def _group(
    *rules: Rule,
    applies: Callable[[Case, Strategy], bool] = lambda c, s: True,
    source: str = "",
) -> RuleGroup:
    """`source` is of those that name none."""
    named = (rule._replace(source=rule.source or source) for rule in rules)
    return RuleGroup(applies, tuple(named))


def find_violations(case: Case) -> list[Violation]:
    """Every rule that makes the case illegal, in the order of `RULES`."""
    return list(_find_violated(case, _ILLEGAL))


def find_first_violation(case: Case) -> Violation | None:
    """The first of them: enough to leave a strategy out."""
    return next(_find_violated(case, _ILLEGAL), None)


def find_warnings(case: Case) -> list[Violation]:
    """Rules for what works but deserves a word."""
    return list(_find_violated(case, _WARNINGS))


def is_refused(group: RuleGroup, case: Case) -> bool:
    """Whether one of these rules forbids a lever, whatever others say."""
    return any(rule.check(case, case.strategy) for rule in group.rules)


def _find_violated(case: Case, groups: Iterable[RuleGroup]) -> Iterator[Violation]:
    strategy = case.strategy
    allowed = find_trainer(strategy.trainer).allows if strategy.trainer else ()
    for group in groups:
        if not group.applies(case, strategy):
            continue
        for rule in group.rules:
            if rule.check(case, strategy) and rule.name not in allowed:
                values = {"c": case, "s": strategy, "m": case.spec}
                reason, source = rule.reason.format(**values), rule.source.format(**values)
                yield Violation(rule=rule.name, reason=reason, source=source)


def check_lora_targets(spec: ModelSpec, targets: tuple[str, ...]) -> None:
    """Raise where a target is no module of this model: adapters would silently be missing."""
    known = spec.module_names
    words = [ALL_LINEAR, EMBEDDINGS]
    others = tuple(target for target in targets if target != EMBEDDINGS)
    if not others:
        raise UsageError(
            f"`{EMBEDDINGS}` stands beside other targets.",
            remedy=f"--set lora_targets={ALL_LINEAR},{EMBEDDINGS}",
        )
    if EXPERTS in targets:
        _check_experts(spec, others)
        words.append(EXPERTS)
    for target in targets:
        check_takes_adapter(spec.model_type, target)
        if target not in words and target not in known:
            raise UsageError(
                f"{spec.name} has no module `{target}`.{did_you_mean(target, known)}",
                remedy=f"--set lora_targets={ALL_LINEAR}, or some of {','.join(known)}",
            )


def _check_experts(spec: ModelSpec, targets: tuple[str, ...]) -> None:
    if targets != (ALL_LINEAR, EXPERTS):
        raise UsageError(
            f"`{EXPERTS}` stands behind `{ALL_LINEAR}` alone.",
            remedy=f"--set lora_targets={ALL_LINEAR},{EXPERTS}",
        )
    parts = [part for block in spec.blocks for part in block.linears]
    if not any(part.lora_rank_factor and not part.is_module for part in parts):
        raise UsageError(
            f"{spec.name} has no experts that take adapters.",
            remedy=f"--set lora_targets={ALL_LINEAR}",
        )


def without_dequantized_base(strategy: Strategy) -> dict[str, Any]:
    """Fields that keep an nf4 base quantized: fp8 products need a dequantized one."""
    return {"dequantized_base": False} | ({"fp8": False} if strategy.fp8 else {})


def uses_bf16(s: Strategy) -> bool:
    """Whether anything is stored or computed in bf16."""
    return Dtype.BF16 in (
        s.weights,
        s.compute,
        s.adapter_dtype if s.method is Method.LORA else s.compute,
    )


def needs_triton(s: Strategy) -> bool:
    """Whether kernels are written or compiled for the card."""
    has_kernels = s.fused_kernels or s.optimizer.record.needs_triton
    return has_kernels or s.uses_liger_loss or s.compile


def _adapts_bare_weights(case: Case) -> bool:
    return any(
        not part.is_module and is_lora_target(part, case.strategy.lora_targets)
        for block in case.spec.blocks
        for part in block.linears
    )


_BNB = "https://huggingface.co/docs/bitsandbytes/main/en/installation"
_DEEPSPEED = "https://www.deepspeed.ai/docs/config-json/"
_DORA_SHARDED = "https://github.com/huggingface/peft/issues/1731"
_FLASH_ATTN = "https://github.com/Dao-AILab/flash-attention#nvidia-cuda-support"
_FSDP2 = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
_LIGER = "https://github.com/linkedin/Liger-Kernel (monkey_patch.py, 0.8)"
_LOSS_CHUNKS = "tightfit/training/model.py; liger-kernel 0.8.5, fused_linear_cross_entropy.py"
_PEFT_FSDP = "https://huggingface.co/docs/peft/accelerate/fsdp"
_PEFT_ZERO = "https://huggingface.co/docs/peft/accelerate/deepspeed"
_SCALER = "https://huggingface.co/docs/peft/developer_guides/troubleshooting"
_VARLEN = "torch.nn.attention.varlen of torch 2.10 on, else the flash-attn package; " + _FLASH_ATTN
_WHEELS = "https://github.com/pytorch/pytorch/issues/190385"

JOB_RULES = _group(
    # The job itself: first, because these forbid every strategy alike
    Rule(
        "torch-wheels",
        lambda c, s: c.is_below(5),
        "torch is built for compute capability 5.0 on; {c.gpu.name} is {c.capability}",
        _WHEELS,
    ),
    Rule(
        "learned-positions",
        lambda c, s: c.has_learned_positions and s.seq_len > (c.spec.max_positions or 0),
        "{m.name} has {m.max_positions} learned positions; {s.seq_len} were asked for",
        "the model's config.json",
    ),
    Rule(
        "absurd-batch",
        lambda c, s: s.tokens_per_micro_batch > MAX_TOKENS_PER_MICRO_BATCH,
        "{s.micro_batch} x {s.seq_len} tokens in a micro-batch is more than any card takes",
        "more than 2^24 tokens",
    ),
    Rule(
        "more-than-there-is",
        lambda c, s: s.gpus_per_node > c.node.num_gpus or s.num_nodes > c.num_nodes,
        "{s.num_nodes} x {s.gpus_per_node} GPUs were asked for; there are {c.num_nodes} "
        "x {c.node.num_gpus}",
        "the hardware given",
    ),
    # The card
    Rule(
        "legacy-wheels",
        lambda c, s: c.is_below(7, 5) and not c.is_below(5),
        "{c.gpu.name} ({c.capability}) needs torch's CUDA 12.6 wheels, which end with 2.14",
        _WHEELS,
        is_warning=True,
    ),
    Rule(
        "fp16-capability",
        lambda c, s: s.compute is Dtype.FP16 and c.is_below(5, 3),
        "fp16 arithmetic needs compute capability 5.3; {c.gpu.name} is {c.capability}",
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions",
    ),
    Rule(
        "bf16-capability",
        lambda c, s: not c.gpu.supports_bf16 and not c.is_cpu and uses_bf16(s),
        "bf16 needs compute capability 8.0; {c.gpu.name} is {c.capability}",
        "torch.cuda.is_bf16_supported(including_emulation=False), torch 2.13",
    ),
    Rule(
        "int8-capability",
        lambda c, s: s.weights is Dtype.INT8 and c.is_below(7, 5),
        "int8 needs compute capability 7.5; {c.gpu.name} is {c.capability}",
        _BNB,
    ),
    Rule(
        "nf4-capability",
        lambda c, s: s.weights is Dtype.NF4 and c.is_below(6),
        "nf4 needs compute capability 6.0; {c.gpu.name} is {c.capability}",
        _BNB,
    ),
    Rule(
        "optimizer-capability",
        lambda c, s: c.is_below(*s.optimizer.record.min_capability),
        "{s.optimizer.value} needs a newer card; {c.gpu.name} is of compute capability "
        "{c.capability}",
        _BNB,
    ),
    Rule(
        "triton-capability",
        lambda c, s: needs_triton(s) and c.is_below(7),
        "fused kernels and torch.compile need compute capability 7.0 (Triton); "
        "{c.gpu.name} is {c.capability}",
        "torch/_inductor/scheduler.py and torch/utils/_triton.py, torch 2.13",
    ),
    # Number formats
    Rule(
        "quantized-full",
        lambda c, s: s.method is Method.FULL and s.weights.is_quantized,
        "{s.weights.value} weights take no gradient, so full tuning cannot train them; "
        "train adapters on them instead",
        "https://arxiv.org/abs/2305.14314",
    ),
    Rule(
        "quantized-family",
        lambda c, s: (
            s.weights in (Dtype.NF4, Dtype.INT8)
            and not c.family.quantizes_linears
            and not s.quirks.packs_subclasses
        ),
        "bitsandbytes packs none of {m.model_type}'s layers, so {s.weights.value} weights would "
        "take as much memory as 16-bit ones: use LoRA over those",
        "transformers 5.22: replace_with_bnb_linear takes nn.Linear itself and no subclass",
    ),
    Rule(
        "packed-arithmetic",
        lambda c, s: s.compute.is_quantized or s.adapter_dtype.is_quantized,
        "arithmetic and adapters are fp32, bf16 or fp16; {s.compute.value} and "
        "{s.adapter_dtype.value} were asked for",
        "https://arxiv.org/abs/2305.14314",
    ),
    Rule(
        "autocast-up",
        lambda c, s: s.compute is Dtype.FP32 and s.weights in (Dtype.BF16, Dtype.FP16),
        "autocast lowers precision, it never raises it: {s.weights.value} weights do not "
        "compute in fp32; store fp32 weights",
        "https://docs.pytorch.org/docs/stable/amp.html",
    ),
    # The next two: DeepSpeed keeps its own fp32 copy and its own scaler.
    Rule(
        "fp16-trained-weights",
        lambda c, s: s.method is Method.FULL and s.weights is Dtype.FP16 and not s.sharding.is_zero,
        "the gradient scaler refuses fp16 gradients, so trained weights stay fp32 under "
        "fp16 arithmetic; these are fp16",
        _SCALER,
    ),
    Rule(
        "fp16-adapters",
        lambda c, s: (
            s.method is Method.LORA
            and s.compute is Dtype.FP16
            and s.adapter_dtype is not Dtype.FP32
            and not s.sharding.is_zero
        ),
        "the gradient scaler of fp16 arithmetic takes fp32 gradients only; the adapters "
        "are {s.adapter_dtype.value}",
        _SCALER,
    ),
    Rule(
        "fp16-overflow",
        lambda c, s: s.compute is Dtype.FP16 and c.family.overflows_fp16,
        "activations of {m.model_type} exceed fp16's range (65504) and become infinite",
        "https://github.com/huggingface/transformers/pull/36832",
    ),
    Rule(
        "fp16-overflow-t5",
        lambda c, s: s.compute is Dtype.FP16 and c.family.may_overflow_fp16,
        "{m.model_type} was trained in bf16 and can overflow in fp16; watch for a nan loss",
        "https://github.com/huggingface/transformers/issues/9295",
        is_warning=True,
    ),
    Rule(
        "rocm",
        lambda c, s: c.gpu.compute_capability is None and not c.is_cpu,
        "{c.gpu.name}: tightfit was not measured on ROCm; speed follows data sheets, and "
        "bitsandbytes, DeepSpeed and fused kernels must be builds for ROCm",
        "tightfit/hardware/rates.py: AMD_SUSTAINED_FRACTION",
        is_warning=True,
    ),
    Rule(
        "bf16-updates",
        lambda c, s: s.method is Method.FULL and s.weights is Dtype.BF16 and not s.sharding.is_zero,
        "bf16 weights round away small updates, and their Adam moments are bf16 too: "
        "--set weights=fp32 keeps full precision, at twice the state and without fp8",
        "https://arxiv.org/abs/2010.06192",
        is_warning=True,
    ),
    # Attention, kernels, lengths
    Rule(
        "attention-capability",
        lambda c, s: c.is_below(*s.attention.record.min_capability),
        "{s.attention.value} attention needs compute capability {c.attention_capability}; "
        "{c.gpu.name} is {c.capability}",
        _VARLEN,
    ),
    Rule(
        "attention-dtype",
        lambda c, s: s.compute not in s.attention.record.computes,
        "{s.attention.value} attention computes in {c.attention_dtypes}, not {s.compute.value}",
        _VARLEN,
    ),
    Rule(
        "attention-head-dim",
        lambda c, s: not s.attention.record.takes_head_dim(c.spec.head_dim),
        "{s.attention.value} attention takes heads up to {s.attention.record.max_head_dim} wide, "
        "in steps of {s.attention.record.head_dim_multiple}; {m.name} has {m.head_dim}",
        _VARLEN,
    ),
    Rule(
        "attention-family",
        lambda c, s: (
            s.attention is not Attention.SDPA  # has rules of its own
            and s.attention.record.takes_head_dim(c.spec.head_dim)
            and c.attention_problem is not None
        ),
        "{s.attention.value} attention cannot run {m.model_type}: {c.attention_problem}",
        "tightfit/models/attention.py; transformers 5.22",
    ),
    Rule(
        "flash-package",
        lambda c, s: s.attention is Attention.FLASH and needs_flash_attn(c.needs),
        "torch's own flash attention cannot run {m.name}, which the flash-attn package can",
        "torch.nn.attention.varlen, torch 2.13",
        is_warning=True,
    ),
    Rule(
        "recomputed-layers",
        lambda c, s: s.recomputed_layers is not None and not s.checkpointing,
        "recomputing {s.recomputed_layers} layers needs checkpointing, which is off",
        "tightfit's training step",
    ),
    Rule(
        "offloaded-inputs",
        lambda c, s: s.offloaded_inputs > 0 and not s.checkpointing,
        "there are no recomputed layers whose inputs could go to host memory: set checkpointing",
        "tightfit/training/recompute.py",
    ),
    Rule(
        "recomputed-layers-there",
        lambda c, s: (s.recomputed_layers or 0) > c.spec.num_layers,
        "{m.name} has {m.num_layers} layers, and not {s.recomputed_layers} to recompute",
        "tightfit's training step",
    ),
    Rule(
        "sdpa-softcap",
        lambda c, s: s.attention is Attention.SDPA and c.spec.has_attention_softcap,
        "sdpa cannot cap attention logits as {m.name} does; use eager",
        "transformers 5.22, integrations/sdpa_attention.py; "
        "https://github.com/huggingface/transformers/pull/32865",
    ),
    Rule(
        "sdpa-grouped-heads",
        lambda c, s: s.attention is Attention.SDPA and c.lacks_grouped_kernel and not s.repeat_keys,
        "sdpa has no fused kernel for grouped heads in {s.compute.value} on {c.gpu.name} "
        "({c.capability}) and would hold the score matrix: set repeat_keys",
        "torch 2.11, sdp_utils.cpp: the memory-efficient kernel does not take enable_gqa; "
        "benchmarks/results/h200_steps.json, Llama-3.2-1B in fp32",
        is_warning=True,
    ),
    Rule(
        "sdpa-family",
        lambda c, s: (
            s.attention is Attention.SDPA
            and not c.spec.has_attention_softcap
            and find_sdpa_problem(c.needs) is not None
        ),
        "transformers has no sdpa attention for {m.model_type}; use eager",
        "_supports_sdpa in transformers 5.22",
    ),
    Rule(
        "fused-family",
        lambda c, s: s.fused_kernels and not c.family.has_liger,
        "Liger has no fused kernels for {m.model_type}; use the plain or chunked loss",
        _LIGER,
    ),
    Rule(
        "fused-loss-family",
        lambda c, s: (
            s.loss is Loss.FUSED and not s.fused_kernels and not can_fuse_head_and_loss(c.spec)
        ),
        "{m.model_type} makes all logits itself, so head and loss cannot be fused: use the plain "
        "or chunked loss",
        _LIGER,
    ),
    Rule(
        "loss-slices",
        lambda c, s: s.loss_chunk_factor > 1 and s.loss is not Loss.FUSED,
        "only the fused loss has chunks that can be enlarged, and this is the {s.loss.value} loss",
        _LOSS_CHUNKS,
    ),
    Rule(
        "loss-slices-family",
        lambda c, s: s.loss_chunk_factor > 1 and not can_fuse_head_and_loss(c.spec),
        "{m.model_type} makes all logits itself, so the loss has no chunks to enlarge",
        _LOSS_CHUNKS,
    ),
    Rule(
        "compile-sinks",
        lambda c, s: s.compile and s.attention is Attention.FLEX and c.family.has_sinks,
        "compiled as one, flex attention and sinks get wrong gradients: set compile=false",
        "measured with torch 2.11: docs/decisions/0012-attention-and-experts.md",
    ),
    Rule(
        "compile-over-fused",
        lambda c, s: s.compile and s.fused_kernels,
        "torch.compile cannot see into Liger's norm and falls back: use one of the two",
        "measured with torch 2.11 and liger-kernel 0.8",
        is_warning=True,
    ),
    Rule(
        "beyond-positions",
        lambda c, s: (
            c.spec.max_positions is not None
            and s.seq_len > c.spec.max_positions
            and not c.has_learned_positions
            and not c.spec.is_encoder_decoder
        ),
        "{s.seq_len} tokens exceed the {m.max_positions} that {m.name} was trained on; "
        "quality drops unless `rope_parameters` and max_position_embeddings of its config.json are "
        "scaled for them",
        "the model's config.json",
        is_warning=True,
    ),
    Rule(
        "packing-encoder-decoder",
        lambda c, s: s.packing and c.spec.is_encoder_decoder,
        "packing joins documents of one stream; {m.name} has an encoder and a decoder",
        "tightfit's packer",
    ),
    Rule(
        "packing-kto",
        lambda c, s: s.packing and s.objective.record.needs_kl,
        "the mismatched rows of {s.objective.value} cannot be packed: set packing=false",
        "tightfit/training/loop.py",
    ),
    Rule(
        "packing-family",
        lambda c, s: s.packing and not c.spec.is_encoder_decoder and not c.needs.can_pack,
        "{m.model_type} models cannot keep packed documents apart: set packing=false",
        "transformers 5.22: linear attention and Mamba run on from one document to the next",
    ),
    Rule(
        "packing-mask",
        lambda c, s: (
            s.packing
            and s.attention is not Attention.FLEX
            and (s.attention.record.varlen == "never" or c.is_below(8) or c.is_cpu)
        ),
        "packing without flash attention builds a block mask of {s.seq_len} x {s.seq_len}",
        "torch.nn.attention.varlen needs compute capability 8.0",
        is_warning=True,
    ),
)

SHARDING_RULES = _group(
    Rule(
        "single-many",
        lambda c, s: s.sharding is Sharding.SINGLE and s.world_size > 1,
        "sharding `single` runs on one GPU; {s.world_size} were asked for",
        "tightfit's launcher",
    ),
    Rule(
        "needless-sharding",
        lambda c, s: (
            s.world_size == 1 and s.sharding is not Sharding.SINGLE and s.offload is Offload.NONE
        ),
        "{s.sharding.value} on one GPU shards nothing; use single",
        "https://arxiv.org/abs/1910.02054",
        is_warning=True,
    ),
    Rule(
        "hybrid-one-node",
        lambda c, s: s.sharding is Sharding.FSDP_HYBRID and s.num_nodes < 2,
        "fsdp-hybrid replicates between nodes; there is one node: use fsdp",
        _FSDP2,
    ),
    Rule(
        "offload-unsharded",
        lambda c, s: s.offload is not Offload.NONE and not s.sharding.shards_optimizer,
        "{s.sharding.value} keeps all state on the GPU; offload needs fsdp or zero "
        "(or a paged optimizer)",
        _DEEPSPEED,
    ),
    Rule(
        "fsdp-partial-offload",
        lambda c, s: s.sharding.is_fsdp and s.offload in (Offload.OPTIMIZER, Offload.PARAMS),
        "FSDP offloads weights, gradients and optimizer together; `{s.offload.value}` alone "
        "is not possible: use all",
        _FSDP2,
    ),
    Rule(
        "zero-param-offload",
        lambda c, s: s.sharding in (Sharding.ZERO1, Sharding.ZERO2) and s.offload.moves_params,
        "weights are offloaded with zero3 only, not with {s.sharding.value}",
        _DEEPSPEED,
    ),
    Rule(
        "int8-sharded",
        lambda c, s: s.weights is Dtype.INT8 and s.sharding.shards_weights,
        "int8 weights cannot be sharded: only 4-bit weights can be stored as floats for "
        "{s.sharding.value}",
        _PEFT_FSDP,
    ),
    Rule(
        "gptq-sharded",
        lambda c, s: s.weights is Dtype.GPTQ4 and s.sharding.shards_weights,
        "GPTQ weights are packed integers, which {s.sharding.value} cannot shard",
        _PEFT_FSDP,
    ),
    Rule(
        "nf4-zero3-offload",
        lambda c, s: (
            s.weights is Dtype.NF4 and s.sharding is Sharding.ZERO3 and s.offload.moves_params
        ),
        "nf4 weights with zero3 work without offload; offload them with fsdp",
        _PEFT_ZERO,
    ),
    # The optimizer
    Rule(
        "optimizer-fsdp",
        lambda c, s: s.sharding.is_fsdp and bool(s.optimizer.record.fsdp_problem),
        "{s.optimizer.record.fsdp_problem}",
        "{s.optimizer.record.fsdp_source}",
    ),
    Rule(
        "optimizer-zero",
        lambda c, s: s.sharding.is_zero and bool(s.optimizer.record.zero_problem),
        "{s.optimizer.record.zero_problem}",
        "deepspeed/runtime/zero/stage_1_and_2.py, 0.19",
    ),
    Rule(
        "optimizer-offload",
        lambda c, s: s.offload.moves_optimizer and bool(s.optimizer.record.offload_problem),
        "{s.optimizer.record.offload_problem}",
        _DEEPSPEED,
    ),
)

CONTEXT_RULES = _group(
    Rule(
        "context-gpus",
        lambda c, s: s.world_size % s.context_parallel > 0,
        "{s.context_parallel} GPUs share a row, and {s.world_size} cannot be grouped so: use a "
        "divisor",
    ),
    Rule(
        "context-nodes",
        lambda c, s: (
            s.context_parallel % s.gpus_per_node > 0 and s.gpus_per_node % s.context_parallel > 0
        ),
        "the {s.context_parallel} GPUs that share a row are neither part of a node of "
        "{s.gpus_per_node} nor whole nodes",
    ),
    Rule(
        "context-single",
        lambda c, s: s.sharding is Sharding.SINGLE,
        "GPUs that share rows add up their gradients: use ddp, fsdp or zero, not single",
    ),
    Rule(
        "context-family",
        lambda c, s: c.context_problem is not None,
        "the rows of {m.model_type} models cannot be shared by GPUs: {c.context_problem}",
        "transformers 5.22",
    ),
    Rule(
        "context-heads",
        lambda c, s: c.spec.num_heads % s.context_parallel > 0,
        "{m.name} has {m.num_heads} attention heads, which cannot be spread over "
        "{s.context_parallel} GPUs: use a divisor",
        "https://arxiv.org/abs/2309.14509",
    ),
    Rule(
        "context-method",
        lambda c, s: not s.is_trained,
        "rows are shared in training: `{s.method.value}` trains nothing",
    ),
    Rule(
        "context-objective",
        lambda c, s: s.objective is not Objective.SFT,
        "the answers of {s.objective.value} are not added up over GPUs that share rows: set "
        "context_parallel=1",
    ),
    Rule(
        "context-compile",
        lambda c, s: s.compile,
        "a compiled layer would be cut in two by the exchange of heads: set compile=false",
    ),
    Rule(
        "context-trainer",
        lambda c, s: bool(s.trainer),
        "no configuration of context parallel is written for {s.trainer}: plan it without",
        "tightfit/planning/trainer_configs.py",
    ),
    applies=lambda c, s: s.context_parallel > 1,
    source="tightfit/training/context_parallel.py",
)

FUSED_LORA_RULES = _group(
    Rule(
        "folded-method",
        lambda c, s: s.method is not Method.LORA,
        "there are no adapters to fuse: `{s.method.value}` trains none",
    ),
    Rule(
        "folded-dropout",
        lambda c, s: s.lora_dropout > 0,
        "fused LoRA reads the same input as its matrix, which dropout would change",
    ),
    Rule(
        "folded-dora",
        lambda c, s: is_dora(s),
        "DoRA divides by a norm between the two products, so they cannot be one",
    ),
    Rule(
        "folded-base",
        lambda c, s: s.weights in (Dtype.INT8, Dtype.GPTQ4),
        "fused LoRA dequantizes the base matrix itself, and {s.weights.value} has "
        "kernels of its own",
    ),
    Rule(
        "folded-dtype",
        lambda c, s: s.adapter_dtype is not s.compute,
        "fused LoRA multiplies in one number format: adapters are "
        "{s.adapter_dtype.value}, arithmetic is {s.compute.value}",
    ),
    Rule(
        "folded-autocast",
        lambda c, s: s.is_autocast,
        "autocast casts the input of each product, and fused LoRA casts nothing",
    ),
    Rule(
        "folded-zero3",
        lambda c, s: s.sharding is Sharding.ZERO3,
        "zero3 gathers a matrix when its own module is called, and fused LoRA reads it "
        "from outside: use fsdp, ddp or zero2",
        "deepspeed 0.19, runtime/zero/parameter_offload.py",
    ),
    applies=lambda c, s: s.fused_lora,
    source="tightfit/runtime/kernels/fused_lora.py",
)

MLP_TILE_RULES = _group(
    Rule(
        "tiles-checkpointing",
        lambda c, s: not s.checkpointing,
        "the MLPs of recomputed layers run in tiles, and no layer is recomputed: set checkpointing",
    ),
    Rule(
        "tiles-family",
        lambda c, s: not c.family.can_tile_mlp,
        "layers of {m.model_type} have no MLP that can run on some tokens at a time: set "
        "mlp_tiles=1",
        "transformers 5.22: modules that take more than the hidden states, or none of their own",
    ),
    Rule(
        "tiles-compile",
        lambda c, s: s.compile,
        "a compiled layer is one graph, which tiles would cut: set compile=false",
    ),
    Rule(
        "tiles-zero3",
        lambda c, s: s.sharding is Sharding.ZERO3,
        "zero3 gathers a matrix once a pass, and tiles call it several times: use fsdp, ddp or "
        "zero2",
        "deepspeed 0.19, runtime/zero/partitioned_param_coordinator.py",
    ),
    Rule(
        "tiles-weights",
        lambda c, s: s.weights is Dtype.INT8 or s.has_fp8,
        "MLPs in int8 or fp8 have not been tried in tiles: set mlp_tiles=1",
    ),
    Rule(
        "tiles-router-loss",
        lambda c, s: s.router_loss_weight > 0,
        "the router loss reads all tokens of a layer's router at once: set mlp_tiles=1",
    ),
    applies=lambda c, s: s.mlp_tiles > 1,
    source="tightfit/runtime/kernels/tiled_mlp.py",
)

DORA_RULES = _group(
    Rule(
        "dora-method",
        lambda c, s: s.dora and s.method is Method.FULL,
        "DoRA is a kind of adapter; `{s.method.value}` has none",
        "https://arxiv.org/abs/2402.09353",
    ),
    Rule(
        "dora-experts",
        lambda c, s: is_dora(s) and _adapts_bare_weights(c),
        "DoRA does not take the experts of {m.name}, which are bare parameters: name "
        "modules with --set lora_targets=",
        "peft 0.21, lora/layer.py ParamWrapper",
    ),
    Rule(
        "dora-zero3",
        lambda c, s: is_dora(s) and s.sharding is Sharding.ZERO3,
        "DoRA reads the base weights outside their own module, where zero3 has already "
        "freed them: use fsdp, ddp or zero2",
        _DORA_SHARDED,
    ),
    Rule(
        "dora-sharded-quantized",
        lambda c, s: (
            is_dora(s) and s.weights in (Dtype.NF4, Dtype.INT8) and s.sharding.shards_weights
        ),
        "DoRA on sharded {s.weights.value} weights fails when adapters are made: it copies "
        "the packed base",
        _DORA_SHARDED,
        is_warning=True,
    ),
)

DEQUANTIZED_RULES = _group(
    Rule(
        "unpacked-weights",
        lambda c, s: s.method is not Method.LORA or s.weights is not Dtype.NF4,
        "only a frozen nf4 base can be dequantized once, and this is `{s.method.value}` over "
        "{s.weights.value} weights",
    ),
    Rule(
        "unpacked-family",
        lambda c, s: not c.family.quantizes_linears,
        "transformers quantizes none of {m.model_type}'s layers, so none can be dequantized",
        "transformers 5.22: replace_with_bnb_linear, FalconLinear",
    ),
    Rule(
        "unpacked-sharding",
        lambda c, s: s.sharding.shards_optimizer,
        "a dequantized base is whole on every GPU, and {s.sharding.value} spreads quantized "
        "weights: use ddp",
    ),
    Rule(
        "unpacked-upcast",
        lambda c, s: s.upcast_unquantized,
        "quantized matrices return the fp32 of upcast norms, which dequantized ones would not",
    ),
    applies=lambda c, s: s.dequantized_base,
    source="tightfit/runtime/layers.py",
)

PACKED_EXPERTS_RULES = _group(
    Rule(
        "experts-zero3",
        lambda c, s: s.sharding is Sharding.ZERO3,
        "zero3 does not gather the scales of experts in nf4: use fsdp, ddp or zero2",
        "deepspeed 0.19, runtime/zero/partition_parameters.py",
    ),
    applies=lambda c, s: packs_experts(s) and not s.dequantized_base and c.spec.grouped_params > 0,
    source="tightfit/runtime/packed_experts.py",
)

ROUTER_LOSS_RULES = _group(
    Rule(
        "router-loss-family",
        lambda c, s: not c.family.has_router_loss or not any(b.num_experts for b in c.spec.blocks),
        "{m.name} has no router loss: set router_loss_weight=0",
        "transformers 5.22: load_balancing_loss_func",
    ),
    Rule(
        "router-loss-method",
        lambda c, s: s.method is Method.LOAD,
        "the router loss is for training: `{s.method.value}` trains nothing",
    ),
    Rule(
        "router-loss-compile",
        lambda c, s: s.compile,
        "routers inside compiled layers are out of the router loss's reach: set compile=false",
    ),
    Rule(
        "router-loss-trainer",
        lambda c, s: bool(s.trainer),
        "tightfit does not write a router loss into other trainers' configurations: set it there",
    ),
    applies=lambda c, s: s.router_loss_weight > 0,
    source="tightfit/training/routing.py",
)

OBJECTIVE_RULES = _group(
    Rule(
        "objective-method",
        lambda c, s: s.method is Method.LOAD,
        "`{s.method.value}` trains nothing: leave --objective {s.objective.value} out",
    ),
    Rule(
        "objective-family",
        lambda c, s: c.spec.is_encoder_decoder,
        "{s.objective.value} compares answers of one stream; {m.name} has an encoder and a decoder",
    ),
    Rule(
        "objective-loss",
        lambda c, s: s.loss is Loss.KERNEL,
        "the {s.loss.value} loss gives cross-entropy alone, and {s.objective.value} needs each "
        "answer's log-probability: use the plain, chunked or fused loss",
    ),
    Rule(
        "reference-copy-sharded",
        lambda c, s: s.copies_reference and s.sharding.shards_optimizer,
        "{s.sharding.value} keeps no frozen copy of the weights, which full tuning needs for the "
        "reference: set precompute_reference=true",
        "tightfit/training/engine.py",
    ),
    Rule(
        "objective-zero3",
        lambda c, s: s.sharding is Sharding.ZERO3 and any(count_forward_only_passes(s)),
        "zero3 gathers weights in the order of one forward and one backward pass; the passes "
        "without gradients that {s.objective.value} puts before them have not been tried: use "
        "fsdp or zero2, or for dpo and ipo precompute_reference=true",
        "deepspeed 0.19, runtime/zero/partitioned_param_coordinator.py",
    ),
    applies=lambda c, s: s.objective is not Objective.SFT,
    source="tightfit/training/preference.py",
)

REFERENCE_RULES = _group(
    Rule(
        "reference-objective",
        lambda c, s: not s.objective.record.needs_reference,
        "{s.objective.value} has no reference to compute before training: "
        "set precompute_reference=false",
        "tightfit/core/objectives.py",
    ),
    applies=lambda c, s: s.precompute_reference,
)

FP8_RULES = _group(
    Rule(
        "fp8-capability",
        lambda c, s: not c.is_cpu and (c.gpu.compute_capability or (0, 0)) < (8, 9),
        "fp8 products need compute capability 8.9; {c.gpu.name} is {c.capability}",
        "torch._scaled_mm, torch 2.13",
    ),
    Rule(
        "fp8-cpu",
        lambda c, s: c.is_cpu,
        "CPUs have no fp8 units: products would be slower than in bf16",
        "torch._scaled_mm on CPUs, torch 2.13",
    ),
    Rule(
        "fp8-method",
        lambda c, s: s.method is Method.LOAD,
        "fp8 products are for training: `{s.method.value}` trains nothing",
    ),
    Rule(
        "fp8-dtype",
        lambda c, s: (
            s.is_autocast or s.compute is not Dtype.BF16 or s.weights not in (Dtype.BF16, Dtype.NF4)
        ),
        "fp8 products are made of plain bf16 weights and activations: weights are "
        "{s.weights.value}, arithmetic is {s.compute.value}",
    ),
    Rule(
        "fp8-packed",
        lambda c, s: s.fp8 and s.weights is Dtype.NF4 and not s.dequantized_base,
        "fp8 products are made of dequantized matrices, and these stay quantized in "
        "nf4: --set dequantized_base=true",
    ),
    Rule(
        "fp8-family",
        lambda c, s: not c.family.has_fp8_linears,
        "linear layers of {m.model_type} are of a class of their own, which has no fp8 products",
        "transformers 5.22: Conv1D of gpt2, FalconLinear",
    ),
    Rule(
        "fp8-frozen-family",
        lambda c, s: s.stores_fp8 and c.family.casts_to_weight_dtype,
        "{m.model_type} casts a matrix's input to the format of its weights, which "
        "would be fp8 under LoRA",
        "transformers 5.22: T5DenseActDense.forward",
    ),
    Rule(
        "fp8-adapters",
        lambda c, s: s.stores_fp8 and not s.fused_lora,
        "adapters beside fp8 weights must be fused: --set fused_lora=true",
    ),
    Rule(
        "fp8-gradients-method",
        lambda c, s: s.fp8_gradients and s.method is Method.LORA,
        "fp8 gradients are for full tuning: LoRA leaves the matrices frozen",
    ),
    Rule(
        "fp8-twice",
        lambda c, s: s.fp8 and s.fp8_gradients,
        "fp8 covers the backward pass already: set fp8 or fp8_gradients, not both",
    ),
    Rule(
        "fp8-sharded",
        lambda c, s: s.sharding.shards_optimizer,
        "{s.sharding.value} cuts weights into shards in their own format, which fp8 copies "
        "are not made for yet: use single or ddp",
    ),
    applies=lambda c, s: s.has_fp8,
    source="tightfit/runtime/kernels/fp8.py",
)

CPU_RULES = _group(
    Rule(
        "cpu-kernels",
        lambda c, s: s.fused_kernels,
        "fused kernels are written in Triton, which runs on GPUs: use the plain or chunked "
        "loss on a CPU",
        "https://github.com/linkedin/Liger-Kernel (needs triton and a GPU)",
    ),
    Rule(
        "cpu-loss",
        lambda c, s: s.uses_liger_loss and not s.fused_kernels,
        "the {s.loss.value} loss is written in Triton, which runs on GPUs: use the plain or "
        "chunked loss on a CPU",
        "https://github.com/linkedin/Liger-Kernel (needs triton and a GPU)",
    ),
    Rule(
        "cpu-optimizer",
        lambda c, s: bool(s.optimizer.record.cpu_problem),
        "{s.optimizer.record.cpu_problem}",
        "tightfit/core/optimizers.py",
    ),
    Rule(
        "cpu-attention",
        lambda c, s: not s.attention.record.runs_on_cpu,
        "{s.attention.value} attention runs on GPUs; sdpa has a fused kernel for CPUs",
        "torch.nn.attention.varlen, torch 2.13",
    ),
    Rule(
        "cpu-fp16",
        lambda c, s: Dtype.FP16 in (s.compute, s.adapter_dtype),
        "CPUs have no fast fp16, and it would need a gradient scaler: use fp32 or bf16",
        "https://docs.pytorch.org/docs/stable/amp.html",
    ),
    Rule(
        "cpu-bf16",
        lambda c, s: not c.gpu.supports_bf16 and uses_bf16(s),
        "{c.gpu.name} has no bf16 units (avx512_bf16, amx_bf16): use fp32",
        "/proc/cpuinfo",
    ),
    Rule(
        "cpu-paged",
        lambda c, s: s.optimizer.record.is_paged,
        "a paged optimizer moves its state between a GPU and the host; on a CPU it is adamw-8bit",
        "bitsandbytes 0.50, functional.get_paged",
        is_warning=True,
    ),
    Rule(
        "cpu-offload",
        lambda c, s: s.offload is not Offload.NONE or s.offloaded_inputs > 0,
        "offload on a CPU saves nothing: the host's memory is where everything is already",
        "the hardware given",
        is_warning=True,
    ),
    Rule(
        "cpu-nf4-rows",
        lambda c, s: s.weights is Dtype.NF4 and c.wrong_nf4_width is not None,
        "bitsandbytes dequantizes nf4 rows of {c.wrong_nf4_width} values wrongly on a CPU: "
        "set weights=bf16 or fp32, or train on a GPU",
        "bitsandbytes 0.50 with AVX512: rows of a multiple of 16 values, and not of 64",
    ),
    Rule(
        "cpu-compile",
        lambda c, s: s.compile,
        "compiling for a CPU takes about three minutes and gains 2 to 7%",
        "measured with torch 2.13 on 2 cores, SmolLM2-135M LoRA",
        is_warning=True,
    ),
    Rule(
        "cpu-quantized",
        lambda c, s: s.weights.is_quantized and not s.dequantized_base,
        "{s.weights.value} weights are dequantized for every product, which is slow on a CPU",
        "bitsandbytes 0.50 on CPUs",
        is_warning=True,
    ),
    applies=lambda c, s: c.is_cpu,
)

NEW_TOKENS_RULES = _group(
    Rule(
        "new-tokens-encoder",
        lambda c, s: c.spec.is_encoder_decoder,
        "new tokens are added to decoder models; {m.name} has an encoder",
        "tightfit/runtime/vocabulary.py",
    ),
    Rule(
        "new-tokens-zero3",
        lambda c, s: s.sharding is Sharding.ZERO3,
        "ZeRO-3 partitions embeddings as they are read, before rows for new tokens can be added: "
        "use fsdp, ddp or zero2",
        "tightfit/training/zero.py",
    ),
    Rule(
        "new-tokens-head-bias",
        lambda c, s: s.num_new_rows > 0 and c.spec.lm_head_bias,
        "the head of {m.name} has a bias, which peft leaves out where it trains single rows: "
        "set train_embeddings=true",
        "peft 0.21, tuners/trainable_tokens/layer.py",
    ),
    Rule(
        "new-tokens-trainer",
        lambda c, s: bool(s.trainer),
        "no configuration of new tokens is written for {s.trainer}: plan it without them",
        "tightfit/planning/trainer_configs.py",
    ),
    applies=lambda c, s: bool(s.add_tokens or s.add_special_tokens),
)

EMBEDDING_ADAPTER_RULES = _group(
    Rule(
        "embedding-adapters-encoder",
        lambda c, s: c.spec.is_encoder_decoder,
        "adapters on embeddings are for decoders; {m.name} has an encoder",
        "tightfit/runtime/adapters.py",
    ),
    Rule(
        "embedding-adapters-trained",
        lambda c, s: s.train_embeddings or s.num_new_rows > 0,
        "embeddings have either an adapter or trained rows: leave `embeddings` out of "
        "lora_targets, or train_embeddings and new tokens out",
        "peft 0.21, tuners/tuners_utils.py",
    ),
    Rule(
        "embedding-adapters-dora",
        lambda c, s: s.dora,
        "DoRA's norms of embeddings and head have not been tried: leave `embeddings` or dora out",
        "tightfit/runtime/adapters.py",
    ),
    Rule(
        "embedding-adapters-dropout",
        lambda c, s: s.lora_dropout > 0 and s.loss is Loss.FUSED,
        "the fused loss adds the head's adapter to its matrix, where no input can be dropped: "
        "use another loss, or no lora_dropout",
        "tightfit/runtime/adapters.py",
    ),
    Rule(
        "embedding-adapters-zero",
        lambda c, s: s.sharding.is_zero,
        "adapters on embeddings have not been tried with {s.sharding.value}: use ddp or fsdp",
        "tightfit/training/zero.py",
    ),
    Rule(
        "embedding-adapters-trainer",
        lambda c, s: bool(s.trainer),
        "no configuration of adapters on embeddings is written for {s.trainer}",
        "tightfit/planning/trainer_configs.py",
    ),
    applies=lambda c, s: s.adapts_embeddings,
)

TRAINER_RULES = _group(
    Rule(
        "trainer",
        lambda c, s: c.trainer_problem is not None,
        "{c.trainer_problem}",
        "tightfit/core/trainers.py",
    ),
    applies=lambda c, s: bool(s.trainer),
)

GROUPS = (
    JOB_RULES,
    NEW_TOKENS_RULES,
    EMBEDDING_ADAPTER_RULES,
    TRAINER_RULES,
    SHARDING_RULES,
    CONTEXT_RULES,
    FUSED_LORA_RULES,
    MLP_TILE_RULES,
    DORA_RULES,
    DEQUANTIZED_RULES,
    PACKED_EXPERTS_RULES,
    ROUTER_LOSS_RULES,
    OBJECTIVE_RULES,
    REFERENCE_RULES,
    FP8_RULES,
    CPU_RULES,
)
RULES = tuple(rule for group in GROUPS for rule in group.rules)


def _select(*, warnings: bool) -> tuple[RuleGroup, ...]:
    return tuple(
        group._replace(rules=tuple(rule for rule in group.rules if rule.is_warning is warnings))
        for group in GROUPS
    )


_ILLEGAL, _WARNINGS = _select(warnings=False), _select(warnings=True)
