"""Kernel timings of this machine: matrix products, attention, memory-bound kernels, optimizer
updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW

from tightfit.core.units import GIB, MIB
from tightfit.hardware.calibration import (
    KERNEL,
    LOSS_BYTES,
    TORCH,
    AttentionTime,
    MatmulTime,
    OptimizerTime,
    TrafficTime,
)
from tightfit.hardware.types import FP8, FP8_EXACT, FP8_KINDS
from tightfit.runtime.attention import (
    Bounds,
    VarlenCall,
    find_varlen_kernel,
    require_varlen_kernel,
    run_varlen_kernel,
)
from tightfit.runtime.calibrate.bench import Bench, Work, time_after_work
from tightfit.runtime.kernels.adamw import TritonAdamW
from tightfit.runtime.kernels.fp8 import multiply_rows, scale_rows

MatmulShape = tuple[int, int, int]
"""m, n, k: tokens, outputs, inputs in a forward pass."""

GPU_TOKENS = (512, 2048, 8192)
GPU_LINEARS = ((3072, 768), (2048, 2048), (8192, 2048), (4096, 4096), (11008, 4096), (13824, 5120))
"""n, k: linear layers of GPT-2 small, Llama-3.2-1B, Llama-2-7B and Llama-2-13B."""
WEIGHT_GRADIENT: MatmulShape = (11008, 4096, 8192)
"""k is the tokens."""
GPU_OTHERS: tuple[MatmulShape, ...] = (
    (2048, 4096, 11008),
    *((4096, 4096, 2048), WEIGHT_GRADIENT),
    *((2048, 32000, 4096), (2048, 128256, 4096), (8192, 50304, 2048)),  # vocabularies
    # The fused loss's chunks of 8192 tokens, and the gradient of one's input
    *((256, 128256, 4096), (1024, 128256, 4096), (1024, 32000, 4096), (256, 4096, 128256)),
)
LORA_SHAPES: tuple[MatmulShape, ...] = (
    *((2048, 16, 4096), (8192, 16, 4096), (8192, 64, 4096), (8192, 16, 11008), (2048, 8, 2048)),
    *((2048, 4096, 16), (8192, 4096, 16), (8192, 11008, 64), (2048, 2048, 8)),
    *((16, 4096, 8192), (4096, 16, 8192)),  # gradients of both matrices
)
GPU_FEW: tuple[MatmulShape, ...] = (
    *((2048, n, k) for n, k in GPU_LINEARS),
    *((512, 4096, 4096), (8192, 4096, 4096), (2048, 32000, 4096)),
    *((8192, 16, 4096), (8192, 4096, 16), (2048, 8, 2048), (2048, 2048, 8)),
)
GPU_LARGEST: tuple[MatmulShape, ...] = ((2048, 4096, 4096), (8192, 4096, 4096), (8192, 11008, 4096))
CPU_SHAPES: tuple[MatmulShape, ...] = (
    *((m, n, k) for m in (128, 512, 2048) for n, k in ((576, 576), (1536, 576), (2048, 2048))),
    *((512, 8192, 2048), (512, 4096, 4096), (512, 11008, 4096), (2048, 8192, 2048)),
    *((512, 49152, 576), (512, 32000, 2048)),
    *((512, 16, 576), (512, 576, 16), (2048, 16, 2048), (2048, 2048, 16), (2048, 64, 2048)),
    *((576, 576, 512), (2048, 2048, 512)),
)
ANCHORS: dict[str, MatmulShape] = {"cuda": (2048, 4096, 4096), "cpu": (512, 2048, 2048)}
MATMUL_CALLS = {"cuda": 8, "cpu": 4}
"""Calls per measurement of a long product."""


def measure_matmuls(bench: Bench) -> list[MatmulTime]:
    """A table per dtype: fp32 in full precision, and what the device has beside it."""
    wanted = _plan(bench)
    rows: list[MatmulTime] = []
    for number, (dtype, shapes) in enumerate(wanted):
        with bench.part(1 / (len(wanted) - number)):
            rows += _measure_dtype(bench, dtype, shapes)
    return rows


SUSTAINED_SHAPE: MatmulShape = (8192, 4096, 4096)
SUSTAINED_SECONDS = 1.5
"""Of products only, until the GPU is at the clock that its power limit allows."""


def measure_sustained(bench: Bench) -> MatmulTime | None:
    """One product again at the sustained clock; None on a CPU."""
    m, n, k = SUSTAINED_SHAPE
    if bench.is_cpu or bench.seconds_left < 2 * SUSTAINED_SECONDS:
        return None
    dtype = "bf16" if bench.supports_bf16 else "fp16"
    work = _prepare_matmul(bench, dtype, SUSTAINED_SHAPE)
    return MatmulTime(
        dtype=dtype, m=m, n=n, k=k, seconds=time_after_work(work, seconds=SUSTAINED_SECONDS)
    )


def _plan(bench: Bench) -> list[tuple[str, tuple[MatmulShape, ...]]]:
    if bench.is_cpu:
        kinds = [("fp32", CPU_SHAPES)]
        return [*kinds, ("bf16", CPU_SHAPES)] if bench.supports_bf16 else kinds
    whole = (*((m, n, k) for m in GPU_TOKENS for n, k in GPU_LINEARS), *GPU_OTHERS, *LORA_SHAPES)
    usual, other = ("bf16", "fp16") if bench.supports_bf16 else ("fp16", None)
    found = [(usual, whole), ("fp32", GPU_FEW)]
    if other is not None:
        found += [(other, GPU_FEW), ("tf32", GPU_LARGEST)]
    if torch.cuda.get_device_capability(bench.device) >= (8, 9):
        found += [(FP8, GPU_LARGEST), (FP8_EXACT, (*GPU_LARGEST, WEIGHT_GRADIENT))]
    return found


def _measure_dtype(bench: Bench, dtype: str, shapes: tuple[MatmulShape, ...]) -> list[MatmulTime]:
    """One medium size first, whatever the time, to predict the others; then small to large."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    anchor, calls = ANCHORS[bench.device.type], MATMUL_CALLS[bench.device.type]
    rows: list[MatmulTime] = []
    try:
        for m, n, k in sorted(shapes, key=lambda shape: (shape != anchor, prod(shape))):
            known = max((row.flops_per_second for row in rows), default=float("inf"))
            is_late = rows and bench.seconds_left < calls * 2.0 * m * n * k / known
            if is_late or not bench.has_room(4.0 * (m * k + n * k + 2 * m * n)):
                continue
            seconds = bench.try_seconds(partial(_prepare_matmul, bench, dtype, (m, n, k)))
            if seconds is not None:
                rows.append(MatmulTime(dtype=dtype, m=m, n=n, k=k, seconds=seconds))
    except (RuntimeError, AttributeError, TypeError) as error:
        if dtype not in FP8_KINDS:  # torch has no public function for fp8 yet
            raise
        bench.skipped.append(f"{dtype} products: {str(error).splitlines()[0][:200]}")
        return []
    finally:
        torch.set_float32_matmul_precision(before)
    bench.note_missing(f"of {len(shapes)} {dtype} products", len(shapes) - len(rows))
    return rows


