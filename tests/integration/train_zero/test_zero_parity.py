"""ZeRO on two gloo ranks against one plain process: losses, weights, checkpoints, overflow."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from zero_cases import (
    CASES,
    NUM_STEPS,
    PREFERENCES,
    RESUMED,
    SAVED_AT,
    Case,
    count_trained,
    make_batches,
    make_plan,
    make_trainer,
    run_step,
    write_models,
)

from shard_cases import lone_place
from tightfit.core.settings import Method, Offload, Sharding
from tightfit.runtime.load import load_base
from tightfit.training.engine import TorchEngine
from tightfit.training.model import Objective, build_optimizer, prepare_model

WORKER = Path(__file__).with_name("zero_worker.py")
SUPPORT = str(Path(__file__).parents[2] / "support")
STAGES = {Sharding.ZERO1: 1, Sharding.ZERO2: 2, Sharding.ZERO3: 3}
MATRIX_VALUES = 64 * 64
"""Of the layer that the workers look at: a query projection."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    losses: list[float]
    norms: list[float]
    eval_sums: list[float]
    """Before and after training."""
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zero-model")
    write_models(path)
    return path


@pytest.fixture(scope="module")
def references(folder: Path) -> Iterator[dict[tuple[str, Method], Reference]]:
    """By model and method."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kinds = dict.fromkeys((case.model, case.method) for case in CASES)
    yield {kind: train_alone(folder, *kind) for kind in kinds}
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def out(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case on two ranks, in one launch, on a machine that seems to have no compiler."""
    path = tmp_path_factory.mktemp("zero-out")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launch([*launcher, str(WORKER), "many"], folder, path)
    return path


