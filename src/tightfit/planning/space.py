"""The strategy space: every way a request could run on a group of nodes, legal or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

from tightfit.core.attention import Attention
from tightfit.core.dtypes import Dtype
from tightfit.core.objectives import Objective
from tightfit.core.optimizers import Optimizer
from tightfit.core.settings import Loss, Method, Offload, Sharding
from tightfit.core.strategy import Strategy
from tightfit.estimation.flops import skips_masked_pairs
from tightfit.estimation.job import count_inputs_for_host
from tightfit.hardware.types import Gpu, Node, NodeGroup
from tightfit.models.attention import list_proposed, needs_of
from tightfit.models.families.registry import find_family
from tightfit.models.spec import ModelSpec
from tightfit.planning.request import JobRequest
from tightfit.planning.rules import (
    DEQUANTIZED_RULES,
    FUSED_LORA_RULES,
    Case,
    find_violations,
    is_refused,
)

_Fields = dict[str, Any]

_ONE_GPU = (
    (Sharding.SINGLE, Offload.NONE),
    (Sharding.FSDP, Offload.ALL),
    (Sharding.ZERO2, Offload.OPTIMIZER),
    (Sharding.ZERO3, Offload.ALL),
)
_MANY_GPUS = (
    (Sharding.DDP, Offload.NONE),
    (Sharding.FSDP, Offload.NONE),
    (Sharding.FSDP_GRAD_OP, Offload.NONE),
    (Sharding.ZERO1, Offload.NONE),
    (Sharding.ZERO2, Offload.NONE),
    (Sharding.ZERO3, Offload.NONE),
    (Sharding.FSDP, Offload.ALL),
    (Sharding.ZERO2, Offload.OPTIMIZER),
    (Sharding.ZERO3, Offload.OPTIMIZER),
    (Sharding.ZERO3, Offload.ALL),
)
_KERNELS: tuple[_Fields, ...] = (
    {"loss": Loss.FUSED, "fused_kernels": True, "compile": False},
    {"loss": Loss.FUSED, "fused_kernels": False, "compile": True},
    {"loss": Loss.CHUNKED, "fused_kernels": False, "compile": True},
    {"loss": Loss.FUSED, "fused_kernels": False, "compile": False},
    {"loss": Loss.CHUNKED, "fused_kernels": False, "compile": False},
    {"loss": Loss.PLAIN, "fused_kernels": False, "compile": False},
)
MAX_BATCH_LOSS_FRACTION = 0.05
"""How much smaller than asked a step may be for the sake of a rounder micro-batch."""
MOST_MLP_TILES, LEAST_TILE_TOKENS = 8, 8192
"""Tiles that the planner proposes. A wide MLP in eighths takes less than attention does, and each
tile of a quantized one dequantizes its matrices anew."""
_FULL_OPTIMIZERS = (Optimizer.ADAMW, *(one for one in Optimizer if one.is_8bit))


class Layout(NamedTuple):
    """How many nodes of a group take part, with how many GPUs each."""

    group: NodeGroup
    num_nodes: int
    gpus_per_node: int

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node


def list_layouts(group: NodeGroup, request: JobRequest, *, is_coarse: bool = False) -> list[Layout]:
    """One GPU, one whole node, then whole nodes doubling up to all of them."""
    counts = sorted({2**power for power in range(17) if 2**power < group.num_nodes})
    shapes = [(1, 1), *((count, group.node.num_gpus) for count in (*counts, group.num_nodes))]
    if is_coarse:
        shapes = shapes[-1:]
    fixed = request.fixed
    if fixed.get("sharding") is Sharding.SINGLE:
        shapes = [(1, 1)]
    if fixed.get("context_parallel", 1) != 1:
        shapes = [shape for shape in shapes if shape != (1, 1)] or shapes
    if "num_nodes" in fixed or "gpus_per_node" in fixed:
        nodes, gpus = fixed.get("num_nodes"), fixed.get("gpus_per_node")
        shapes = [(_count(nodes, shape[0]), _count(gpus, shape[1])) for shape in shapes]
    return [
        Layout(group=group, num_nodes=nodes, gpus_per_node=gpus)
        for nodes, gpus in dict.fromkeys(shapes)
    ]


LEAST_SLICE_TOKENS = 2048
"""Of a row, for each GPU that shares it: below, its kernels are too small to gain time."""


def list_context_sizes(layout: Layout) -> list[int]:
    """How many GPUs could share a row: powers of two, inside a node first, then whole nodes."""
    gpus = layout.gpus_per_node
    inside = [2**power for power in range(1, 17) if gpus % 2**power == 0]
    nodes = [2**power for power in range(1, 17) if layout.num_nodes % 2**power == 0]
    return [*inside, *(gpus * count for count in nodes)]


def _count(stated: object, otherwise: int) -> int:
    return stated if isinstance(stated, int) else otherwise


def enumerate_strategies(
    request: JobRequest,
    layout: Layout,
    *,
    is_coarse: bool = False,
    context_parallel: int = 1,
    on_needless: Callable[[str, Strategy], None] | None = None,
) -> Iterator[Strategy]:
    """Every strategy of one layout at micro-batch 1, what is faster where it fits first.

    `on_needless` is told of those that never gain, with the reason; they are not yielded.

    What a request fixes replaces that part of the space. A coarse space has the
    levers that nearly always win only; the buying guide uses it.
    """
    base: _Fields = {
        "seq_len": request.planned_seq_len,
        "num_nodes": layout.num_nodes,
        "gpus_per_node": layout.gpus_per_node,
        "context_parallel": context_parallel,
    }
    node = layout.group.node
    is_cpu = node.gpu.is_cpu
    axes = (
        list_precisions(request, node.gpu, is_coarse=is_coarse),
        [
            pair
            for pair in _list_shardings(layout, is_coarse=is_coarse)
            if pair["offload"] is Offload.NONE or not is_cpu
        ],
        _list_kernels(request, node, is_coarse=is_coarse),
        _list_attention(request, node, is_coarse=is_coarse),
        [{"checkpointing": False}, {"checkpointing": True}],
        _list_references(request, is_coarse=is_coarse),
    )
    plainest = Strategy()
    seen: set[Strategy] = set()
    examples: dict[str, Strategy] = {}
    is_asked = not {"method", "sharding", "offload", "compile"}.isdisjoint(request.fixed)
    for parts in product(*axes):
        merged = dict(base)
        for part in parts:
            merged |= part
        needless = _find_needless(merged)
        if needless:
            if on_needless is not None and not is_asked:
                examples.setdefault(needless, plainest.model_copy(update=merged))
                on_needless(needless, examples[needless])
            continue
        for optimizer in _list_optimizers(merged, is_coarse=is_coarse or is_cpu):
            # A copy is not validated again, which would take longer than judging it.
            fields = {"fused_lora": True, **merged, "optimizer": optimizer, **request.fixed}
            strategy = plainest.model_copy(update=fields)
            if request.trainer is not None:
                strategy = request.trainer.follow(
                    strategy, request.spec.model_type, given=request.fixed, is_planning=True
                )
            if "fused_lora" not in request.fixed and _refuses_fused_lora(
                request.spec, strategy, node
            ):
                strategy = strategy.model_copy(update={"fused_lora": False})
            for one in _list_bases(request, strategy, node):
                if one not in seen:
                    seen.add(one)
                    yield one


def _refuses_fused_lora(spec: ModelSpec, fused: Strategy, node: Node) -> bool:
    """Whether LoRA stays as it is: fused it costs nothing, so only a rule is against it.

    Compiled layers do without: the compiler fuses those passes itself. Not so with fp8, which
    needs it.
    """
    if fused.method is not Method.LORA or (fused.compile and not fused.fp8):
        return True
    case = Case(spec=spec, strategy=fused, node=node, num_nodes=fused.num_nodes)
    return is_refused(FUSED_LORA_RULES, case)


def _list_bases(request: JobRequest, strategy: Strategy, node: Node) -> list[Strategy]:
    """Dequantized where no rule forbids it, then quantized: what there is room for. fp8 needs a
    dequantized base.

    Only where nf4 was asked for: of an open method, 16-bit LoRA is as large and as fast, and
    loses nothing.
    """
    is_asked = request.method == "qlora" or request.fixed.get("weights") is Dtype.NF4
    if not is_asked or "dequantized_base" in request.fixed:
        return [strategy]
    dequantized = strategy.model_copy(update={"dequantized_base": True})
    case = Case(spec=request.spec, strategy=dequantized, node=node, num_nodes=strategy.num_nodes)
    if is_refused(DEQUANTIZED_RULES, case):
        return [strategy]
    return [dequantized] if strategy.fp8 else [dequantized, strategy]


def list_long_row_levers(spec: ModelSpec, strategy: Strategy, node: Node) -> Iterator[_Fields]:
    """What makes room beside recomputation and is not pulled yet, for rows that would not fit
    otherwise: what costs least time first, each to be added to those before it.

    Of a step of 32,768 tokens on one H200 inputs in host memory cost 0.3%, eight tiles 3.3%
    (benchmarks/results/h200_long_rows.json).
    """
    if node.gpu.is_cpu:
        return
    most = strategy.count_recomputed(spec.num_layers) - 1
    if strategy.offloaded_inputs == 0 and most > 0:
        # As many as the host has room for.
        most = min(most, count_inputs_for_host(spec, strategy, node.host_memory_bytes))
        if most > 0:
            yield {"offloaded_inputs": most}
    if strategy.mlp_tiles == 1:
        num_tiles = strategy.tokens_per_micro_batch // LEAST_TILE_TOKENS
        yield {"mlp_tiles": min(MOST_MLP_TILES, max(2, num_tiles))}


def list_micro_batches(request: JobRequest, strategy: Strategy) -> list[tuple[int, int]]:
    """(micro-batch, accumulation) pairs, smallest first.

    Micro-batch x accumulation x GPUs comes as near to the effective batch as it
    can without passing it; only more GPUs than sequences pass it.
    """
    share = max(1, request.effective_batch // strategy.num_batches)
    if "micro_batch" in request.fixed:
        sizes = [strategy.micro_batch]
    else:  # divisors, and powers of two that lose little
        divisors = [size for size in range(1, min(share, 4096) + 1) if share % size == 0]
        powers = [2**power for power in range(17) if 2**power <= share]
        close = [size for size in powers if share % size <= MAX_BATCH_LOSS_FRACTION * share]
        sizes = sorted({*divisors, *close})
    if "grad_accum" in request.fixed:
        return [(size, strategy.grad_accum) for size in sizes]
    return [(size, max(1, share // size)) for size in sizes]


def list_precisions(request: JobRequest, gpu: Gpu, *, is_coarse: bool = False) -> list[_Fields]:
    """Number formats per method, the card's natural ones first.

    bf16 stays in the space of cards without it, so that the reason of its
    absence can be shown.
    """
    half = choose_compute_dtype(request.spec, gpu)
    is_alone = is_coarse or half is Dtype.BF16 or gpu.is_cpu
    halves = [half] if is_alone else [half, Dtype.BF16]
    stated = request.fixed.get("compute")
    if isinstance(stated, Dtype):
        halves = [stated]
    found: list[_Fields] = []
    for compute in halves:
        adapter = Dtype.BF16 if compute is Dtype.BF16 else Dtype.FP32
        lora: _Fields = {
            "method": Method.LORA,
            "compute": compute,
            "adapter_dtype": adapter,
            "autocast": compute is Dtype.FP16,
        }
        if request.spec.stored_dtype is Dtype.GPTQ4:
            found.append({**lora, "weights": Dtype.GPTQ4})
            continue  # a packed checkpoint has no other weights to offer
        if request.method in ("auto", "lora"):
            found.append({**lora, "weights": compute})
        # bitsandbytes runs on CPUs, but so slowly that it must be asked for.
        is_proposed = request.method == "auto" and not gpu.is_cpu
        if is_proposed or request.method == "qlora":
            found.append({**lora, "weights": Dtype.NF4})
        if is_proposed:
            found.append({**lora, "weights": Dtype.INT8})
        if request.method in ("auto", "full"):
            full: _Fields = {"method": Method.FULL, "compute": compute, "adapter_dtype": adapter}
            if compute is not Dtype.FP16:
                found.append({**full, "weights": compute})
            if compute is not Dtype.FP32 and not (is_coarse and compute is Dtype.BF16):
                found.append({**full, "weights": Dtype.FP32})
    return found


def choose_compute_dtype(spec: ModelSpec, gpu: Gpu) -> Dtype:
    """The arithmetic a card is made for: bf16, else fp16, else (or where fp16 overflows) fp32.

    A CPU without units for bf16 computes in fp32.
    """
    if gpu.supports_bf16:
        return Dtype.BF16
    if gpu.is_cpu:
        return Dtype.FP32
    trial = Strategy(
        method=Method.FULL, weights=Dtype.FP32, compute=Dtype.FP16, attention=Attention.EAGER
    )
    case = Case(spec=spec, strategy=trial, node=Node(gpu=gpu, num_gpus=1), num_nodes=1)
    is_forbidden = any(v.rule.startswith("fp16") for v in find_violations(case))
    return Dtype.FP32 if is_forbidden else Dtype.FP16


def choose_attention(spec: ModelSpec, node: Node, *, compute: Dtype) -> Attention:
    """The best attention that runs this model on this card with no further package: sdpa, else
    flash, else eager."""
    for attention in list_proposed(needs_of(spec)):
        trial = Strategy(method=Method.LOAD, weights=compute, compute=compute, attention=attention)
        case = Case(spec=spec, strategy=trial, node=node, num_nodes=1)
        names = ("cpu-attention", "attention", attention.value)
        if not any(v.rule.startswith(names) for v in find_violations(case)):
            return attention
    return Attention.EAGER


def must_repeat_keys(spec: ModelSpec, node: Node, *, attention: Attention, compute: Dtype) -> bool:
    """Whether SDPA would fall back to its math kernel, which holds the score matrix."""
    trial = Strategy(method=Method.LOAD, weights=compute, compute=compute, attention=attention)
    case = Case(spec=spec, strategy=trial, node=node, num_nodes=1)
    return attention is Attention.SDPA and case.lacks_grouped_kernel


def _list_shardings(layout: Layout, *, is_coarse: bool) -> list[_Fields]:
    pairs: tuple[tuple[Sharding, Offload], ...] = _ONE_GPU if layout.world_size == 1 else _MANY_GPUS
    if is_coarse:
        wanted = (Sharding.SINGLE, Sharding.DDP, Sharding.FSDP)
        pairs = tuple(pair for pair in pairs if pair[0] in wanted and pair[1] is Offload.NONE)
    if layout.num_nodes > 1:
        pairs = (*pairs, (Sharding.FSDP_HYBRID, Offload.NONE))
    return [{"sharding": sharding, "offload": offload} for sharding, offload in pairs]


def _list_kernels(request: JobRequest, node: Node, *, is_coarse: bool) -> list[_Fields]:
    if node.gpu.is_cpu:  # compiling takes minutes and gains a few percent
        return [kernels for kernels in _KERNELS if not kernels["compile"]][1:]
    if not is_coarse:
        # Where there are fused kernels they were as fast or faster on every family measured.
        has_liger = find_family(request.spec.model_type).has_liger
        return [kernels for kernels in _KERNELS if not (has_liger and kernels["compile"])]
    trial = Strategy(method=Method.FULL, weights=Dtype.FP32, compute=Dtype.FP32, **_KERNELS[0])
    case = Case(spec=request.spec, strategy=trial, node=node, num_nodes=1)
    names = [violation.rule for violation in find_violations(case)]
    has_fused = not any(name.startswith(("fused", "triton")) for name in names)
    return [_KERNELS[0] if has_fused else _KERNELS[3]]


def _list_attention(request: JobRequest, node: Node, *, is_coarse: bool) -> list[_Fields]:
    """sdpa where the model has it; flash for packed rows, which it needs no mask for; flash and
    flex for windows that sdpa would compute as masked squares.

    Rows that are not packed are padded to the longest of their batch: the worst
    batch is as long as the longest row, and packed ones are as long as allowed.
    """
    asked = request.fixed.get("compute")
    compute = asked if isinstance(asked, Dtype) else choose_compute_dtype(request.spec, node.gpu)
    best = choose_attention(request.spec, node, compute=compute)
    repeated = must_repeat_keys(request.spec, node, attention=best, compute=compute)
    is_plain = is_coarse or node.gpu.is_cpu
    others = [] if is_plain else list_proposed(needs_of(request.spec))
    length = request.longest_batch_len
    window = request.spec.sliding_window if request.spec.num_sliding_layers else None
    kinds = [best]
    if not skips_masked_pairs(best, window=window, seq_len=length):
        kinds += [kind for kind in others if kind.record.skips == "windows"]
    found: list[_Fields] = [
        {"attention": kind, "packing": False, "seq_len": length} for kind in dict.fromkeys(kinds)
    ]
    if _can_join_rows(request) and not request.spec.is_encoder_decoder:
        kinds = [best, *(kind for kind in others if kind.record.varlen == "always")]
        found += [{"attention": kind, "packing": True} for kind in dict.fromkeys(kinds)]
    stated = request.fixed.get("packing")
    wanted = [fields for fields in found if stated in (None, fields["packing"])] or found
    return [
        {**fields, "repeat_keys": repeated and fields["attention"] is best} for fields in wanted
    ]


def _can_join_rows(request: JobRequest) -> bool:
    """Whether packing would lay two rows into one sequence; else it costs time alone."""
    profile = request.profile
    if profile is None:
        return False
    return profile.num_packed_rows < profile.num_rows


def _list_references(request: JobRequest, *, is_coarse: bool) -> list[_Fields]:
    """The reference in each step, or once before training, where the objective needs one."""
    objective = request.fixed.get("objective")
    if not (isinstance(objective, Objective) and objective.record.needs_reference):
        return [{}]
    once = {"precompute_reference": True}
    return [once] if is_coarse else [{"precompute_reference": False}, once]


def _list_optimizers(fields: _Fields, *, is_coarse: bool) -> tuple[Optimizer, ...]:
    """Adapters have little state: only full tuning gains from smaller optimizers.

    DeepSpeed calls 8-bit optimizers untested, so they are not proposed with it.
    """
    if fields["method"] is not Method.FULL or fields["sharding"].is_zero:
        return (Optimizer.ADAMW,)
    return _FULL_OPTIMIZERS[:2] if is_coarse else _FULL_OPTIMIZERS


def _find_needless(fields: _Fields) -> str:
    """Why what is legal never gains, so that looking at it would only cost time; else empty."""
    is_zero = fields["sharding"].is_zero
    if is_zero and fields["compile"]:
        return "DeepSpeed's hooks break a compiled graph at every layer"
    is_about_state = fields["offload"] is Offload.OPTIMIZER or (
        fields["sharding"] in (Sharding.ZERO1, Sharding.ZERO2)
    )
    if fields["method"] is Method.LORA and is_about_state:
        return (
            "the optimizer state of adapters is too small to gain from sharding (ZeRO-1, ZeRO-2) "
            "or offloading it alone: --set sharding=zero1 plans it all the same"
        )
    return ""
