"""Cutting out queries, comparing results, and judging answers, against truth made by hand."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from tightfit.core.errors import NotFoundError, UsageError
from tightfit.evaluation.sql import (
    QueryError,
    QueryLimits,
    QueryRows,
    extract_query,
    find_database,
    find_literals,
    find_tables,
    has_order,
    judge_answer,
    make_task,
    rows_agree,
)

LIMITS = QueryLimits(seconds=2)
SCHEMA = (
    "CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, age INTEGER);\n"
    "CREATE TABLE song (title VARCHAR(20), singer_id INT, plays NUMERIC, price REAL);"
)


@pytest.mark.parametrize(
    ("answer", "query"),
    [
        ("SELECT 1", "SELECT 1"),
        ("  select 1 ;  ", "select 1"),
        ("[SQL] SELECT a FROM b [/SQL]", "SELECT a FROM b"),
        ("[SQL]SELECT a FROM b", "SELECT a FROM b"),
        ("Sure!\n```sql\nSELECT a\nFROM b;\n```\nThis lists a.", "SELECT a\nFROM b"),
        ("```\nSELECT a\n```", "SELECT a"),
        ("``` sql SELECT a FROM b```", "SELECT a FROM b"),
        ("The query with a count is: SELECT a FROM b; It counts.", "SELECT a FROM b"),
        ("SELECT a FROM b\n\nThis query lists a.", "SELECT a FROM b"),
        ("SELECT ';' FROM b; done", "SELECT ';' FROM b"),
        ('SELECT "a;b" FROM b', 'SELECT "a;b" FROM b'),
        ("WITH x AS (SELECT 1) SELECT * FROM x", "WITH x AS (SELECT 1) SELECT * FROM x"),
        ("SELECT 1; SELECT 2", None),
        ("SELECT 1; drop table b", None),
        ("DELETE FROM b WHERE a IN (SELECT 1)", None),
        ("CREATE TABLE x AS SELECT 1", None),
        ("There are 3 singers, with love.", None),
        ("", None),
    ],
)
def test_the_query_in_an_answer(answer: str, query: str | None) -> None:
    assert extract_query(answer) == query


@pytest.mark.parametrize(
    ("query", "is_ordered"),
    [
        ("SELECT a FROM b ORDER BY a", True),
        ("SELECT a FROM b order\n by a LIMIT 1", True),
        ("SELECT a FROM (SELECT a FROM b ORDER BY a)", False),
        ("SELECT a FROM b WHERE c = ' order by '", False),
        ("SELECT a FROM b WHERE c = (SELECT max(c) FROM b) ORDER BY a", True),
        ("SELECT order_id FROM b", False),
    ],
)
def test_when_order_counts(query: str, is_ordered: bool) -> None:
    assert has_order(query) is is_ordered


_ONE: QueryRows = [("a", 1), ("b", 2)]


@pytest.mark.parametrize(
    ("gold", "found", "unordered", "ordered"),
    [
        (_ONE, [("a", 1), ("b", 2)], True, True),
        (_ONE, [("b", 2), ("a", 1)], True, False),
        (_ONE, [(1, "a"), (2, "b")], False, False),  # columns stay in their order
        (_ONE, [("a", 1)], False, False),
        (_ONE, [("a", 1), ("b", 2), ("b", 2)], False, False),
        ([("a",), ("a",), ("b",)], [("a",), ("b",), ("b",)], False, False),  # a multiset
        ([(1, 2)], [(2, 1)], False, False),
        ([(1.0,)], [(1,)], True, True),
        ([(0.1 + 0.2,)], [(0.3,)], True, True),
        ([(1000.0001,)], [(1000.0002,)], True, True),
        ([(1.0,)], [(1.001,)], False, False),
        ([(10_000_000,)], [(10_000_001,)], False, False),  # integers are exact
        ([("1",)], [(1,)], False, False),
        ([(None,)], [(None,)], True, True),
        ([(None,)], [(0,)], False, False),
        ([(None,)], [("",)], False, False),
        ([(b"a",)], [("a",)], False, False),
        ([], [], True, True),
        ([], [(None,)], False, False),
        ([(2.0, "x"), (1.0, "x")], [(1.0000001, "x"), (2.0000001, "x")], True, False),
        ([(1, None), (None, 1)], [(None, 1), (1, None)], True, False),
        ([(float("inf"),)], [(float("inf"),)], True, True),
    ],
)
def test_comparison(gold: QueryRows, found: QueryRows, unordered: bool, ordered: bool) -> None:
    assert rows_agree(gold, found, is_ordered=False) is unordered
    assert rows_agree(found, gold, is_ordered=False) is unordered
    assert rows_agree(gold, found, is_ordered=True) is ordered


def test_tables_and_literals_of_a_text() -> None:
    text = f"How many?\n\n{SCHEMA}\nSomething (else)."

    assert [table.split("(")[0].strip() for table in find_tables(text)] == [
        "CREATE TABLE singer",
        "CREATE TABLE song",
    ]
    assert find_tables(text)[1].endswith("price REAL)")
    literals = find_literals("SELECT t1.a FROM t1 WHERE b = 'x''y' AND c > 5.5 LIMIT 3")
    assert (literals.texts, literals.numbers) == (("x''y",), (5.5, 3.0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Spider's layout: one database in a folder of its own."""
    (tmp_path / "music").mkdir()
    with closing(sqlite3.connect(tmp_path / "music" / "music.sqlite")) as connection:
        connection.executescript(SCHEMA)
        singers = [(1, "Ann", 30), (2, "Bob", 40), (3, "Cy", 50)]
        connection.executemany("INSERT INTO singer VALUES (?, ?, ?)", singers)
        connection.commit()
    return tmp_path


