"""Results of a trace: TracedMemory, TracedTime, and OperationLog. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from tightfit.core.frozen import FiniteFrozen
from tightfit.core.profiles import Peak


class TracedTime(FiniteFrozen):
    """One steady step of one rank, without communication between ranks."""

    seconds_per_step: NonNegativeFloat
    stages: dict[str, float]
    """`forward`, `recompute`, `backward`, `update`: until the device is done, summing to
    `seconds_per_step`."""
    components: dict[str, float]
    """By cause, as in `StepTime.components`, summing to `seconds_per_step`."""
    host_seconds: NonNegativeFloat
    """Time of the host alone."""
    device_seconds: NonNegativeFloat
    """Time of the device alone, gaps between kernels included."""
    flops: NonNegativeFloat
    """Of products and attention, masked pairs and recomputed layers included."""


class TracedStage(FiniteFrozen):
    """One stage of the job and its peak on the traced GPU."""

    name: str
    """`load`, `first step`, `steady step`, `eval`, `save`, `generate` or `resume`."""
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt


class Timeline(FiniteFrozen):
    """Allocated bytes by category over the job, downsampled without losing peaks."""

    categories: tuple[str, ...]
    bytes: tuple[tuple[int, ...], ...]
    """One row per category."""
    stages: tuple[tuple[int, str], ...]
    """The column at which each stage begins."""


class TracedMemory(FiniteFrozen):
    """Memory of one GPU, from the training step on fake tensors. Excludes the CUDA context."""

    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt
    """On a GPU without a limit."""
    smallest_capacity_bytes: NonNegativeInt
    """Least reserve of torch's allocator with which the job does not run out of memory."""
    stages: tuple[TracedStage, ...]
    peak: Peak
    timeline: Timeline
    num_layers: NonNegativeInt
    num_traced_layers: NonNegativeInt
    refusal: str = ""
    """Why all layers were traced; empty where a few were enough."""
    seconds: NonNegativeFloat
    """Duration of the trace."""
    versions: dict[str, str]
    """Versions of the libraries that ran."""


# OperationLog: every operation of one traced step, with its work. Imports no torch.

MATMUL = "matmul"
ATTENTION = "attention"
MEMORY_BOUND = "memory_bound"
LOSS = "loss"
DEQUANTIZE = "dequantize"
OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
HOST = "host"
"""Views and empty tensors: no work for the device."""
TRITON = "triton::kernel"
"""The name of every triton kernel."""

ADAPTER, AGAIN, SHARD = "adapter", "again", "shard"
"""Python that runs around an operation: peft's in a LoRA layer, the start of a recomputed layer,
FSDP's hooks around a collective."""
ADDED_PRODUCT = "aten::addmm_"
"""In-place product: the last one of a fused LoRA layer, forward and backward."""

FORWARD, BACKWARD, RECOMPUTE, UPDATE = "forward", "backward", "recompute", "update"
STAGES = (FORWARD, RECOMPUTE, BACKWARD, UPDATE)


class Operation(FiniteFrozen):
    """One call of an operation, or the mean of `count` similar calls."""

    name: str
    """`aten::mm`, `bitsandbytes::dequantize_4bit`, `triton::kernel`."""
    kind: str
    stage: str
    dtype: str = ""
    """Of the arithmetic, by its name in `core.dtypes`, else by torch's."""
    shape: tuple[int, ...] = ()
    """Products: m, n, k, number of products. Attention: head width, mean sequence length, 1 if
    causal, 1 if backward. Optimizers and dequantization: the number of values."""
    flops: NonNegativeFloat = 0.0
    """Masked pairs included, as `torch.utils.flop_counter` counts them."""
    num_bytes: NonNegativeFloat = 0.0
    """Read and written."""
    num_indexed: NonNegativeFloat = 0.0
    """Values whose addresses are computed one by one. Products: those of unaligned operands."""
    num_kernels: NonNegativeFloat = 0.0
    num_tensors: NonNegativeFloat = 1.0
    """Tensors in the list of a `_foreach` operation."""
    num_calls: NonNegativeFloat = 1.0
    """Operations that the host issues; more than one where a library's operation is composed."""
    around: str = ""
    """Python that runs around it, if any."""
    waits: bool = False
    """Whether the host reads a value and so waits for the device."""
    count: PositiveInt = 1


class RepeatedOperations(FiniteFrozen):
    """A run of operations, and how often it is repeated."""

    layer: NonNegativeInt | None = None
    """The decoder layer that began the run, which lasts until the next layer begins."""
    operations: tuple[NonNegativeInt, ...]
    """Indices into the log's table."""
    count: PositiveInt = 1


class OperationLog(FiniteFrozen):
    """One steady step: forward, backward and update, in call order."""

    operations: tuple[Operation, ...]
    """Each once."""
    stretches: tuple[RepeatedOperations, ...]

    def walk(self) -> Iterator[Operation]:
        """Every call; those of an update are summed, and appear once with their count."""
        table = self.operations
        for run in self.stretches:
            for _ in range(run.count):
                for index in run.operations:
                    yield table[index]

    def shortened(self) -> OperationLog:
        """The same calls; identical layers appear once, with their number."""
        found: list[RepeatedOperations] = []
        for one in self.stretches:
            if found and found[-1].operations == one.operations:
                count = found[-1].count + one.count
                found[-1] = RepeatedOperations(operations=one.operations, count=count)
            else:
                found.append(one.model_copy(update={"layer": None}))
        return OperationLog(operations=self.operations, stretches=tuple(found))

    def count_calls(self) -> list[int]:
        """How often each operation of the table occurs in the step."""
        counts = [0] * len(self.operations)
        for run in self.stretches:
            for index in run.operations:
                counts[index] += run.count
        return counts

    def sum_flops(self) -> float:
        times = self.count_calls()
        return sum(
            calls * one.count * one.flops for calls, one in zip(times, self.operations, strict=True)
        )


_SUMMED = ("flops", "num_bytes", "num_indexed", "num_kernels", "num_tensors", "num_calls")


def list_totals(one: Operation) -> list[float]:
    """Sums over its calls; the first is their number."""
    values = one.shape[0] if one.shape else 0
    each = [*(getattr(one, name) for name in _SUMMED), values]
    return [float(one.count), *(one.count * value for value in each)]


def from_totals(like: Operation, totals: Sequence[float]) -> Operation:
    """The mean of calls with these sums."""
    count = max(1, round(totals[0]))
    means = [total / count for total in totals[1:]]
    changes = dict(zip(_SUMMED, means, strict=False))
    shape = (round(means[-1]),) if like.shape else ()
    return like.model_copy(update={**changes, "shape": shape, "count": count})


def sum_up(calls: Sequence[Operation]) -> list[Operation]:
    """Calls of an update, summed by operation: their order does not matter."""
    found: dict[tuple[str, str, str, bool], list[Operation]] = {}
    for one in calls:
        found.setdefault((one.name, one.kind, one.dtype, one.waits), []).append(one)
    return [
        from_totals(
            group[0], [sum(column) for column in zip(*map(list_totals, group), strict=True)]
        )
        for group in found.values()
    ]
