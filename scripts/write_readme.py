"""Fill README.md and docs with what the commands in them print, and with measured figures.

    python scripts/write_readme.py            # rewrite
    python scripts/write_readme.py --check    # fail if anything is out of date

A fenced `console` block is one `$ command` and its output; the tables between two marks
(`<!-- figures -->`, `<!-- end of figures -->`) come from `benchmarks/results/`.
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
PAGES = [
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("accuracy", "after-training", "reliability", "speed")
    ),
]
RESULTS = ROOT / "benchmarks" / "results"
TRAINING = RESULTS / "h200_training.json"
"""Whole runs, measured by benchmarks/measure_training.py."""
DECODING = RESULTS / "h200_decoding.json"
"""The transformers engine beside `generate`, measured by benchmarks/measure_decoding.py."""
ARTEFACTS = RESULTS / "artefacts.json"
"""What each step after training loses, measured by benchmarks/measure_artefacts.py."""
CLI_SECONDS = RESULTS / "cli_seconds.json"
"""Commands that only answer, measured by benchmarks/measure_cli_seconds.py."""
MEMORY, SPEED = "GPU memory, reserved", "tokens per second"
COLUMNS = 100
BLOCK = re.compile(r"```console\n\$ (.+)\n(?:.*\n)*?```\n")
MARKED = re.compile(r"(<!-- (\w+) -->\n)(?:.*\n)*?(<!-- end of \2 -->\n)")


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
        f"({published['oom_rows']:.0f} of them were out of memory; "
        f"{published['false_fits'] or 'none'} of those is said to fit)."
    )
    total = read("h200_trace.json")["total"]
    lines += [
        "",
        f"With `--trace`, peak memory is off by "
        f"{total['mean_allocated_error']:.2%} in the mean over "
        f"{total['jobs']:.0f} jobs that were held out.",
    ]
    return "\n".join(lines) + "\n"


def make_traced_figures() -> str:
    total = read("h200_trace.json")["total"]
    return (
        "[Tracing](tracing.md) needs torch. Peak allocated memory of "
        f"{total['jobs']:.0f} jobs that were held out while the tracer was built is off by "
        f"{total['mean_allocated_error']:.2%} in the mean and {total['worst_allocated_error']:.1%} "
        "at worst; the smallest memory in which they run on the card by "
        f"{total['mean_capacity_error']:.2%}, and never more than "
        f"{total['worst_capacity_error_low']:.1%} too low. On a calibrated card the time per step "
        f"of {total['timed_jobs']:.0f} others is within 10% for "
        f"{1 - total['far_seconds_error_fraction']:.0%} of them, "
        f"{total['median_seconds_error']:.1%} in the median and "
        f"{total['worst_seconds_error']:.0%} at worst (`benchmarks/results/h200_trace.json`).\n"
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
    """What each format loses, and how fast `generate` is."""
    chain = make_chain_figures(json.loads(ARTEFACTS.read_text()))
    return "\n".join([*chain, *make_generation_figures()]) + "\n"


def make_chain_figures(chain: dict[str, Any]) -> list[str]:
    lines = [
        f"SmolLM2-135M tuned on text-to-SQL, merged, then in other formats; "
        f"{chain['chain']['rows'][0]['num_positions']:,} tokens of wikitext-2 "
        f"(`benchmarks/results/{ARTEFACTS.name}`):",
        "",
        "| format | size | same top token | KL | perplexity | SQL answers right |",
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
    document = json.loads(DECODING.read_text())
    lines = [
        f"The transformers engine on a 7B shape, {document['prompt_tokens']} tokens a prompt, on "
        f"one {document['about']['gpu']}, beside transformers' `generate` with its default cache "
        f"in the same call (`benchmarks/results/{DECODING.name}`):",
        "",
        "| weights | answers at a time | new tokens/s | `generate`'s | first token of the first "
        "answer, all prompts at once |",
        "|---|---|---|---|---|",
    ]
    for kind, found in document["results"].items():
        for count, case in found["cases"].items():
            rate = found["peer"].get(count, {}).get("new_tokens_per_second")
            peer = f"{rate:,.0f}" if rate else ""
            lines.append(
                f"| {kind} | {count} | {case['new_tokens_per_second']:,.0f} | {peer} "
                f"| {case['first_token_seconds'] * 1000:,.0f} ms |"
            )
    cold = document["results"]["bf16"]["warm_seconds"]
    again = document["second_start_seconds"]
    lines += [
        "",
        f"From a loaded model to the first token it took {again:.1f} s where an earlier start had "
        f"compiled the kernels, and {cold:.0f} s where none had. `generate` launches each "
        "kernel from Python and is bound by the host; transformers' compiled and continuous "
        "batching were not measured in this call.",
    ]
    return lines


def make_cli_figures() -> str:
    result = json.loads(CLI_SECONDS.read_text())
    lines = [
        f"CPU seconds of whole processes, user and system, the fastest of several runs on "
        f"{result['num_cores']} cores (`benchmarks/results/{CLI_SECONDS.name}`; "
        f"`benchmarks/measure_cli_seconds.py --check` fails above {result['limit_seconds']} s):",
        "",
        "| `tightfit ...` | with torch installed | without |",
        "|---|---|---|",
    ]
    for row in result["rows"]:
        bare = "needs tokenizers" if row["without_torch"] is None else f"{row['without_torch']} s"
        lines.append(f"| `{row['command']}` | {row['with_torch']} s | {bare} |")
    return "\n".join(lines) + "\n"


def make_kill_figures() -> str:
    lines = [
        "| verb | moments | still running | all processes | went on | failed |",
        "|---|---|---|---|---|---|",
    ]
    for row in json.loads((RESULTS / "kills.json").read_text())["rows"]:
        counts = (row["trials"], row["running"], row["all_killed"], row["went_on"])
        counted = " | ".join(map(str, counts))
        lines.append(f"| {row['verb']} | {counted} | {len(row['failures'])} |")
    return "\n".join(lines) + "\n"


def make_fault_figures() -> str:
    """A row for each verb; of each fault trials, and those that ended with an error."""
    rows = json.loads((RESULTS / "faults.json").read_text())["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    lines = [f"| verb | {' | '.join(kinds)} | failed |", "|---|" + "---|" * (len(kinds) + 1)]
    for verb in dict.fromkeys(row["verb"] for row in rows):
        of = {row["kind"]: row for row in rows if row["verb"] == verb}
        cells = [
            f"{of[kind]['refused']} of {of[kind]['trials']} refused" if kind in of else ""
            for kind in kinds
        ]
        num_failed = sum(len(row["failures"]) for row in of.values())
        lines.append(f"| {verb} | {' | '.join(cells)} | {num_failed} |")
    return "\n".join(lines) + "\n"


def make_fuzz_figures() -> str:
    lines = ["| kind | cases | refused | accepted | failed |", "|---|---|---|---|---|"]
    for row in json.loads((RESULTS / "fuzz.json").read_text())["kinds"]:
        counts = (row["cases"], row["refused"], row["accepted"], row["failures"])
        lines.append(f"| {row['kind']} | {' | '.join(f'{count:,}' for count in counts)} |")
    return "\n".join(lines) + "\n"


MAKERS = {
    "cli": make_cli_figures,
    "figures": make_figures,
    "traced": make_traced_figures,
    "fuzz": make_fuzz_figures,
    "kills": make_kill_figures,
    "faults": make_fault_figures,
    "runs": lambda: "\n".join(make_training_figures(json.loads(TRAINING.read_text()))) + "\n",
    "after": make_after_figures,
}


def fill(text: str) -> str:
    text = BLOCK.sub(run_block, text)
    return MARKED.sub(
        lambda match: match.group(1) + MAKERS[match.group(2)]() + match.group(3), text
    )


def main() -> int:
    if not TRAINING.exists():
        print(
            f"error: {TRAINING.relative_to(ROOT)} is missing, so docs/accuracy.md has no runs"
            "\n  try: python benchmarks/measure_training.py on a GPU, or git checkout that file",
            file=sys.stderr,
        )
        return 1
    stale = []
    for page in PAGES:
        before = page.read_text()
        after = fill(before)
        if after != before:
            stale.append(str(page.relative_to(ROOT)))
            if "--check" not in sys.argv:
                page.write_text(after)
    if stale and "--check" in sys.argv:
        print(f"out of date: {', '.join(stale)}\n  try: python scripts/write_readme.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
