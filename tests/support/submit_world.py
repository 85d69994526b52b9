"""A tiny recipe, and stand-ins for the commands of a Slurm to submit it to.

PYTEST_DONT_REWRITE: it asserts nothing, and files import its names before pytest does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tightfit.clusters import follow
from tightfit.clusters.slurm import backend, queue

CLUSTER_TESTS = Path(__file__).parents[1] / "unit" / "clusters"
SINFO = (
    "c1|cpu|up|(null)|16000|4|idle|1:00:00|900000|avx2\n"
    "c2|cpu|up|(null)|16000|4|idle|1:00:00|900000|avx2\n"
)
SINFO_COMMAND = """#!/bin/bash
case "$*" in *-O*) exit 1;; esac
cd "$(dirname "$0")"
touch "asked.$PPID"
while [ "$(ls asked.* | wc -l)" -lt "$SLURM_CROWD" ]; do sleep 0.05; done
cat nodes.txt
"""
SBATCH = """#!/bin/bash
echo "$*" >>"$SLURM_CALLS"
if [ "$1" = --test-only ]; then echo "sbatch: Job 7 to start at noon" >&2; exit 0; fi
if [ -n "$SLURM_REFUSES" ]; then echo "sbatch: error: $SLURM_REFUSES" >&2; exit 1; fi
echo 42
"""
SQUEUE = """#!/bin/bash
state=$SLURM_STATE
if grep -q scancel "$SLURM_CALLS"; then state=CANCELLED; fi
if [ "$2" = --me ]; then
  script=$(grep -o '^--parsable .*' "$SLURM_CALLS" | tail -1 | cut -d' ' -f2)
  if [ "$state" = RUNNING ]; then echo "42|cpu|$script"; fi
  exit
fi
printf '%-48s%-24s%-12s%-80s%-256s\\n' 42 "$state" 1 None c1
"""
SCANCEL = '#!/bin/bash\necho "scancel $*" >>"$SLURM_CALLS"\n'


def write_site(folder: Path, text: str) -> None:
    """What it says, and that the nodes see the test's folder: /tmp, which they would not."""
    place = folder / "config" / "tightfit"
    place.mkdir(parents=True, exist_ok=True)
    (place / "site.yaml").write_text(f"shared: {json.dumps(str(folder))}\n{text}")


@pytest.fixture
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TIGHTFIT_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TIGHTFIT_SITE", raising=False)
    write_site(tmp_path, "")
    monkeypatch.setattr(follow, "FIRST_POLL_SECONDS", 0.0)
    monkeypatch.setattr(queue, "MAX_POLL_SECONDS", 0.0)
    monkeypatch.setattr(backend, "SETTLE_SECONDS", 0.0)
    sys.path.insert(0, str(CLUSTER_TESTS))
    yield
    sys.path.remove(str(CLUSTER_TESTS))


class Slurm:
    """Commands of a cluster with one partition of two CPU nodes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        (folder / "nodes.txt").write_text(SINFO)
        commands = {"sinfo": SINFO_COMMAND, "sbatch": SBATCH, "squeue": SQUEUE, "scancel": SCANCEL}
        for name, text in commands.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.calls = folder / "calls"
        self.calls.write_text("")
        self._env = monkeypatch
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setenv("SLURM_CALLS", str(self.calls))
        monkeypatch.setenv("SLURM_CROWD", "1")
        monkeypatch.setenv("SLURM_STATE", "RUNNING")
        monkeypatch.delenv("SLURM_REFUSES", raising=False)

    def say(self, state: str) -> None:
        self._env.setenv("SLURM_STATE", state)

    def wait_for(self, num_submitters: int) -> None:
        """No nodes are shown to one submitter before as many have asked for them."""
        self._env.setenv("SLURM_CROWD", str(num_submitters))

    def refuse(self, why: str) -> None:
        self._env.setenv("SLURM_REFUSES", why)

    @property
    def num_submitted(self) -> int:
        return self.calls.read_text().count("--parsable")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    from small_models import make_tokenizer

    model = tmp_path / "model"
    words = make_tokenizer(model)
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": len(words), "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "torch_dtype": "float32", "tie_word_embeddings": True,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(shape))
    rows = [{"instruction": f"add {n} and 1", "output": f"it is {n + 1}"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe: dict[str, Any] = {
        "model": "./model", "data": "rows.jsonl", "method": "lora", "seq_len": 64,
        "max_steps": 6, "effective_batch": 8, "random_weights": True, "output": "out",
    }  # fmt: skip
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(recipe))
    return path