def launch(command: list[str], folder: Path, out: Path) -> None:
    extensions = out / "extensions"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",  # else DeepSpeed says that it has found no other
        "PYTHONPATH": os.pathsep.join(filter(None, (SUPPORT, os.environ.get("PYTHONPATH")))),
        "PATH": str(Path(sys.executable).parent),
        "CXX": "",
        "TORCH_EXTENSIONS_DIR": str(extensions),
    }
    done = subprocess.run(
        [sys.executable, *command, str(folder), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout == ""
    assert not extensions.exists(), "DeepSpeed compiled something"


def train_alone(folder: Path, model_name: str, method: Method) -> Reference:
    """The same job in plain torch: one process takes all micro-batches of a step."""
    case = Case(sharding=Sharding.SINGLE, method=method, num_ranks=1, model=model_name)
    plan = make_plan(folder, case)
    strategy, training, device = plan.strategy, plan.training, torch.device("cpu")
    assert training is not None
    base = load_base(folder / model_name, strategy, device)
    model = prepare_model(base, strategy, training)
    module = Objective.from_strategy(model, strategy)
    optimizer = build_optimizer(module.named_parameters(), strategy.optimizer, training)
    engine = TorchEngine(
        module, optimizer, strategy=strategy, device=device, max_grad_norm=training.max_grad_norm
    )
    losses, norms, sums = [], [], [evaluate(module)]
    for step in range(NUM_STEPS):
        outcome = run_step(engine, step, training, rank=0, num_ranks=1)
        losses.append(float(outcome.loss_sum) / count_trained(make_batches(step)))
        norms.append(float(outcome.update.grad_norm))
    sums.append(evaluate(module))
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return Reference(losses=losses, norms=norms, eval_sums=sums, weights=weights)


def evaluate(module: torch.nn.Module) -> float:
    module.eval()
    with torch.no_grad():
        summed = float(module(**make_batches(3)[0]))
    module.train()
    return summed


def read(out: Path, case: Case) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((out / f"{case.name}.json").read_text())
    return facts


def test_reference_is_worth_comparing_with(
    references: dict[tuple[str, Method], Reference],
) -> None:
    for reference in references.values():
        assert reference.losses[-1] < reference.losses[0] - 0.05
    norms = references["llama", Method.FULL].norms
    assert min(norms) > 0.5, "the clipping bound must bite"


def test_every_case_ran(out: Path) -> None:
    assert {case.sharding for case in CASES} == set(STAGES)
    assert all((out / f"{case.name}.json").is_file() for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_and_weights_are_those_of_one_process(
    case: Case, out: Path, references: dict[tuple[str, Method], Reference]
) -> None:
    facts, reference = read(out, case), references[case.model, case.method]

    assert facts["losses"] == pytest.approx(reference.losses, abs=1e-5)
    assert facts["norms"] == pytest.approx(reference.norms, abs=1e-4)
    sums = [facts["eval_before"], facts["eval_after"]]
    assert sums == pytest.approx(reference.eval_sums, abs=1e-2)
    saved = load_file(out / f"{case.name}.st")
    assert saved.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        torch.testing.assert_close(saved[name], weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_deepspeed_really_runs_the_stage(case: Case, out: Path) -> None:
    facts = read(out, case)
    is_split = case.sharding is Sharding.ZERO3
    moves_optimizer, moves_params = case.offload.moves_optimizer, case.offload.moves_params

    assert facts["engine"] == "DeepSpeedEngine"
    assert facts["stage"] == STAGES[case.sharding]
    assert facts["optimizer"] == (
        "DeepSpeedZeroOptimizer_Stage3" if is_split else "DeepSpeedZeroOptimizer"
    )
    assert facts["inner"] == "AdamW"
    assert facts["is_partitioned"] is is_split
    assert facts["whole_values"] == MATRIX_VALUES
    assert facts["local_values"] == (0 if is_split else MATRIX_VALUES)
    assert facts["shard_values"] == (MATRIX_VALUES // 2 if is_split else 0)
    assert facts["offloads_optimizer"] is moves_optimizer
    assert facts["optimizer_device"] == ("cpu" if moves_optimizer else "none")
    assert facts["param_device"] == ("cpu" if moves_params else "none")


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_are_those_of_one_process(name: str, folder: Path, out: Path) -> None:
    found = json.loads((out / f"preference-{name}.json").read_text())
    changes = PREFERENCES[name] | {"sharding": "single", "precompute_reference": False}
    alone = make_trainer(folder, lone_place(), **changes)

    losses = alone.train(0, NUM_STEPS)

    assert losses[-1] < losses[0] - 0.004
    assert found["losses"] == pytest.approx(losses, abs=1e-4)
    margins = [step.preference.reward_margin for step in alone.metrics if step.preference]
    assert [one["reward_margin"] for one in found["records"]] == pytest.approx(margins, abs=1e-3)


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_resuming_gives_the_same_curve(case: Case, out: Path) -> None:
    facts = read(out, case)

    assert len(facts["resumed"]["losses"]) == NUM_STEPS - SAVED_AT
    assert facts["resumed"]["losses"] == pytest.approx(facts["losses"][SAVED_AT:], abs=1e-6)


def test_checkpoint_of_adapters_leaves_the_base_model_out(out: Path, folder: Path) -> None:
    sizes = {case.method: [] for case in RESUMED}  # type: dict[Method, list[int]]
    for case in RESUMED:
        sizes[case.method].append(read(out, case)["resumed"]["checkpoint_bytes"])

    base = (folder / "llama" / "model.safetensors").stat().st_size
    assert min(sizes[Method.FULL]) > 3 * base
    assert max(sizes[Method.LORA]) < 2 * base


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_checkpoint_that_cannot_be_resumed_is_refused(case: Case, out: Path) -> None:
    resumed = read(out, case)["resumed"]
    problem, remedy = resumed["error_of_three"]

    assert "written by 2 processes" in problem
    assert "resume on 2 GPUs" in remedy
    assert "not written by ZeRO" in resumed["error_of_foreign"][0]


@pytest.mark.parametrize("sharding", [Sharding.ZERO1, Sharding.ZERO3])
def test_bf16_keeps_fp32_masters(
    sharding: Sharding, out: Path, references: dict[tuple[str, Method], Reference]
) -> None:
    facts = json.loads((out / f"{sharding.value}-none-full-bf16.json").read_text())

    assert facts["weight_dtype"] == "torch.bfloat16"
    assert facts["master_dtype"] == "torch.float32"
    expected = references["llama", Method.FULL].losses[: len(facts["losses"])]
    assert facts["losses"] == pytest.approx(expected, abs=0.02)


def test_fp16_overflow_is_skipped_and_survived(
    out: Path, references: dict[tuple[str, Method], Reference]
) -> None:
    facts = json.loads((out / "overflow.json").read_text())

    assert facts["is_skipped"]
    assert facts["is_unchanged"]
    assert facts["scale"] == [2.0**16, 2.0**15]
    expected = references["llama", Method.LORA].losses[: len(facts["losses"])]
    assert facts["losses"] == pytest.approx(expected, abs=0.01)


def test_one_process_without_torchrun(
    folder: Path, tmp_path: Path, references: dict[tuple[str, Method], Reference]
) -> None:
    launch([str(WORKER), "alone"], folder, tmp_path)

    case = Case(sharding=Sharding.ZERO2, method=Method.LORA, offload=Offload.OPTIMIZER, num_ranks=1)
    facts = read(tmp_path, case)
    assert facts["losses"] == pytest.approx(references["llama", Method.LORA].losses, abs=1e-5)


def test_compiler_really_is_hidden() -> None:
    assert shutil.which("g++", path=str(Path(sys.executable).parent)) is None
