"""Host memory that a merge will take, and how it gives back what it took."""

from __future__ import annotations

import contextlib
import ctypes

from tightfit.export.merge.changes import AdapterChanges
from tightfit.export.merge.plan import MergePlan
from tightfit.runtime.stored_weights import StoredWeights

FP32_BYTES = 4
_COPIES = 2
"""A matrix and what is added to it."""
_DORA_COPIES = 4
"""Beside those the scaled sum and its squares, whose rows' norms are taken."""


ALLOCATOR_BYTES = 64 << 20
"""What the C library keeps of freed matrices until it is told: see `release_freed`."""
RELEASE_BYTES = 64 << 20
"""Written between two such calls."""


def estimate_merge_bytes(changes: AdapterChanges, stored: StoredWeights, plan: MergePlan) -> int:
    """Beside what the process holds before: the adapter, and the costliest matrix on its way.

    Each matrix is there as stored, in fp32 with its copies while the adapter is added, and as
    written. Leaves out the page cache, which the system gives back on demand.
    """
    copies = _DORA_COPIES if changes.is_dora else _COPIES
    costliest = 0
    for output in plan.outputs:
        key = plan.sources[output.name]
        held = stored.tensors[key].num_bytes if key is not None else 0
        num_values = output.num_bytes // output.dtype.itemsize
        computed = FP32_BYTES * num_values * copies if changes.is_changed(output.name) else 0
        is_as_stored = (
            not computed and key is not None and (stored.tensors[key].dtype == output.dtype)
        )
        made = 0 if is_as_stored else output.num_bytes
        costliest = max(costliest, held + computed + made)
    # Half-precision adapters are raised to fp32, layer by layer, and stay so.
    return 2 * changes.num_bytes + costliest + ALLOCATOR_BYTES


def estimate_whole_bytes(stored: StoredWeights, plan: MergePlan, adapter_bytes: int) -> int:
    """The model as it will be stored, its largest matrix twice in fp32, and the adapter."""
    values = [tensor.num_values for tensor in stored.tensors.values()]
    width = max(output.dtype.itemsize for output in plan.outputs)
    return sum(values) * width + 2 * FP32_BYTES * max(values) + 2 * adapter_bytes


def release_freed() -> None:
    """Hand freed matrices back to the system, where the C library is glibc.

    It would keep those below 32 MiB in a heap that their mixed sizes break into pieces, and a
    merge would grow with the model after all. Source: malloc_trim(3).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
