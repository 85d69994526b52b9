"""LoRA of a small model on real datasets: eval loss, ROUGE and execution accuracy before and after.

python benchmarks/real_data.py --model SmolLM2-135M-Instruct.gguf --data DATA --out RESULT.json

DATA holds alpaca/random_9k.json, samsum/samsum_{train_4000,test}.jsonl and
text2sql/spider_{train_3000,dev_create_context}.jsonl: Stanford Alpaca (CC BY-NC 4.0), SAMSum
(CC BY-NC-ND 4.0) and Spider (CC BY-SA 4.0). No text of theirs is kept here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _provenance import provenance

JOBS: dict[str, dict[str, Any]] = {
    "alpaca": {
        "recipe": {"data": "alpaca/random_9k.json", "eval_fraction": 0.05, "epochs": 1},
        "score": None,
    },
    "samsum": {
        "recipe": {
            "data": "samsum/samsum_train_4000.jsonl",
            "eval_fraction": 0.05,
            "epochs": 2,
        },
        "score": ["samsum/samsum_test.jsonl", "--limit", "300"],
    },
    "spider": {
        "recipe": {
            "data": "text2sql/spider_train_3000.jsonl",
            "eval_fraction": 0.05,
            "epochs": 3,
            "seq_len": 2048,
        },
        "score": ["text2sql/spider_dev_create_context.jsonl", "--limit", "200", "--batch", "64"],
    },
}
SHARED: dict[str, Any] = {
    "method": "lora",
    "seq_len": 1024,
    "effective_batch": 16,
    "learning_rate": 5e-4,
    "lora": {"rank": 16},
    "log_to": [],
}


def call(*words: str) -> dict[str, Any]:
    """One tightfit command; its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", *words, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_job(name: str, model: str, data: Path, work: Path) -> dict[str, Any]:
    job = JOBS[name]
    recipe = SHARED | job["recipe"]
    path = work / f"{name}.yaml"
    run = work / "runs" / name
    whole = recipe | {
        "model": str(Path(model).absolute()),
        "on": "here",
        "data": str((data / recipe["data"]).absolute()),
        "output": str(run),
    }
    path.write_text(json.dumps(whole))
    prepared = call("prepare", str(path))["report"]
    trained = call("train", str(path))["report"]
    found: dict[str, Any] = {"recipe": recipe}
    found["prepared"] = {
        key: prepared[key]
        for key in ("num_read", "num_truncated", "num_dropped", "num_duplicates", "template")
    } | {"train_rows": prepared["train"]["num_rows"], "formats": prepared["sources"][0]["format"]}
    found["trained"] = trained
    if job["score"] is not None:
        file, *more = job["score"]
        scores = call("eval", str(run), "--data", str(data / file), *more)
        # Where files lay on the machine that ran it says nothing.
        lost = ("answers_path", "model", "base_model", "data")
        found["scores"] = {key: value for key, value in scores.items() if key not in lost}
    print(name, json.dumps(found.get("scores", trained))[:1500], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    about = provenance("benchmarks/real_data.py") | {
        package: version(package) for package in ("torch", "transformers", "peft")
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in JOBS:
            if not options.only or name in options.only.split(","):
                results[name] = run_job(name, options.model, options.data, Path(folder))
                options.out.write_text(json.dumps({"about": about, "jobs": results}, indent=1))


if __name__ == "__main__":
    main()
