"""`tightfit bench` for real on this CPU: a model of a config alone, a few steps, nothing left."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tightfit.api.bench import read_bench_job
from tightfit.api.options.training import BenchOptions
from tightfit.clusters.local.launcher import TRIAL_PREFIX, run_job
from tightfit.clusters.protocol import SilentObserver
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus, TokenFolders

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
JOB = ("--random-weights", "--method", "lora", "--on", "cpu")
TOO_LITTLE_BYTES = 450 * 2**20
"""Python with torch takes about half of it, 32 rows of 1024 tokens far more."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tmp").mkdir()
    for name, value in {
        "TMPDIR": tmp_path / "tmp",
        "TIGHTFIT_LEDGER": tmp_path / "ledger.sqlite",
        "TIGHTFIT_CACHE": tmp_path / "cache",
        "OMP_NUM_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    return folder


def bench(*words: str, data_limit: int | None = None) -> tuple[int, Any]:
    def limit() -> None:
        if data_limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (data_limit, data_limit))

    done = subprocess.run(
        [sys.executable, "-m", "tightfit", "bench", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        preexec_fn=limit,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_real_steps_are_measured_and_nothing_is_left(model: Path, tmp_path: Path) -> None:
    sizes = ("--seq-len", "64", "--effective-batch", "4", "--steps", "4", "--warm-up", "2")
    code, found = bench(str(model), *JOB, *sizes)

    assert code == 0, found
    (only,) = found["trials"]
    measured = only["measured"]
    assert (only["status"], measured["num_steps"]) == ("measured", 4)
    spread = measured["seconds_per_step"]
    assert 0 < spread["low"] <= spread["median"] <= spread["high"] < 60
    # Every step has 4 full rows, of which all but the first token are trained.
    share = measured["trained_tokens_per_second"] / measured["tokens_per_second"]
    assert share == pytest.approx(63 / 64)
    memory = next(item for item in only["compared"] if item["name"] == "process memory")
    assert 100 * 2**20 < memory["measured"] < 4 * 2**30
    assert list((tmp_path / "tmp").glob(f"{TRIAL_PREFIX}*")) == []
    assert not (tmp_path / "runs").exists()


def test_a_worker_without_memory_is_a_row_and_exit_code_5(model: Path, tmp_path: Path) -> None:
    sizes = ("--seq-len", "1024", "--effective-batch", "32", "--set", "micro_batch=32")
    more = ("--set", "checkpointing=false", "--steps", "1")
    code, found = bench(str(model), *JOB, *sizes, *more, data_limit=TOO_LITTLE_BYTES)

    assert code == found["exit_code"] == 5
    assert [trial["status"] for trial in found["trials"]] == ["out-of-memory"]
    assert list((tmp_path / "tmp").glob(f"{TRIAL_PREFIX}*")) == []


def test_the_worker_writes_neither_checkpoint_nor_result(model: Path, tmp_path: Path) -> None:
    flags = BenchOptions(
        job=str(model), random_weights=True, method="lora", on="cpu", seq_len=32,
        effective_batch=2, steps=1, warm_up=1,
    )  # fmt: skip
    job = read_bench_job(flags, tmp_path / "tmp")
    run = RunFolder(path=tmp_path / "run")
    run.path.mkdir()
    run.write_tokens(TokenFolders(train=str(job.rows.store.folder)))
    run.write_state(RunState(status=RunStatus.PREPARED, updated_at="2026-01-01T00:00:00Z"))
    run.write_plan(job.plans[0])
    state = run_job(run, observer=SilentObserver(), is_trial=True)

    assert (state.status, state.step) == (RunStatus.FINISHED, 2), run.log_path.read_text()
    assert {path.name for path in run.path.iterdir()} == {
        "plan.json", "state.json", "tokens.json", "metrics.jsonl", "log.txt", "launcher.lock"
    }  # fmt: skip
