"""Execution accuracy of SQL: does the answer's query find what the gold query finds?

Queries are untrusted: they run read-only, with limits on time and memory, on the named SQLite
database, or on synthetic rows made from the CREATE TABLE statements in the prompt. The pool of
values holds the gold query's literals and their neighbours; an answer must agree on several
fillings, a small form of test-suite accuracy (arXiv:2010.02840).
"""

from __future__ import annotations

import math
import random
import re
import sqlite3
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NewType, TypeVar
from urllib.parse import quote

from tightfit.core.errors import InvalidInputError, NotFoundError, UsageError
from tightfit.core.text import did_you_mean

# Run an untrusted query: read-only, on one database, with limits on time and memory.

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
_MAX_RESULT_BYTES = 1 << 26
"""Of texts and blobs in all rows of a result."""
_MAX_COLUMNS = 500
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


def limit(connection: sqlite3.Connection) -> None:
    """Bound memory, before anything that is not ours runs."""
    connection.execute(f"PRAGMA hard_heap_limit = {_HEAP_BYTES}")
    connection.execute("PRAGMA trusted_schema = OFF")
    if sys.version_info >= (3, 11):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, _MAX_COLUMNS)


def lock(connection: sqlite3.Connection) -> Sandbox:
    """Permanently forbid everything but reading."""
    limit(connection)
    connection.execute("PRAGMA query_only = ON")
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
    _end_at(sandbox, deadline)
    try:
        with closing(sandbox.cursor()) as cursor:
            cursor.execute(query)
            if cursor.description is None:
                raise QueryError("it is not a query")
            rows = _fetch(cursor, limits.num_rows)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        is_late = time.monotonic() > deadline
        reason = f"more than {limits.seconds:g} s" if is_late else _reason(error)
        raise QueryError(reason) from error
    finally:
        sandbox.set_progress_handler(None, 0)
    return rows


def _end_at(connection: sqlite3.Connection, deadline: float) -> None:
    """Interrupt whatever runs beyond a time."""
    connection.set_progress_handler(lambda: int(time.monotonic() > deadline), _STEPS_PER_LOOK)


def _fetch(cursor: sqlite3.Cursor, most: int) -> QueryRows:
    """All rows: SQLite's own limits do not count those that were handed over."""
    rows: QueryRows = []
    num_bytes = 0
    for row in cursor:
        num_bytes += sum(len(value) for value in row if isinstance(value, str | bytes))
        if num_bytes > _MAX_RESULT_BYTES:
            raise QueryError(f"rows of more than {_MAX_RESULT_BYTES >> 20} MiB")
        if len(rows) == most:
            raise QueryError(f"more than {most:,} rows")
        rows.append(row)
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


# SQL as text: a simple rule finds the query in an answer; no parser.

_TAGGED = re.compile(r"\[SQL\](.*?)(?:\[/SQL\]|\Z)", re.IGNORECASE | re.DOTALL)
_FENCED = re.compile(r"```[ \t]*\w*[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL)
_QUERY = re.compile(
    r"\bSELECT\b|\bWITH\s+(?:RECURSIVE\s+)?[\w\"`\[\]]+\s*(?:\([^()]*\)\s*)?AS\s*\(", re.IGNORECASE
)
_STATEMENT = re.compile(
    r"(?:SELECT|WITH|VALUES|INSERT|UPDATE|DELETE|REPLACE|CREATE|DROP|ALTER|ATTACH|DETACH|PRAGMA"
    r"|VACUUM|REINDEX|ANALYZE|BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE|END|EXPLAIN)\b",
    re.IGNORECASE,
)
_CREATE_TABLE = re.compile(r"\bCREATE\s+TABLE\b(?:(?!\bCREATE\s+TABLE\b)[^(])*", re.IGNORECASE)
"""Up to its parenthesis."""
_SKIPPED = re.compile(
    r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\[\]\n]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)",
    re.DOTALL,
)
"""Quoted text, quoted names and comments; in linear time, whatever is left open."""
_STRING = re.compile(r"'((?:[^']|'')*)'|\"((?:[^\"]|\"\")*)\"")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])")


class Literals(NamedTuple):
    """Values that a query compares with."""

    texts: tuple[str, ...]
    numbers: tuple[float, ...]


