"""Fill README.md with what the commands in it really print, and with measured figures.

    python scripts/write_readme.py            # rewrite
    python scripts/write_readme.py --check    # fail if anything is out of date

A fenced `console` block is one `$ command` and its output; the tables between the
`figures` marks come from `benchmarks/results/`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
TRAINING = RESULTS / "h200_training.json"
"""Whole runs, measured by benchmarks/measure_training.py."""
GENERATION = RESULTS / "h200_generation.json"
"""`tightfit generate` and its peers, measured by benchmarks/measure_generation.py."""
ARTEFACTS = RESULTS / "artefacts.json"
"""What each step after training loses, measured by benchmarks/measure_artefacts.py."""
MEMORY, SPEED = "GPU memory, reserved", "tokens per second"
COLUMNS = 100
BLOCK = re.compile(r"```console\n\$ (.+)\n(?:.*\n)*?```\n")
FIGURES = re.compile(r"(<!-- figures -->\n)(?:.*\n)*?(<!-- end of figures -->\n)")
AFTER = re.compile(r"(<!-- after -->\n)(?:.*\n)*?(<!-- end of after -->\n)")


def run_block(match: re.Match[str]) -> str:
    command = match.group(1)
    words = shlex.split(command)
    words[0] = str(Path(sys.executable).with_name(words[0]))
    environment = os.environ | {"COLUMNS": str(COLUMNS), "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    environment["TIGHTFIT_TRACE"] = "0"  # what planning says without torch
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
    lines += ["", make_traced_figures(read("h200_trace.json")["total"])]
    if TRAINING.exists():
        lines += ["", *make_training_figures(json.loads(TRAINING.read_text()))]
    return "\n".join(lines) + "\n"


def make_traced_figures(total: dict[str, float]) -> str:
    return (
        "[Traced](docs/tracing.md), where torch is installed: peak allocated memory of "
        f"{total['jobs']:.0f} jobs that were not looked at while the tracer was built is off by "
        f"{total['mean_allocated_error']:.2%} in the mean and {total['worst_allocated_error']:.1%} "
        "at worst; the smallest memory in which they survive on the card by "
        f"{total['mean_capacity_error']:.2%}, and never more than "
        f"{total['worst_capacity_error_low']:.1%} too low. On a calibrated card the time per step "
        f"of {total['timed_jobs']:.0f} others is within 10% for "
        f"{1 - total['far_seconds_error_fraction']:.0%} of them, "
        f"{total['median_seconds_error']:.1%} in the median and "
        f"{total['worst_seconds_error']:.0%} at worst (`benchmarks/results/h200_trace.json`)."
    )


def make_training_figures(document: dict[str, Any]) -> list[str]:
    """One row per run that finished; those that did not are named below."""
    jobs: dict[str, dict[str, Any]] = document["jobs"]
    done = {name: job["report"] for name, job in jobs.items() if job["exit_code"] == 0}
    lines = [
        "Whole runs of a 7B shape through `tightfit train` on one H200, predicted against measured "
        f"(`benchmarks/results/{TRAINING.name}`):",
        "",
        "| run | peak memory | predicted off by | tokens/s | predicted off by |",
        "|---|---|---|---|---|",
    ]
    for name, report in done.items():
        rows = {row["name"]: row for row in report["compared"]}
        memory, speed = rows[MEMORY], rows[SPEED]
        lines.append(
            f"| {name} | {memory['measured'] / 2**30:.1f} GiB | {memory['error_percent']:+.1f}% "
            f"| {speed['measured']:,.0f} | {speed['error_percent']:+.1f}% |"
        )
    failed = [name for name in jobs if name not in done]
    return lines + (["", f"Did not finish: {', '.join(failed)}."] if failed else [])


def make_after_figures() -> str:
    """What is lost by each step, and what generation reaches."""
    chain = make_chain_figures(json.loads(ARTEFACTS.read_text())) if ARTEFACTS.exists() else []
    return "\n".join([*chain, *make_generation_figures()]) + "\n"


def make_chain_figures(chain: dict[str, Any]) -> list[str]:
    lines = [
        f"SmolLM2-135M as `make demo` tunes it, merged, then stored otherwise; "
        f"{chain['chain']['rows'][0]['num_positions']:,} tokens of wikitext-2 "
        f"(`benchmarks/results/{ARTEFACTS.name}`):",
        "",
        "| stored as | size | same top token | KL | perplexity | SQL answers right |",
        "|---|---|---|---|---|---|",
    ]
    right = next(m for m in chain["task"]["metrics"] if m["name"] == "execution")["scores"]
    lines.append(f"| adapter, fp32 | | | | | {right['tuned']['value']:.0%} |")
    rows = [*chain["merge"]["rows"], *chain["chain"]["rows"]]
    for row in rows:
        name = Path(row["name"]).name.removesuffix(".gguf")
        change = row["perplexity"] / row["reference_perplexity"] - 1
        lines.append(
            f"| {name} | {row['size_bytes'] / 2**20:,.0f} MiB | {row['top1_fraction']:.1%} "
            f"| {row['mean_kl']:.2g} | {change:+.1%} | {right[name]['value']:.0%} |"
        )
    return [*lines, ""]


def make_generation_figures() -> list[str]:
    cases = json.loads(GENERATION.read_text())["cases"]
    lines = [
        "`tightfit generate` of a 7B shape in bf16 on one H200, beside the better of transformers' "
        f"own batch tools in the same call (`benchmarks/results/{GENERATION.name}`):",
        "",
        "| answers at a time | new tokens/s | of the peer | memory | predicted off by "
        "| bandwidth at its peak, of a copy's |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases.values():
        ours = case["ours"]
        memory = ours["memory"]
        off = memory["predicted_bytes"] / memory["device_bytes"] - 1
        peer = f"{case['of_best_peer']:.1f}x" if "of_best_peer" in case else case["weights"]
        lines.append(
            f"| {case['parallel']} | {ours['rates']['new_per_second']:,.0f} | {peer} "
            f"| {memory['device_bytes'] / 2**30:.1f} GiB | {off:+.1%} "
            f"| {ours['traffic']['peak_fraction']:.0%} |"
        )
    return lines


def main() -> int:
    is_check = "--check" in sys.argv
    if not TRAINING.exists():
        print(
            f"error: {TRAINING.relative_to(ROOT)} is missing, so README.md has no training figures"
            "\n  try: python benchmarks/measure_training.py on a GPU, or git checkout that file",
            file=sys.stderr,
        )
        if is_check:
            return 1
    before = README.read_text()
    after = BLOCK.sub(run_block, before)
    after = FIGURES.sub(lambda match: match.group(1) + make_figures() + match.group(2), after)
    after = AFTER.sub(lambda match: match.group(1) + make_after_figures() + match.group(2), after)
    if is_check:
        if after != before:
            print("README.md is out of date: run python scripts/write_readme.py")
        return int(after != before)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
