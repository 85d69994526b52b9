"""`--trace` through the real command line, a real tracer's process and a real tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
NUM_PARAMS = 2 * 32000 * 1024 + 1024 + 12 * (2 * 1024 * (1024 + 256) + 3 * 1024 * 2816 + 2 * 1024)
"""Embeddings and head, last norm, and per layer q, k, v, o, the MLP and two norms."""
FULL = ("estimate", "model", "--method", "full", "--on", "A100-40GB", "--micro-batch", "4")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    return folder


def run(home: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TIGHTFIT_CACHE": str(home / "cache"), "COLUMNS": "120"}
    environment.pop("TIGHTFIT_TRACE", None)
    return subprocess.run(
        [sys.executable, "-m", "tightfit.cli.app", *words],
        cwd=home,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_json(home: Path, *words: str) -> Any:
    done = run(home, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_estimate_tells_what_a_trace_saw(home: Path) -> None:
    reported = run_json(home, *FULL, "--no-checkpointing", "--trace")
    trace = reported["trace"]
    assert reported["tier"] == "traced"
    assert trace["num_layers"] == 12
    assert trace["num_traced_layers"] == 5
    stages = {stage["name"]: stage["peak_allocated_bytes"] for stage in trace["stages"]}
    assert stages["load"] == pytest.approx(2 * NUM_PARAMS, rel=0.01)
    assert stages["first step"] < stages["steady step"], "optimizer state comes with the first"
    assert stages["steady step"] - stages["first step"] <= 4 * NUM_PARAMS * 1.02
    assert trace["peak"]["components"]["optimizer"] == pytest.approx(4 * NUM_PARAMS, rel=0.01)
    assert sum(trace["peak"]["components"].values()) == trace["peak_allocated_bytes"]
    assert trace["peak_allocated_bytes"] <= trace["smallest_capacity_bytes"] * 1.001
    assert trace["smallest_capacity_bytes"] <= trace["peak_reserved_bytes"]
    assert list(stages) == [
        "load", "first step", "steady step", "eval", "save", "generate", "resume",
    ]  # fmt: skip
    # Nothing is made on the card to save: weights stand there, and AdamW's two moments.
    assert 6 * NUM_PARAMS <= stages["save"] < stages["steady step"]
    assert reported["host_loading"]["weight_bytes_by_rank"] == [2 * NUM_PARAMS]
    assert reported["time"]["tier"] == "traced"
    seconds = reported["time"]["seconds_per_step"]
    assert sum(reported["time"]["components"].values()) == pytest.approx(seconds)
    assert sum(reported["traced_time"]["stages"].values()) == pytest.approx(seconds)
    savings = {tuple(one["setting"].items()): one["saving_bytes"] for one in reported["advice"]}
    assert any(("checkpointing", "true") in setting for setting in savings)
    assert all(saving > 0 for saving in savings.values())


def test_the_picture_is_drawn_and_named(home: Path) -> None:
    """Of the same job, whose trace is then known."""
    done = run(home, *FULL, "--no-checkpointing", "--trace", "--chart", "step.html")
    assert done.returncode == 0, done.stderr
    assert "At the traced peak" in done.stdout
    page = (home / "step.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")


def test_plan_traces_where_asked_and_recomputes_no_more_than_it_must(home: Path) -> None:
    words = ("plan", "model", "--method", "full", "--on", "RTX-4090", "--seq-len", "4096")
    by_formula = run_json(home, *words)["plans"][0]
    plan = run_json(home, *words, "--trace")["plans"][0]
    assert by_formula["estimate"]["tier"] == "closed-form"
    assert plan["estimate"]["tier"] == "traced"
    assert plan["estimate"]["peak"]["tensors"]
    assert plan["estimate"]["verdict"] == "fits"
    assert by_formula["estimate"]["time"]["tier"] == "closed-form"
    assert plan["estimate"]["time"]["tier"] == "traced"


def test_without_a_config_a_trace_is_refused_and_a_plan_is_not(home: Path) -> None:
    done = run(home, "estimate", "7B-params", "--on", "A100-40GB", "--trace")
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert run(home, "plan", "7B-params", "--on", "A100-40GB").returncode == 0


def test_a_chart_without_a_trace_is_refused(home: Path) -> None:
    done = run(home, "estimate", "model", "--on", "A100-40GB", "--chart", "step.html")
    assert done.returncode == 2
    assert "--trace --chart step.html" in done.stderr


def test_what_cannot_be_traced_is_said_and_planned_by_formula(home: Path) -> None:
    words = ("estimate", "model", "--on", "A100-40GB", "--trace", "--sharding", "zero3")
    done = run(home, *words, "--offload", "all")
    assert done.returncode != 0
    assert "offloads" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tracer_that_is_killed_takes_nothing_with_it(home: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if any('tracing.worker' in word for word in sys.orig_argv): os.kill(os.getpid(), 9)\n"
    )
    words = ("plan", "model", "--on", "V100-32GB", "--seq-len", "512", "--trace")
    done = run(home, *words, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "killed" in done.stdout
