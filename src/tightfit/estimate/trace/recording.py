"""Recording: every allocation of a traced job and its end, in order. Knows no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from tightfit.estimate.trace.operations import OperationLog

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
ACTIVATIONS = "activations"
LOGITS = "logits"
COMMUNICATION = "communication"
KV_CACHE = "kv cache"
INPUTS = "inputs"
LOAD_RESERVE = "load reserve"
"""Of transformers: as much as all weights, taken at once and given back, to have the blocks."""
TEMPORARY = "temporary"
CATEGORIES = (
    WEIGHTS,
    GRADIENTS,
    OPTIMIZER,
    ACTIVATIONS,
    LOGITS,
    COMMUNICATION,
    KV_CACHE,
    INPUTS,
    LOAD_RESERVE,
    TEMPORARY,
)
"""What an allocation serves, in the order in which pictures stack them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One block of device memory, from the moment it was asked for."""

    num_bytes: int
    """As asked for; the allocator rounds."""
    op: str
    """`aten.mm`, `bitsandbytes.dequantize_4bit`; empty for what stood there before."""
    module: str
    """`model.layers.3.mlp.down_proj`; empty where no module was running."""
    stage: str
    """`load`, `forward`, `backward`, `update`, `eval`, `generate`, `save` or `resume`."""
    step: int
    """The training step it was made in, from 1; 0 outside of steps."""
    layer: int | None
    """The decoder layer it belongs to."""
    shape: tuple[int, ...]
    dtype: str
    category: str
    stream: int = 0
    """Of the device; a stream's free blocks serve no other. 0 is the one that computes."""


@dataclass(slots=True, kw_only=True)
class Recording:
    """Allocations, and the order of their beginnings and ends.

    An event `i + 1` makes `allocations[i]`, an event `-(i + 1)` ends it. What is never
    ended stays to the end of the job.
    """

    allocations: list[Allocation] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    operations: OperationLog | None = field(default=None, compare=False)
    """What the last step computes. None where an operation was not understood."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each allocation, as the allocator model takes them."""
        return [allocation.num_bytes for allocation in self.allocations]

    @property
    def streams(self) -> list[int]:
        """The device stream of each allocation."""
        return [allocation.stream for allocation in self.allocations]

    def walk(self) -> Iterator[tuple[Allocation, bool]]:
        """Each event as its allocation, and whether it begins."""
        for event in self.events:
            yield self.allocations[abs(event) - 1], event > 0


def repeat_events(
    events: Sequence[int], *, first: int, may_stay: Collection[int] = ()
) -> list[int] | None:
    """The same beginnings and ends once more, of allocations numbered from `first`.

    None where something but `may_stay` was left standing, or something older ended: what comes
    next then finds other things there than these events did.
    """
    numbers: dict[int, int] = {}
    standing: set[int] = set()
    again = []
    for event in events:
        if event > 0:
            numbers[event] = first + len(numbers)
            standing.add(event)
        elif -event not in numbers:
            return None
        standing.discard(-event)
        again.append(numbers[event] if event > 0 else -numbers[-event])
    return again if standing.issubset(may_stay) else None


def find_peak(sizes: Sequence[int], events: Sequence[int]) -> tuple[int, int]:
    """The largest sum of live bytes, and the position in `events` at which it is reached."""
    live = peak = at = 0
    for position, event in enumerate(events):
        live += sizes[event - 1] if event > 0 else -sizes[-event - 1]
        if live > peak:
            peak, at = live, position
    return peak, at
