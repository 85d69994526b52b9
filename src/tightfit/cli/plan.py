"""`tightfit plan`: the best ways to run a job on given hardware, and why."""

from __future__ import annotations

from tightfit.cli.flags import takes
from tightfit.cli.plan_flags import PlanFlags

EXAMPLES = """\b
Examples:
  tightfit plan Llama-2-7b --on 4xV100-32GB
  tightfit plan Qwen2.5-7B --on RTX-4090 --data train.jsonl --seq-len 4096 --save plan.json
  tightfit plan job.yaml --on slurm:gpu --explain
  tightfit plan Llama-3.1-70B --on '2n x 8xA100-80GB' --method full --json
  tightfit plan Llama-3.1-8B --method full --buy --chart memory.html
"""


@takes(PlanFlags)
def plan(flags: PlanFlags) -> None:
    """Search every way to run the job and show the best few that fit.

    The search covers method, precision, sharding, offload, micro-batch, checkpointing, kernels,
    optimizer and node count; the first row is the fastest that fits.
    """
