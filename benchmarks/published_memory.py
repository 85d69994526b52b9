"""Predicted peak memory against what others measured and published, by source and method.

    .venv/bin/python benchmarks/published_memory.py            # table, and the result file
    .venv/bin/python benchmarks/published_memory.py --check    # fails if it misses or got worse
    .venv/bin/python benchmarks/published_memory.py --rows     # every row, worst first

`published/README.md` says where the rows come from and how each was translated. Every prediction is
`tightfit estimate` with options that its command line has; `--trainer` names the software.
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
from tightfit.api.estimate import estimate
from tightfit.core.units import GIB
from tightfit.estimation.result import Verdict

HERE = Path(__file__).resolve().parent
JOBS = HERE / "published" / "jobs.jsonl"
RESULT = HERE / "results" / "published_memory.json"

MEDIAN_LIMIT = 0.10
NINETIETH_LIMIT = 0.25
CLASSIFIED_LIMIT = 0.95
MIN_ROWS = 120
NOISE = 0.002
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
    reason: str
    observed_outcome: str | None

    @property
    def error(self) -> float | None:
        """Signed, relative; None where only the outcome was published."""
        return self.predicted_bytes / self.observed_bytes - 1 if self.observed_bytes else None

    @property
    def is_classified(self) -> bool | None:
        """An OOM must not be a comfortable `fits`, a run must not be `does_not_fit`."""
        if self.observed_outcome == "oom":
            return not self.is_false_fit
        if self.observed_outcome == "fits":
            return self.verdict in (Verdict.FITS, Verdict.TIGHT)
        return None

    @property
    def is_false_fit(self) -> bool:
        return self.observed_outcome == "oom" and self.verdict is Verdict.FITS


def read_jobs() -> tuple[list[dict[str, Any]], Counter[str]]:
    """Expressible jobs, and how many rows were left out for which reason."""
    jobs = [json.loads(line) for line in JOBS.read_text().splitlines()]
    left_out = Counter(job["excluded_because"] for job in jobs if job.get("excluded_because"))
    return [job for job in jobs if not job.get("excluded_because")], left_out


def predict(job: dict[str, Any]) -> Outcome:
    """What `tightfit estimate` says of the job, by the options that a user would type."""
    found = estimate(**job["estimate"])
    gpu, strategy = found.estimate.gpu, found.strategy
    by_kind = {
        "allocated": gpu.peak_allocated_bytes,
        "active": gpu.peak_allocated_bytes,
        "reserved": gpu.peak_reserved_bytes - gpu.components["cuda_context"],
        "device": gpu.peak_reserved_bytes,
    }
    return Outcome(
        row=job["row"],
        source=job["source"].split(":")[0],
        method="qlora" if strategy.weights.is_quantized else strategy.method.value,
        label=_label(job),
        observed_bytes=job["observed_bytes"],
        predicted_bytes=by_kind[job["observed_kind"] or "device"],
        moment=gpu.peak_phase,
        verdict=found.estimate.verdict,
        reason=found.estimate.reason,
        observed_outcome=job["outcome"],
    )


def _label(job: dict[str, Any]) -> str:
    """The options of the command."""
    return " ".join(f"{name}={value}" for name, value in job["estimate"].items())


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
        "false_fits": sum(o.is_false_fit for o in outcomes),
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
            wrong = f" WRONG {o.observed_outcome} {o.reason}" if o.is_classified is False else ""
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
