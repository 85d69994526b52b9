"""How fast models answered here before: one JSON file per model, in a folder beside the ledger.

As the ledger, a memory and not a duty: what cannot be read or kept is left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from tightfit.core.errors import UserError
from tightfit.core.files import write_atomic
from tightfit.ledger.store import ledger_path

FOLDER = "answers"
MOST_KEPT = 64
MAX_FILE_BYTES = 1024**2
_UNSAFE = re.compile(r"[^A-Za-z0-9.]+")


class AnswerRate(BaseModel):
    """One run, beside what was predicted for it: their ratio carries over to other prompts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    date: str
    """UTC, ISO 8601."""
    place: str
    """`local:HOST`, `slurm:PARTITION`: where the same may be expected again."""
    device: str
    """`CPU` or a card's name."""
    num_workers: PositiveInt
    new_tokens_per_second: PositiveFloat
    """Of all of them together."""
    predicted_new_tokens_per_second: PositiveFloat
    start_seconds: NonNegativeFloat | None = None
    """From the start of a worker's process until its model was loaded; None: not measured."""

    @property
    def fraction(self) -> float:
        """What the run reached of its prediction."""
        return self.new_tokens_per_second / self.predicted_new_tokens_per_second


_RATES = TypeAdapter(tuple[AnswerRate, ...])


def record_rate(work: str, rate: AnswerRate) -> None:
    """Keep one more of `work`, which names a model, its weights and its engine."""
    path = _path_of(work)
    if path is None:
        return
    kept = (*read_rates(work), rate)[-MOST_KEPT:]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, _RATES.dump_json(kept, indent=1) + b"\n")
    except (OSError, UserError):
        return


def read_rates(work: str) -> tuple[AnswerRate, ...]:
    """Oldest first; nothing where nothing was kept."""
    path = _path_of(work)
    try:
        if path is None or path.stat().st_size > MAX_FILE_BYTES:
            return ()
        return _RATES.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return ()


def _path_of(work: str) -> Path | None:
    ledger = ledger_path()
    return None if ledger is None else ledger.parent / FOLDER / f"{_UNSAFE.sub('-', work)}.json"
