"""Print rows of an evaluation, spread evenly over it: the question, and each model's answer.

python examples/text_to_sql/show_answers.py RUN/eval/test-answers.jsonl 5
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 92


def main() -> None:
    path, num_rows = Path(sys.argv[1]), int(sys.argv[2])
    console = Console(highlight=False, soft_wrap=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[:: max(1, len(rows) // num_rows)][:num_rows]:
        console.print(Text("\n" + find_question(row["prompt"]), style="bold"))
        widest = max(map(len, row["answers"]))
        for who, answer in row["answers"].items():
            is_right = answer["scores"]["execution"] == 1
            console.print(render_answer(who.ljust(widest), answer["text"], is_right=is_right))


def find_question(prompt: str) -> str:
    """The prompt is instruction, question and tables, a blank line between them."""
    return prompt.split("\n\n")[1]


def render_answer(who: str, text: str, *, is_right: bool) -> Text:
    """One line, the answer cut where it rambles."""
    words = " ".join(text.split())
    words = words if len(words) <= WIDTH else f"{words[: WIDTH - 4]} ..."
    return Text(
        f"  {'right' if is_right else 'wrong'}  {who}  {words}",
        style="green" if is_right else "red",
    )


if __name__ == "__main__":
    main()
