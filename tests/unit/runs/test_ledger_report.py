"""The report: numbers that can be worked out by hand, and runs that stopped half way."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from made_runs import make_eval, make_plan, make_records, make_run, make_step
from tightfit.core.errors import NotFoundError
from tightfit.hardware.machine import DriverReading
from tightfit.runs.metrics import EventRecord, Record, append_record
from tightfit.runs.report import (
    RunReport,
    find_runs,
    list_differing,
    list_results,
    make_report,
    probe_state,
    read_found_runs,
    read_report,
    resolve_runs,
    write_report,
)
from tightfit.runs.run_folder import (
    RunFolder,
    RunState,
    RunStatus,
    probe_environment,
)


def test_a_whole_run_by_hand(tmp_path: Path) -> None:
    report = make_report(make_run(tmp_path / "run"))

    assert report.name == "run"
    assert (report.step, report.num_steps, report.num_epochs) == (160, 160, 2.0)
    assert report.num_tokens == 160 * 3200
    assert report.total_seconds == pytest.approx(2 * 2.0 + 158 * 0.5)
    assert report.seconds_per_epoch == pytest.approx(report.total_seconds / 2)
    assert report.seconds_per_step == 0.5
    assert report.tokens_per_second == pytest.approx(6400)
    assert report.data_wait_fraction == pytest.approx(0.01)
    assert report.peak_gpu_allocated_bytes == 2_006_000_000
    assert report.eval_before is not None
    assert report.eval_after is not None
    assert report.eval_before.loss == 2.75
    assert report.eval_after.step == 160
    assert report.eval_after.loss == pytest.approx(1.25 + 1.5 * math.exp(-160 / 30))
    assert report.first_loss is not None
    assert report.last_loss is not None
    assert report.first_loss > 2.4
    assert report.last_loss < 1.3
    assert report.disk_bytes == sum(p.stat().st_size for p in (tmp_path / "run").iterdir())


def test_errors_are_signed_and_in_percent_of_the_measurement(tmp_path: Path) -> None:
    plan = make_plan()
    gpu = plan.estimate.gpu
    inside = gpu.peak_reserved_bytes - gpu.context_bytes
    step = make_step(1, gpu_reserved_bytes=inside // 2, seconds=plan.estimate.time.seconds_per_step)
    report = make_report(make_run(tmp_path / "run", plan=plan, records=[step]))

    errors = {found.name: found.error_percent for found in report.compared}
    assert errors["GPU memory, reserved"] == pytest.approx(100, abs=0.01)
    assert errors["time per step"] == pytest.approx(0)


def test_host_memory_is_compared_for_all_ranks_of_a_node(tmp_path: Path) -> None:
    plan = make_plan(on="4xT4")
    assert plan.strategy.gpus_per_node == 4
    report = make_report(make_run(tmp_path / "run", plan=plan, records=[make_step(1)]))
    (host,) = (found for found in report.compared if found.name.startswith("host"))
    assert host.measured == 4 * 3_100_000_000
    assert report.peak_host_bytes == 3_100_000_000


def test_on_a_cpu_memory_is_the_process(tmp_path: Path) -> None:
    plan = make_plan(on="cpu")
    report = make_report(make_run(tmp_path / "run", plan=plan))
    assert report.is_cpu
    memory = [found for found in report.compared if "memory" in found.name]
    assert [found.name for found in memory] == ["process memory"]
    assert memory[0].predicted == plan.estimate.gpu.peak_reserved_bytes


def test_long_steps_that_hold_an_evaluation_do_not_slow_the_speed(tmp_path: Path) -> None:
    steps: list[Record] = [make_step(i, seconds=9.0 if i % 10 == 0 else 0.5) for i in range(1, 41)]
    report = make_report(make_run(tmp_path / "run", records=steps))
    assert report.tokens_per_second == pytest.approx(6400)
    assert report.total_seconds == pytest.approx(4 * 9 + 36 * 0.5)


def test_after_a_change_of_plan_only_its_own_steps_are_compared(tmp_path: Path) -> None:
    """In the file's order: the resumed run did steps 9 and 10 again with the smaller plan."""
    change = EventRecord(step=10, text="out of memory with micro-batch 8; going on with 4")
    before: list[Record] = [make_step(i, gpu_reserved_bytes=9 * 10**9) for i in range(1, 9)]
    after: list[Record] = [make_step(i, gpu_reserved_bytes=4 * 10**9) for i in range(9, 21)]
    report = make_report(make_run(tmp_path / "run", records=[*before, change, *after]))

    assert report.peak_gpu_reserved_bytes == 4 * 10**9
    assert [event.text for event in report.plan_changes] == [change.text]
    assert report.events == ()
    assert report.step == 20


