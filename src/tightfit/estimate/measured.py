"""Between the measured points of one device: seconds of a product, rates by length and size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import exp, log, log2

from tightfit.core.dtypes import Dtype
from tightfit.hardware.measured_rates import (
    FP8,
    FP8_EXACT,
    FP8_KINDS,
    AttentionRow,
    BandwidthRow,
    MatmulRow,
    MeasuredRates,
)

FLASH_HALF_SPEED_LENGTH = 320.0
"""Sequence length at which attention kernels run at half their long-sequence rate.

Source: fit to the causal rows 191, 260, 298, 319, 333, 335e12 at 512 to 16k, of FlashAttention-2 on
H100 (arXiv:2407.08608 figure 5).
"""
NUM_NEIGHBOURS = 4
"""Measured products that one between them is told by."""
SAME_SHAPE_DISTANCE = 1e-3
"""In squared doublings: below it a shape is the measured one."""


class MatmulTable:
    """Seconds of any (m x k) by (k x n) product, from some that were measured.

    A roofline of the best rate and the bandwidth gives the scale; what the nearest measured
    shapes took beside theirs corrects it, weighed by the inverse square of the distance in
    doublings. Leaves out: memory layouts, which libraries hide well.
    """

    def __init__(
        self, rows: Sequence[MatmulRow], *, value_bytes: int, bytes_per_second: float
    ) -> None:
        self.best_flops_per_second = max(2.0 * m * n * k / s for m, n, k, s in rows)
        self._value_bytes = value_bytes
        self._bytes_per_second = bytes_per_second
        self._rows = [
            (log2(m), log2(n), log2(k), log(seconds / self._roofline(m, n, k)))
            for m, n, k, seconds in rows
        ]
        self._seen: dict[tuple[float, float, float], float] = {}

    def seconds(self, m: float, n: float, k: float) -> float:
        found = self._seen.get((m, n, k))
        if found is None:
            if len(self._seen) >= 65_536:
                self._seen.clear()
            found = self._roofline(m, n, k) * exp(self._correction(log2(m), log2(n), log2(k)))
            self._seen[m, n, k] = found
        return found

    def _roofline(self, m: float, n: float, k: float) -> float:
        moved = self._value_bytes * (m * n + m * k + n * k)
        return 2.0 * m * n * k / self.best_flops_per_second + moved / self._bytes_per_second

    def _correction(self, m: float, n: float, k: float) -> float:
        near = sorted(
            ((a - m) ** 2 + (b - n) ** 2 + (c - k) ** 2, told) for a, b, c, told in self._rows
        )[:NUM_NEIGHBOURS]
        weights = [1.0 / (distance + SAME_SHAPE_DISTANCE) for distance, _ in near]
        return sum(w * told for w, (_, told) in zip(weights, near, strict=True)) / sum(weights)


_tables: dict[tuple[int, str], tuple[MeasuredRates, MatmulTable | None]] = {}


def find_table(measured: MeasuredRates | None, dtype: Dtype) -> MatmulTable | None:
    """The table of one dtype, made once; None where it was not measured."""
    return _find_table(measured, dtype.value)


def find_fp8_table(measured: MeasuredRates | None, *, is_exact: bool = False) -> MatmulTable | None:
    """The same of fp8 operands; results, which are wider, are corrected by what was measured.

    `is_exact`: as the backward pass sums; where that was not measured, as the forward pass does.
    """
    exact = _find_table(measured, FP8_EXACT) if is_exact else None
    return exact or _find_table(measured, FP8)


def _find_table(measured: MeasuredRates | None, name: str) -> MatmulTable | None:
    if measured is None:
        return None
    found = _tables.get((id(measured), name))
    if found is None:
        if len(_tables) >= 256:
            _tables.clear()
        # Held beside its table, so that its id cannot become another one's.
        found = (measured, _make_table(measured, name))
        _tables[id(measured), name] = found
    return found[1]


def _make_table(measured: MeasuredRates, name: str) -> MatmulTable | None:
    rows = measured.matmuls.get(name, ())
    stream = stream_rate(measured)
    if not rows or stream is None:
        return None
    value_bytes = 1 if name in FP8_KINDS else Dtype(name).value_bytes
    return MatmulTable(rows, value_bytes=value_bytes, bytes_per_second=stream)


def stream_rate(measured: MeasuredRates | None) -> float | None:
    """Copies of the largest tensor that was tried."""
    return measured.copies[-1][1] if measured is not None and measured.copies else None


def bandwidth_at(rows: Sequence[BandwidthRow], tensor_bytes: float) -> float:
    """Between two sizes by their logarithms; the ends hold beyond."""
    points = [(float(size), rate) for size, rate in rows]
    return _between(points, tensor_bytes)


def attention_rates(
    rows: Sequence[AttentionRow], *, head_dim: int, seq_len: float
) -> tuple[float, float] | None:
    """Causal FLOP/s forward and backward.

    Kernels are made for a few head widths: another one takes as long as the next wider. Beyond
    the measured lengths rates grow and fall as where nothing was measured.
    """
    if not rows:
        return None
    widths = sorted({row[0] for row in rows})
    width = next((each for each in widths if each >= head_dim), widths[-1])
    used = min(1.0, head_dim / width)
    points = sorted(row[1:] for row in rows if row[0] == width)
    nearest = min(max(seq_len, points[0][0]), points[-1][0])
    used *= (1.0 + FLASH_HALF_SPEED_LENGTH / nearest) / (1.0 + FLASH_HALF_SPEED_LENGTH / seq_len)
    forward = _between([(float(length), rate) for length, rate, _ in points], nearest)
    backward = _between([(float(length), rate) for length, _, rate in points], nearest)
    return used * forward, used * backward


def _between(points: Sequence[tuple[float, float]], at: float) -> float:
    """A power law between neighbours, the ends' own values beyond them."""
    place = bisect_left([x for x, _ in points], at)
    if place == 0:
        return points[0][1]
    if place == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    share = log(at / x0) / log(x1 / x0)
    return y0 * exp(share * log(y1 / y0))
