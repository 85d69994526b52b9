"""Ask a server the test questions with OpenAI's client, and count the right calls.

    tightfit serve demo-out/runs/tool_calls --port 8000
    python examples/tool_calls/ask.py demo-out/tool_calls/test.jsonl http://127.0.0.1:8000/v1

Half of the questions are asked as streams. `--json` prints the counts alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("url")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    client = OpenAI(base_url=options.url, api_key="none", timeout=600)
    model = client.models.list().data[0].id
    counts = {"questions": 0, "right_calls": 0, "right_names": 0, "right_refusals": 0}
    counts |= {"calls_asked": 0, "refusals_asked": 0}
    for line in options.rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        *asked, wanted = row["messages"]
        is_stream = counts["questions"] % 2 == 1
        settings = {"model": model, "temperature": 0, "max_tokens": 80, "tools": row["tools"]}
        calls = ask(client, asked, is_stream=is_stream, **settings)
        gold = [read(call["function"]) for call in wanted.get("tool_calls", ())]
        counts["questions"] += 1
        counts["calls_asked" if gold else "refusals_asked"] += 1
        if not gold:
            counts["right_refusals"] += not calls
        else:
            counts["right_calls"] += calls == gold
            counts["right_names"] += [name for name, _ in calls] == [name for name, _ in gold]
        if not options.json:
            mark = "right" if calls == gold else "WRONG"
            print(f"{mark}  {asked[-1]['content']}\n       {calls or 'no call'}")
    print(json.dumps(counts))


def ask(client: OpenAI, messages: Any, *, is_stream: bool, **settings: Any) -> list[Any]:
    """Names and arguments of the calls that the model makes."""
    given = {"messages": messages, **settings}
    if not is_stream:
        answer = client.chat.completions.create(**given)
        called = answer.choices[0].message.tool_calls or []
    else:
        chunks = client.chat.completions.create(**given, stream=True)
        called = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    return [read(call.function.model_dump()) for call in called]


def read(function: dict[str, str]) -> tuple[str, Any]:
    """Name and arguments."""
    return function["name"], json.loads(function["arguments"])


if __name__ == "__main__":
    main()
