"""Sharded training on processes of this machine, against one process that trains alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from shard_worker import (
    CASES,
    NUM_PREFERENCE_STEPS,
    PREFERENCES,
    SHARDED_MIXTURE,
    SHARDED_PREFERENCES,
    SHARED_ROWS,
    SHARED_STOP,
)

from shard_cases import (
    NUM_STEPS,
    VOCABULARY,
    make_family,
    make_mixture,
    make_model,
    make_store,
)
from tightfit.core.objectives import ExampleKind

WORKER = Path(__file__).with_name("shard_worker.py")
METHODS = ("full", "lora")
TOLERANCE = 1e-5


def _start(part: str, folder: Path, num_ranks: int) -> subprocess.Popen[bytes]:
    launcher = []
    if num_ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(WORKER.parents[2] / "support"),
    }
    command = [sys.executable, *launcher, str(WORKER), part, str(folder)]
    with (folder / f"{part}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _finish(process: subprocess.Popen[bytes], part: str, folder: Path) -> None:
    code = process.wait(timeout=600)
    assert code == 0, (folder / f"{part}.log").read_text()[-4000:]


def _notes(folder: Path, part: str, rank: int = 0) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / f"{part}.{rank}.json").read_text())
    return read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All launches, each once: many cases share the start of their processes."""
    folder = tmp_path_factory.mktemp("sharded")
    make_store(folder / "store")
    make_model(folder / "model")
    make_model(folder / "lacking", vocab_size=VOCABULARY - 8)
    make_mixture(folder / "mixture")
    make_store(folder / "pairs", num_rows=22, example=ExampleKind.PAIR)
    make_store(folder / "labelled", example=ExampleKind.LABELLED)
    make_model(folder / "large", hidden_size=512, intermediate_size=1536, num_hidden_layers=16)
    make_model(folder / "multi-query", num_key_value_heads=1)
    make_model(folder / "three-heads", hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    for family in ("gemma2", "gpt_oss"):
        make_family(folder / family, family)
    started = [("single", _start("single", folder, 1)), ("many", _start("many", folder, 2))]
    for part, process in started:
        _finish(process, part, folder)
    _finish(_start("resume-alone", folder, 1), "resume-alone", folder)
    _finish(_start("resume-on-four", folder, 4), "resume-on-four", folder)
    return folder


@pytest.mark.parametrize(("method", "name"), CASES)
def test_losses_and_weights_are_those_of_one_process(folder: Path, method: str, name: str) -> None:
    case = f"{method}-{name}"
    alone = _notes(folder, "single")[f"{method}-single"]["losses"]
    losses = _notes(folder, "many")[case]["losses"]

    assert len(losses) == len(alone) == NUM_STEPS
    assert losses == pytest.approx(alone, abs=TOLERANCE)
    _assert_same_tensors(folder, case, f"{method}-single")


def test_every_rank_reports_the_same_losses(folder: Path) -> None:
    first, second = _notes(folder, "many", 0), _notes(folder, "many", 1)

    names = [f"{method}-{name}" for method, name in CASES]
    assert [first[name]["losses"] for name in names] == [second[name]["losses"] for name in names]


@pytest.mark.parametrize("method", METHODS)
def test_the_losses_fall_and_the_methods_differ(folder: Path, method: str) -> None:
    """Otherwise equal curves would prove nothing."""
    notes = _notes(folder, "single")
    losses = notes[f"{method}-single"]["losses"]

    assert min(losses[-5:]) < losses[0] - 0.02
    assert notes["full-single"]["losses"][-1] != pytest.approx(
        notes["lora-single"]["losses"][-1], abs=1e-2
    )


@pytest.mark.parametrize("method", METHODS)
def test_accumulated_micro_batches_weigh_each_token_as_one_batch(folder: Path, method: str) -> None:
    notes = _notes(folder, "single")

    assert notes[f"{method}-single"]["losses"] == pytest.approx(
        notes[f"{method}-one-batch"]["losses"], abs=TOLERANCE
    )
    _assert_same_tensors(folder, f"{method}-single", f"{method}-one-batch")


@pytest.mark.parametrize(("method", "name"), CASES)
def test_the_model_is_wrapped_as_named(folder: Path, method: str, name: str) -> None:
    wrapping = _notes(folder, "many")[f"{method}-{name}"]["wrapping"]

    if name.startswith("ddp"):
        assert wrapping["is_ddp"]
        assert wrapping["none_sharded"]
        assert wrapping["num_fsdp_modules"] == 0
        return
    assert not wrapping["is_ddp"]
    assert wrapping["num_fsdp_modules"] == 5  # four layers and the rest
    assert wrapping["all_sharded"]
    assert wrapping["local_share"] == 0.5
    assert wrapping["keeps_gathered"] == (name == "fsdp-grad-op")
    is_hybrid = name == "fsdp-hybrid"
    assert wrapping["mesh_shape"] == ([1, 2] if is_hybrid else [2])
    assert wrapping["placements"].count("Shard") == 1
    assert wrapping["placements"].count("Replicate") == int(is_hybrid)
    assert wrapping["offload"] == (
        "CPUOffloadPolicy" if name == "fsdp-offload" else "OffloadPolicy"
    )
    assert wrapping["device"] == "cpu"


@pytest.mark.parametrize("name", SHARDED_MIXTURE)
def test_a_mixture_is_balanced_and_counted_over_all_ranks(folder: Path, name: str) -> None:
    alone = _notes(folder, "single")["mixture-single"]
    many = _notes(folder, "many")[f"mixture-{name}"]

    assert many["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    for found, wanted in zip(many["routing"], alone["routing"], strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
    _assert_same_tensors(folder, f"mixture-{name}", "mixture-single")
    assert all(load > 1 for _, load, _ in alone["routing"])  # not even by chance


@pytest.mark.parametrize("name", SHARED_ROWS)
def test_processes_that_share_rows_learn_what_one_learns(folder: Path, name: str) -> None:
    alone = _notes(folder, "single")[f"shared-{name}-alone"]
    every = [_notes(folder, "many", rank)[f"shared-{name}"] for rank in range(2)]

    for shared in every:
        assert shared["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
        assert shared["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert shared["evaluated"] == pytest.approx(alone["evaluated"], abs=TOLERANCE)
        assert shared["warm-up"] == pytest.approx(alone["warm-up"], abs=TOLERANCE)
        for found, wanted in zip(shared["routing"], alone["routing"], strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)
    _assert_same_tensors(folder, f"shared-{name}", f"shared-{name}-alone")


def test_a_run_of_shared_rows_goes_on_with_more_processes(folder: Path) -> None:
    alone = _notes(folder, "single")["shared-packed-alone"]["losses"]
    resumed = _notes(folder, "resume-on-four")["shared-resumed"]["losses"]

    assert resumed == pytest.approx(alone[SHARED_STOP:], abs=TOLERANCE)
    _assert_same_tensors(folder, "shared-resumed", "shared-packed-alone")


def test_heads_that_cannot_be_spread_are_refused(folder: Path) -> None:
    problem, remedy = _notes(folder, "many")["refusal"]

    assert "3 attention heads" in problem
    assert remedy == "--set context_parallel=1"


@pytest.mark.parametrize("method", METHODS)
def test_a_run_moves_from_two_processes_to_one_to_four(folder: Path, method: str) -> None:
    uninterrupted = _notes(folder, "single")[f"{method}-single"]["losses"]
    on_four = _notes(folder, "resume-on-four")[f"{method}-resumed"]["losses"]
    resumed = [*_notes(folder, "resume-alone")[method], *on_four]

    assert resumed == pytest.approx(uninterrupted[-len(resumed) :], abs=TOLERANCE)
    _assert_same_tensors(folder, f"{method}-resumed", f"{method}-single")


def test_loading_shards_holds_one_copy_of_the_weights(folder: Path) -> None:
    memory = _notes(folder, "many")["memory"]
    whole = memory["model_bytes"]
    first, second = memory["peak_bytes"]

    assert whole > 150e6
    # The other rank: its half, one whole layer, and what the libraries allocate.
    assert second < 0.85 * whole
    # Rank 0: what it has read, less what it has sent, and its half.
    assert first < 1.25 * whole


def test_an_overflow_on_one_rank_is_skipped_by_all(folder: Path) -> None:
    for rank in (0, 1):
        overflow = _notes(folder, "many", rank)["overflow"]
        assert overflow["is_skipped"]
        assert overflow["is_unchanged"]
        assert overflow["scale_fraction"] == 0.5
    losses = [_notes(folder, "many", rank)["overflow"]["losses"] for rank in (0, 1)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("sharding", SHARDED_PREFERENCES)
@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_are_those_of_one_process(folder: Path, name: str, sharding: str) -> None:
    """Losses, rewards, KL and weights; and with the reference computed before, the same losses."""
    alone = _notes(folder, "single")[f"{name}-single"]
    many = _notes(folder, "many")[f"{name}-{sharding}"]

    assert many["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
    assert len(many["preference"]) == NUM_PREFERENCE_STEPS
    for ours, theirs in zip(many["preference"], alone["preference"], strict=True):
        assert ours == pytest.approx(theirs, abs=TOLERANCE)
    _assert_same_tensors(folder, f"{name}-{sharding}", f"{name}-single")
    if name != "orpo":
        assert many["precomputed"] == pytest.approx(many["losses"], abs=TOLERANCE)
        assert many["reference"] == pytest.approx(alone["reference"], abs=1e-3)


@pytest.mark.parametrize(("name", "matrices"), [("packed", 4 * 7), ("packed-mixture", 2 * (4 + 2))])
def test_4bit_weights_train_alike_in_shards(folder: Path, name: str, matrices: int) -> None:
    packed = _notes(folder, "many")[name]

    assert packed["fsdp-codes"] == [matrices, matrices]
    assert packed["ddp-codes"] == [matrices, 0]
    assert packed["fsdp"] == pytest.approx(packed["ddp"], abs=TOLERANCE)


@pytest.mark.parametrize("name", ["packed", "packed-mixture"])
def test_4bit_shards_that_compute_something_else_are_refused(folder: Path, name: str) -> None:
    for rank in (0, 1):
        problem, remedy = _notes(folder, "many", rank)[name]["refusal"]
        assert "do not survive sharding" in problem
        assert "--sharding ddp" in remedy


def _assert_same_tensors(folder: Path, first: str, second: str) -> None:
    left = load_file(folder / f"{first}.safetensors")
    right = load_file(folder / f"{second}.safetensors")

    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], atol=TOLERANCE, rtol=1e-4, msg=name)