def is_right(answer: str, gold: str, folder: Path | None, values: Mapping[str, str]) -> bool:
    task = make_task(values, prompt=SCHEMA, gold_answer=gold, folder=folder, limits=LIMITS)
    return judge_answer(task, answer, LIMITS).is_right


GOLD = "SELECT name FROM singer WHERE age > 30"
ANSWERS = [
    ("SELECT name FROM singer WHERE age > 30;", True),
    ("select T.name from singer as T where not T.age <= 30", True),
    ("SELECT name FROM singer WHERE age >= 30", False),
    ("SELECT name, age FROM singer WHERE age > 30", False),
    ("SELECT name FROM singer", False),
    ("SELECT nothing FROM nowhere", False),
    ("Ann and Bob", False),
    ("SELECT name FROM singer WHERE age > 30; SELECT 1", False),
    ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT i FROM n", False),
]


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
@pytest.mark.parametrize("is_real", [True, False])
def test_judging(folder: Path, answer: str, expected: bool, is_real: bool) -> None:
    limits = QueryLimits(seconds=0.3)
    values = {"db_id": "music"}
    task = make_task(
        values, prompt=SCHEMA, gold_answer=GOLD, folder=folder if is_real else None, limits=limits
    )

    assert task.is_synthetic is not is_real
    assert judge_answer(task, answer, limits).is_right is expected


@pytest.mark.parametrize(
    ("gold", "wrong"),
    [
        ("SELECT COUNT(*) FROM song", "SELECT COUNT(DISTINCT title) FROM song"),
        ("SELECT COUNT(*) FROM song WHERE plays > 700", "SELECT COUNT(*) FROM song"),
        (
            "SELECT COUNT(*) FROM song WHERE plays > 700",
            "SELECT COUNT(*) FROM song WHERE plays>=700",
        ),
        ("SELECT id FROM singer WHERE name = 'Zed'", "SELECT id FROM singer WHERE name = 'Zeds'"),
        (
            "SELECT id FROM singer WHERE name LIKE '%Zed%'",
            "SELECT id FROM singer WHERE name = 'Zed'",
        ),
        ("SELECT title FROM song WHERE price < 2.5", "SELECT title FROM song WHERE price > 2.5"),
        ("SELECT AVG(plays) FROM song", "SELECT SUM(plays) FROM song"),
        (
            "SELECT T1.name FROM singer T1 JOIN song T2 ON T1.id = T2.singer_id",
            "SELECT name FROM singer",
        ),
        ("SELECT title FROM song ORDER BY price DESC LIMIT 3", "SELECT title FROM song LIMIT 3"),
        ("SELECT name FROM singer GROUP BY name HAVING COUNT(*) > 1", "SELECT name FROM singer"),
    ],
)
def test_synthetic_rows_tell_near_misses_apart(gold: str, wrong: str) -> None:
    assert is_right(gold, gold, None, {})
    assert not is_right(wrong, gold, None, {})


def test_synthetic_rows_are_the_same_every_time() -> None:
    tasks = [
        make_task({}, prompt=SCHEMA, gold_answer=GOLD, folder=None, limits=LIMITS) for _ in "ab"
    ]

    assert tasks[0].results == tasks[1].results
    assert not tasks[0].finds_nothing


@pytest.mark.parametrize(
    ("prompt", "gold"),
    [
        ("no schema", "SELECT 1"),
        (SCHEMA, "there is no query"),
        (SCHEMA, "SELECT x FROM nowhere"),
        ("CREATE TABLE x (a, a)", "SELECT a FROM x"),
        ("CREATE TABLE x AS SELECT load_extension('evil') AS (a)", "SELECT a FROM x"),
    ],
)
def test_a_row_without_truth_is_an_error_of_the_row(prompt: str, gold: str) -> None:
    with pytest.raises(QueryError):
        make_task({}, prompt=prompt, gold_answer=gold, folder=None, limits=LIMITS)


def test_where_a_database_lies(folder: Path) -> None:
    flat = folder / "flat.sqlite"
    flat.touch()

    assert find_database(folder, "flat") == flat
    assert find_database(folder, "music") == folder / "music" / "music.sqlite"
    with pytest.raises(NotFoundError, match="Did you mean `music`"):
        find_database(folder, "musik")


@pytest.mark.parametrize("name", ["../music/music", "/etc/passwd", ".hidden", "a/b", "x\0"])
def test_a_database_name_leads_nowhere_else(folder: Path, name: str) -> None:
    with pytest.raises(UsageError):
        find_database(folder, name)