def test_a_resumed_run_counts_each_step_once(tmp_path: Path) -> None:
    twice: list[Record] = [make_step(1), make_step(2), make_step(2, loss=9.0), make_step(3)]
    report = make_report(make_run(tmp_path / "run", records=twice))
    assert report.num_tokens == 3 * 3200


def test_nan_losses_are_counted_and_left_out_of_means(tmp_path: Path) -> None:
    records: list[Record] = [make_step(1, loss=2.0), make_step(2, loss=math.nan)]
    records.append(make_eval(2, math.nan).model_copy(update={"perplexity": math.inf}))
    report = make_report(make_run(tmp_path / "run", records=records))
    assert (report.first_loss, report.last_loss, report.num_nonfinite_losses) == (2.0, 2.0, 1)
    assert report.eval_after is not None
    assert report.eval_after.loss is None


def test_only_a_mixture_has_lines_for_its_experts(tmp_path: Path) -> None:
    dense = make_report(make_run(tmp_path / "dense"))
    loads: dict[str, Any] = {
        "router_loss": 2.25,
        "expert_load_max": 3.5,
        "idle_experts_fraction": 0.125,
    }
    records: list[Record] = [make_step(step, **loads) for step in range(1, 30)]
    mixture = make_report(make_run(tmp_path / "mixture", records=records))

    def shown(report: RunReport) -> dict[str, str]:
        return {line.label: line.value for line in list_results(report)}

    labels = {"router loss, last", "expert load, max", "idle experts"}
    assert not labels & shown(dense).keys()
    assert [shown(mixture)[label] for label in sorted(labels)] == ["3.50x", "12.5%", "2.2500"]


def test_a_run_that_has_only_a_plan(tmp_path: Path) -> None:
    run = RunFolder(path=tmp_path)
    run.write_plan(make_plan())
    report = make_report(run)
    assert report.status is RunStatus.PREPARED
    assert report.seconds_per_step is None
    assert {found.measured for found in report.compared} == {None}


def test_a_broken_state_is_a_failed_run_with_a_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.state_path.write_text("{")
    report = make_report(run)
    assert report.status is RunStatus.FAILED
    assert "state.json" in (report.problem or "")


def test_a_folder_without_a_plan_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"plan\.json"):
        make_report(RunFolder(path=tmp_path))


def test_a_written_report_serves_until_something_changes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", records=make_records(20))
    written = make_report(run)
    write_report(run, written)
    run.report_path.write_text(written.model_copy(update={"model": "marked"}).model_dump_json())
    assert read_report(run).model == "marked"

    append_record(run.metrics_path, make_step(21))
    later = run.report_path.stat().st_mtime + 5
    os.utime(run.metrics_path, (later, later))
    assert read_report(run).model != "marked"
    assert read_report(run).step == 21


