"""Write a small text-to-SQL dataset with its SQLite databases: same seed, same files.

    python scripts/make_demo_data.py demo-out/text_to_sql

Makes train.jsonl, test.jsonl and databases/NAME.sqlite there. The test questions are about
tables that training never shows, in phrasings that training never uses.
"""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

SYSTEM = "Answer the question with one SQLite query."
NUM_TRAIN_ROWS = 360
NUM_TEST_ROWS = 60
NUM_PARENTS = 8
NUM_RECORDS = 40

WORDS = {
    "city": "Lisbon Oslo Turin Ghent Porto Graz Malmo Lyon",
    "color": "red blue green black white silver",
    "status": "open closed pending cancelled",
    "genre": "drama comedy horror western mystery",
    "country": "Norway Brazil Japan Kenya Canada Spain",
    "team": "north south east west central",
    "material": "oak steel glass wool clay",
    "language": "French Danish Korean Polish Hindi",
    "level": "basic middle expert",
    "cuisine": "Thai Greek Cuban Mexican Turkish",
    "habitat": "forest desert river coast mountain",
    "engine": "diesel electric hybrid petrol",
    "season": "spring summer autumn winter",
}
FIRST = "Ana Ben Cora Dirk Elsa Finn Gita Hugo Ines Jonas Kira Liam Mara Nils Olga Piet"
LAST = "Adler Berg Costa Duarte Evans Frank Gomez Hansen Ivers Jansen Keller Lund"
ADJECTIVES = "Silent Golden Broken Hidden Distant Frozen Gentle Hollow Iron Lonely"
NOUNS = "Harbor Garden River Mirror Tower Island Engine Valley Letter Bridge"

