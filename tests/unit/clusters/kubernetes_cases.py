"""Six jobs from recipe and site to objects; tests/golden/kubernetes has what becomes of them."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from made_runs import PROFILE
from tightfit.clusters.kubernetes.objects import TrainingJob, build_train_job, build_training
from tightfit.clusters.kubernetes.pod import Document, User
from tightfit.clusters.site import KubernetesSite, Site, Volume
from tightfit.core.recipe import Recipe, make_training, read_recipe
from tightfit.core.settings import Method
from tightfit.core.units import GIB
from tightfit.hardware.resolve import resolve_hardware
from tightfit.hardware.types import Cluster
from tightfit.models.resolve import resolve_model
from tightfit.planning.plan import Plan
from tightfit.planning.request import JobRequest
from tightfit.planning.search import search

GOLDEN = Path(__file__).parents[2] / "golden" / "kubernetes"
IMAGE = "registry.example.org/tightfit:0.1-cuda"
SHARED = Volume(name="shared", claim="team-shared", mount="/data", local="/mnt/shared")
MODELS = Volume(name="models", host_path="/srv/models", mount="/models")
OWNER = User(uid=1234, gid=100)
RUN = "/mnt/shared/runs/mine"
ROWS = PROFILE.model_copy(
    update={"num_rows": 52_000, "num_tokens": 10_400_000, "num_packed_rows": 20_800}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    recipe: str
    site: Site
    nodes: int = 1
    staged_bytes: int = 0
    user: User | None = OWNER
    build: Callable[[TrainingJob, Site], list[Document]] = build_training


def make_site(**changes: object) -> Site:
    held: dict[str, object] = {"image": IMAGE, "namespace": "team", "volumes": (SHARED, MODELS)}
    return Site(kubernetes=KubernetesSite.model_validate({**held, **changes}))


CASES = {
    "qlora_7b": Case(
        recipe="model: meta-llama/Llama-2-7b-hf\nmethod: qlora\non: RTX-4090\nepochs: 3\n",
        site=make_site(),
    ),
    "lora_13b_two_pods": Case(
        recipe="model: meta-llama/Llama-2-13b-hf\nmethod: lora\non: 2n x 4xV100-32GB\n",
        site=make_site(interface="net1"),
        nodes=2,
    ),
    "cpu": Case(
        recipe="model: HuggingFaceTB/SmolLM2-135M\nmethod: lora\non: CPU\nmax_steps: 200\n",
        site=make_site(image="registry.example.org/tightfit:0.1-cpu"),
    ),
    "staged_model": Case(
        recipe="model: meta-llama/Llama-2-7b-hf\nmethod: lora\non: 4xA100-40GB\n",
        site=make_site(),
        staged_bytes=int(12.6 * GIB),
    ),
    "trainjob": Case(
        recipe="model: meta-llama/Llama-2-13b-hf\nmethod: lora\non: 2n x 4xV100-32GB\n",
        site=make_site(
            queue="team-queue", service_account="trainer", image_pull_secret="registry"
        ),
        nodes=2,
        build=build_train_job,
    ),
    "secrets_queue": Case(
        recipe="model: meta-llama/Llama-2-7b-hf\nmethod: qlora\non: T4\nmax_steps: 1000\n",
        site=make_site(
            secrets=("wandb", "object-store"),
            image_pull_secret="registry",
            service_account="trainer",
            priority_class="batch-low",
            queue="team-queue",
            node_selector={"nvidia.com/gpu.product": "Tesla-T4"},
            tolerations=(
                {"key": "team", "operator": "Equal", "value": "nlp", "effect": "NoSchedule"},
                {"key": "spot", "operator": "Exists", "effect": "NoExecute",
                 "tolerationSeconds": 300},
            ),
        ),
        user=None,
    ),
}  # fmt: skip


@functools.cache
def plan_case(name: str) -> Plan:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(f"{case.recipe}data: /mnt/shared/data/train.jsonl\n")
        recipe = read_recipe(path)
    return make_plan(recipe, nodes=case.nodes)


def make_plan(recipe: Recipe, *, nodes: int) -> Plan:
    fixed = recipe.fixed_strategy() | {"num_nodes": nodes}
    training = {
        method: make_training(recipe, method=method, model_path=f"/models/{recipe.model}")
        for method in (Method.FULL, Method.LORA)
    }
    request = JobRequest(
        spec=resolve_model(recipe.model),
        method=recipe.method.value,
        num_epochs=recipe.num_epochs,
        max_steps=recipe.max_steps,
        profile=ROWS,
        training=training,
        fixed=fixed,
    )
    return search(request, _hardware(recipe.on or ""), num_plans=1, is_coarse=True).plans[0]


def _hardware(on: str) -> Cluster:
    """Words; a CPU is one of fixed size, whatever machine this is."""
    if on != "CPU":
        return resolve_hardware(on)
    found = resolve_hardware("cpu")
    group = found.groups[0]
    rates = {"peak_flops": {"fp32": 5e11, "bf16": 5e11}, "memory_bytes_per_second": 4e10,
             "pcie_bytes_per_second": 4e10, "supports_bf16": True}  # fmt: skip
    names = {"name": "CPU, 8 cores", "memory_bytes": 28 * GIB, "measured": None}
    gpu = group.node.gpu.model_copy(update={**rates, **names})
    sizes = {"gpu": gpu, "num_gpus": 1, "num_cores": 8, "host_memory_bytes": 32 * GIB}
    node = group.node.model_copy(update={**sizes, "free_gpu_memory_bytes": None})
    return found.model_copy(update={"groups": (group.model_copy(update={"node": node}),)})


def make_job(name: str) -> TrainingJob:
    case = CASES[name]
    return TrainingJob(
        plan=plan_case(name), run=Path(RUN), staged_bytes=case.staged_bytes, user=case.user
    )


@functools.cache
def build_case(name: str) -> list[Document]:
    case = CASES[name]
    return case.build(make_job(name), case.site)