def extract_query(answer: str) -> str | None:
    """The query in an answer; None where there is none, or several statements.

    Looked for in this order: between `[SQL]` and `[/SQL]`; in the first code fence;
    in the whole answer from its first SELECT or WITH. The query ends at the first `;`
    outside quotes, or at the first empty line, and prose behind it is dropped.
    """
    marked = _TAGGED.search(answer) or _FENCED.search(answer)
    text = (marked[1] if marked else answer).strip()
    first = _QUERY.search(text)
    if first is None or _STATEMENT.match(text, 0, first.start()):
        return None
    text = text[first.start() :]
    masked = mask_quotes(text)
    end = masked.find(";")
    if end >= 0:
        rest = text[end + 1 :].strip().lstrip(";").strip()
        return None if _STATEMENT.match(rest) else text[:end].strip()
    return re.split(r"\n[ \t]*\n", text, maxsplit=1)[0].strip()


def has_order(query: str) -> bool:
    """Whether the query itself is sorted; an ORDER BY inside parentheses sorts only its part."""
    depth, outer = 0, []
    for char in mask_quotes(query):
        depth += (char == "(") - (char == ")")
        outer.append(char if depth == 0 else " ")
    return re.search(r"\bORDER\s+BY\b", "".join(outer), re.IGNORECASE) is not None


def find_tables(text: str) -> list[str]:
    """The CREATE TABLE statements in a text, each up to where its parentheses close."""
    masked = mask_quotes(text)
    opened: list[int] = []
    ends: dict[int, int] = {}
    for found in re.finditer(r"[()]", masked):
        if found[0] == "(":
            opened.append(found.start())
        elif opened:
            ends[opened.pop()] = found.end()
    tables = []
    for start in _CREATE_TABLE.finditer(masked):
        end = ends.get(start.end())
        if end is not None:
            tables.append(text[start.start() : end])
    return tables


def find_literals(query: str) -> Literals:
    """Quoted texts and bare numbers, in order, each once."""
    quoted = [first or second for first, second in _STRING.findall(query)]
    numbers = [float(text) for text in _NUMBER.findall(mask_quotes(query))]
    return Literals(tuple(dict.fromkeys(quoted)), tuple(dict.fromkeys(numbers)))


def mask_quotes(text: str) -> str:
    """The text, equally long, with quotes and comments blanked out."""
    return _SKIPPED.sub(lambda found: " " * len(found[0]), text)


# Comparison of results: multisets of rows, or sequences where the gold query is ordered.

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9

_Row = tuple[Value, ...]


def rows_agree(gold: QueryRows, found: QueryRows, *, is_ordered: bool) -> bool:
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