def gone_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_a_running_run_whose_process_is_gone_has_died(tmp_path: Path) -> None:
    here = socket.gethostname()

    def status(**state: Any) -> RunStatus:
        run = make_run(tmp_path / str(len(list(tmp_path.iterdir()))),
                       status=RunStatus.RUNNING, **state)  # fmt: skip
        return probe_state(run).status

    now = "2126-01-01T00:00:00Z"
    assert status(pid=gone_pid(), host=here) is RunStatus.DIED
    assert status(pid=os.getpid(), host=here, updated_at=now) is RunStatus.RUNNING
    # The same number, but this process began long after the state was written.
    assert status(pid=os.getpid(), host=here, updated_at="2020-01-01T00:00:00Z") is RunStatus.DIED
    assert status(pid=gone_pid(), host="another-host") is RunStatus.RUNNING
    assert status(pid=gone_pid()) is RunStatus.RUNNING


def test_a_run_that_was_killed_while_it_started_has_died(tmp_path: Path) -> None:
    def probe(name: str, pid: int | None) -> RunState:
        run = make_run(tmp_path / name, status=RunStatus.PREPARED)
        if pid is not None:
            run.lock_path.write_text(json.dumps({"pid": pid, "host": socket.gethostname()}))
        return probe_state(run)

    died = probe("killed", gone_pid())
    assert died.status is RunStatus.DIED
    assert died.remedy is not None
    assert probe("starting", os.getpid()).status is RunStatus.PREPARED
    assert probe("queued", None).status is RunStatus.PREPARED
    ended = make_run(tmp_path / "ended", status=RunStatus.FINISHED)
    ended.lock_path.write_text(json.dumps({"pid": gone_pid(), "host": socket.gethostname()}))
    assert probe_state(ended).status is RunStatus.FINISHED


def test_the_host_may_stand_in_environment_json(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", status=RunStatus.RUNNING, pid=gone_pid())
    run.write_environment(probe_environment([]))
    assert probe_state(run).status is RunStatus.DIED


def test_environment_needs_no_torch_and_keeps_the_command_line(tmp_path: Path) -> None:
    driver = DriverReading(driver_version="580.1", cuda_version=(13, 0))
    found = probe_environment(["tightfit", "train", "a\udcff.yaml"], read_gpus=lambda: driver)
    run = make_run(tmp_path / "run")
    run.write_environment(found)

    assert run.read_environment() == found
    assert (found.driver, found.driver_cuda) == ("580.1", "13.0")
    assert found.python == sys.version.split()[0]
    assert found.argv[2] == "a\\udcff.yaml"
    program = "import sys; from tightfit.runs.run_folder import *; probe_environment([]); "
    out = subprocess.check_output(
        [sys.executable, "-c", f"{program}print(*sys.modules)"], text=True
    )
    assert {"torch", "transformers", "matplotlib"}.isdisjoint(out.split())


def test_runs_are_found_one_level_further_in_newest_first(tmp_path: Path) -> None:
    make_run(tmp_path / "old", updated_at="2026-01-01T00:00:00+00:00")
    make_run(tmp_path / "team" / "new", updated_at="2026-03-01T00:00:00+00:00")
    make_run(tmp_path / "too" / "deep" / "down")
    broken = make_run(tmp_path / "broken")
    broken.plan_path.write_text("{}")
    (tmp_path / "file").write_text("")

    found = read_found_runs(find_runs(tmp_path))

    assert [run.folder.path.name for run in found] == ["new", "old", "broken"]
    assert found[-1].error is not None


def test_a_name_is_looked_for_in_runs_and_the_nearest_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "sql-lora")
    assert [run.path for run in resolve_runs("sql-lora")] == [Path("runs/sql-lora")]
    with pytest.raises(NotFoundError, match="sql-lora"):
        resolve_runs("sql-lorra")
    for odd in ("a\0b", "x" * 5000, "~nobody-here", "/dev/null"):
        with pytest.raises(NotFoundError):
            resolve_runs(odd)


def test_what_differs_between_plans() -> None:
    differing = list_differing([make_plan(), make_plan(micro_batch=2)])
    assert differing["micro_batch"] == ("4", "2")
    assert "seq_len" not in differing
    assert list_differing([make_plan(), make_plan()]) == {}
