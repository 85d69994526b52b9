"""What a distribution of row lengths means for batches: percentiles, buckets, padding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

BUCKET_GROWTH = 1.03
"""Each bucket of the histogram is at most 3% wide, so that re-planning from it loses little."""
PERCENTILES = (50, 90, 95, 99)


def percentiles(rows_by_length: Mapping[int, int]) -> dict[str, int]:
    """Nearest-rank percentiles: the shortest length that covers that share of the rows."""
    num_rows = sum(rows_by_length.values())
    wanted = {f"p{share}": math.ceil(num_rows * share / 100) for share in PERCENTILES}
    found: dict[str, int] = {}
    covered = 0
    for length in sorted(rows_by_length):
        covered += rows_by_length[length]
        for name, rank in wanted.items():
            if name not in found and covered >= rank:
                found[name] = length
    return found


def buckets(rows_by_length: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """(longest length, rows) of neighbouring lengths, ascending; a few hundred at most."""
    pairs: list[tuple[int, int]] = []
    limit = 0
    for length in sorted(rows_by_length):
        if pairs and length <= limit:
            pairs[-1] = (length, pairs[-1][1] + rows_by_length[length])
        else:
            pairs.append((length, rows_by_length[length]))
            limit = math.floor(length * BUCKET_GROWTH)
    return tuple(pairs)


def scaled(rows_by_length: Mapping[int, int], num_rows: int) -> dict[int, int]:
    """The same distribution over `num_rows` rows in whole numbers that sum to it exactly."""
    num_counted = sum(rows_by_length.values())
    if num_counted == num_rows:
        return dict(rows_by_length)
    result: dict[int, int] = {}
    covered = given = 0
    for length in sorted(rows_by_length):
        covered += rows_by_length[length]
        upto = covered * num_rows // num_counted
        if upto > given:
            result[length] = upto - given
            given = upto
    return result


def estimate_padding_waste(pairs: Iterable[tuple[int, int]], micro_batch: int) -> float:
    """Share of slots that padding fills when an epoch's shuffled rows are cut into micro-batches.

    Each batch is padded to its own longest row; the last one may be smaller.
    The slots are the exact expectation over all shuffles: rows are drawn
    without replacement, so the longest of `m` is at most L with probability
    C(rows up to L, m) / C(all rows, m). Grouping by length is not assumed.
    """
    ascending = sorted(pairs)
    num_rows = sum(rows for _, rows in ascending)
    num_tokens = sum(length * rows for length, rows in ascending)
    num_full, rest = divmod(num_rows, micro_batch)
    num_slots = 0.0
    if num_full:
        num_slots += num_full * micro_batch * _expected_longest(ascending, micro_batch, num_rows)
    if rest:
        num_slots += rest * _expected_longest(ascending, rest, num_rows)
    return min(max(1.0 - num_tokens / num_slots, 0.0), 1.0)


def _expected_longest(pairs: list[tuple[int, int]], batch: int, num_rows: int) -> float:
    log_all = _log_choose(num_rows, batch)
    expected = below = 0.0
    covered = 0
    for length, rows in pairs:
        covered += rows
        upto = math.exp(_log_choose(covered, batch) - log_all) if covered >= batch else 0.0
        expected += length * (upto - below)
        below = upto
    return expected


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)