def _group(rows: QueryRows) -> dict[_Row, list[_Row]]:
    """Rows grouped by the values that must be equal exactly, sorted by their numbers.

    So equal multisets meet pairwise. They could miss each other only where two rows differ
    by less than the tolerance in one number and by more in a later one.
    """
    groups: dict[_Row, list[_Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(0 if isinstance(value, int | float) else value for value in row)].append(row)
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


# Synthetic databases, filled so that wrong queries give other results.

_T = TypeVar("_T")

BUILDING_SECONDS = 5.0
"""For the tables of one prompt, whose defaults and checks are expressions."""
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


def _allow_building(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action == sqlite3.SQLITE_FUNCTION:
        return _allow_reading(action, first, second)
    return sqlite3.SQLITE_OK if action in _BUILDING else sqlite3.SQLITE_DENY


@contextmanager
def open_synthetic(tables: Sequence[str], literals: Literals, *, seed: int) -> Iterator[Sandbox]:
    """A locked in-memory database with these tables and rows drawn with `seed`.

    Raises `QueryError` where SQLite does not accept the tables.
    """
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        limit(connection)
        connection.set_authorizer(_allow_building)
        deadline = time.monotonic() + BUILDING_SECONDS
        _end_at(connection, deadline)
        try:
            for statement in tables:
                connection.execute(statement)
            rng = random.Random(seed)
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            for (name,) in connection.execute(query).fetchall():
                if not name.startswith("sqlite_"):
                    _fill(connection, name, _Pool(literals, rng))
        except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
            is_late = time.monotonic() > deadline
            reason = f"takes more than {BUILDING_SECONDS:g} s" if is_late else "is not SQLite's"
            raise QueryError(f"the schema {reason}: {_reason(error)}") from error
        connection.set_progress_handler(None, 0)
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
        # Other keys may draw a value twice.
        connection.execute(f"INSERT OR IGNORE INTO {quoted} VALUES ({marks})", [*row.values()])


def _is_text(declared: str) -> bool:
    return any(word in declared.upper() for word in ("CHAR", "CLOB", "TEXT"))


DATABASE_KEYS = ("db_id", "database")
DATABASE_ENDINGS = (".sqlite", ".sqlite3", ".db")
_PLAIN_NAME = re.compile(r"[\w][\w .+-]*")

_Opener = Callable[[], AbstractContextManager[Sandbox]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlTask:
    """A question's gold query and the databases that it runs on."""

    gold: str
    openers: tuple[_Opener, ...]
    is_synthetic: bool
    results: tuple[QueryRows, ...]
    """What the gold query finds, by database."""

    @property
    def finds_nothing(self) -> bool:
        """The gold query finds no row in any database, which proves little."""
        return not any(value is not None for rows in self.results for row in rows for value in row)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlVerdict:
    """The result of one answer."""

    is_right: bool
    query: str | None
    """As found in the answer; None where there is none."""
    problem: str | None = None
    """Why it gave no rows."""


def make_task(
    values: Mapping[str, Any],
    *,
    prompt: str,
    gold_answer: str,
    folder: Path | None,
    limits: QueryLimits,
) -> SqlTask:
    """The task of a data row, with its gold query already run.

    The database is `folder`'s file that the row names by `db_id` or `database`; without
    a folder it is made from the CREATE TABLE statements of the prompt, with synthetic
    rows. Raises `QueryError` where the gold query cannot be run.
    """
    gold = extract_query(gold_answer)
    if gold is None:
        raise QueryError("the gold answer is not one query")
    name = database_of(values)
    is_synthetic = folder is None or name is None
    if folder is not None and name is not None:
        openers: tuple[_Opener, ...] = (partial(open_sandbox, find_database(folder, name)),)
    else:
        tables = find_tables(prompt)
        if not tables:
            raise QueryError("the row names no database and shows no CREATE TABLE")
        make = partial(open_synthetic, tables, find_literals(gold))
        openers = tuple(partial(make, seed=seed) for seed in range(NUM_FILLINGS))
    results = []
    for opener in openers:
        with opener() as sandbox:
            results.append(run_query(sandbox, gold, limits))
    return SqlTask(gold=gold, openers=openers, is_synthetic=is_synthetic, results=tuple(results))


def judge_answer(task: SqlTask, answer: str, limits: QueryLimits) -> SqlVerdict:
    """Run the answer's query where the gold query was run. Never raises for a bad answer."""
    query = extract_query(answer)
    if query is None:
        return SqlVerdict(is_right=False, query=None, problem="the answer is not one query")
    is_ordered = has_order(task.gold)
    for opener, expected in zip(task.openers, task.results, strict=True):
        try:
            with opener() as sandbox:
                found = run_query(sandbox, query, limits)
        except QueryError as error:
            return SqlVerdict(is_right=False, query=query, problem=str(error))
        if not rows_agree(expected, found, is_ordered=is_ordered):
            return SqlVerdict(is_right=False, query=query)
    return SqlVerdict(is_right=True, query=query)


def database_of(values: Mapping[str, Any]) -> str | None:
    """The database that a row names, if any."""
    for key in DATABASE_KEYS:
        if isinstance(values.get(key), str) and values[key].strip():
            return str(values[key]).strip()
    return None


def find_database(folder: Path, name: str) -> Path:
    """`folder/name.sqlite`, or `folder/name/name.sqlite` as Spider has it."""
    if not _PLAIN_NAME.fullmatch(name):
        raise UsageError(
            f"`{name[:60]}` is no name of a database: it would lead out of {folder}.",
            remedy="name databases by letters, digits, - and _",
        )
    for parent in (folder, folder / name):
        for ending in DATABASE_ENDINGS:
            path = parent / f"{name}{ending}"
            if path.is_file():
                return path
    known: list[str] = []
    if folder.is_dir():
        found = (
            path for path in folder.iterdir() if path.is_dir() or path.suffix in DATABASE_ENDINGS
        )
        known = sorted({path.stem for path in found})
    raise NotFoundError(
        f"{folder} holds no database `{name}`.{did_you_mean(name, known)}",
        remedy=f"put {name}.sqlite there, or name another folder with --databases",
    )
