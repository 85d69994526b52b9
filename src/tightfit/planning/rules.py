"""What cannot work, whatever the memory: every legality rule, as data, with its source."""

from __future__ import annotations

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import UsageError
from tightfit.core.strategy import (
    ALL_LINEAR,
    Attention,
    Loss,
    Method,
    Optimizer,
)
from tightfit.core.suggest import did_you_mean
from tightfit.estimate.logits import has_head_apart
from tightfit.models.spec import ModelSpec
from tightfit.planning.case import T5_TYPES, Case, Rule, Violation, is_halved, wants_triton
from tightfit.planning.rules_adapters import ADAPTER_RULES
from tightfit.planning.rules_cpu import CPU_RULES
from tightfit.planning.rules_fp8 import FP8_RULES
from tightfit.planning.rules_sharding import SHARDING_RULES
from tightfit.planning.rules_unpacked import UNPACKED_RULES

_BNB = "https://huggingface.co/docs/bitsandbytes/main/en/installation"
_FLASH = "https://github.com/Dao-AILab/flash-attention#nvidia-cuda-support"
_VARLEN = "torch.nn.attention.varlen of torch 2.10 on, else the flash-attn package; " + _FLASH
_LIGER = "https://github.com/linkedin/Liger-Kernel (monkey_patch.py, 0.8)"
_SLICES = "tightfit/train/objective.py; liger-kernel 0.8.5, fused_linear_cross_entropy.py"
_SCALER = "https://huggingface.co/docs/peft/developer_guides/troubleshooting"
_WHEELS = "https://github.com/pytorch/pytorch/issues/190385"

