"""Whole training runs of 7B shapes from recipes, through the `tightfit train` command.

python benchmarks/measure_training.py --out benchmarks/results/h200_training.json

Weights are drawn, not read: memory and time do not depend on their values. The tokenizer has one
token per word, so that the rows have known lengths. What was planned stands beside what the run
measured; both come from the run's own report.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _provenance import provenance

CATALOGUE = Path(__file__).resolve().parents[1] / "src" / "tightfit" / "catalogue" / "models"
LLAMA_2 = "meta-llama--Llama-2-7b-hf"
NUM_STEPS = 12
SEQ_LEN = 2048

JOBS: dict[str, dict[str, Any]] = {
    "qlora": {"method": "qlora"},
    "lora": {"method": "lora"},
    "full": {"method": "full", "keep_checkpoints": 0},
    "lora-packed-short-rows": {"method": "lora", "rows": "short", "packing": True},
    "lora-fp16-as-on-older-cards": {
        "method": "lora",
        "strategy": {
            "weights": "fp16",
            "compute": "fp16",
            "adapter_dtype": "fp32",
            "autocast": True,
            "repeat_keys": True,
            "loss": "chunked",
            "fused_kernels": False,
            "compile": False,
        },
    },
    "lora-int8": {"method": "lora", "strategy": {"weights": "int8"}},
}


def read_catalogue(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CATALOGUE / f"{name}.json").read_text())
    return config


def count_words(config: dict[str, Any]) -> int:
    """Of the text model, where there is another one beside it."""
    return int(config.get("text_config", config)["vocab_size"])


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """A config and a tokenizer with as many words as the model has tokens."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", "<pad>"]
    words += [f"w{number}" for number in range(count_words(config) - len(words))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(words[:4])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named})
    )


def write_rows(path: Path, *, kind: str, num_rows: int) -> None:
    """Long rows fill a sequence; short ones have the spread of instruction data."""
    rng = random.Random(0)
    with path.open("w") as stream:
        for _ in range(num_rows):
            length = SEQ_LEN - 2 if kind == "long" else min(1500, int(rng.lognormvariate(4.4, 0.8)))
            words = " ".join(f"w{rng.randrange(30_000)}" for _ in range(max(8, length)))
            stream.write(json.dumps({"text": words}) + "\n")


def run_job(name: str, job: dict[str, Any], work: Path) -> dict[str, Any]:
    """One `tightfit train`; its report, or what it said when it failed."""
    kind = job.get("rows", "long")
    data = work / f"{kind}.jsonl"
    if not data.exists():
        write_rows(data, kind=kind, num_rows=400 if kind == "long" else 8000)
    recipe = {
        "model": str(work / "model"),
        "data": str(data),
        "on": "here",
        "seq_len": SEQ_LEN,
        "max_steps": NUM_STEPS,
        "effective_batch": 16,
        "random_weights": True,
        "log_to": [],
        "output": str(work / "runs" / name),
        **{key: value for key, value in job.items() if key != "rows"},
    }
    path = work / f"{name}.yaml"
    path.write_text(json.dumps(recipe))
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", "train", str(path), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    print(name, done.returncode, done.stderr[-2000:], flush=True)
    stated = {key: value for key, value in recipe.items() if key not in ("model", "data", "output")}
    found: dict[str, Any] = {"recipe": stated | {"model": LLAMA_2}, "exit_code": done.returncode}
    run = work / "runs" / name
    if done.returncode:
        log = run / "log.txt"
        found["said"] = done.stderr[-1500:]
        print(log.read_text()[-4000:] if log.exists() else done.stdout[-2000:], flush=True)
    else:
        found["report"] = json.loads((run / "report.json").read_text())
        found["strategy"] = json.loads((run / "plan.json").read_text())["strategy"]
        for row in found["report"]["compared"]:
            print("  ", row, flush=True)
    shutil.rmtree(run, ignore_errors=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of jobs, separated by commas")
    options = parser.parse_args()
    names = [name for name in JOBS if not options.only or name in options.only.split(",")]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_model(work / "model", read_catalogue(LLAMA_2))
        for name in names:
            results[name] = run_job(name, JOBS[name], work)
            document = {
                "about": provenance("benchmarks/measure_training.py")
                | {package: version(package) for package in ("torch", "transformers", "peft")},
                "jobs": results,
            }
            options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
