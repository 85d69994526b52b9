"""When two results are the same: rows as a multiset, order only where it was asked for.

Rows count with their repetitions, and their order counts where the gold query has an
ORDER BY of its own, as in Spider's test-suite evaluation (arXiv:2010.02840,
github.com/taoyds/test-suite-sql-eval). Columns are compared in the order in which the
query gives them; that evaluation also accepts permuted columns, so ours is stricter.
Numbers may differ by a millionth where at least one is no integer. Rows that tie in an
ORDER BY have no order of their own, and SQLite's is taken for the right one.
"""

from __future__ import annotations

import math
from collections import defaultdict

from tightfit.evaluate.sql_sandbox import Rows, Value

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9

_Row = tuple[Value, ...]


def rows_agree(gold: Rows, found: Rows, *, is_ordered: bool) -> bool:
    """Whether a result is the gold result."""
    if len(gold) != len(found):
        return False
    if is_ordered:
        return all(map(_row_agrees, gold, found))
    gold_groups, found_groups = _group(gold), _group(found)
    return gold_groups.keys() == found_groups.keys() and all(
        len(rows) == len(found_groups[key]) and all(map(_row_agrees, rows, found_groups[key]))
        for key, rows in gold_groups.items()
    )


def _group(rows: Rows) -> dict[_Row, list[_Row]]:
    """Rows by all that must be equal exactly; inside, sorted by their numbers.

    So equal multisets meet pairwise. They could miss each other only where two rows differ
    by less than the tolerance in one number and by more in a later one.
    """
    groups: dict[_Row, list[_Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(0 if _is_number(value) else value for value in row)].append(row)
    for members in groups.values():
        members.sort(key=lambda row: [value for value in row if isinstance(value, int | float)])
    return groups


def _row_agrees(gold: _Row, found: _Row) -> bool:
    return len(gold) == len(found) and all(map(_value_agrees, gold, found))


def _value_agrees(gold: Value, found: Value) -> bool:
    if isinstance(gold, float) or isinstance(found, float):
        if isinstance(gold, int | float) and isinstance(found, int | float):
            return math.isclose(gold, found, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
        return False
    return type(gold) is type(found) and gold == found


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float)