MAX_TOKENS_PER_MICRO_BATCH = 2**24
_8BIT = (Optimizer.ADAMW_8BIT, Optimizer.ADAMW_PAGED_8BIT)
_GEMMA3_TYPES = frozenset({"gemma3", "gemma3_text"})
_NO_SDPA_TYPES = frozenset({"bloom", "codegen", "gpt_oss"})
_NO_FLASH_TYPES = frozenset({"bloom", "codegen"}) | T5_TYPES
_NO_PACKING_TYPES = frozenset({"bloom", "mpt", "falcon", "RefinedWeb", "RefinedWebModel"})
_GEMMA_TYPES = _GEMMA3_TYPES | {"gemma", "gemma2"}
_QWEN_TYPES = frozenset({"qwen2", "qwen3", "qwen3_moe", "qwen3_next"})
_LLAMA_TYPES = frozenset({"llama", "llama4_text", "ministral", "mistral", "mixtral", "phi3"})
LIGER_TYPES = _GEMMA_TYPES | _QWEN_TYPES | _LLAMA_TYPES
LIGER_TYPES |= {"glm4", "gpt_oss", "granite", "nemotron", "olmo2", "olmo3", "smollm3"}


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
        violated=lambda c: not c.gpu.supports_bf16 and not c.is_cpu and is_halved(c),
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
        name="8bit-optimizer-capability",
        reason="8-bit optimizers need compute capability 6.0; {c.gpu.name} is {c.capability}",
        source=_BNB,
        violated=lambda c: c.strategy.optimizer in _8BIT and c.is_below(6),
    ),
    Rule(
        name="triton-capability",
        reason="fused kernels and torch.compile need compute capability 7.0 (Triton); "
        "{c.gpu.name} is {c.capability}",
        source="torch/_inductor/scheduler.py and torch/utils/_triton.py, torch 2.13",
        violated=lambda c: wants_triton(c) and c.is_below(7),
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
        violated=lambda c: c.strategy.compute is Dtype.FP16 and c.spec.model_type in _GEMMA3_TYPES,
    ),
    Rule(
        name="fp16-overflow-t5",
        reason="{m.model_type} was trained in bf16 and can overflow in fp16; watch for a nan loss",
        source="https://github.com/huggingface/transformers/issues/9295",
        violated=lambda c: c.strategy.compute is Dtype.FP16 and c.spec.model_type in T5_TYPES,
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
        violated=lambda c: c.strategy.attention is Attention.FLASH and c.is_below(8),
    ),
    Rule(
        name="flash-dtype",
        reason="flash attention computes in fp16 or bf16, not {s.compute.value}",
        source=_VARLEN,
        violated=lambda c: (
            c.strategy.attention is Attention.FLASH and c.strategy.compute is Dtype.FP32
        ),
    ),
    Rule(
        name="flash-head-dim",
        reason="flash attention takes heads up to 256 wide; {m.name} has {m.head_dim}",
        source=_VARLEN,
        violated=lambda c: c.strategy.attention is Attention.FLASH and c.spec.head_dim > 256,
    ),
    Rule(
        name="flash-family",
        reason="transformers has no flash attention for {m.model_type}",
        source="_supports_flash_attn in transformers 5.22",
        violated=lambda c: (
            c.strategy.attention is Attention.FLASH and c.spec.model_type in _NO_FLASH_TYPES
        ),
    ),
    Rule(
        name="flash-softcap",
        reason="torch's own flash attention cannot cap attention logits as {m.name} does: the "
        "flash-attn package is needed",
        source="torch.nn.attention.varlen, torch 2.13",
        violated=lambda c: c.strategy.attention is Attention.FLASH and c.spec.has_attention_softcap,
        severity="warning",
    ),
    Rule(
        name="flash-sinks",
        reason="{m.model_type} has attention sinks, which flash attention knows from compute "
        "capability 9.0 on; {c.gpu.name} is {c.capability}",
        source="_compatible_flash_implementations of gpt_oss in transformers 5.22",
        violated=lambda c: (
            c.strategy.attention is Attention.FLASH
            and c.spec.model_type == "gpt_oss"
            and c.is_below(9)
        ),
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
        reason="sdpa cannot cap attention logits as {m.name} does; use eager (or flash)",
        source="transformers 5.22, integrations/sdpa_attention.py; "
        "https://github.com/huggingface/transformers/pull/32865",
        violated=lambda c: c.strategy.attention is Attention.SDPA and c.spec.has_attention_softcap,
    ),
    Rule(
        name="sdpa-grouped-heads",
        reason="sdpa has no fused kernel for grouped heads in {s.compute.value} on {c.gpu.name} "
        "({c.capability}) and would hold the score matrix: set repeat_keys",
        source="torch 2.11, sdp_utils.cpp: the memory-efficient kernel does not take enable_gqa; "
        "benchmarks/results/h200_steps.json, Llama-3.2-1B in fp32",
        violated=lambda c: (
            c.strategy.attention is Attention.SDPA
            and c.lacks_grouped_kernel
            and not c.strategy.repeat_keys
        ),
        severity="warning",
    ),
    Rule(
        name="sdpa-family",
        reason="transformers has no sdpa attention for {m.model_type}; use eager",
        source="_supports_sdpa in transformers 5.22",
        violated=lambda c: (
            c.strategy.attention is Attention.SDPA and c.spec.model_type in _NO_SDPA_TYPES
        ),
    ),
    Rule(
        name="fused-family",
        reason="Liger has no fused kernels for {m.model_type}; use the plain or chunked loss",
        source=_LIGER,
        violated=lambda c: (
            (c.strategy.fused_kernels or c.strategy.loss is Loss.FUSED)
            and c.spec.model_type not in LIGER_TYPES
        ),
    ),
    Rule(
        name="loss-slices",
        reason="only the fused loss walks in slices that can be widened, and this is the "
        "{s.loss.value} loss",
        source=_SLICES,
        violated=lambda c: c.strategy.loss_slice_factor > 1 and c.strategy.loss is not Loss.FUSED,
    ),
    Rule(
        name="loss-slices-family",
        reason="{m.model_type} makes all logits itself, so that the loss has no slices to widen",
        source=_SLICES,
        violated=lambda c: c.strategy.loss_slice_factor > 1 and not has_head_apart(c.spec),
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
        violated=lambda c: c.strategy.packing and c.spec.model_type in _NO_PACKING_TYPES,
    ),
    Rule(
        name="packing-opt",
        reason="opt keeps packed documents apart by flash attention alone, which needs 16-bit "
        "arithmetic and compute capability 8.0: set packing=false",
        source="transformers 5.22: modeling_opt.py makes its mask without positions",
        violated=lambda c: (
            c.strategy.packing
            and c.spec.model_type == "opt"
            and (
                c.strategy.attention is Attention.EAGER
                or c.strategy.compute is Dtype.FP32
                or c.is_below(8)
                or c.is_cpu
            )
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

RULES = (*_RULES, *SHARDING_RULES, *ADAPTER_RULES, *UNPACKED_RULES, *FP8_RULES, *CPU_RULES)
_ILLEGAL = tuple(rule for rule in RULES if rule.severity == "illegal")
_WARNINGS = tuple(rule for rule in RULES if rule.severity == "warning")
