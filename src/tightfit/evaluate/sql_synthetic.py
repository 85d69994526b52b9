"""Synthetic rows: databases made from a schema alone, filled so that wrong queries show.

Empty tables would let nearly any query pass. The values come from a small pool, the
same for all columns of a type, so that joins find partners, and the pool holds the
literals of the gold query and their neighbours, so that its conditions hold for some
rows and fail for others. An answer must agree on several fillings, which is the idea of
test-suite accuracy (arXiv:2010.02840) in a small form.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

from tightfit.evaluate.sql_sandbox import QueryFaultError, Sandbox, Value, lock
from tightfit.evaluate.sql_text import Literals

_T = TypeVar("_T")

NUM_FILLINGS = 4
NUM_ROWS = 40
_WORDS = ("red", "Oslo", "north", "Ada", "open", "2019", "A1", "Kim")
_SMALL = range(1, 10)
_STEPS = (-7, -1, 0, 1, 7)
_BUILDING = {
    sqlite3.SQLITE_CREATE_TABLE,
    sqlite3.SQLITE_CREATE_INDEX,  # of a PRIMARY KEY
    sqlite3.SQLITE_REINDEX,
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_PRAGMA,
    sqlite3.SQLITE_TRANSACTION,
}


@contextmanager
def open_synthetic(tables: Sequence[str], literals: Literals, *, seed: int) -> Iterator[Sandbox]:
    """A locked in-memory database with these tables and rows drawn with `seed`.

    Raises `QueryFaultError` where SQLite does not accept the tables.
    """
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.set_authorizer(_only_building)
        try:
            for statement in tables:
                connection.execute(statement)
            rng = random.Random(seed)
            for name in _table_names(connection):
                _fill(connection, name, _Pool(literals, rng))
        except (sqlite3.Error, sqlite3.Warning, ValueError) as fault:
            raise QueryFaultError(f"the schema is not SQLite's: {fault}") from fault
        connection.set_authorizer(None)
        yield lock(connection)


class _Pool:
    """Values to draw from, by a column's declared type; half of them near the query's own."""

    def __init__(self, literals: Literals, rng: random.Random) -> None:
        self._rng = rng
        asked = [int(number) for number in literals.numbers if abs(number) < 2**53]
        bare = [text.strip("%") for text in literals.texts]
        self._asked_numbers = [number + step for number in asked for step in _STEPS]
        self._asked_texts = [*bare, *(f"{text} B" for text in bare)]
        self._texts = [*map(str, _SMALL), *map(str, self._asked_numbers), *_WORDS]
        self._fractions = [0.0, *(number % 1 for number in literals.numbers), 0.25]

    def draw(self, declared: str) -> Value:
        """By SQLite's own affinity rules (sqlite.org/datatype3.html, section 3.1)."""
        kind = declared.upper()
        if "INT" not in kind:
            if _is_text(kind) or not kind:
                return self._rng.choice(self._either(self._asked_texts, self._texts))
            if any(word in kind for word in ("REAL", "FLOA", "DOUB")):
                return self._number() + self._rng.choice(self._fractions)
        return self._number()

    def _number(self) -> int:
        return self._rng.choice(self._either(self._asked_numbers, _SMALL))

    def _either(self, asked: list[_T], others: Sequence[_T]) -> Sequence[_T]:
        return asked if asked and self._rng.random() < 0.5 else others


def _fill(connection: sqlite3.Connection, table: str, pool: _Pool) -> None:
    quoted = '"' + table.replace('"', '""') + '"'
    columns = connection.execute(f"PRAGMA table_info({quoted})").fetchall()
    keys = [name for _, name, declared, _, _, key in columns if key and not _is_text(declared)]
    marks = ", ".join("?" * len(columns))
    for number in range(1, NUM_ROWS + 1):
        row = {name: pool.draw(declared) for _, name, declared, *_ in columns}
        if len(keys) == 1:
            row[keys[0]] = number
        # Other keys draw the same value twice now and then.
        connection.execute(f"INSERT OR IGNORE INTO {quoted} VALUES ({marks})", [*row.values()])


def _is_text(declared: str) -> bool:
    return any(word in declared.upper() for word in ("CHAR", "CLOB", "TEXT"))


def _table_names(connection: sqlite3.Connection) -> list[str]:
    found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return [name for (name,) in found if not name.startswith("sqlite_")]


def _only_building(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in _BUILDING else sqlite3.SQLITE_DENY