def _prepare_matmul(bench: Bench, dtype: str, shape: MatmulShape) -> Work:
    m, n, k = shape
    if dtype in FP8_KINDS:  # as training multiplies, fast in forward only; without the casts
        left, right = (scale_rows(bench.randn(rows, k, dtype=torch.bfloat16)) for rows in (m, n))
        return partial(multiply_rows, left, right, is_fast=dtype == FP8)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    return partial(functional.linear, bench.randn(m, k, dtype=kind), bench.randn(n, k, dtype=kind))


# Attention forward and backward, by kind, head width and length.

HEAD_DIMS = (128, 64)
LENGTHS = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (256, 512, 1024, 2048)}
TOKENS = {"cuda": 8192, "cpu": 1024}
"""Tokens per call at least: short sequences come in batches."""
WIDTH = {"cuda": 4096, "cpu": 512}
"""Of all heads."""
MASKED_LENGTHS = {"cuda": (1024, 2048), "cpu": (512,)}
"""For masks given as a matrix, as for padded rows and windows."""
ATTENTION_CALLS = {"cuda": 6, "cpu": 3}
"""Calls per measurement of a long call."""
WRITTEN_LENGTHS = {"cuda": (1024, 2048), "cpu": (512,)}
"""For attention that materializes its scores, whose time depends on their number only."""
DOCUMENT_LENGTHS = {128: (128, 1024, 256, 512, 64, 4096), 64: (128, 1024, 256, 512)}
"""By head width, for documents laid end to end, which are short as a rule. Far ones come first:
the rest can be interpolated if time runs out."""
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def measure_attention(bench: Bench) -> list[AttentionTime]:
    wanted = list(_list_wanted(bench.device.type))
    found = [_measure_attention_kernel(bench, *one) for one in wanted]
    rows = [row for row in found if row is not None]
    bench.note_missing("attention shapes", len(wanted) - len(rows))
    return rows


