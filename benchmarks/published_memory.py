"""Predicted peak memory against what others measured and published, by source and method.

    .venv/bin/python benchmarks/published_memory.py            # table, and the result file
    .venv/bin/python benchmarks/published_memory.py --check    # fails if it misses or got worse
    .venv/bin/python benchmarks/published_memory.py --rows     # every row, worst first

`published/README.md` says where the rows come from and how each was translated.
Nothing here or in the estimator knows about a row or a source.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _provenance import provenance
from tightfit.core.strategy import Quirks, Strategy
from tightfit.core.units import GIB
from tightfit.estimation.memory import (
    estimate_moments,
    judge_fit,
    list_reserved_components,
    peak_moment,
)
from tightfit.estimation.result import Verdict
from tightfit.hardware.catalogue import find_gpu
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec

HERE = Path(__file__).resolve().parent
JOBS = HERE / "published" / "jobs.jsonl"
RESULT = HERE / "results" / "published_memory.json"

MEDIAN_LIMIT = 0.10
NINETIETH_LIMIT = 0.25
CLASSIFIED_LIMIT = 0.95
MIN_ROWS = 120
NOISE = 0.002
HOLDS_LOGITS = ("fms-acceleration", "litgpt")
"""Whose steps hold logits beside what the loss reads: transformers before 4.45 reads a shifted
copy, and litgpt's loop keeps the variable."""
"""A change of the median smaller than this is not "worse"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One published row and its prediction."""

    row: int
    source: str
    method: str
    label: str
    observed_bytes: int | None
    predicted_bytes: int
    moment: str
    verdict: Verdict
    observed_outcome: str | None

    @property
    def error(self) -> float | None:
        """Signed, relative; None where only the outcome was published."""
        return self.predicted_bytes / self.observed_bytes - 1 if self.observed_bytes else None

    @property
    def is_classified(self) -> bool | None:
        """An OOM must not be a comfortable `fits`, a run must not be `does_not_fit`."""
        if self.observed_outcome == "oom":
            return self.verdict is not Verdict.FITS
        if self.observed_outcome == "fits":
            return self.verdict is not Verdict.DOES_NOT_FIT
        return None


def read_jobs() -> tuple[list[dict[str, Any]], Counter[str]]:
    """Expressible jobs, and how many rows were left out for which reason."""
    jobs = [json.loads(line) for line in JOBS.read_text().splitlines()]
    left_out = Counter(job["excluded_because"] for job in jobs if job.get("excluded_because"))
    return [job for job in jobs if not job.get("excluded_because")], left_out


def make_strategy(job: dict[str, Any]) -> Strategy:
    stated = set(job) & set(Strategy.model_fields) - {"checkpointing"}
    fields = {name: job[name] for name in stated if job[name] is not None}
    targets = fields.get("lora_targets")
    if isinstance(targets, str):
        fields["lora_targets"] = (targets,)
    return Strategy(
        **fields,
        checkpointing=job["checkpointing"] != "none",
        gpus_per_node=job["gpus"],
        quirks=Quirks(
            **{name: job[name] for name in Quirks.model_fields if name in job},
            keeps_logits=any(name in job["source"] for name in HOLDS_LOGITS),
            padding_mask=True,
        ),
    )


def make_spec(job: dict[str, Any]) -> ModelSpec:
    """The catalogue's model, changed where the source has modelling code of its own."""
    stated = {k: v for k, v in job.get("extras", {}).items() if k in ModelSpec.model_fields}
    return resolve_model(job["model"]).model_copy(update=stated)


def predict(job: dict[str, Any]) -> Outcome:
    strategy = make_strategy(job)
    moments = estimate_moments(make_spec(job), strategy)
    peak = peak_moment(moments)
    held = list_reserved_components(peak, moments, strategy)
    by_kind = {
        "allocated": peak.allocated_bytes,
        "active": peak.allocated_bytes,
        "reserved": sum(held.values()) - held["cuda_context"],
        "device": sum(held.values()),
    }
    capacity = _capacity_bytes(job)
    return Outcome(
        row=job["row"],
        source=job["source"].split(":")[0],
        method=job["method"] if job["weights"] not in ("nf4", "int8", "gptq4") else "qlora",
        label=_label(job),
        observed_bytes=job.get("observed_bytes"),
        predicted_bytes=by_kind[job["observed_kind"] or "device"],
        moment=peak.name,
        verdict=judge_fit(
            allocated_bytes=peak.allocated_bytes + held["cuda_context"],
            reserved_bytes=sum(held.values()),
            capacity_bytes=capacity or sum(held.values()),
        ),
        observed_outcome=job.get("outcome") if capacity else None,
    )


def _capacity_bytes(job: dict[str, Any]) -> int | None:
    """None where the source does not say which card it was: then only its memory is compared."""
    if job.get("gpu_memory_gib"):
        return int(job["gpu_memory_gib"] * GIB)
    return find_gpu(job["gpu"]).memory_bytes if job.get("gpu") else None


