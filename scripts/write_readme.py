"""Fill README.md with what the commands in it really print, and with measured figures.

    python scripts/write_readme.py            # rewrite
    python scripts/write_readme.py --check    # fail if anything is out of date

A fenced `console` block is one `$ command` and its output; the table between the
`figures` marks comes from `benchmarks/results/`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = 100
BLOCK = re.compile(r"```console\n\$ (.+)\n(?:.*\n)*?```\n")
FIGURES = re.compile(r"(<!-- figures -->\n)(?:.*\n)*?(<!-- end of figures -->\n)")


def run_block(match: re.Match[str]) -> str:
    command = match.group(1)
    words = shlex.split(command)
    words[0] = str(Path(sys.executable).with_name(words[0]))
    environment = os.environ | {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    output = (done.stdout + done.stderr).rstrip()
    output = "\n".join(line.rstrip() for line in output.splitlines())
    return f"```console\n$ {command}\n{output}\n```\n"


def read(name: str) -> dict[str, dict[str, float]]:
    content: dict[str, dict[str, float]] = json.loads((RESULTS / name).read_text())
    return content


def make_figures() -> str:
    measured = read("h200_memory.json")["total"]
    published = read("published_memory.json")["total"]
    time = json.loads((RESULTS / "published_time.json").read_text())["groups"]
    rows = [
        ("Peak memory, our own steps on one H200", measured["cases"], measured, "h200_memory"),
        (
            "Peak memory, published by others",
            published["memory_rows"],
            published,
            "published_memory",
        ),
        (
            "Tokens/s, our own steps on one H200",
            time["measured steps, H200"]["jobs"],
            time["measured steps, H200"],
            "published_time",
        ),
        (
            "Tokens/s, published by others",
            time["all published"]["jobs"],
            time["all published"],
            "published_time",
        ),
    ]
    lines = [
        "| predicted against | jobs | median error | 90th percentile | file |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {count:.0f} | {row['median_error']:.1%} | {row['p90_error']:.1%} "
        f"| `benchmarks/results/{file}.json` |"
        for name, count, row, file in rows
    ]
    lines.append("")
    lines.append(
        f"Of {published['outcome_rows']:.0f} published runs and failures, "
        f"{published['classified_right']:.1%} are classified right "
        f"({published['oom_rows']:.0f} of them were out of memory)."
    )
    return "\n".join(lines) + "\n"


def main() -> int:
    before = README.read_text()
    after = BLOCK.sub(run_block, before)
    after = FIGURES.sub(lambda match: match.group(1) + make_figures() + match.group(2), after)
    if "--check" in sys.argv:
        if after != before:
            print("README.md is out of date: run python scripts/write_readme.py")
        return int(after != before)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
