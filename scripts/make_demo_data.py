"""Write a small text-to-SQL dataset with its SQLite databases: same questions, same files.

    python scripts/make_demo_data.py demo-out/text_to_sql           questions of 6 kinds, one table
    python scripts/make_demo_data.py demo-out/text_to_sql --full    of 15 kinds, one table or two

Makes train.jsonl, dev.jsonl, test.jsonl and databases/NAME.sqlite there, from
examples/text_to_sql/questions.yaml. Development and test ask about tables that training never
shows; with --full also in phrasings that training never uses.
"""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

QUESTIONS = yaml.safe_load(
    (Path(__file__).parents[1] / "examples" / "text_to_sql" / "questions.yaml").read_text()
)
SYSTEM = "Answer the question with one SQLite query."
NUM_ROWS = {"train": 240, "dev": 12, "test": 60}
NUM_PHRASINGS = 4
NUM_FULL_ROWS = {"train": 360, "dev": 60, "test": 60}
NUM_PARENTS = 8
NUM_RECORDS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table: what it is called, its columns in order, and what is in it."""

    name: str
    label: str
    """The column that names a record."""
    numbers: tuple[str, ...]
    category: str
    columns: tuple[str, ...]
    records: tuple[tuple[str | int, ...], ...]

    def values(self, column: str) -> list[str | int]:
        return [record[self.columns.index(column)] for record in self.records]


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """A table, and where it has one the table that it points to."""

    name: str
    main: Table
    parent: Table | None = None
    link: str = ""
    """The column of both tables that joins them: `writer_id`."""

    @property
    def tables(self) -> tuple[Table, ...]:
        return (self.main,) if self.parent is None else (self.parent, self.main)


def main() -> None:
    out, is_full = Path(sys.argv[1]), "--full" in sys.argv[2:]
    intents = [item for item in QUESTIONS["intents"] if is_full or "is_short" in item]
    (out / "databases").mkdir(parents=True, exist_ok=True)
    for part, num_rows in (NUM_FULL_ROWS if is_full else NUM_ROWS).items():
        databases = read_tables(QUESTIONS["tables"][part], with_parents=is_full)
        for database in databases:
            write_database(database, out / "databases" / f"{database.name}.sqlite")
        for intent in intents:
            intent["ask"] = intent[part] if is_full else intent["train"][:NUM_PHRASINGS]
        rows = make_rows(part, databases, intents, num_rows)
        path = out / f"{part}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {num_rows} questions about {len(databases)} databases")


def read_tables(text: str, *, with_parents: bool) -> list[Database]:
    """The databases that the text describes, filled."""
    databases = []
    for line in text.strip().splitlines():
        main_text, _, parent_text = line.partition(" < ")
        name, parent_name = main_text.partition(":")[0], parent_text.partition(":")[0]
        rng = random.Random(name)
        if not (parent_text and with_parents):
            databases.append(Database(name=name, main=make_table(main_text, rng, NUM_RECORDS)))
            continue
        link = f"{parent_name.removesuffix('s')}_id"
        keys: list[str | int] = list(range(1, NUM_PARENTS + 1))
        parent = make_table(parent_text, rng, NUM_PARENTS, {link: keys})
        main = make_table(main_text, rng, NUM_RECORDS, {link: rng.choices(keys, k=NUM_RECORDS)})
        databases.append(Database(name=name, main=main, parent=parent, link=link))
    return databases


def make_table(
    text: str, rng: random.Random, num_records: int, keys: dict[str, list[str | int]] | None = None
) -> Table:
    """A table from its line, with the columns of `keys` before its own."""
    name, *specs = text.replace(": ", " ", 1).split()
    kinds = dict(spec.split(":") for spec in specs)
    values = {column: draw_values(kind, num_records, rng) for column, kind in kinds.items()}
    values = (keys or {}) | values
    return Table(
        name=name,
        label=next(iter(kinds)),
        numbers=tuple(column for column, kind in kinds.items() if "-" in kind),
        category=next(column for column, kind in kinds.items() if kind in QUESTIONS["words"]),
        columns=tuple(values),
        records=tuple(zip(*values.values(), strict=True)),
    )


def draw_values(kind: str, count: int, rng: random.Random) -> list[str | int]:
    """One column. Names and numbers never repeat, so that no ranking has a tie."""
    if kind in QUESTIONS["words"]:
        return rng.choices(QUESTIONS["words"][kind].split(), k=count)
    if kind in QUESTIONS["names"]:
        parts = [words.split() for words in QUESTIONS["names"][kind]]
        return rng.sample(list(map(" ".join, itertools.product(*parts))), count)
    if kind == "code":
        return [f"{rng.choice('KLMPRT')}{number}" for number in rng.sample(range(100, 1000), count)]
    low, high = map(int, kind.split("-"))
    return rng.sample(range(low, high + 1), count)


def describe_table(table: Table) -> str:
    kinds = ["INTEGER" if isinstance(value, int) else "TEXT" for value in table.records[0]]
    columns = ", ".join(f"{name} {kind}" for name, kind in zip(table.columns, kinds, strict=True))
    return f"CREATE TABLE {table.name} ({columns});"


def fill_database(database: Database, connection: sqlite3.Connection) -> None:
    for table in database.tables:
        connection.execute(describe_table(table))
        marks = ", ".join("?" * len(table.columns))
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", table.records)
    connection.commit()


def write_database(database: Database, path: Path) -> None:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        fill_database(database, connection)


def finds_something(database: Database, sql: str) -> bool:
    """Whether the query returns rows: two wrong queries agree on nothing all too easily."""
    with closing(sqlite3.connect(":memory:")) as connection:
        fill_database(database, connection)
        return bool(connection.execute(sql).fetchall())


def make_rows(
    part: str, databases: list[Database], intents: list[dict[str, Any]], num_rows: int
) -> list[dict[str, str]]:
    """Questions of every kind in turn, none twice, in random order."""
    rng = random.Random(part)
    rows: dict[str, dict[str, str]] = {}
    for intent in itertools.cycle(intents):
        if len(rows) == num_rows:
            break
        needs_parent = "JOIN" in intent["sql"]
        database = rng.choice([item for item in databases if item.parent or not needs_parent])
        fields = draw_fields(database, rng)
        answer = intent["sql"].format(**fields) + ";"
        if not finds_something(database, answer):
            continue
        question = rng.choice(intent["ask"]).format(**fields)
        rows[f"{database.name} {question}"] = {
            "db_id": database.name,
            "system": SYSTEM,
            "question": question,
            "context": "\n".join(map(describe_table, database.tables)),
            "answer": answer,
        }
    shuffled = list(rows.values())
    rng.shuffle(shuffled)
    return shuffled


def draw_fields(database: Database, rng: random.Random) -> dict[str, str | int]:
    """Names and values for a question; values come from the records, so that answers differ."""
    table, parent = database.main, database.parent
    number = rng.choice(table.numbers)
    ordered = sorted(table.values(number))
    first, second = sorted(rng.sample(range(6, len(ordered) - 6), 2))
    fields = {
        "t": table.name,
        "l": table.label,
        "c": table.category,
        "n": number,
        "v": ordered[first],
        "w": ordered[second],
        "k": rng.randint(2, 9),
        "s": rng.choice(table.values(table.category)),
    }
    if parent is not None:
        fields |= {"p": parent.name, "m": parent.label, "d": parent.category, "j": database.link}
        fields["u"] = rng.choice(parent.values(parent.category))
    return fields


if __name__ == "__main__":
    main()
