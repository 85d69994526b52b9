"""Training speed of tightfit and its peers, measured on one H200, job by job.

    .venv/bin/python benchmarks/h200_throughput.py            # table, and the file of ratios
    .venv/bin/python benchmarks/h200_throughput.py --check    # fails if a ratio fell

`measure_throughput.py` measured the jobs. "trl best" is the fastest of trl's rows but its default.
Errors are of what the plan predicted, too high above zero.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from _provenance import write_result
from tightfit.core.settings import Method
from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB
from tightfit.estimation.flops import estimate_step_flops
from tightfit.hardware.resolve import resolve_hardware
from tightfit.models.resolve import resolve_model

RESULTS = Path(__file__).resolve().parent / "results"
MEASURED = RESULTS / "h200_throughput.json"
RATIOS = RESULTS / "h200_throughput_ratios.json"
OURS, DEFAULT, BEST = "tightfit", "trl-default", "trl best"
ASKED_FOR = {
    "tightfit-fp8": "fp8 to trl best",
    "tightfit-fp8-gradients": "fp8 gradients to trl best",
}
"""What tightfit does only when asked, and the name of its ratio."""
NOISE = 0.03
"""Of a ratio, from one call on the machine to the next."""
LOSS_TOLERANCE = 0.02
"""Between first losses: kernels round differently, and packed rows are other rows."""

PREDICTED = {"tokens per second": "speed", "GPU memory, allocated": "memory"}
"""Of what a run's report compares."""

Rows = dict[str, dict[str, Any]]


def compare(rows: Rows) -> dict[str, float]:
    """How many times as fast as each peer tightfit is; what did not run is left out."""
    speeds = {name: row["tokens_per_second"] for name, row in rows.items() if "fault" not in row}
    ours = speeds.pop(OURS, None)
    asked = {name: speeds.pop(name) for name in ASKED_FOR if name in speeds}
    if ours is None:
        return {}
    of_trl = [speed for name, speed in speeds.items() if _is_tuned_trl(name)]
    if of_trl:
        speeds[BEST] = max(of_trl)
    ratios = {name: round(ours / speed, 3) for name, speed in speeds.items()}
    if of_trl:
        ratios |= {ASKED_FOR[name]: round(fp8 / speeds[BEST], 3) for name, fp8 in asked.items()}
    return ratios


def find_errors(rows: Rows) -> dict[str, dict[str, float]]:
    """Relative errors of our predictions, by framework and quantity."""
    return {
        name: {
            PREDICTED[row["name"]]: round(row["error_percent"] / 100, 5)
            for row in rows[name]["compared"]
            if row["name"] in PREDICTED
        }
        for name in (OURS, *ASKED_FOR)
        if "compared" in rows.get(name, {})
    }


def find_utilization(job: dict[str, Any]) -> float | None:
    """Of the H200's dense bf16 peak, what full tuning in bf16 needs by its mathematics; None for
    other methods. Attention counts with the pairs that its mask leaves."""
    report, row = job["job"], job["contestants"].get(OURS, {})
    if report["method"] != "full" or "fault" in row:
        return None
    strategy = Strategy(
        method=Method.FULL, micro_batch=report["num_rows"], grad_accum=1, seq_len=report["seq_len"]
    )
    spec = resolve_model(report["model"].rpartition("--")[2])
    flops = estimate_step_flops(spec, strategy).model
    peak = resolve_hardware("H200").groups[0].node.gpu.flops(strategy.compute)
    return round(float(flops / row["step_seconds"] / peak), 3)


def _is_tuned_trl(name: str) -> bool:
    return name.startswith("trl-") and name != DEFAULT


def list_strange_losses(rows: Rows) -> list[str]:
    """Frameworks whose first loss differs from trl's default: they train something else."""
    losses = {name: row["first_losses"][0] for name, row in rows.items() if "fault" not in row}
    usual = losses.get(DEFAULT)
    if usual is None:
        return []
    return [n for n, loss in losses.items() if not abs(loss / usual - 1) <= LOSS_TOLERANCE]


def render_job(name: str, rows: Rows, ratios: dict[str, float]) -> str:
    head = f"{OURS} is {_times(ratios, DEFAULT)} trl's default, {_times(ratios, BEST)} its best"
    lines = [f"{name}: {head}"]
    for contestant, row in rows.items():
        if "fault" in row:
            problem = " ".join(row["fault"].split())
            lines.append(f"  {contestant:18} did not run: {problem[:100]}")
            continue
        memory = [row.get(f"peak_{kind}_bytes", 0) / GIB for kind in ("allocated", "reserved")]
        speed = f"{row['tokens_per_second']:9,.0f} tokens/s {row['step_seconds']:8.4f} s"
        lines.append(
            f"  {contestant:18} {speed} {memory[0]:7.1f} {memory[1]:7.1f} GiB"
            f"  loss {row['first_losses'][0]:.3f}  {_describe_fallback(row)}"
        )
    return "\n".join(lines)


def render_errors(errors: dict[str, dict[str, float]]) -> str:
    return "\n".join(
        f"  {who:22} predicted: {report['speed']:+.1%} tokens/s, {report['memory']:+.2%} allocated"
        for who, report in errors.items()
    )


def _times(ratios: dict[str, float], peer: str) -> str:
    return f"{ratios[peer]:.2f}x" if peer in ratios else "not compared with"


def _describe_fallback(row: dict[str, Any]) -> str:
    """A peer's earlier attempts, or the plan that tightfit chose."""
    if "plan" in row:
        return str(row["plan"])
    way = "checkpointing" if row["switches"]["checkpointing"] else "no checkpointing"
    return f"{way}, after {len(row['tried'])} that failed" if row["tried"] else way


def find_faults(
    ratios: dict[str, dict[str, float]], recorded: dict[str, dict[str, float]]
) -> list[str]:
    """What fell under its floor, or is no longer measured."""
    return [
        f"{job}: {ratios.get(job, {}).get(peer, 'no ratio')} against {peer}, was {before}"
        for job, peers in recorded.items()
        for peer, before in peers.items()
        if ratios.get(job, {}).get(peer, 0.0) < before * (1 - NOISE)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the recorded ratios")
    arguments = parser.parse_args()
    if not MEASURED.exists():
        parser.error(f"nothing was measured yet: benchmarks/measure_throughput.py --out {MEASURED}")
    jobs = json.loads(MEASURED.read_text())["jobs"]
    ratios = {name: compare(job["contestants"]) for name, job in jobs.items()}
    strange = []
    for name, job in jobs.items():
        print(render_job(name, job["contestants"], ratios[name]))
        print(render_errors(find_errors(job["contestants"])))
        strange += [
            f"{name}: {who} trains something else"
            for who in list_strange_losses(job["contestants"])
        ]
    if arguments.check:
        recorded = json.loads(RATIOS.read_text())["ratios"]
        problems = find_faults(ratios, recorded) + strange
        print("\n".join(f"error: {problem}" for problem in problems) or "throughput: all good")
        return 1 if problems else 0
    print("\n".join(f"error: {problem}" for problem in strange))
    errors = {name: find_errors(job["contestants"]) for name, job in jobs.items()}
    used = {name: find_utilization(job) for name, job in jobs.items()}
    write_result(
        RATIOS,
        "benchmarks/h200_throughput.py",
        noise=NOISE,
        ratios=ratios,
        prediction_errors=errors,
        utilization={name: fraction for name, fraction in used.items() if fraction is not None},
    )
    return 1 if strange else 0


if __name__ == "__main__":
    sys.exit(main())
