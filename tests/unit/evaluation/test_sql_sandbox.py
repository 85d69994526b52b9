"""Queries that try to do more than read, or to never end."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tightfit.core.errors import InvalidInputError
from tightfit.evaluation.sql import (
    Literals,
    QueryError,
    QueryLimits,
    Sandbox,
    extract_query,
    find_tables,
    open_sandbox,
    open_synthetic,
    run_query,
)

LIMITS = QueryLimits(seconds=0.5, num_rows=100)
ATTACKS = (
    "DELETE FROM pets",
    "INSERT INTO pets VALUES ('x', 1)",
    "UPDATE pets SET age = 0",
    "DROP TABLE pets",
    "CREATE TABLE more (a)",
    "CREATE TEMP TABLE more (a)",
    "CREATE VIRTUAL TABLE more USING fts5(a)",
    "ALTER TABLE pets RENAME TO gone",
    "ATTACH 'other.sqlite' AS other",
    "DETACH main",
    "VACUUM",
    "VACUUM INTO 'copy.sqlite'",
    "REINDEX",
    "ANALYZE",
    "BEGIN",
    "PRAGMA query_only = OFF",
    "PRAGMA writable_schema = ON",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA table_info(pets)",
    "SELECT load_extension('evil')",
    "SELECT writefile('out.txt', 'x')",
    "SELECT readfile('/etc/passwd')",
    "SELECT 1; DELETE FROM pets",
    "WITH doomed AS (SELECT 1) DELETE FROM pets",
    "",
    ";",
    "-- nothing",
    "how many pets are there?",
    "SELECT * FROM no_such_table",
    "SELECT \0 1",
    "SELECT '\ud800'",
)
BOMBS = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
    "SELECT COUNT(*) FROM " + ", ".join(f"many AS t{i}" for i in range(8)),
    "SELECT a.i FROM many a, many b, many c, many d, many e ORDER BY random()",
    "SELECT length(zeroblob(1000000000) || zeroblob(1000000000))",
    "SELECT length(printf('%.*c', 900000000, 'x'))",
    "SELECT length(group_concat(hex(zeroblob(900000)))) FROM many a, many b",
    "SELECT length(printf('%900000000d', 1))",
    "SELECT length(\"printf\"('%.' || 900000000 || 'c', 'x'))",
    "SELECT length(format/**/('%*d', 900000000, 1)) || printf('%d', 1)",
    "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "SELECT zeroblob(1000000) FROM many",  # within every limit of SQLite's, but not together
)
BUILDING_BOMBS = (
    "CREATE TABLE t AS SELECT * FROM (SELECT 1 FROM "
    + ", ".join(f"(VALUES {', '.join(f'({i})' for i in range(99))}) a{n}" for n in range(6))
    + ")",
    "CREATE TABLE t (a TEXT, b TEXT AS (printf('%900000000d', 1)) STORED)",
    "CREATE TABLE t (a TEXT, b TEXT AS (hex(zeroblob(900000000))))",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "pets of 100% #1?.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE pets (name TEXT, age INTEGER)")
        connection.executemany("INSERT INTO pets VALUES (?, ?)", [("Rex", 3), ("Tom", 9)])
        connection.execute("CREATE TABLE many (i INTEGER)")
        connection.executemany("INSERT INTO many VALUES (?)", [(i,) for i in range(90)])
        connection.commit()
    return path


@pytest.fixture
def sandbox(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    monkeypatch.chdir(path.parent)  # where relative names of an attack would be written
    with open_sandbox(path) as opened:
        yield opened


def test_reading_works(sandbox: Sandbox) -> None:
    query = "SELECT upper(name), age * 1.5 FROM pets WHERE name LIKE 'R%'"

    assert run_query(sandbox, query, LIMITS) == [("REX", 4.5)]


@pytest.mark.parametrize(
    ("query", "text"),
    [("SELECT printf('%.2f', age) FROM pets", "3.00"), ("SELECT PRINTF( '%03d' , 7)", "007")],
)
def test_plain_formatting_works(sandbox: Sandbox, query: str, text: str) -> None:
    assert run_query(sandbox, query, LIMITS)[0] == (text,)


def test_a_recursive_query_that_ends_is_fine(sandbox: Sandbox) -> None:
    query = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n WHERE i < 5) SELECT * FROM n"
    )

    assert len(run_query(sandbox, query, LIMITS)) == 5


@pytest.mark.parametrize("query", ATTACKS)
def test_an_attack_is_refused_and_leaves_no_trace(sandbox: Sandbox, path: Path, query: str) -> None:
    before = hashlib.sha256(path.read_bytes()).digest()

    with pytest.raises(QueryError):
        run_query(sandbox, query, LIMITS)

    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    assert run_query(sandbox, "SELECT COUNT(*) FROM pets", LIMITS) == [(2,)]


@pytest.mark.parametrize("query", BOMBS)
def test_a_bomb_ends_in_time(sandbox: Sandbox, query: str) -> None:
    started = time.process_time()  # a bomb computes; a machine that stands still does not

    with pytest.raises(QueryError):
        run_query(sandbox, query, LIMITS)

    assert time.process_time() - started < 10 * LIMITS.seconds


@pytest.mark.parametrize("table", BUILDING_BOMBS)
def test_tables_of_a_prompt_are_built_within_limits(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tightfit.evaluation.sql.BUILDING_SECONDS", 0.5)
    began = time.process_time()

    (found,) = find_tables(f"Given {table}; how many?")
    with (
        pytest.raises(QueryError, match="the schema"),
        open_synthetic([found], Literals((), ()), seed=0),
    ):
        pass

    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "piece", ["/*", "[", "CREATE TABLE a (", "CREATE TABLE ", "'\"", "WITH a("]
)
def test_texts_that_are_left_open_take_linear_time(piece: str) -> None:
    began = time.process_time()

    find_tables(piece * 50_000)
    extract_query("SELECT " + piece * 50_000)

    assert time.process_time() - began < 5


def test_too_many_rows_are_an_error(sandbox: Sandbox) -> None:
    with pytest.raises(QueryError, match="more than 100 rows"):
        run_query(sandbox, "SELECT a.i FROM many a, many b", LIMITS)


def test_the_clock_is_named_as_the_reason(sandbox: Sandbox) -> None:
    with pytest.raises(QueryError, match=r"more than 0\.5 s"):
        run_query(sandbox, BOMBS[0], LIMITS)


def test_text_that_is_no_utf8_is_read(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO pets VALUES (CAST(x'466fff' AS TEXT), 1)")
        connection.commit()

    with open_sandbox(path) as sandbox:
        rows = run_query(sandbox, "SELECT name FROM pets WHERE age = 1", LIMITS)

    assert rows == [("Fo\ufffd",)]


@pytest.mark.parametrize("content", [None, b"", b"not a database, but long enough to be read" * 40])
def test_what_is_no_database_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.sqlite"
    if content is not None:
        path.write_bytes(content)
    if content == b"":  # an empty file is an empty database to SQLite
        with open_sandbox(path) as sandbox, pytest.raises(QueryError, match="no such table"):
            run_query(sandbox, "SELECT * FROM pets", LIMITS)
        return

    with pytest.raises(InvalidInputError, match=r"x\.sqlite"), open_sandbox(path):
        pass
