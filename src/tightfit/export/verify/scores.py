"""Logits of the reference kept on disk, and each artefact compared with them, with 99%
intervals.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.core.errors import SetupError
from tightfit.core.files import cache_folder
from tightfit.core.units import render_bytes
from tightfit.engines.protocol import Engine

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


_IN_MEMORY_BYTES = 256 << 20
_ROWS_AT_ONCE = 64
WindowCallback = Callable[[int], None]
"""Called after each window with its number of positions."""
Window = tuple[int, ...]


class ScoreStore:
    """The reference's logits in fp32: in memory while they are few, else in a cache file."""

    def __init__(self, windows: Sequence[Window], num_vocabulary: int) -> None:
        import numpy as np

        self.windows = windows
        self._folder: Path | None = None
        shape = (sum(map(len, windows)), num_vocabulary)
        num_bytes = 4 * shape[0] * shape[1]
        if num_bytes <= _IN_MEMORY_BYTES:
            self.scores: NDArray[np.float32] = np.empty(shape, np.float32)
            return
        self._folder = _make_folder(num_bytes)
        self.scores = np.memmap(self._folder / "scores.f32", np.float32, "w+", shape=shape)

    def close(self) -> None:
        """Free disk and memory."""
        del self.scores
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> ScoreStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreComparison:
    """By position of the text, artefact compared with reference."""

    kl: NDArray[np.float64]
    """KL(reference || artefact)."""
    is_same: NDArray[np.bool_]
    """Both have the same most likely token."""
    gap: NDArray[np.float64]
    """Between the reference's two largest logits."""
    max_diff: NDArray[np.float64]
    """Largest |difference| of logits at this position."""
    entropy_fraction: NDArray[np.float64]
    """Of the artefact's distribution, as a share of the largest possible."""
    is_first: NDArray[np.bool_]
    """First position of a window, where a token attends only to itself."""
    reference_loss: NDArray[np.float64]
    """-log p of the token that follows, where one does."""
    loss: NDArray[np.float64]
    score: float
    """Typical size of the reference's largest logits."""
    num_common: int
    """Tokens that both have logits for."""
    num_vocabulary: int
    reference_vocabulary: int


def record_scores(engine: Engine, windows: Sequence[Window], watch: WindowCallback) -> ScoreStore:
    """Compute the reference's logits of every window."""
    first = engine.logits(windows[0])
    store = ScoreStore(windows, first.shape[1])
    start = 0
    for number, window in enumerate(windows):
        rows = first if number == 0 else engine.logits(window)
        store.scores[start : start + len(window)] = rows
        start += len(window)
        watch(len(window))
    return store


def compare_scores(engine: Engine, store: ScoreStore, watch: WindowCallback) -> ScoreComparison:
    """Compare the artefact's logits of the same windows, one window in memory at a time."""
    import numpy as np

    parts: list[dict[str, Any]] = []
    start = 0
    num_vocabulary = 0
    for window in store.windows:
        rows = engine.logits(window)
        num_vocabulary = rows.shape[1]
        held = store.scores[start : start + len(window)]
        for low in range(0, len(window), _ROWS_AT_ONCE):
            high = min(low + _ROWS_AT_ONCE, len(window))
            targets = np.array(window[low + 1 : high + 1], dtype=np.int64)
            parts.append(_compare(held[low:high], rows[low:high], targets, is_start=low == 0))
        start += len(window)
        watch(len(window))
    joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    score = float(joined.pop("top").mean())
    reference_vocabulary = store.scores.shape[1]
    return ScoreComparison(
        **joined,
        score=score,
        num_common=min(reference_vocabulary, num_vocabulary),
        num_vocabulary=num_vocabulary,
        reference_vocabulary=reference_vocabulary,
    )


def _compare(
    reference: NDArray[np.float32],
    other: NDArray[np.float32],
    targets: NDArray[np.int64],
    *,
    is_start: bool,
) -> dict[str, Any]:
    """Vocabularies may be padded differently: only common tokens are compared."""
    import numpy as np

    width = min(reference.shape[1], other.shape[1])
    one, two = (np.asarray(rows[:, :width], np.float64) for rows in (reference, other))
    best = np.partition(one, -2, axis=1)[:, -2:]
    log_one, log_two = _log_softmax(one), _log_softmax(two)
    share = np.exp(log_one)
    with np.errstate(invalid="ignore"):  # scores of a broken model are compared as they are
        kl = (share * (log_one - log_two)).sum(axis=1)
        diff = np.abs(one - two)
        entropy = -(np.exp(log_two) * log_two).sum(axis=1) / np.log(width)
    known = np.arange(len(targets))
    inside = np.minimum(targets, width - 1)
    is_first = np.zeros(len(one), np.bool_)
    is_first[0] = is_start
    return {
        "kl": kl,
        "is_same": one.argmax(1) == two.argmax(1),
        "gap": best[:, 1] - best[:, 0],
        "max_diff": diff.max(axis=1),
        "entropy_fraction": entropy,
        "is_first": is_first,
        "reference_loss": -log_one[known, inside],
        "loss": -log_two[known, inside],
        "top": np.abs(best[:, 1]),
    }


