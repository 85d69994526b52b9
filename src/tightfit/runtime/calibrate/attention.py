"""Attention forward and backward, by kind, head width and length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightfit.hardware.calibration import AttentionTime
from tightfit.runtime.calibrate.bench import Bench, Work
from tightfit.runtime.varlen import Bounds, VarlenCall, attend, find_kernel, require_kernel

HEAD_DIMS = (128, 64)
LENGTHS = {"cuda": (512, 1024, 2048, 4096, 8192), "cpu": (256, 512, 1024, 2048)}
TOKENS = {"cuda": 8192, "cpu": 1024}
"""Of one call at least, in as many rows as that makes: short sequences come in batches."""
WIDTH = {"cuda": 4096, "cpu": 512}
"""Of all heads."""
MASKED_LENGTHS = {"cuda": (1024, 2048), "cpu": (512,)}
"""For masks that are given as a matrix, as padded rows and windows have them."""
CALLS = {"cuda": 6, "cpu": 3}
"""Runs that one measurement of a long call takes."""


WRITTEN_LENGTHS = {"cuda": (1024, 2048), "cpu": (512,)}
"""For attention that writes its scores out, whose time grows with their number alone."""
DOCUMENT_LENGTHS = {128: (128, 1024, 256, 512, 64, 4096), 64: (128, 1024, 256, 512)}
"""By head width, for documents laid end to end, which are short as a rule. Far ones come first:
what lies between them can be told if time runs out."""
Shape = tuple[int, ...]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def measure_attention(bench: Bench) -> list[AttentionTime]:
    kind = bench.device.type
    wanted = list(_list_wanted(kind))
    rows: list[AttentionTime] = []
    for name, length, head_dim, is_causal in wanted:
        row = _measure(bench, name, length, head_dim, is_causal=is_causal)
        rows += [] if row is None else [row]
    if len(rows) < len(wanted):
        missing = len(wanted) - len(rows)
        bench.skipped.append(f"{missing} attention shapes: no time or memory left")
    return rows


def _list_wanted(kind: str) -> Iterator[tuple[str, int, int, bool]]:
    """Kind, length, head width and mask; what most jobs need comes first."""
    yield from (("sdpa", length, 128, True) for length in LENGTHS[kind])
    yield from (
        (name, length, 128, False) for length in WRITTEN_LENGTHS[kind] for name in ("eager", "math")
    )
    yield from (("masked", length, 128, False) for length in MASKED_LENGTHS[kind])
    yield from (("sdpa", length, 64, True) for length in LENGTHS[kind])
    yield from (("masked", length, 64, False) for length in MASKED_LENGTHS[kind])
    if kind == "cuda" and find_kernel() is not None:
        yield from (
            ("varlen", length, width, True)
            for width, lengths in DOCUMENT_LENGTHS.items()
            for length in lengths
        )
    yield from (("sdpa", MASKED_LENGTHS[kind][0], head_dim, False) for head_dim in HEAD_DIMS)


def _measure(
    bench: Bench, name: str, length: int, head_dim: int, *, is_causal: bool
) -> AttentionTime | None:
    kind = bench.device.type
    batch, heads = max(1, TOKENS[kind] // length), WIDTH[kind] // head_dim
    shape = (batch, heads, length, head_dim)
    scores = 12 * batch * heads * length * length if name in ("eager", "math") else 0
    room = 20.0 * batch * heads * length * head_dim * bench.dtype.itemsize + 2.0 * scores
    if bench.seconds_left <= 0 or not bench.has_room(room):
        return None
    given = (batch * length, heads, head_dim) if name == "varlen" else shape
    way = _choose(name, length, bench, is_causal=is_causal)
    forward = bench.try_seconds(partial(_prepare_forward, bench, given, way))
    # Both directions take about 3.5 times as long, a few times over.
    if forward is None or bench.seconds_left < 3.5 * CALLS[kind] * forward:
        return None
    both = bench.try_seconds(partial(_prepare_both, bench, given, way))
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
    if name == "varlen":
        return _attend_documents(length, bench)
    if name == "masked":
        seen = torch.ones(length, length, dtype=torch.bool, device=bench.device).tril()
        mask = seen.expand(max(1, TOKENS[bench.device.type] // length), 1, -1, -1).contiguous()
        return partial(functional.scaled_dot_product_attention, attn_mask=mask)
    hidden = torch.ones(length, length, dtype=torch.bool, device=bench.device).triu(1)
    mask = torch.zeros(length, length, dtype=bench.dtype, device=bench.device)
    mask = mask.masked_fill(hidden, torch.finfo(bench.dtype).min)[None, None]
    return partial(attend_eagerly if name == "eager" else _attend_by_math, mask=mask)


def _attend_documents(length: int, bench: Bench) -> Attend:
    """As packed batches are, all documents of one length."""
    num_tokens = max(length, TOKENS[bench.device.type])
    ends = torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device=bench.device)
    bounds = Bounds(offsets=ends, longest=length)
    call = VarlenCall(bounds=bounds, scale=None, window=None, softcap=None, dropout=0.0)
    return partial(attend, require_kernel(), call=call)


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


def _prepare_forward(bench: Bench, shape: Shape, way: Attend) -> Work:
    q, k, v = (bench.randn(*shape).requires_grad_() for _ in range(3))
    return partial(way, q, k, v)


def _prepare_both(bench: Bench, shape: Shape, way: Attend) -> Work:
    q, k, v = (bench.randn(*shape).requires_grad_() for _ in range(3))
    gradient = bench.randn(*shape)

    def step() -> object:
        return torch.autograd.grad(way(q, k, v), (q, k, v), gradient)

    return step
