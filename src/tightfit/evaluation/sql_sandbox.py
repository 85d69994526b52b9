"""Run an untrusted query: read-only, on one database, with limits on time and memory."""

from __future__ import annotations

import re
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NewType
from urllib.parse import quote

from tightfit.core.errors import InvalidInputError

Value = str | bytes | int | float | None
QueryRows = list[tuple[Value, ...]]
Sandbox = NewType("Sandbox", sqlite3.Connection)
"""A connection that has been locked; only `run_query` should use it."""

_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,  # stopped by the time limit, like any long query
}
_FORBIDDEN_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
_PADDING_FUNCTIONS = {"printf", "format"}
"""They can pad to any width in one call, past the time limit: only harmless formats pass."""
_PADDING_WORD = re.compile("printf|format", re.IGNORECASE)
_HARMLESS_PADDING = re.compile(
    r"\b(?:printf|format)\s*\(\s*'(?:[^'*\d]|(?<!\d)\d{1,3}(?!\d))*'\s*[,)]", re.IGNORECASE
)
_MAX_VALUE_BYTES = 1 << 20
_HEAP_BYTES = 1 << 28
"""SQLite's limits for one value and for this process: a single function call can make a
gigabyte, and the time limit is checked only between calls."""
_STEPS_PER_LOOK = 1000
_MAX_TEXT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLimits:
    """What one query may use."""

    seconds: float = 5.0
    num_rows: int = 20_000


class QueryError(Exception):
    """The query gives no rows to compare: not SQL, forbidden, too slow, too many rows."""


@contextmanager
def open_sandbox(path: Path) -> Iterator[Sandbox]:
    """A database file, read-only."""
    try:
        # A path in a URI keeps its slashes; `?` and `#` in names would end it.
        connection = sqlite3.connect(
            f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, isolation_level=None
        )
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error
    with closing(connection):
        try:
            connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        except sqlite3.Error as error:
            raise _unreadable(path, error) from error
        yield lock(connection)


def lock(connection: sqlite3.Connection) -> Sandbox:
    """Permanently forbid everything but reading."""
    connection.execute(f"PRAGMA hard_heap_limit = {_HEAP_BYTES}")
    connection.execute("PRAGMA query_only = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    if sys.version_info >= (3, 11):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    # Some published databases hold text that is no UTF-8.
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    connection.set_authorizer(_allow_reading)
    return Sandbox(connection)


def run_query(sandbox: Sandbox, query: str, limits: QueryLimits) -> QueryRows:
    """The rows of one query, or `QueryError` with the reason; no other exception leaves it."""
    if len(query) > _MAX_TEXT:
        raise QueryError("the query is too long")
    deadline = time.monotonic() + limits.seconds
    sandbox.set_authorizer(_allow_padding if _pads_harmlessly(query) else _allow_reading)
    sandbox.set_progress_handler(lambda: int(time.monotonic() > deadline), _STEPS_PER_LOOK)
    try:
        with closing(sandbox.cursor()) as cursor:
            cursor.execute(query)
            if cursor.description is None:
                raise QueryError("it is not a query")
            rows: QueryRows = cursor.fetchmany(limits.num_rows + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        is_late = time.monotonic() > deadline
        reason = f"more than {limits.seconds:g} s" if is_late else _reason(error)
        raise QueryError(reason) from error
    finally:
        sandbox.set_progress_handler(None, 0)
    if len(rows) > limits.num_rows:
        raise QueryError(f"more than {limits.num_rows:,} rows")
    return rows


def _allow_reading(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    function = (second or first or "").lower() if action == sqlite3.SQLITE_FUNCTION else ""
    is_denied = action not in _ALLOWED or function in _FORBIDDEN_FUNCTIONS | _PADDING_FUNCTIONS
    return sqlite3.SQLITE_DENY if is_denied else sqlite3.SQLITE_OK


def _allow_padding(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action == sqlite3.SQLITE_FUNCTION and (second or first or "").lower() in _PADDING_FUNCTIONS:
        return sqlite3.SQLITE_OK
    return _allow_reading(action, first, second)


def _pads_harmlessly(query: str) -> bool:
    """Whether every `printf` in the text has a literal format without `*` or a wide field."""
    num_words = len(_PADDING_WORD.findall(query))
    return 0 < num_words == len(_HARMLESS_PADDING.findall(query))


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "more memory than a query may use"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _unreadable(path: Path, error: sqlite3.Error) -> InvalidInputError:
    return InvalidInputError(
        f"{path} cannot be read as an SQLite database: {error}.",
        remedy=f"sqlite3 {path} .schema    (says what is wrong with it)",
    )
