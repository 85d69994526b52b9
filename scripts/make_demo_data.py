"""Write a small text-to-SQL chat dataset, made from templates, with rows of very different lengths.

python scripts/make_demo_data.py demo-out/text_to_sql.jsonl
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

TABLES = {
    "orders": ["order_id", "customer_id", "placed_on", "total_eur", "status"],
    "customers": ["customer_id", "full_name", "city", "country", "joined_on"],
    "machines": ["machine_id", "rack", "gpu_model", "gpu_count", "bought_on"],
    "jobs": ["job_id", "machine_id", "owner", "started_at", "ended_at", "exit_code"],
    "papers": ["paper_id", "title", "year", "venue", "num_citations"],
}
QUESTIONS = {
    "How many rows of {table} have {column} equal to '{value}'?": (
        "SELECT COUNT(*) FROM {table} WHERE {column} = '{value}';"
    ),
    "List the ten {table} with the largest {column}, largest first.": (
        "SELECT * FROM {table} ORDER BY {column} DESC LIMIT 10;"
    ),
    "For each {column} in {table}, how many rows are there?": (
        "SELECT {column}, COUNT(*) FROM {table} GROUP BY {column};"
    ),
    "Which {column} occur in {table}, each once, in alphabetical order?": (
        "SELECT DISTINCT {column} FROM {table} ORDER BY {column};"
    ),
}
VALUES = ("open", "Lisbon", "A100", "2024-05-01", "NeurIPS", "0")
NUM_ROWS = 600


def describe_table(table: str) -> str:
    columns = ",\n  ".join(f"{column} TEXT" for column in TABLES[table])
    return f"CREATE TABLE {table} (\n  {columns}\n);"


def make_row(rng: random.Random) -> dict[str, object]:
    """One conversation; most show one or two tables, some the whole schema and more questions."""
    shown = rng.sample(sorted(TABLES), k=rng.choice([1, 1, 1, 2, 2, 5]))
    schema = "\n".join(describe_table(table) for table in shown)
    messages = [{"role": "system", "content": f"Answer with SQL for this schema:\n{schema}"}]
    for _ in range(rng.choice([1, 1, 1, 1, 2, 6])):
        table = rng.choice(shown)
        question, answer = rng.choice(sorted(QUESTIONS.items()))
        fields = {"table": table, "column": rng.choice(TABLES[table]), "value": rng.choice(VALUES)}
        messages.append({"role": "user", "content": question.format(**fields)})
        messages.append({"role": "assistant", "content": answer.format(**fields)})
    return {"messages": messages}


def main() -> None:
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = random.Random(7)
    lines = (json.dumps(make_row(rng)) for _ in range(NUM_ROWS))
    path.write_text("\n".join(lines) + "\n")
    print(f"{NUM_ROWS} conversations in {path}")


if __name__ == "__main__":
    main()
