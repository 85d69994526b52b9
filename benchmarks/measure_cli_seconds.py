"""CPU seconds of the commands that only answer, with torch installed and without.

    python benchmarks/measure_cli_seconds.py           # both environments, and the result file
    python benchmarks/measure_cli_seconds.py --check   # this environment; fails over the limit

Each figure is user and system time of a whole process, the fastest of several runs. The
environment without torch has tightfit and what it requires alone. `train --dry-run` reads a tiny
model's files and encodes 40 rows; without tokenizers it cannot, and its row is empty there. A
machine that is slow just now is allowed as much more, by a plain loop, and with --check twice that:
others may use it, and what is looked for is a command that has become slow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from _provenance import write_result
from tightfit.trace.tracer import list_versions

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "cli_seconds.json"
LIMIT_SECONDS = 1.5
LOOP = "-c 'sum(number * number for number in range(3_000_000))'"
LOOP_SECONDS = 0.25
"""What the machine of the committed result takes for it: the limit is meant there."""
NUM_RUNS = 5
LLAMA = "Llama-3.1-8B"
COMMANDS = (
    "--help",
    f"plan {LLAMA} --on 2xRTX-4090 --seq-len 4096",
    "plan Llama-2-70b-hf --on 8xA100-80GB --method full",
    "plan gpt2 --on T4",
    "plan Qwen2.5-7B --on RTX-4090 --data rows.jsonl",
    "plan job.yaml",
    "plan Llama-3.1-70B --on '2n x 8xA100-80GB' --network 100Gb/s",
    f"plan {LLAMA} --on 4xV100-32GB --explain",
    "plan Mixtral-8x7B --on 8xH100-80GB --top 10",
    "plan falcon-7b --on L4 --json",
    f"plan {LLAMA} --buy",
    f"estimate {LLAMA} --on 4xV100-32GB",
    "train model --data rows.jsonl --on cpu --dry-run",
)
RECIPE = f"model: {LLAMA}\non: 4xA100-40GB\nmethod: lora\nseq_len: 4096\n"
WORDS = ("add", "and", "that", "is", *map(str, range(64)))
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "torch_dtype": "float32", "tie_word_embeddings": True,
    "eos_token_id": 2, "pad_token_id": 3, "bos_token_id": 1,
}  # fmt: skip


def write_job(folder: Path) -> None:
    """Rows, a recipe, and a model of a few thousand values whose tokenizer knows single words."""
    rows = ({"instruction": f"add {i} and 1", "output": f"that is {i + 1}"} for i in range(40))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(RECIPE)
    model = folder / "model"
    model.mkdir()
    known = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "<pad>", *WORDS])}
    special = [
        {"id": known[word], "content": word, "special": True, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}
        for word in ("<s>", "</s>", "<pad>")
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None,
        "decoder": None, "model": {"type": "WordLevel", "vocab": known, "unk_token": "<unk>"},
    }  # fmt: skip
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s>{% endfor %}"
    settings = {"eos_token": "</s>", "pad_token": "<pad>", "chat_template": template}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "config.json").write_text(json.dumps(CONFIG))
    head = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (model / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))


def measure(python: Path, words: str, folder: Path, num_runs: int) -> float | None:
    """The fastest run's CPU seconds; None where the command needs what is not installed."""
    seconds = []
    for _ in range(num_runs + 1):  # the first writes bytecode
        environment = {**os.environ, "TIGHTFIT_CACHE": str(folder / "cache")}
        process = subprocess.Popen(
            ["sh", "-c", f"exec '{python}' {words}"],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode and "which is not installed" in said:
            return None
        if process.returncode:
            raise SystemExit(f"`python {words}` ended with {process.returncode}: {said}")
        seconds.append(used.ru_utime + used.ru_stime)
    return round(min(seconds[1:]), 2)


def make_bare(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    quiet = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([str(python), "-m", "pip", "install", *quiet, str(ROOT)], check=True)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the limit alone")
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--bare", type=Path, help="a Python without torch; default: one is made")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tightfit-cli-") as name:
        folder = Path(name)
        write_job(folder)
        pythons = {"with_torch": Path(sys.executable)}
        if not arguments.check:
            pythons["without_torch"] = arguments.bare or make_bare(folder / "bare")
        for command in COMMANDS:
            row: dict[str, Any] = {"command": command}
            for kind, python in pythons.items():
                row[kind] = measure(python, f"-m tightfit {command}", folder, arguments.runs)
            rows.append(row)
            print("  ".join(f"{row[kind] or '-':>5}" for kind in pythons), command, flush=True)
        loop = measure(Path(sys.executable), LOOP, folder, arguments.runs) or 0.0
    if not arguments.check:
        write_result(
            RESULT,
            "benchmarks/measure_cli_seconds.py",
            num_cores=len(os.sched_getaffinity(0)),
            versions=list_versions(),
            limit_seconds=LIMIT_SECONDS,
            loop_seconds=loop,
            rows=rows,
        )
    limit = LIMIT_SECONDS * max(1.0, loop / LOOP_SECONDS) * (2 if arguments.check else 1)
    slow = [row["command"] for row in rows for kind in pythons if (row[kind] or 0) > limit]
    for command in dict.fromkeys(slow):
        print(f"error: over {limit:.2f} s of CPU: tightfit {command}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
