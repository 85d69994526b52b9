"""The demo from start to end: seconds of each stage, and right answers before and after.

python benchmarks/measure_demo.py --out benchmarks/results/demo.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "demo-out"
RUN = OUT / "runs" / "text_to_sql"
REPORTED = (
    "strategy",
    "num_trainable_params",
    "num_steps",
    "num_epochs",
    "num_tokens",
    "num_trained_tokens",
    "total_seconds",
    "tokens_per_second",
    "compared",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    about = provenance("benchmarks/measure_demo.py") | describe_machine()
    started = time.monotonic()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    demo = ROOT / "scripts" / "demo.sh"
    subprocess.run(["bash", demo], check=True, env=os.environ | {"PATH": path})
    report = json.loads((RUN / "report.json").read_text())
    scores = json.loads((RUN / "eval" / "test.json").read_text())
    stages = read_stages((OUT / "stages.tsv").read_text())
    result = {
        "about": about,
        "seconds": round(time.monotonic() - started),
        "cpu_seconds": round(sum(stage["cpu_seconds"] for stage in stages)),
        "stages": stages,
        "trained": {key: report[key] for key in REPORTED},
        "test_sha256": digest(OUT / "text_to_sql" / "test.jsonl"),
        "num_test_rows": scores["num_rows"],
        "scores": next(m["scores"] for m in scores["metrics"] if m["name"] == "execution"),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def read_stages(text: str) -> list[dict[str, Any]]:
    """Seconds of each stage; the file's CPU times are those of all stages so far."""
    stages: list[dict[str, Any]] = []
    total = 0.0
    for line in text.splitlines():
        name, seconds, cpu = line.split("\t")
        so_far = sum(map(read_minutes, cpu.split()))
        stages.append(
            {"name": name, "seconds": int(seconds), "cpu_seconds": round(so_far - total, 1)}
        )
        total = so_far
    return stages


def read_minutes(text: str) -> float:
    """`1m2.5s`, as the shell's `times` writes it."""
    minutes, seconds = text.removesuffix("s").split("m")
    return 60 * int(minutes) + float(seconds)


def describe_machine() -> dict[str, str]:
    """The CPU as the kernel names it, how busy it was before, and what the figures depend on."""
    name, info = platform.machine(), Path("/proc/cpuinfo")
    if info.is_file():
        named = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = named[0].partition(": ")[2] if named else name
    packages = ("torch", "transformers", "peft")
    return {
        "cpu": f"{name}, {os.cpu_count()} cores",
        "load_before": f"{os.getloadavg()[0]:.1f}",
        **{package: version(package) for package in packages},
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
