"""How much the transformers engine takes at once: what it obeys and what predictions count with."""

from __future__ import annotations

PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Of one prefill; other rows wait for it."""
PREFILL_COLUMNS = 2048
"""Of one pass of it; longer prompts are read in several, which bounds the memory it takes."""
COLUMN_STEP = 256
"""Slots have whole multiples of these columns, each of which is a recording of its own."""
ROW_SPARE_FRACTION = 0.25
"""Rows that are no slots grow their buffers by this share."""
CPU_SLOTS = 8
MOST_SLOTS = 32
KEPT_FRACTION = 0.8
"""Of the free memory that keys and values may take; scores and activations need the rest."""


def round_columns(count: int) -> int:
    """Columns of a slot that holds so many tokens."""
    return -(-count // COLUMN_STEP) * COLUMN_STEP
