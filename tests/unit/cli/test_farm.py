"""What `farm` prints at its end, and how it names what ends its workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tightfit.cli.farm import PIPED_COLUMNS, _render_statistics
from tightfit.cli.terminal.screen import show
from tightfit.clusters.site import Site
from tightfit.farming.backends.slurm import SlurmStarter
from tightfit.farming.statistics import FarmStatistics, NodeStatistics
from tightfit.farming.worker_pool import StartedWorkers, WorkerBackend


def make_statistics(*, start_seconds: float | None) -> FarmStatistics:
    node = NodeStatistics(
        partition="gpu-interactive-long",
        node="compute-node-0123.cluster.example.org",
        device="cuda",
        num_workers=2,
        num_chunks=10,
        num_answers=200,
        share=1.0,
        num_prompt_tokens=1_000_000,
        num_new_tokens=12_345_678,
        new_tokens_per_second=12_345.6,
        answers_per_second=5.2,
        load_seconds=100.0,
        busy_seconds=12_345.0,
        idle_seconds=1_234.0,
        taken_over={},
        num_discarded=0,
        num_lost_workers=1,
        bytes_per_second=3e12,
        bandwidth_fraction=0.62,
        bottleneck="memory bandwidth",
        sentence="Memory bandwidth: the weights are read in every pass.",
    )
    return FarmStatistics(
        model="m",
        num_prompts=200,
        num_answers=200,
        num_failed=0,
        num_prompt_tokens=1_000_000,
        num_new_tokens=12_345_678,
        seconds=38.0,
        start_seconds=start_seconds,
        new_tokens_per_second=1.0,
        total_tokens_per_second=1.0,
        answers_per_second=1.0,
        num_chunks=10,
        prompts_per_chunk=20,
        num_workers=2,
        released={},
        num_discarded=0,
        nodes=(node,),
    )


def test_in_a_pipe_the_table_keeps_its_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)

    statistics = make_statistics(start_seconds=100.0)
    show(_render_statistics(statistics), piped_columns=PIPED_COLUMNS)

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "200 answers in 38 s, after 1 min 40 s until a model was loaded"
    (header,) = (line for line in lines if line.startswith("partition"))
    assert header.split()[-5:] == ["taken", "over", "doubled", "memory/s", "bottleneck"]
    (row,) = (line for line in lines if line.startswith("gpu-interactive-long"))
    assert "compute-node-0123.cluster.example.org" in row
    assert row.endswith(" 0  3,000.0 GB (62%)  memory bandwidth")
    assert lines[-1].endswith("org: Memory bandwidth: the weights are read in every pass.")


def test_statistics_of_earlier_versions_say_what_they_know(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show(_render_statistics(make_statistics(start_seconds=None)))

    assert capsys.readouterr().out.startswith("200 answers in 38 s\n")


def test_workers_of_slurm_are_cancelled_by_their_arrays(tmp_path: Path) -> None:
    jobs = [
        StartedWorkers(group="gpu", kind=WorkerBackend.SLURM, names=("41",), num_workers=2),
        StartedWorkers(group="cpu", kind=WorkerBackend.SLURM, names=("57",), num_workers=3),
    ]
    starter = SlurmStarter(tmp_path, Site())

    assert starter.name_cancel_command(jobs) == "scancel 41 57"
    assert starter.name_cancel_command([]) == ""