def _list_wanted(kind: str) -> Iterator[tuple[str, int, int, bool]]:
    """Kind, length, head width and mask; the most common first."""
    yield from (("sdpa", length, 128, True) for length in LENGTHS[kind])
    yield from (
        (name, length, 128, False) for length in WRITTEN_LENGTHS[kind] for name in ("eager", "math")
    )
    yield from (("masked", length, 128, False) for length in MASKED_LENGTHS[kind])
    yield from (("sdpa", length, 64, True) for length in LENGTHS[kind])
    yield from (("masked", length, 64, False) for length in MASKED_LENGTHS[kind])
    if kind == "cuda" and find_varlen_kernel() is not None:
        yield from (
            ("varlen", length, width, True)
            for width, lengths in DOCUMENT_LENGTHS.items()
            for length in lengths
        )
    yield from (("sdpa", MASKED_LENGTHS[kind][0], head_dim, False) for head_dim in HEAD_DIMS)


def _measure_attention_kernel(
    bench: Bench, name: str, length: int, head_dim: int, is_causal: bool
) -> AttentionTime | None:
    kind = bench.device.type
    batch, heads = max(1, TOKENS[kind] // length), WIDTH[kind] // head_dim
    shape = (batch, heads, length, head_dim)
    scores = 12 * batch * heads * length * length if name in ("eager", "math") else 0
    room = 20.0 * batch * heads * length * head_dim * bench.dtype.itemsize + 2.0 * scores
    if bench.seconds_left <= 0 or not bench.has_room(room):
        return None
    given = (batch * length, heads, head_dim) if name == "varlen" else shape
    attend = _choose(name, length, bench, is_causal=is_causal)

    def prepare_forward() -> Work:
        return partial(attend, *(bench.randn(*given).requires_grad_() for _ in range(3)))

    def prepare_both() -> Work:
        q, k, v = (bench.randn(*given).requires_grad_() for _ in range(3))
        gradient = bench.randn(*given)
        return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), gradient)

    forward = bench.try_seconds(prepare_forward)
    # Both directions take about 3.5 times as long, a few times over.
    if forward is None or bench.seconds_left < 3.5 * ATTENTION_CALLS[kind] * forward:
        return None
    both = bench.try_seconds(prepare_both)
    if both is None:
        return None
    return AttentionTime.model_validate(
        {
            "kind": name,
            "dtype": str(bench.dtype).removeprefix("torch."),
            **dict(zip(("batch", "heads", "length", "head_dim"), shape, strict=True)),
            "is_causal": is_causal,
            "forward_seconds": forward,
            "backward_seconds": max(both - forward, 0.5 * forward),
        }
    )


