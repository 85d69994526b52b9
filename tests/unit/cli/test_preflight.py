"""`tightfit preflight`: what it refuses, what it prints, and its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Run

from tightfit.api import preflight
from tightfit.clusters.preflight.gather import NodeReport, PreflightReport, PreflightRequest
from tightfit.core.findings import Finding, Status

OPTIONS = ("--nodes", "2", "--rendezvous", "10.0.0.1:29500", "--interface", "eth0")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No site file, no Slurm job."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("TIGHTFIT_SITE", "SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)


def make_report(*findings: Finding) -> PreflightReport:
    is_bad = any(finding.status is Status.ERROR for finding in findings)
    return PreflightReport(
        findings=findings,
        worst=Status.ERROR if is_bad else Status.OK,
        exit_code=6 if is_bad else 0,
        seconds=4.2,
        nodes=tuple(
            NodeReport(
                name=name,
                address="10.0.0.1",
                interface="eth0",
                clock_offset_seconds=0.0,
                facts=None,
                options=OPTIONS,
            )
            for name in "ab"
        ),
        links=(),
        all_reduce=None,
    )


FINE = Finding(area="names", name="all", status=Status.OK, detail="resolved")
ERROR = Finding(
    area="port", name="a:29500", status=Status.ERROR, detail="is taken", remedy="--port 29501"
)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "no Slurm job"),
        (("--nodes", "n[1-"), 2, "brackets"),
        (("--nodes", "n[1-300]"), 2, "300 nodes"),
        (("--nodes", "a,b", "--on", "slurm:gpu"), 2, "both say"),
        (("--on", "k8s"), 2, "Slurm alone"),
        (("--nodes", "a,b", "--num-nodes", "3"), 2, "--num-nodes"),
        (("--nodes", "a,b", "--port", "70000"), 2, "--port"),
    ],
)
def test_what_is_refused(run: Run, words: tuple[str, ...], code: int, said: str) -> None:
    answer = run("preflight", *words)

    assert answer.code == code
    assert said in answer.err
    assert "try:" in answer.err


def test_a_prefix_that_does_not_start_is_a_finding(run: Run) -> None:
    answer = run("preflight", "--nodes", "a,b", "--run-with", "no-such-ssh {node}", "--json")

    assert answer.code == 6
    errors = [finding for finding in answer.json["findings"] if finding["status"] == "error"]
    assert [finding["name"] for finding in errors] == ["a", "b"]
    assert "no-such-ssh" in errors[0]["detail"]


def test_the_options_are_printed_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken lines could not be copied into a shell."""
    monkeypatch.setattr(preflight, "run_preflight", lambda *_: make_report(FINE))
    answer = run("preflight", "--nodes", "a,b", columns=60)

    assert answer.code == 0
    assert "Start the job with" in answer.out
    assert f"  on b:  tightfit train RECIPE.YAML {' '.join(OPTIONS)}\n" in answer.out


def test_an_error_gives_6_and_its_remedy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "run_preflight", lambda *_: make_report(FINE, ERROR))
    answer = run("preflight", "--nodes", "a,b")

    assert answer.code == 6
    assert "try: --port 29501" in answer.out
    assert "Once that is put right" in answer.out


def test_a_slurm_job_checks_its_own_nodes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[PreflightRequest] = []

    def stand_in(request: PreflightRequest, _tell: object) -> PreflightReport:
        asked.append(request)
        return make_report(FINE)

    monkeypatch.setattr(preflight, "run_preflight", stand_in)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[01-02]")
    run("preflight", "--interface", "ib0", "--port", "1234")

    assert asked[0].nodes == ("gpu01", "gpu02")
    assert asked[0].start.prefix.startswith("srun --overlap")
    assert (asked[0].port, asked[0].interface) == (1234, "ib0")


def test_without_slurm_there_is_no_allocation(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = run("preflight", "--on", "slurm:gpu")

    assert answer.code == 6
    assert "salloc" in answer.err


def test_nodes_that_there_are_not_are_not_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rest = "16000|4|idle|1:00:00|0|x"
    lines = f"g1|gpu|up|gpu:v100:4|{rest}\\ng2|gpu|up|gpu:v100:1|{rest}"
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f"#!/bin/sh\ncase \"$*\" in *-O*) exit 1;; esac\nprintf '{lines}\\n'\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    many = run("preflight", "--on", "slurm:gpu", "--num-nodes", "3")
    large = run("preflight", "--on", "slurm:gpu", "--gpus-per-node", "4")

    assert (many.code, large.code) == (2, 2)
    assert "slurm:gpu has 2." in many.err
    assert "slurm:gpu has 1 with 4 GPUs" in large.err
