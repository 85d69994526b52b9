"""Kernels bound by memory: copies, elementwise, reductions, the loss, AdamW, unpacking nf4."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
from torch.nn import functional

from tightfit.core.units import GIB, MIB
from tightfit.hardware.calibration import LOSS_BYTES, TrafficTime
from tightfit.runtime.calibrate.bench import Bench, Work

SIZES = {
    "cuda": (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB),
    "cpu": (MIB // 4, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
}
"""Bytes of one tensor; a CPU's batches are smaller."""
CHAIN_BYTES = 256 * MIB
"""Tensors in turn until that much: each reads what the one before wrote, as layers do, and none
finds its own old result in the cache."""
ROOM_TIMES = {
    "copy": 3.0,
    "elementwise": 3.0,
    "softmax": 3.0,
    "sum": 2.0,
    "loss": 12.0,
    "indexed": 4.0,
}
"""Tensors' worth of memory that a kernel needs beside the chain."""
LOGITS = {"cuda": (2048, 32000), "cpu": (128, 32000)}
HEAD_DIM = 128
NUM_SEQUENCES = 4
ROTATED_VALUES = 4.5
"""Per value of a head: two products, half of them negated, all joined, all added."""
NF4_SHAPE = {"cuda": (11008, 4096), "cpu": (2048, 2048)}


def measure_traffic(bench: Bench) -> list[TrafficTime]:
    wanted = [*_list_rows(bench), *_list_chains(bench)]
    rows: list[TrafficTime] = []
    for kind, size, moved, make in wanted:
        needed = 1.5 * CHAIN_BYTES + ROOM_TIMES[kind] * size
        fits = bench.seconds_left > 0 and bench.has_room(needed)
        seconds = bench.try_seconds(make) if fits else None
        if seconds is not None:
            rows.append(_row(kind, size, moved, seconds))
    if len(rows) < len(wanted):
        missing = len(wanted) - len(rows)
        bench.skipped.append(f"{missing} memory-bound kernels: no time or memory left")
    return rows


Wanted = tuple[str, int, float, Callable[[], Work]]
"""Kind, bytes of the tensor, bytes moved, and how to prepare it."""


def _list_rows(bench: Bench) -> list[Wanted]:
    num_rows, vocab = LOGITS[bench.device.type]
    values, value = num_rows * vocab, bench.dtype.itemsize
    return [
        (kind, values * value, float(values * moved), partial(make, bench, num_rows, vocab))
        for kind, make, moved in (
            ("loss", _prepare_loss, LOSS_BYTES),
            ("softmax", _prepare_softmax, 2 * value),
            ("sum", _prepare_sum, value),
            ("indexed", _prepare_indexed, ROTATED_VALUES * 2 * value),
        )
    ]


def _list_chains(bench: Bench) -> list[Wanted]:
    return [
        (kind, size, float(times * size), partial(_prepare_chain, bench, kind, size))
        for size in SIZES[bench.device.type]
        for kind, times in (("copy", 2), ("elementwise", 3))
    ]


def _row(kind: str, size: int, moved: float, seconds: float) -> TrafficTime:
    return TrafficTime.model_validate(
        {"kind": kind, "tensor_bytes": size, "moved_bytes": moved, "seconds": seconds}
    )


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


def _prepare_softmax(bench: Bench, num_rows: int, vocab: int) -> Work:
    return partial(torch.softmax, bench.randn(num_rows, vocab), -1)


def _prepare_sum(bench: Bench, num_rows: int, vocab: int) -> Work:
    return partial(torch.sum, bench.randn(num_rows, vocab), -1)


def _prepare_indexed(bench: Bench, num_rows: int, vocab: int) -> Work:
    """Heads rotated as transformers does it, between linear layers that keep tokens together."""
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
    """Weights per second that bitsandbytes unpacks; None where it is not installed or fails."""
    try:
        from bitsandbytes import functional as bits
    except (ImportError, RuntimeError, OSError):
        bench.skipped.append("unpacking nf4: bitsandbytes is not installed")
        return None
    rows, columns = NF4_SHAPE[bench.device.type]
    try:
        weight = bench.randn(rows, columns)
        packed, state = bits.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        seconds = bench.seconds(lambda: bits.dequantize_4bit(packed, state))
    except (RuntimeError, AttributeError, NotImplementedError) as fault:
        bench.skipped.append(f"unpacking nf4: {str(fault).splitlines()[0][:200]}")
        return None
    return rows * columns / seconds