# `TABLE: NAME COLUMN:KIND ...`; the first column names a record, KIND is a word list or a range.
TRAIN_TABLES = """
employees: name:person salary:2000-9000 age:20-64 city:city
orders: customer:person total:10-900 quantity:1-90 status:status
films: title:title year:1950-2023 rating:10-99 genre:genre
cars: model:title price:3000-60000 mileage:500-90000 color:color
students: name:person grade:40-100 age:16-70 country:country
houses: owner:person rooms:1-60 rent:300-3000 city:city
flights: code:code delay:0-240 distance:200-9000 origin:city
players: name:person goals:0-80 height:150-210 team:team
chairs: label:code price:20-700 weight:2-90 material:material
courses: title:title hours:10-200 seats:5-120 level:level
hotels: name:title stars:1-70 capacity:20-900 country:country
parcels: code:code weight:1-200 cost:3-400 status:status
books: title:title pages:80-900 copies:1-300 language:language < writers: name:person city:city
repairs: code:code cost:50-5000 hours:1-99 status:status < garages: name:title city:city
songs: title:title seconds:90-600 plays:10-9000 genre:genre < singers: name:person country:country
"""
TEST_TABLES = """
museums: name:title guests:1000-90000 rooms:3-120 city:city
birds: species:title wingspan:15-300 lifespan:2-70 habitat:habitat
restaurants: name:title tables:4-90 score:20-100 cuisine:cuisine
trucks: plate:code load:500-20000 fuel:40-700 engine:engine < depots: name:title city:city
tours: title:title price:20-2000 days:1-60 season:season < guides: name:person language:language
"""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A kind of question, as it is asked in training, in the test, and answered in SQL."""

    sql: str
    train: tuple[str, ...]
    test: str
    needs_parent: bool = False


INTENTS = (
    Intent(
        sql="SELECT COUNT(*) FROM {t} WHERE {n} > {v}",
        train=(
            "How many {t} have a {n} above {v}?",
            "Count the {t} with {n} greater than {v}.",
            "What is the number of {t} whose {n} is over {v}?",
            "Tell me how many {t} have more than {v} as {n}.",
        ),
        test="How many of the {t} have a {n} greater than {v}?",
    ),
    Intent(
        sql="SELECT COUNT(*) FROM {t} WHERE {n} < {v}",
        train=(
            "How many {t} have a {n} below {v}?",
            "Count the {t} with {n} less than {v}.",
            "What is the number of {t} whose {n} is under {v}?",
            "Tell me how many {t} have less than {v} as {n}.",
        ),
        test="How many of the {t} have a {n} under {v}?",
    ),
    Intent(
        sql="SELECT {l} FROM {t} WHERE {c} = '{s}'",
        train=(
            "Show the {l} of all {t} whose {c} is {s}.",
            "Which {t} have {s} as their {c}? Give the {l}.",
            "List the {l} of every one of the {t} where {c} equals {s}.",
            "I want the {l} of {t} with {c} {s}.",
        ),
        test="Give me the {l} of the {t} that have {c} {s}.",
    ),
    Intent(
        sql="SELECT {c}, AVG({n}) FROM {t} GROUP BY {c}",
        train=(
            "What is the average {n} of {t} for each {c}?",
            "For every {c}, show the mean {n} of the {t}.",
            "Give each {c} with the average {n} of its {t}.",
            "Show the average {n} of the {t} by {c}.",
        ),
        test="For each {c}, what is the average {n} of the {t}?",
    ),
    Intent(
        sql="SELECT {c}, COUNT(*) FROM {t} GROUP BY {c}",
        train=(
            "How many {t} are there for each {c}?",
            "For every {c}, count the {t}.",
            "Give each {c} with its number of {t}.",
            "Show the number of {t} by {c}.",
        ),
        test="For each {c}, what is the number of {t}?",
    ),
    Intent(
        sql="SELECT {l} FROM {t} ORDER BY {n} DESC LIMIT {k}",
        train=(
            "List the {l} of the top {k} {t} by {n}.",
            "Which {k} {t} have the highest {n}? Show the {l}, highest first.",
            "Give the {l} of the {k} {t} with the largest {n}, in descending order.",
            "Show the {l} of the first {k} {t} when sorted by {n} from high to low.",
        ),
        test="What are the {l} of the {k} {t} with the highest {n}, from high to low?",
    ),
    Intent(
        sql="SELECT {l} FROM {t} ORDER BY {n} LIMIT {k}",
        train=(
            "List the {l} of the bottom {k} {t} by {n}.",
            "Which {k} {t} have the lowest {n}? Show the {l}, lowest first.",
            "Give the {l} of the {k} {t} with the smallest {n}, in ascending order.",
            "Show the {l} of the first {k} {t} when sorted by {n} from low to high.",
        ),
        test="What are the {l} of the {k} {t} with the lowest {n}, from low to high?",
    ),
    Intent(
        sql="SELECT MAX({n}) FROM {t} WHERE {c} = '{s}'",
        train=(
            "What is the highest {n} among {t} where {c} is {s}?",
            "Give the maximum {n} of the {t} whose {c} is {s}.",
            "For {t} with {c} {s}, what is the largest {n}?",
            "Among {t} with {s} as {c}, find the highest {n}.",
        ),
        test="Among the {t} whose {c} is {s}, what is the maximum {n}?",
    ),
    Intent(
        sql="SELECT SUM({n}) FROM {t} WHERE {c} = '{s}'",
        train=(
            "What is the total {n} of {t} where {c} is {s}?",
            "Give the sum of {n} over the {t} whose {c} is {s}.",
            "For {t} with {c} {s}, add up the {n}.",
            "Among {t} with {s} as {c}, find the total {n}.",
        ),
        test="Among the {t} whose {c} is {s}, what is the total {n}?",
    ),
    Intent(
        sql="SELECT DISTINCT {c} FROM {t}",
        train=(
            "Give the distinct {c} values in {t}.",
            "Which different {c} occur among the {t}?",
            "List each {c} of the {t} once.",
            "Show every {c} found in {t}, without repeats.",
        ),
        test="List the different {c} values of the {t}.",
    ),
    Intent(
        sql="SELECT {l} FROM {t} WHERE {c} = '{s}' AND {n} > {v}",
        train=(
            "Show the {l} of {t} whose {c} is {s} and whose {n} is above {v}.",
            "Which {t} with {c} {s} have a {n} over {v}? Give the {l}.",
            "List the {l} of {t} where {c} equals {s} and {n} is greater than {v}.",
            "I want the {l} of {t} with {c} {s} and more than {v} as {n}.",
        ),
        test="Give me the {l} of the {t} that have {c} {s} and a {n} above {v}.",
    ),
    Intent(
        sql="SELECT {l} FROM {t} WHERE {n} BETWEEN {v} AND {w}",
        train=(
            "Show the {l} of {t} whose {n} is between {v} and {w}.",
            "Which {t} have a {n} from {v} to {w}? Give the {l}.",
            "List the {l} of {t} where {n} lies between {v} and {w}.",
            "I want the {l} of {t} with {n} from {v} to {w}.",
        ),
        test="Give me the {l} of the {t} that have a {n} between {v} and {w}.",
    ),
    Intent(
        sql="SELECT {l} FROM {t} WHERE {n} > (SELECT AVG({n}) FROM {t})",
        train=(
            "Show the {l} of {t} whose {n} is above the average.",
            "Which {t} have a {n} higher than the average {n}? Give the {l}.",
            "List the {l} of {t} where {n} is greater than the mean {n}.",
            "I want the {l} of {t} with a {n} over the average {n}.",
        ),
        test="Give me the {l} of the {t} that have a {n} above the average {n}.",
    ),
    Intent(
        sql="SELECT {t}.{l} FROM {t} JOIN {p} ON {t}.{j} = {p}.{j} WHERE {p}.{d} = '{u}'",
        train=(
            "Show the {l} of {t} that belong to {p} whose {d} is {u}.",
            "Which {t} are from {p} with {d} {u}? Give the {l}.",
            "List the {l} of {t} where the {d} of the {p} is {u}.",
            "I want the {l} of {t} of {p} with {u} as {d}.",
        ),
        test="Give me the {l} of the {t} that belong to {p} with {d} {u}.",
        needs_parent=True,
    ),
    Intent(
        sql="SELECT {p}.{m}, COUNT(*) FROM {t} JOIN {p} ON {t}.{j} = {p}.{j} GROUP BY {p}.{j}",
        train=(
            "How many {t} does each of the {p} have? Show the {m} and the count.",
            "For every one of the {p}, give the {m} and the number of {t}.",
            "Count the {t} of each of the {p}, by {m}.",
            "Show the {m} of all {p} with their number of {t}.",
        ),
        test="For each of the {p}, show the {m} and how many {t} there are.",
        needs_parent=True,
    ),
)


def main() -> None:
    out = Path(sys.argv[1])
    train, test = read_tables(TRAIN_TABLES), read_tables(TEST_TABLES)
    (out / "databases").mkdir(parents=True, exist_ok=True)
    for database in (*train, *test):
        write_database(database, out / "databases" / f"{database.name}.sqlite")
    parts = (
        ("train", train, NUM_TRAIN_ROWS, lambda intent: intent.train),
        ("test", test, NUM_TEST_ROWS, lambda intent: (intent.test,)),
    )
    for name, databases, num_rows, phrasings in parts:
        rows = make_rows(databases, num_rows, phrasings, random.Random(name))
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text(lines)
        print(f"{num_rows} questions about {len(databases)} databases in {out / name}.jsonl")


def read_tables(text: str) -> list[Database]:
    """The databases that the text describes, filled."""
    databases = []
    for line in text.strip().splitlines():
        main_text, _, parent_text = line.partition(" < ")
        name, parent_name = main_text.partition(":")[0], parent_text.partition(":")[0]
        rng = random.Random(name)
        if not parent_text:
            databases.append(Database(name=name, main=make_table(main_text, rng, NUM_RECORDS)))
            continue
        link, keys = f"{parent_name.removesuffix('s')}_id", list(range(1, NUM_PARENTS + 1))
        parent = make_table(parent_text, rng, NUM_PARENTS, {link: keys})
        main = make_table(main_text, rng, NUM_RECORDS, {link: rng.choices(keys, k=NUM_RECORDS)})
        databases.append(Database(name=name, main=main, parent=parent, link=link))
    return databases


def make_table(
    text: str, rng: random.Random, num_records: int, keys: dict[str, list[int]] | None = None
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
        category=next(column for column, kind in kinds.items() if kind in WORDS),
        columns=tuple(values),
        records=tuple(zip(*values.values(), strict=True)),
    )


def draw_values(kind: str, count: int, rng: random.Random) -> list[str | int]:
    """One column. Names and numbers never repeat, so that no ranking has a tie."""
    if kind in WORDS:
        return rng.choices(WORDS[kind].split(), k=count)
    if kind == "person":
        return rng.sample(
            [f"{first} {last}" for first in FIRST.split() for last in LAST.split()], count
        )
    if kind == "title":
        return rng.sample(
            [f"{word} {noun}" for word in ADJECTIVES.split() for noun in NOUNS.split()], count
        )
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
    databases: list[Database],
    num_rows: int,
    phrasings: Callable[[Intent], tuple[str, ...]],
    rng: random.Random,
) -> list[dict[str, str]]:
    """Questions of every intent in turn, none twice, in random order."""
    rows: dict[str, dict[str, str]] = {}
    for intent in itertools.cycle(INTENTS):
        if len(rows) == num_rows:
            break
        fitting = [item for item in databases if item.parent or not intent.needs_parent]
        database = rng.choice(fitting)
        fields = draw_fields(database, rng)
        answer = intent.sql.format(**fields) + ";"
        if not finds_something(database, answer):
            continue
        question = rng.choice(phrasings(intent)).format(**fields)
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


def draw_fields(database: Database, rng: random.Random) -> dict[str, object]:
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
