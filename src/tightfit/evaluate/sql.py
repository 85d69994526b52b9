"""Execution accuracy: does the answer's query find what the gold query finds?"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tightfit.core.errors import NotFoundError, UsageError
from tightfit.core.suggest import did_you_mean
from tightfit.evaluate.sql_compare import rows_agree
from tightfit.evaluate.sql_sandbox import (
    QueryFaultError,
    QueryLimits,
    Rows,
    Sandbox,
    open_sandbox,
    run_query,
)
from tightfit.evaluate.sql_synthetic import NUM_FILLINGS, open_synthetic
from tightfit.evaluate.sql_text import extract_query, find_literals, find_tables, has_order

DATABASE_KEYS = ("db_id", "database")
DATABASE_ENDINGS = (".sqlite", ".sqlite3", ".db")
_PLAIN_NAME = re.compile(r"[\w][\w .+-]*")

_Opener = Callable[[], AbstractContextManager[Sandbox]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlTask:
    """A question's gold query and the databases it is asked of."""

    gold: str
    openers: tuple[_Opener, ...]
    is_synthetic: bool
    results: tuple[Rows, ...]
    """What the gold query finds, by database."""

    @property
    def finds_nothing(self) -> bool:
        """No database has a row that the gold query finds: then little is proved."""
        return not any(value is not None for rows in self.results for row in rows for value in row)


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlVerdict:
    """What became of one answer."""

    is_right: bool
    query: str | None
    """As cut out of the answer; None where it holds none."""
    problem: str | None = None
    """Why it is wrong, where it did not even give rows."""


def make_task(
    values: Mapping[str, Any],
    *,
    prompt: str,
    gold_answer: str,
    folder: Path | None,
    limits: QueryLimits,
) -> SqlTask:
    """The task that a data row stands for, its gold query already run.

    The database is `folder`'s file that the row names by `db_id` or `database`; without
    a folder it is made from the CREATE TABLE statements of the prompt, with synthetic
    rows. Raises `QueryFaultError` where the gold query cannot be run.
    """
    gold = extract_query(gold_answer)
    if gold is None:
        raise QueryFaultError("the gold answer is not one query")
    name = database_of(values)
    is_synthetic = folder is None or name is None
    if folder is not None and name is not None:
        openers: tuple[_Opener, ...] = (partial(open_sandbox, find_database(folder, name)),)
    else:
        openers = _synthetic_openers(prompt, gold)
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
        except QueryFaultError as fault:
            return SqlVerdict(is_right=False, query=query, problem=str(fault))
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
    known = sorted(set(_names_in(folder)))
    raise NotFoundError(
        f"{folder} holds no database `{name}`.{did_you_mean(name, known)}",
        remedy=f"put {name}.sqlite there, or name another folder with --databases",
    )


def _names_in(folder: Path) -> Iterator[str]:
    if folder.is_dir():
        for path in folder.iterdir():
            if path.is_dir() or path.suffix in DATABASE_ENDINGS:
                yield path.stem


def _synthetic_openers(prompt: str, gold: str) -> tuple[_Opener, ...]:
    tables = find_tables(prompt)
    if not tables:
        raise QueryFaultError("the row names no database and shows no CREATE TABLE")
    literals = find_literals(gold)
    return tuple(
        partial(open_synthetic, tables, literals, seed=seed) for seed in range(NUM_FILLINGS)
    )
