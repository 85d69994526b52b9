"""What a trace of a 7B job costs the machine that plans it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tightfit.models.catalogue import read_source_config
from tightfit.models.resolve import resolve_model

GIB = 2**30
MOST_MEMORY_BYTES = 2 * GIB
MOST_IMPORTS = {"few": 5.0, "all": 10.0}
"""CPU time of a trace, in imports of its libraries in the same minute: seconds would tell how fast
the machine is, and what else it is doing."""
LIBRARIES = (
    "import sys; sys.modules['bitsandbytes'] = None; import torch, peft; "
    "from transformers import AutoModelForCausalLM, LlamaForCausalLM"
)


def _trace_7b(folder: Path, *, is_full_depth: bool) -> tuple[dict[str, Any], Any]:
    """The tracer's answer, and what its processes used."""
    job = {
        "config": read_source_config(resolve_model("Llama-2-7b-hf")),
        "strategy": {"method": "lora", "micro_batch": 2, "seq_len": 1024},
        "compute_capability": (9, 0),
        "is_full_depth": is_full_depth,
    }
    given, answer = folder / "in", folder / "out"
    given.write_text(json.dumps(job) + "\n")
    words = [sys.executable, "-m", "tightfit.training.tracing.worker"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with given.open() as stdin, answer.open("w") as stdout:
        used = _wait(subprocess.Popen(words, stdin=stdin, stdout=stdout, env=environment))
    return json.loads(answer.read_text()), used


def _wait(process: subprocess.Popen[bytes]) -> Any:
    """What the process and its children used."""
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return used


def _cpu_seconds(used: Any) -> float:
    return float(used.ru_utime + used.ru_stime)


@pytest.mark.parametrize("depth", MOST_IMPORTS)
def test_tracing_7b_takes_seconds_and_little_memory(depth: str, tmp_path: Path) -> None:
    answer, used = _trace_7b(tmp_path, is_full_depth=depth == "all")

    traced = answer["traced"]
    assert traced is not None, answer["problem"]
    assert (traced["num_traced_layers"] == traced["num_layers"]) == (depth == "all")
    assert used.ru_maxrss * 1024 < MOST_MEMORY_BYTES
    imports = _wait(subprocess.Popen([sys.executable, "-c", LIBRARIES]))
    assert _cpu_seconds(used) < MOST_IMPORTS[depth] * _cpu_seconds(imports)
