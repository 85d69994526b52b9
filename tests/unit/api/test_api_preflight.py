"""preflight as a Python call."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tightfit.api.preflight import preflight
from tightfit.core.errors import SetupError, UsageError
from tightfit.core.import_path import module_words

REPORT = {
    "findings": [], "worst": "ok", "exit_code": 0, "seconds": 1.5, "links": [],
    "all_reduce": None,
    "nodes": [
        {"name": "c1", "address": "10.0.0.1", "interface": "ib0", "clock_offset_seconds": 0.0,
         "facts": None, "options": ["--nodes", "1"]}
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("TIGHTFIT_SITE", "SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)


def test_a_node_that_cannot_be_reached_is_a_finding() -> None:
    steps: list[str] = []
    report = preflight(
        nodes="a,b",
        run_with="no-such-ssh {node}",
        progress=lambda text, _done, _total: steps.append(text),
    )

    assert report.exit_code == SetupError.exit_code
    assert [node.name for node in report.nodes] == ["a", "b"]
    assert "starting an agent on each of 2 nodes" in steps


def test_no_nodes_are_named() -> None:
    with pytest.raises(UsageError, match="No nodes are named"):
        preflight()


def write_salloc(folder: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    path = folder / "salloc"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_the_report_comes_back_from_an_allocation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = tmp_path / "said"
    write_salloc(tmp_path, monkeypatch, f"echo \"$@\" >{said}; echo '{json.dumps(REPORT)}'")
    report = preflight(on="slurm:gpu", port=29501)

    assert report.nodes[0].options == ("--nodes", "1")
    line = said.read_text()
    assert "--partition=gpu" in line.split()
    command = [sys.executable, *module_words("tightfit", "preflight", "--port", "29501", "--json")]
    assert line.endswith(f"{' '.join(command)}\n")


def test_nodes_that_slurm_does_not_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_salloc(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(SetupError, match="Slurm gave no 2 nodes"):
        preflight(on="slurm:gpu")
