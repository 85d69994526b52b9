"""A small data file with one row of each kind that a reader should see: for the data tab."""

from __future__ import annotations

import json
from pathlib import Path

QUESTIONS = (
    ("How many singers are older than 20?", "SELECT count(*) FROM singer WHERE age > 20;"),
    ("List the names of all bands.", "SELECT name FROM band ORDER BY name;"),
    ("Which album sold best in 1999?", "SELECT title FROM album WHERE year = 1999 LIMIT 1;"),
)


def write_examples(path: Path, *, num_rows: int = 60, has_faults: bool = True) -> Path:
    """Questions with SQL answers of many lengths.

    Faults: line 3 has no answer, line 5 is line 2 again, and line 7 is cut off.
    """
    lines = []
    for number in range(num_rows):
        asked, answer = QUESTIONS[number % len(QUESTIONS)]
        longer = f" Leave out rows {', '.join(map(str, range(number)))}." if number else ""
        row = {"instruction": asked + longer, "output": answer}
        lines.append(json.dumps(row))
    if has_faults:
        lines[2] = json.dumps({"instruction": "Who?", "output": ""})
        lines[4] = lines[1]
        lines[6] = '{"instruction": "cut o'
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