def _choose(name: str, length: int, bench: Bench, *, is_causal: bool) -> Attend:
    if name == "sdpa":
        return partial(functional.scaled_dot_product_attention, is_causal=is_causal)
    if name == "varlen":  # packed documents, all of one length
        num_tokens = max(length, TOKENS[bench.device.type])
        ends = torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device=bench.device)
        bounds = Bounds(offsets=ends, longest=length)
        call = VarlenCall(bounds=bounds)
        return partial(run_varlen_kernel, require_varlen_kernel(), call=call)
    if name == "masked":
        seen = torch.ones(length, length, dtype=torch.bool, device=bench.device).tril()
        mask = seen.expand(max(1, TOKENS[bench.device.type] // length), 1, -1, -1).contiguous()
        return partial(functional.scaled_dot_product_attention, attn_mask=mask)
    hidden = torch.ones(length, length, dtype=torch.bool, device=bench.device).triu(1)
    mask = torch.zeros(length, length, dtype=bench.dtype, device=bench.device)
    mask = mask.masked_fill(hidden, torch.finfo(bench.dtype).min)[None, None]
    return partial(attend_eagerly if name == "eager" else _attend_by_math, mask=mask)


def attend_eagerly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor
) -> torch.Tensor:
    """Operation by operation as transformers' `eager_attention_forward`."""
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    weights = functional.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous().transpose(1, 2)


def _attend_by_math(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor
) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


# Kernels bound by memory: copies, elementwise, reductions, the loss, AdamW, unpacking nf4.

TENSOR_BYTES = {
    "cuda": (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB),
    "cpu": (MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
}
"""Bytes of one tensor."""
CHAIN_BYTES = 256 * MIB
"""Total bytes of the tensors used in turn: each call reads what the one before wrote, as layers do,
and none finds its own old result in the cache."""
ROOM_TIMES = {
    "copy": 3.0,
    "elementwise": 3.0,
    "softmax": 3.0,
    "sum": 2.0,
    "loss": 12.0,
    "indexed": 4.0,
}
"""Memory of a kernel beside the chain, in tensors."""
LOGITS = {"cuda": (2048, 32000), "cpu": (128, 32000)}
HEAD_DIM = 128
NUM_SEQUENCES = 4
ROTATED_VALUES = 4.5
"""Values moved per value of a head: two products, a half negated, a concatenation, a sum."""
NF4_SHAPE = {"cuda": (11008, 4096), "cpu": (2048, 2048)}


def measure_traffic(bench: Bench) -> list[TrafficTime]:
    num_rows, vocab = LOGITS[bench.device.type]
    values, value = num_rows * vocab, bench.dtype.itemsize
    # Kind, bytes of the tensor, bytes moved, and its preparation.
    wanted: list[tuple[str, int, float, Callable[[], Work]]] = [
        (kind, values * value, float(values * moved), partial(make, bench, num_rows, vocab))
        for kind, make, moved in (
            ("loss", _prepare_loss, LOSS_BYTES),
            ("softmax", partial(_prepare_reduction, torch.softmax), 2 * value),
            ("sum", partial(_prepare_reduction, torch.sum), value),
            ("indexed", _prepare_indexed, ROTATED_VALUES * 2 * value),
        )
    ]
    wanted += [
        (kind, size, float(times * size), partial(_prepare_chain, bench, kind, size))
        for size in TENSOR_BYTES[bench.device.type]
        for kind, times in (("copy", 2), ("elementwise", 3))
    ]
    rows: list[TrafficTime] = []
    for kind, size, moved_bytes, make in wanted:
        needed = 1.5 * CHAIN_BYTES + ROOM_TIMES[kind] * size
        fits = bench.seconds_left > 0 and bench.has_room(needed)
        seconds = bench.try_seconds(make) if fits else None
        if seconds is not None:
            fields = {"kind": kind, "tensor_bytes": size, "moved_bytes": moved_bytes}
            rows.append(TrafficTime.model_validate(fields | {"seconds": seconds}))
    bench.note_missing("memory-bound kernels", len(wanted) - len(rows))
    return rows


def _prepare_chain(bench: Bench, kind: str, size: int) -> Work:
    count = min(max(CHAIN_BYTES // size, 2), 64)
    shape = size // bench.dtype.itemsize
    buffers = [torch.ones(shape, device=bench.device, dtype=bench.dtype) for _ in range(count)]
    others = [torch.zeros_like(buffer) for buffer in buffers[: count // 2]]
    turns = cycle(zip(buffers, [*buffers[1:], buffers[0]], strict=True))
    added = cycle(others)

    def copy() -> object:
        source, target = next(turns)
        return target.copy_(source)

    def add() -> object:
        source, target = next(turns)
        return torch.add(source, next(added), out=target)

    return copy if kind == "copy" else add


def _prepare_reduction(
    reduce: Callable[[Tensor, int], Tensor], bench: Bench, num_rows: int, vocab: int
) -> Work:
    return partial(reduce, bench.randn(num_rows, vocab), -1)


def _prepare_indexed(bench: Bench, num_rows: int, vocab: int) -> Work:
    """Rotary embedding as in transformers, on strided heads."""
    shape = (NUM_SEQUENCES, num_rows // NUM_SEQUENCES, vocab // HEAD_DIM, HEAD_DIM)
    heads = bench.randn(*shape).transpose(1, 2)
    turn = bench.randn(1, 1, shape[1], HEAD_DIM)

    def rotate() -> object:
        left, right = heads.chunk(2, dim=-1)
        return heads * turn + torch.cat((-right, left), dim=-1) * turn

    return rotate


def _prepare_loss(bench: Bench, num_rows: int, vocab: int) -> Work:
    """The plain loss of transformers: logits cast to fp32, cross entropy, and back."""
    logits = bench.randn(num_rows, vocab).requires_grad_()
    labels = torch.randint(vocab, (num_rows,), device=bench.device)

    def step() -> object:
        loss = functional.cross_entropy(logits.float(), labels)
        return torch.autograd.grad(loss, logits)

    return step


def measure_nf4(bench: Bench) -> float | None:
    """Weights per second that bitsandbytes dequantizes; None if it is missing or fails."""
    try:
        from bitsandbytes import functional as bits
    except (ImportError, RuntimeError, OSError):
        bench.skipped.append("dequantizing nf4: bitsandbytes is not installed")
        return None
    rows, columns = NF4_SHAPE[bench.device.type]
    try:
        weight = bench.randn(rows, columns)
        packed, state = bits.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        seconds = bench.seconds(lambda: bits.dequantize_4bit(packed, state))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        bench.skipped.append(f"dequantizing nf4: {str(error).splitlines()[0][:200]}")
        return None
    return rows * columns / seconds


# AdamW's update: torch's fused one, and our kernel where it does the same.

NUM_TENSORS = {"cuda": (16, 2**22), "cpu": (8, 2**20)}
"""How many, and how large each."""
TRIED_SIZES = (4096, 1031, 65_537, 1)
"""Full and partial tiles of the kernel."""
NUM_TRIED_STEPS = 3
LEARNING_RATE = 1e-3
CLIP_FACTOR = 0.5
"""The clipping factor in the trial."""
MAX_ROUNDINGS = 4
"""Rounding steps by which two correct updates may differ."""


def measure_optimizers(bench: Bench) -> list[OptimizerTime]:
    """With weights, gradients and state in one dtype."""
    kinds = {"fp32": torch.float32}
    if bench.supports_bf16:
        kinds["bf16"] = torch.bfloat16
    count, size = NUM_TENSORS[bench.device.type]
    updates: tuple[Literal["torch", "kernel"], ...] = (TORCH,) if bench.is_cpu else (TORCH, KERNEL)
    rows = []
    for by in updates:
        for name, dtype in kinds.items():
            if by == KERNEL and not _is_fit_for_use(bench, name, dtype):
                continue
            fits = bench.seconds_left > 0 and bench.has_room(20.0 * count * size)
            make = partial(_prepare_optimizer, bench, dtype, by)
            seconds = bench.try_seconds(make) if fits else None
            if seconds is None:
                bench.skipped.append(f"AdamW in {name}: no time or memory left")
                continue
            rows.append(OptimizerTime(dtype=name, num_params=count * size, seconds=seconds, by=by))
    return rows


def _prepare_optimizer(bench: Bench, dtype: torch.dtype, by: str) -> Work:
    count, size = NUM_TENSORS[bench.device.type]
    weights = [nn.Parameter(bench.randn(size, dtype=dtype)) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    if by == TORCH:
        step: Callable[[], object] = AdamW(weights, lr=1e-5, fused=True).step
        return step
    ours = TritonAdamW([{"params": weights}], lr=1e-5)
    factor = torch.ones((), device=bench.device)

    def clip_and_step() -> None:
        ours.scale_next(factor)
        ours.step()

    return clip_and_step


def _is_fit_for_use(bench: Bench, name: str, dtype: torch.dtype) -> bool:
    """Whether the kernel compiles here and updates as torch does."""
    problem = "" if find_spec("triton") else "triton is not installed"
    if not problem:
        try:
            problem = "" if updates_alike(bench.device, dtype) else "its update is not torch's"
        except Exception as error:  # compilers fail in many ways
            first = (str(error).splitlines() or [""])[0]
            problem = f"{type(error).__name__}: {first}"
    if problem:
        bench.skipped.append(f"the AdamW kernel in {name}: {problem}")
    return not problem


def updates_alike(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel's weights and moments after a few clipped steps are as close to fp64's as
    torch's are, up to rounding."""
    drawn = [(1e-2 * torch.randn(size, device=device)).to(dtype) for size in TRIED_SIZES]
    ours, theirs = ([nn.Parameter(x.clone()) for x in drawn] for _ in range(2))
    exact = [nn.Parameter(x.double()) for x in drawn]
    kernel = TritonAdamW([{"params": ours}], lr=LEARNING_RATE)
    fused = AdamW(theirs, lr=LEARNING_RATE, fused=True)
    slow = AdamW(exact, lr=LEARNING_RATE, foreach=False)
    factor = torch.tensor(CLIP_FACTOR, device=device)
    for _ in range(NUM_TRIED_STEPS):
        for mine, other, right in zip(ours, theirs, exact, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = CLIP_FACTOR * mine.grad
            right.grad = other.grad.double()
        kernel.scale_next(factor)
        kernel.step()
        fused.step()
        slow.step()
    for mine, other, right in zip(ours, theirs, exact, strict=True):
        # Of weights, they and the updates are rounded; of moments the terms are, while their sum
        # may be near zero.
        rounded = right.abs() + NUM_TRIED_STEPS * LEARNING_RATE
        compared = [(mine, other, right, rounded)]
        for name in ("exp_avg", "exp_avg_sq"):
            moment = slow.state[right][name]
            theirs_now = fused.state[other][name]
            compared.append((kernel.state[mine][name], theirs_now, moment, moment.abs().amax()))
        if not all(_is_as_near(*row) for row in compared):
            return False
    return True


def _is_as_near(mine: Tensor, other: Tensor, exact: Tensor, rounded: Tensor) -> bool:
    """`rounded`: the magnitude of what is rounded."""
    room = MAX_ROUNDINGS * torch.finfo(other.dtype).eps * rounded
    return bool(((mine - exact).abs() <= (other - exact).abs() + room).all())
