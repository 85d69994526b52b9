"""Jobs from recipe to batch script: recorded `sinfo`, catalogue models, the real planner."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tightfit.api.submit import plan_on_fewest
from tightfit.clusters.protocol import JobSpec
from tightfit.clusters.site import Site, SlurmSite
from tightfit.clusters.slurm.script import (
    GpuRequest,
    JobResources,
    find_gpu_request,
    find_resources,
    make_batch_job,
    write_script,
)
from tightfit.core.errors import DoesNotFitError
from tightfit.core.profiles import DataProfile
from tightfit.core.recipe import Recipe, make_training
from tightfit.core.settings import Method
from tightfit.hardware.inventory import Inventory, plannable_cluster
from tightfit.hardware.slurm import build_inventory, parse_nodes
from tightfit.hardware.types import Cluster, NodeGroup
from tightfit.models.resolve import resolve_model
from tightfit.planning.plan import Plan
from tightfit.planning.request import JobRequest
from tightfit.planning.search import search

GOLDEN = Path(__file__).parents[2] / "golden" / "sbatch"
PYTHON = "/shared/venv/bin/python"
PLAIN = Site(python=PYTHON)
PROFILE = DataProfile(
    source="rows.jsonl",
    format="alpaca",
    num_rows=50_000,
    num_tokens=25_000_000,
    num_trained_tokens=12_500_000,
    mean_tokens=500.0,
    max_tokens=1024,
    percentiles={"p50": 450, "p90": 900, "p95": 960, "p99": 1020},
    histogram=((256, 10_000), (512, 20_000), (1024, 20_000)),
    num_truncated=0,
    seq_len=1024,
    tokenizer="guessed",
    is_exact=False,
    padding_waste_fraction={"1": 0.0, "2": 0.2, "4": 0.3, "8": 0.4, "16": 0.45},
    packing_waste_fraction=0.02,
    num_packed_rows=25_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A recipe, a partition, and what the command line and the site add."""

    recipe: Recipe
    partition: str
    nodes: int | None = None
    site: Site = PLAIN
    can_requeue: bool = True
    limit_seconds: float | None = None
    fixed: dict[str, Any] = field(default_factory=dict)


def _recipe(model: str, method: str, **fields: Any) -> Recipe:
    data = ({"path": "/shared/data/rows.jsonl"},)
    return Recipe.model_validate({"model": model, "method": method, "data": data} | fields)


MODULES = Site(
    python="python",
    setup=("module load cuda/12.4", "source /shared/conda/etc/profile.d/conda.sh"),
    environment={"HF_HOME": "/shared/hub", "NCCL_DEBUG": "WARN"},
    container="registry.example.org#tools/tightfit:cuda",
    slurm=SlurmSite(account="proj042", qos="normal"),
)
APPTAINER = Site(
    container="apptainer exec --nv --bind /shared '/shared/my images/tightfit.sif'",
    interface="ib0",
    slurm=SlurmSite(constraint="ib", extra=("--exclusive", "--mail-type=END"), warn_seconds=300),
)

CASES = {
    "7b-on-one-v100": Case(
        recipe=_recipe("Llama-2-7b", "lora"), partition="volta", fixed={"gpus_per_node": 1}
    ),
    "13b-on-four-v100": Case(recipe=_recipe("Llama-2-13b", "lora"), partition="volta", nodes=1),
    "13b-on-two-nodes-of-three": Case(
        recipe=_recipe("Llama-2-13b", "lora"), partition="trio", nodes=2
    ),
    "qlora-on-t4": Case(
        recipe=_recipe("Mistral-7B", "qlora", epochs=0.2), partition="turing", nodes=1
    ),
    "full-on-a100-nodes": Case(
        recipe=_recipe("Llama-2-70b", "full", epochs=2), partition="ampere", nodes=4
    ),
    "cpu": Case(recipe=_recipe("SmolLM2-135M", "lora", max_steps=200), partition="cpu", nodes=1),
    "container-and-modules": Case(
        recipe=_recipe("Qwen2.5-7B", "lora"), partition="ampere", nodes=1, site=MODULES
    ),
    "apptainer-on-two-nodes": Case(
        recipe=_recipe("Qwen2.5-7B", "full"), partition="ampere", nodes=2, site=APPTAINER
    ),
    "requeue-when-preempted": Case(
        recipe=_recipe("Llama-2-13b", "lora", epochs=3), partition="low", nodes=1
    ),
    "no-requeue": Case(
        recipe=_recipe("Llama-2-7b", "lora"),
        partition="volta",
        nodes=1,
        can_requeue=False,
        limit_seconds=3600,
        site=PLAIN.model_copy(update={"slurm": SlurmSite(account="proj042", reservation="class")}),
    ),
    "untyped-gpus-by-feature": Case(
        recipe=_recipe("Llama-2-7b", "lora"), partition="mixed", nodes=1
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What comes of a case."""

    plan: Plan
    group: NodeGroup
    gpu: GpuRequest
    resources: JobResources
    script: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan of the search."""

    plan: Plan


@cache
def read_inventory(partition: str | None = None) -> Inventory:
    nodes = parse_nodes((GOLDEN / "cluster.nodes.txt").read_text())
    return build_inventory(nodes, details=None, partition=partition)


@cache
def make(name: str) -> Made:
    """Plan the case as `submit` does, and write its script."""
    case = CASES[name]
    inventory = read_inventory(case.partition)
    plan, group = _plan(case, inventory)
    is_cpu = plan.hardware.node.gpu.is_cpu
    gpu = GpuRequest()
    if not is_cpu:
        gpu = find_gpu_request(
            inventory,
            partition=case.partition,
            gpu_name=plan.hardware.node.gpu.name,
            gpus_per_node=plan.strategy.gpus_per_node,
        )
    resources = find_resources(
        plan,
        max_seconds=group.max_seconds,
        asked_seconds=case.limit_seconds,
        warn=case.site.slurm.warn_seconds,
    )
    spec = JobSpec(plan=plan, run=Path("/shared/runs") / name, can_requeue=case.can_requeue)
    job = make_batch_job(spec, case.site, partition=case.partition, gpu=gpu, resources=resources)
    script = write_script(job, case.site)
    return Made(plan=plan, group=group, gpu=gpu, resources=resources, script=script)


def _layout(case: Case) -> dict[str, int]:
    """As `train_plan.py` fixes it for several nodes."""
    return {"num_nodes": case.nodes} if case.nodes and case.nodes > 1 else {}


def _plan(case: Case, inventory: Inventory) -> tuple[Plan, NodeGroup]:
    recipe = case.recipe
    spec = resolve_model(recipe.model)
    folder = Path("/shared/models") / spec.name.rpartition("/")[2]
    request = JobRequest(
        spec=spec,
        method=recipe.method.value,
        seq_len=1024,
        num_epochs=recipe.num_epochs,
        max_steps=recipe.max_steps,
        profile=PROFILE,
        fixed=recipe.fixed_strategy() | case.fixed | _layout(case),
        training={
            method: make_training(recipe, method=method, model_path=folder)
            for method in (Method.FULL, Method.LORA)
        },
    )

    def plan_over_part(part: Cluster) -> Found:
        plans = search(request, part, num_plans=1).plans
        if not plans:
            raise DoesNotFitError("nothing fits", remedy="another partition")
        return Found(plan=plans[0])

    found, group = plan_on_fewest(plannable_cluster(inventory), case.nodes, plan_over_part)
    return found.plan, group
