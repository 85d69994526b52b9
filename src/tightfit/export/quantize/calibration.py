"""Calibration: rows of tokens on which quantizers see what a model's inputs look like."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.core.cache import cache_folder
from tightfit.core.errors import InvalidInputError, UserError
from tightfit.core.files import write_atomic
from tightfit.core.strategy import MAX_SEQ_LEN
from tightfit.core.training import DataSource, TrainOn
from tightfit.data.encode import EncodeRequest, encode_dataset
from tightfit.data.token_store import TokenStore
from tightfit.ledger.run_folder import RunFolder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROW_TOKENS = 512
GPU_ROWS = 128
CPU_ROWS = 32
"""Rows by default. GPTQ takes 128 (arXiv:2210.17323 section 4); on a CPU that would be hours for
little: 32 and 128 rows differ by less than the noise of the check."""
FEW_TOKENS = 8192
"""Below that the widest matrices see fewer tokens than they have inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Rows of equal length, and where they came from."""

    rows: NDArray[np.int32]
    source: str
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.rows.tobytes(), digest_size=8).hexdigest()

    @property
    def num_tokens(self) -> int:
        return int(self.rows.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """Where rows may come from: a file, else the run's own data, else Python's documentation."""

    tokenizer: Path
    template: str | None = None
    file: Path | None = None
    run: RunFolder | None = None
    num_rows: int
    max_positions: int = ROW_TOKENS


def read_calibration(request: CalibrationRequest) -> Calibration:
    """Rows drawn evenly from the data, each filled to the last token."""
    length = min(ROW_TOKENS, request.max_positions)
    store, source, notes = _open(request)
    rows = _fill_rows(store, num_rows=request.num_rows, length=length)
    if not len(rows):
        raise InvalidInputError(
            f"{source} has {int(store.lengths.sum()):,} tokens; calibration needs at least "
            f"{length:,}.",
            remedy="name a larger file: --calibrate FILE",
        )
    if rows.size < FEW_TOKENS:
        notes = (
            *notes,
            f"Calibrated on {rows.size:,} tokens, which is little; {FEW_TOKENS:,} or more are "
            "better.",
        )
    return Calibration(rows=rows, source=source, notes=notes)


def _open(request: CalibrationRequest) -> tuple[TokenStore, str, tuple[str, ...]]:
    if request.file is not None:
        return _encode(request, request.file), str(request.file), ()
    if request.run is not None and (found := _run_store(request.run)):
        return found, f"{request.run.path}: its training data", ()
    text = default_text()
    note = (
        "Calibrated on Python's documentation; your own data tells more: --calibrate FILE with "
        "rows as `train` reads them, or plain text."
    )
    return _encode(request, text), "Python's documentation", (note,)


def _run_store(run: RunFolder) -> TokenStore | None:
    """The run's rows as they were trained on; None where the cache has let go of them."""
    try:
        return TokenStore(Path(run.read_tokens().train))
    except UserError:
        return None


def _encode(request: CalibrationRequest, path: Path) -> TokenStore:
    return encode_dataset(
        EncodeRequest(
            sources=(DataSource(path=str(path)),),
            model_folder=request.tokenizer,
            template=request.template,
            train_on=TrainOn.ALL,
            seq_len=min(MAX_SEQ_LEN, 8192),
            skip_faulty=True,
        )
    ).train


def default_text() -> Path:
    """Python's own documentation, which comes with every Python: English prose and code.

    No text of the check is in it, so that quality is not measured on what was calibrated with.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as fault:  # some distributions leave it out
        raise InvalidInputError(
            "There is no text to calibrate on.", remedy="name one: --calibrate FILE"
        ) from fault
    text = "\n\n".join(topic.strip() for _, topic in sorted(topics.items())).encode()
    key = hashlib.blake2b(text, digest_size=8).hexdigest()
    path = cache_folder() / "calibration" / f"{key}.txt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    return path


def _fill_rows(store: TokenStore, *, num_rows: int, length: int) -> NDArray[np.int32]:
    """Rows of the data one behind another, in an order of chance, cut into equal lengths."""
    import numpy as np

    order = np.random.default_rng(0).permutation(len(store))
    pieces, count = [], 0
    for index in order:
        if count >= num_rows * length:
            break
        tokens = store.row(int(index)).tokens
        pieces.append(tokens)
        count += len(tokens)
    whole = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    found = min(num_rows, len(whole) // length)
    return np.ascontiguousarray(whole[: found * length], dtype=np.int32).reshape(found, length)
