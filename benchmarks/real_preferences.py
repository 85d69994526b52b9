"""Preferences on real data: reward accuracy on held-back pairs, before and after.

python benchmarks/real_preferences.py --model SmolLM2-135M-Instruct.gguf --data DATA --out OUT.json

DATA holds alpaca/random_9k.json (Stanford Alpaca, CC BY-NC 4.0). A pair is a row's own answer and,
as the rejected one, the answer of another row. No text of it is kept here.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _provenance import write_result

MOST_CHARS = 160
"""Of an instruction and of an answer: a step then takes a CPU seconds."""
NUM_PAIRS = 400
SHARED: dict[str, Any] = {
    "on": "cpu",
    "method": "lora",
    "seq_len": 128,
    "effective_batch": 8,
    "eval_fraction": 0.12,
    "learning_rate": 2e-4,
    "warmup_fraction": 0.1,
    "log_to": [],
}


def make_pairs(data: Path) -> list[dict[str, str]]:
    rows = [
        row
        for row in json.loads((data / "alpaca" / "random_9k.json").read_text())
        if not row.get("input")
        and len(row["instruction"]) <= MOST_CHARS
        and 20 <= len(row["output"]) <= MOST_CHARS
    ]
    random.Random(0).shuffle(rows)
    rows = rows[:NUM_PAIRS]
    others = rows[1:] + rows[:1]
    return [
        {"prompt": row["instruction"], "chosen": row["output"], "rejected": other["output"]}
        for row, other in zip(rows, others, strict=True)
        if row["output"] != other["output"]
    ]


def train(model: str, pairs: Path, folder: Path, objective: str, steps: int) -> dict[str, Any]:
    recipe = folder / f"{objective}.yaml"
    stated = SHARED | {
        "model": model,
        "data": str(pairs),
        "objective": objective,
        "max_steps": steps,
        "eval_every": steps,
        "output": str(folder / objective),
    }
    recipe.write_text(json.dumps(stated))
    command = [sys.executable, "-m", "tightfit", "train", str(recipe), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    lines = (folder / objective / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    evals = [record for record in records if record["kind"] == "eval"]
    steps_taken = [record for record in records if record["kind"] == "step"]
    return {
        "objective": objective,
        "steps": len(steps_taken),
        "before": {"loss": evals[0]["loss"], **evals[0]["preference"]},
        "after": {"loss": evals[-1]["loss"], **evals[-1]["preference"]},
        "train_margins": [round(one["preference"]["reward_margin"], 4) for one in steps_taken],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--objectives", default="dpo,simpo")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs = folder / "pairs.jsonl"
        rows = make_pairs(options.data)
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        for objective in options.objectives.split(","):
            runs.append(train(options.model, pairs, folder, objective, options.steps))
            write_result(
                options.out,
                "benchmarks/real_preferences.py",
                model=Path(options.model).name,
                num_pairs=len(rows),
                job=SHARED,
                runs=runs,
            )


if __name__ == "__main__":
    main()