def _log_softmax(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    import numpy as np

    with np.errstate(invalid="ignore"):
        shifted = rows - rows.max(axis=1, keepdims=True)
        made: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return made


def _make_folder(num_bytes: int) -> Path:
    home = cache_folder()
    try:
        home.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(home).free
        if free < num_bytes:
            raise SetupError(
                f"The reference's scores take {render_bytes(num_bytes)}; {home} has "
                f"{render_bytes(free)} free.",
                remedy="--tokens with a smaller number, or TIGHTFIT_CACHE=/a/larger/disk",
            )
        return Path(tempfile.mkdtemp(dir=home, prefix="verify-", suffix=".partial"))
    except OSError as error:
        raise SetupError(
            f"Cannot write in {home}: {error.strerror or error}.",
            remedy="set TIGHTFIT_CACHE to a folder that is writable and has free space",
        ) from error


# Means with 99% intervals, so that a small sample decides nothing by chance.

Z99 = 2.5758
"""Of the normal distribution, both sides."""
BLOCK = 16
"""Neighbouring positions are correlated: the spread is taken over blocks of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean and its 99% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The measurements behind a verdict."""

    num_positions: int
    top1: Mean
    settled_top1: Mean
    """Without disagreements at near-ties of the reference."""
    kl: Mean
    max_kl: float
    max_diff: float
    first_max_diff: float
    """At the first position of each window."""
    perplexity: float
    reference_perplexity: float
    perplexity_change: Mean
    entropy_fraction: float
    is_finite: bool


def summarise(found: ScoreComparison, *, noise: float) -> Summary:
    """`noise`: differences of logits below it are rounding."""
    import numpy as np

    is_settled = found.is_same | (found.gap <= 2 * noise)
    change = estimate_mean(found.loss - found.reference_loss)
    return Summary(
        num_positions=len(found.kl),
        top1=estimate_share(found.is_same),
        settled_top1=estimate_share(is_settled),
        kl=estimate_mean(found.kl),
        max_kl=_largest(found.kl),
        max_diff=_largest(found.max_diff),
        first_max_diff=_largest(found.max_diff[found.is_first]),
        perplexity=_exp(float(found.loss.mean())),
        reference_perplexity=_exp(float(found.reference_loss.mean())),
        perplexity_change=Mean(
            value=_exp(change.value) - 1, low=_exp(change.low) - 1, high=_exp(change.high) - 1
        ),
        entropy_fraction=float(found.entropy_fraction.mean()),
        is_finite=bool(np.isfinite(found.kl).all()),
    )


def estimate_mean(values: NDArray[np.float64]) -> Mean:
    """From the spread of blocks of neighbouring positions."""
    import numpy as np

    value = float(values.mean())
    num_blocks = len(values) // BLOCK
    if num_blocks < 2:
        return Mean(value=value, low=-inf, high=inf)
    blocks = values[: num_blocks * BLOCK].reshape(num_blocks, BLOCK).mean(axis=1)
    error = Z99 * float(np.std(blocks, ddof=1)) / sqrt(num_blocks)
    return Mean(value=value, low=value - error, high=value + error)


def estimate_share(is_so: NDArray[np.bool_]) -> Mean:
    """Wilson's interval (J. Am. Stat. Assoc. 22, 1927), which holds near 0 and 1 too."""
    count = len(is_so)
    share = float(is_so.mean())
    z = Z99 * Z99
    centre = (share + z / (2 * count)) / (1 + z / count)
    error = Z99 * sqrt(share * (1 - share) / count + z / (4 * count * count)) / (1 + z / count)
    return Mean(value=share, low=max(0.0, centre - error), high=min(1.0, centre + error))


def _largest(values: NDArray[np.float64]) -> float:
    return float(values.max()) if len(values) else 0.0


def _exp(value: float) -> float:
    return exp(value) if value < 700 else inf