def _label(job: dict[str, Any]) -> str:
    shape = f"{job['micro_batch']}x{job['seq_len']}"
    kernels = " fused" if job.get("fused_kernels") else ""
    return (
        f"{job['model'].split('/')[-1]} {job['method']} {job['weights']}/{job['compute']} {shape} "
        f"{job['sharding']}{job['gpus']} {job['loss']}{kernels} [{job['observed_kind']}]"
    )


def quantile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def summarise(outcomes: list[Outcome]) -> dict[str, Any]:
    errors = [abs(o.error) for o in outcomes if o.error is not None]
    classified = [o.is_classified for o in outcomes if o.is_classified is not None]
    return {
        "memory_rows": len(errors),
        "median_error": round(statistics.median(errors), 4) if errors else None,
        "p90_error": round(quantile(errors, 0.9), 4) if errors else None,
        "outcome_rows": len(classified),
        "classified_right": round(sum(classified) / len(classified), 4) if classified else None,
        "oom_rows": sum(o.observed_outcome == "oom" for o in outcomes),
    }


def render(groups: dict[tuple[str, str], dict[str, Any]], total: dict[str, Any]) -> str:
    head = (
        f"{'source':42}{'method':8}{'rows':>6}{'median':>9}{'p90':>8}{'outcomes':>10}{'right':>8}"
    )
    lines = [head]
    for (source, method), row in [*sorted(groups.items()), (("all", ""), total)]:
        median = f"{row['median_error']:9.1%}" if row["memory_rows"] else f"{'-':>9}"
        p90 = f"{row['p90_error']:8.1%}" if row["memory_rows"] else f"{'-':>8}"
        right = f"{row['classified_right']:8.1%}" if row["outcome_rows"] else f"{'-':>8}"
        lines.append(
            f"{source:42}{method:8}{row['memory_rows']:6}{median}{p90}{row['outcome_rows']:10}{right}"
        )
    return "\n".join(lines)


def check(total: dict[str, Any]) -> list[str]:
    problems = []
    if total["memory_rows"] < MIN_ROWS:
        problems.append(f"only {total['memory_rows']} rows were compared")
    if total["median_error"] > MEDIAN_LIMIT:
        problems.append(f"median error {total['median_error']:.1%} is over {MEDIAN_LIMIT:.0%}")
    if total["p90_error"] > NINETIETH_LIMIT:
        problems.append(f"90th percentile {total['p90_error']:.1%} is over {NINETIETH_LIMIT:.0%}")
    if total["classified_right"] < CLASSIFIED_LIMIT:
        problems.append(f"only {total['classified_right']:.1%} of outcomes are classified right")
    if RESULT.exists():
        before = json.loads(RESULT.read_text())["total"]
        for name in ("median_error", "p90_error"):
            if total[name] > before[name] + NOISE:
                problems.append(f"{name} got worse: {before[name]} -> {total[name]}")
        if total["memory_rows"] < before["memory_rows"]:
            problems.append("fewer rows are compared than before")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed result")
    parser.add_argument("--rows", action="store_true", help="print every row, worst first")
    arguments = parser.parse_args()

    jobs, left_out = read_jobs()
    outcomes = [predict(job) for job in jobs]
    by_group: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_group[outcome.source, outcome.method].append(outcome)
    groups = {key: summarise(members) for key, members in by_group.items()}
    total = summarise(outcomes)

    if arguments.rows:
        for o in sorted(outcomes, key=lambda o: -abs(o.error or 0)):
            seen = f"{o.observed_bytes / GIB:7.2f}" if o.observed_bytes else f"{'-':>7}"
            error = f"{o.error:+7.1%}" if o.error is not None else f"{'':7}"
            wrong = " WRONG " + str(o.observed_outcome) if o.is_classified is False else ""
            print(
                f"{o.row:4} {seen} {o.predicted_bytes / GIB:7.2f} {error} {o.moment:12} {o.label} "
                f"{o.verdict.value}{wrong}"
            )
    print(render(groups, total))
    print(f"\nleft out: {sum(left_out.values())} rows")
    for reason, count in left_out.most_common():
        print(f"  {count:4}  {reason}")
    if arguments.check:
        problems = check(total)
        print(
            "\n".join(f"error: {problem}" for problem in problems) or "published memory: all good"
        )
        return 1 if problems else 0
    write_result(groups, total, left_out)
    return 0


def write_result(
    groups: dict[tuple[str, str], dict[str, Any]], total: dict[str, Any], left_out: Counter[str]
) -> None:
    RESULT.parent.mkdir(exist_ok=True)
    content = {
        **provenance("benchmarks/published_memory.py"),
        "total": total,
        "groups": [{"source": s, "method": m, **row} for (s, m), row in sorted(groups.items())],
        "left_out": dict(left_out.most_common()),
    }
    RESULT.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
