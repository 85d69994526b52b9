"""Every legal setting of the levers for one job of the speed comparison, as the planner sees it.

    python benchmarks/_sweep_plans.py 7b-lora --on here

Prints JSON. The first plan is that of `tightfit plan`, traced; the others follow in the planner's
order, by closed forms.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from _throughput_jobs import JOBS
from tightfit.api.options.training import PlanOptions
from tightfit.api.plan import plan
from tightfit.api.training.recipe import read_plan_job
from tightfit.core.settings import Offload, Sharding
from tightfit.core.strategy import Strategy
from tightfit.hardware.types import Cluster
from tightfit.planning.plan import Plan
from tightfit.planning.ranking import rank_estimate
from tightfit.planning.request import JobRequest
from tightfit.planning.search import search
from tightfit.planning.space import list_micro_batches

MOST = 1_000
"""More settings than the space of one GPU has."""
ONE_GPU: dict[str, object] = {"sharding": Sharding.SINGLE, "offload": Offload.NONE}


def plan_job(name: str, on: str, *, is_traced: bool, has_every_size: bool) -> dict[str, Any]:
    """What is printed."""
    asked = JOBS[name]
    model = asked.model.rpartition("--")[2]
    options = PlanOptions(
        job=model,
        on=on,
        method=asked.method,
        seq_len=asked.seq_len,
        effective_batch=asked.num_rows,
        trace=is_traced,
    )
    result = plan(options)
    assert result.cluster is not None, "a job, not a saved plan"
    first = result.best
    _, request = read_plan_job(options)
    others = list_settings(request, result.cluster, has_every_size=has_every_size)
    return {
        "is_calibrated": first.hardware.node.gpu.measured is not None,
        "plans": describe_plans(name, model, first, others),
    }


def list_settings(request: JobRequest, cluster: Cluster, *, has_every_size: bool) -> list[Plan]:
    """Each setting at its fastest micro-batch, or at every one, in the planner's order."""
    alone = replace(request, fixed={**request.fixed, **ONE_GPU})
    wanted = [alone]
    if has_every_size:
        sizes = list_micro_batches(request, Strategy())
        wanted += [replace(alone, fixed={**alone.fixed, "micro_batch": size}) for size, _ in sizes]
    found: dict[Strategy, Plan] = {}
    for one in wanted:
        plans = search(one, cluster, num_plans=MOST, is_exhaustive=True).plans
        found |= {plan.strategy: plan for plan in plans}
    return sorted(
        found.values(), key=lambda plan: rank_estimate(plan.strategy, plan.estimate, overshoot=1.0)
    )


def describe_plans(
    name: str, model: str, first: Plan, others: Sequence[Plan]
) -> list[dict[str, Any]]:
    """One row per plan; the first has the formulas' seconds too, for a fair order among all."""
    known = {plan.strategy: plan.estimate.time.seconds_per_step for plan in others}
    ordered = [first, *(plan for plan in others if plan.strategy != first.strategy)]
    return [
        {
            "job": name,
            "rank": rank,
            "model": model,
            "strategy": plan.strategy.model_dump(mode="json", exclude_defaults=True),
            "tokens_per_step": plan.strategy.tokens_per_step,
            "tier": plan.estimate.time.tier,
            "memory_tier": plan.estimate.tier,
            "verdict": plan.estimate.verdict.value,
            "predicted_seconds": plan.estimate.time.seconds_per_step,
            "closed_form_seconds": known.get(plan.strategy),
            "predicted_allocated_bytes": plan.estimate.gpu.peak_allocated_bytes,
            "predicted_reserved_bytes": find_reserved(plan),
        }
        for rank, plan in enumerate(ordered, start=1)
    ]


def find_reserved(plan: Plan) -> int:
    """By torch's allocator, whose own count is what is measured: less the CUDA context."""
    return plan.estimate.gpu.peak_reserved_bytes - plan.estimate.gpu.context_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--on", default="here")
    parser.add_argument("--no-trace", action="store_true", help="closed forms for the first too")
    parser.add_argument("--every-micro-batch", action="store_true")
    arguments = parser.parse_args()
    planned = plan_job(
        arguments.job,
        arguments.on,
        is_traced=not arguments.no_trace,
        has_every_size=arguments.every_micro_batch,
    )
    print(json.dumps(planned))
    return 0


if __name__ == "__main__":
    sys.exit(main())
