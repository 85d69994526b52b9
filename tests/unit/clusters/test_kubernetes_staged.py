"""`--stage` in a pod: the first container's own words, in a RAM disk as the kubelet makes it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kubernetes_cases import make_job, make_site
from kubernetes_reading import expand

from stage_lab import make_model
from tightfit.clusters.kubernetes.objects import STAGED_PATH, build_training
from tightfit.clusters.kubernetes.pod import SHM_PATH
from tightfit.runtime.staged import VARIABLE, find_staged


def test_the_copy_is_made_and_found_where_everybody_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ram_disk = tmp_path / "a $(HOME) $HOME 'model'", tmp_path / "shm"
    model.mkdir()
    make_model(model, 1 << 20)
    ram_disk.mkdir()
    ram_disk.chmod(0o777)  # pkg/volume/emptydir: not sticky, unlike a machine's own /dev/shm
    job = make_job("staged_model")
    assert job.plan.training is not None
    training = job.plan.training.model_copy(update={"model_path": str(model)})
    job = replace(job, plan=job.plan.model_copy(update={"training": training}))
    pod = build_training(job, make_site())[-1]["spec"]["template"]["spec"]
    first, main = pod["initContainers"][0], pod["containers"][0]
    words = [expand(word, {}) for word in [*first["command"], *first["args"]]]
    words[-1] = words[-1].replace(SHM_PATH, str(ram_disk))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TIGHTFIT_SITE", raising=False)

    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stderr
    assert {"name": VARIABLE, "value": STAGED_PATH} in main["env"]
    monkeypatch.setenv(VARIABLE, STAGED_PATH.replace(SHM_PATH, str(ram_disk)))
    copy = find_staged(model)
    assert copy is not None
    assert copy.is_relative_to(ram_disk)
