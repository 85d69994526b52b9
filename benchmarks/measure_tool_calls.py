"""The demo of tool calls: right calls of base and tuned model, and of the served one.

python benchmarks/measure_tool_calls.py --out benchmarks/results/tool_calls.json

Trains only where `demo-out/runs/tool_calls` holds no finished run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from _provenance import write_result
from _served import served

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = Path("examples") / "tool_calls"
OUT = Path("demo-out")
RUN = OUT / "runs" / "tool_calls"
TEST = OUT / "tool_calls" / "test.jsonl"
REPORTED = ("num_trainable_params", "num_steps", "num_tokens", "num_trained_tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out.resolve()
    os.chdir(ROOT)
    run("scripts/fetch_demo_model.py", OUT / "SmolLM2-135M-Instruct.gguf")
    run(EXAMPLE / "make_data.py", OUT / "tool_calls")
    if not (RUN / "adapter").is_dir():
        run("-m", "tightfit", "train", EXAMPLE / "recipe.yaml")
    run("-m", "tightfit", "eval", RUN, "--data", TEST, "--metric", "tool-calls", "--batch", 20)
    scores = json.loads((RUN / "eval" / "test.json").read_text())
    with served(RUN) as url:
        counted = run(EXAMPLE / "ask.py", TEST, url, "--json")
    report = json.loads((RUN / "report.json").read_text())
    write_result(
        out,
        "benchmarks/measure_tool_calls.py",
        model="SmolLM2-135M-Instruct",
        trained={key: report[key] for key in REPORTED},
        test_sha256=hashlib.sha256(TEST.read_bytes()).hexdigest(),
        num_test_rows=scores["num_rows"],
        scores={metric["name"]: metric["scores"] for metric in scores["metrics"]},
        served=json.loads(counted.splitlines()[-1]),
    )


def run(*words: object) -> str:
    """A Python command's stdout, which is shown too."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout, flush=True)
    return done.stdout


if __name__ == "__main__":
    main()
