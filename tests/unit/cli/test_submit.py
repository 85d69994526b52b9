"""`tightfit submit` with stand-ins for Slurm's commands, and `train --as-planned`.

tests/integration/cluster does the same on a real Slurm.
"""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from submit_world import SINFO, Slurm, write_site
from tightfit.clusters.slurm.queue import SubmittedJob, write_job_file
from tightfit.runs.run_folder import RunFolder, RunState, RunStatus

pytest_plugins = ("submit_world",)
pytestmark = pytest.mark.usefixtures("own_world")

SAID_AT = "2026-01-01T00:10:00+00:00"


def test_dry_run_shows_plan_script_and_slurms_word(run: Run, job: Path, slurm: Slurm) -> None:
    answer = run("submit", str(job), "--on", "slurm:cpu", "--dry-run")

    assert answer.code == 0, answer.err
    for part in ("LoRA", "#SBATCH --partition=cpu", "Job 7 to start at noon", "Nothing was"):
        assert part in answer.out
    assert not Path("out").exists()
    assert slurm.num_submitted == 0


def test_dry_run_as_one_document(run: Run, job: Path, slurm: Slurm) -> None:
    found = run("submit", str(job), "--on", "slurm:cpu", "--nodes", "2", "--dry-run", "--json").json

    assert found["plan"]["strategy"]["num_nodes"] == 2
    assert "#SBATCH --nodes=2\n" in found["script"]
    assert found["num_slices"] == 1
    assert slurm.num_submitted == 0


def test_submitted_with_everything_in_the_folder(run: Run, job: Path, slurm: Slurm) -> None:
    answer = run("submit", str(job), "--on", "slurm:cpu", "--no-follow", "--json")

    assert answer.code == 0, answer.err
    folder = Path(answer.json["run"])
    assert answer.json["job_id"] == "42"
    assert slurm.num_submitted == 1
    held = {path.name for path in folder.iterdir()}
    assert {"plan.json", "recipe.json", "tokens.json", "state.json", "job.sbatch"} <= held
    assert RunFolder(path=folder).read_tokens().train.startswith(str(folder))
    assert f"--output={folder}/slurm-%j.out" in (folder / "job.sbatch").read_text()


def test_the_same_recipe_is_not_submitted_twice(run: Run, job: Path, slurm: Slurm) -> None:
    run("submit", str(job), "--on", "slurm:cpu", "--no-follow")
    again = run("submit", str(job), "--on", "slurm:cpu", "--no-follow")

    assert again.code == 2
    assert "queued or running already" in again.err
    assert slurm.num_submitted == 1


def test_a_job_that_ended_early_is_submitted_again(run: Run, job: Path, slurm: Slurm) -> None:
    run("submit", str(job), "--on", "slurm:cpu", "--no-follow")
    slurm.say("CANCELLED")
    again = run("submit", "out", "--no-follow")

    assert again.code == 0, again.err
    assert slurm.num_submitted == 2


def test_a_job_that_nobody_noted_is_found_in_the_queue(
    run: Run, job: Path, tmp_path: Path, slurm: Slurm
) -> None:
    run("submit", str(job), "--on", "slurm:cpu", "--no-follow")
    Path("out/slurm.json").unlink()  # killed between sbatch and its note, or sbatch by hand
    line = f"43|cpu|{tmp_path}/out/job.sbatch"
    (tmp_path / "slurm" / "squeue").write_text(f"#!/bin/bash\necho '{line}'\n")
    again = run("submit", str(job), "--on", "slurm:cpu", "--no-follow")

    assert (again.code, slurm.num_submitted) == (2, 1)
    assert "queued or running already" in again.err
    assert json.loads(Path("out/slurm.json").read_text())["job_id"] == "43"


def test_no_plan_for_nodes_that_the_constraint_rules_out(
    run: Run, job: Path, tmp_path: Path, slurm: Slurm
) -> None:
    odd = "c3|cpu|up|(null)|16000|4|idle|1:00:00|900000|ib,avx2\n"
    (tmp_path / "slurm" / "nodes.txt").write_text(SINFO + odd)
    words = ("submit", str(job), "--on", "slurm:cpu", "--dry-run", "--nodes", "3")

    assert run(*words, "--constraint", "avx2").code == 0
    fewer = run(*words, "--constraint", "ib")
    assert fewer.code == 2
    assert "at most 1 node" in fewer.err
    none = run(*words, "--constraint", "volta|ampere")
    assert none.code == 2
    assert "choose among: avx2, ib" in none.err
    assert run(*words, "--constraint", "[ib|avx2]").code == 0  # for Slurm alone to judge
    assert slurm.num_submitted == 0


@pytest.mark.parametrize("option", ["--exclude=c[2-9]", "-x c2", "--nodelist=c1", "-wc1"])
@pytest.mark.usefixtures("slurm")
def test_no_plan_for_nodes_that_raw_options_rule_out(
    run: Run, job: Path, tmp_path: Path, option: str
) -> None:
    words = ("submit", str(job), "--on", "slurm:cpu", "--dry-run", "--nodes")
    assert run(*words, "2").code == 0
    write_site(tmp_path, f"slurm: {{extra: ['{option}']}}\n")
    fewer = run(*words, "2")
    assert fewer.code == 2
    assert "at most 1 node" in fewer.err
    assert run(*words, "1").code == 0


@pytest.mark.usefixtures("slurm")
def test_raw_options_that_the_plan_cannot_follow_are_named(
    run: Run, job: Path, tmp_path: Path
) -> None:
    words = ("submit", str(job), "--on", "slurm:cpu", "--dry-run", "--json")
    write_site(tmp_path, "slurm: {extra: ['--exclude=./bad.txt', '-N 7', '--exclusive']}\n")
    notes = run(*words).json["notes"]
    assert [word in " ".join(notes) for word in ("bad.txt", "--nodes=7")] == [True, True]
    assert not any("exclusive" in note for note in notes)
    write_site(tmp_path, "slurm: {extra: ['--exclude=c1,c2']}\n")
    assert "leaves no node" in run(*words).err


@pytest.mark.usefixtures("slurm")
def test_options_are_held_to_what_the_site_is(run: Run, job: Path) -> None:
    answer = run("submit", str(job), "--on", "slurm:cpu", "--account", "a b", "--dry-run")

    assert answer.code == 2
    assert "more than one word" in answer.err


def test_options_win_over_the_site(run: Run, job: Path, tmp_path: Path, slurm: Slurm) -> None:
    write_site(
        tmp_path,
        "runs: shared\nsetup: module load cuda\nslurm: {account: a1, qos: low, partition: cpu}\n",
    )
    recipe = json.loads(job.read_text())
    del recipe["output"]
    job.write_text(json.dumps(recipe))
    answer = run("submit", str(job), "--on", "slurm", "--account", "a2", "--no-follow", "--json")

    assert answer.code == 0, answer.err
    assert Path(answer.json["run"]) == tmp_path / "shared" / "model-lora-1"
    script = Path(answer.json["script"]).read_text()
    for line in ("--account=a2", "--qos=low", "--partition=cpu"):
        assert f"#SBATCH {line}\n" in script
    assert script.startswith("#!/bin/bash -l\n")
    assert "\nmodule load cuda\n" in script
    assert slurm.num_submitted == 1


@pytest.mark.usefixtures("slurm")
def test_a_time_limit_is_never_rounded_in_silence(run: Run, job: Path) -> None:
    to_cpu = ("submit", str(job), "--on", "slurm:cpu", "--dry-run", "--json", "--time-limit")
    found = run(*to_cpu, "0:10").json
    assert "#SBATCH --time=0-00:01:00\n" in found["script"]
    assert any("10 s to Slurm" in note and "1 min" in note for note in found["notes"])

    found = run(*to_cpu, "10").json
    assert "#SBATCH --time=0-00:10:00\n" in found["script"]
    assert not any("to Slurm" in note for note in found["notes"])


def test_what_slurm_refuses_has_a_remedy(run: Run, job: Path, slurm: Slurm) -> None:
    slurm.refuse("Batch job submission failed: Invalid account or partition combination")
    answer = run("submit", str(job), "--on", "slurm:cpu")

    assert answer.code == 2
    assert "Slurm refuses the job: Invalid account" in answer.err
    assert "--account NAME" in answer.err


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--on", "slurm:gpu"), 3, "choose one of: cpu"),
        (("--on", "4xT4"), 2, "no cluster that takes jobs"),
        (("--on", "slurm:cpu", "--nodes", "3"), 2, "at most 2 nodes"),
        (("--on", "slurm:cpu", "--time-limit", "soon"), 4, "is not a time limit"),
        (("--on", "slurm:cpu", "--time-limit", "infinite"), 2, "is no limit"),
        (("--on", "slurm:cpu", "--time-limit", "2:00:00"), 2, "exceeds the limit of cpu"),
    ],
)
@pytest.mark.usefixtures("slurm")
def test_refusals(run: Run, job: Path, options: tuple[str, ...], code: int, said: str) -> None:
    answer = run("submit", str(job), *options)

    assert answer.code == code
    assert said in answer.err
    assert "  try: " in answer.err


def test_without_slurm_it_says_so(
    run: Run, job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = run("submit", str(job), "--on", "slurm:cpu")

    assert answer.code == 6
    assert "`sinfo` is not on this machine" in answer.err
    assert "tightfit plan MODEL --on" in answer.err, "submit itself takes no hardware in words"


@pytest.fixture
def submitted(tmp_path: Path, slurm: Slurm) -> RunFolder:
    """A run whose job has left the queue, as the slurm fixture says."""
    from made_runs import make_plan

    run = RunFolder(path=tmp_path / "runs" / "mine")
    run.path.mkdir(parents=True)
    run.write_plan(make_plan())
    write_job_file(
        run, SubmittedJob(job_id="42", partition="cpu", submitted_at="2026-01-01T00:00:00+00:00")
    )
    slurm.say("COMPLETED")
    return run


def conclude(run: RunFolder, status: RunStatus, **fields: Any) -> None:
    run.write_state(RunState(status=status, step=5, num_steps=9, updated_at=SAID_AT, **fields))


def test_following_again_ends_with_the_runs_own_code(run: Run, submitted: RunFolder) -> None:
    conclude(submitted, RunStatus.FINISHED, exit_code=0)
    answer = run("submit", "runs/mine", "--follow")
    assert answer.code == 0, answer.err
    assert "job 42: completed, restart 1" in answer.err
    assert "finished at step 5" in answer.out
    assert "queued again 1 time\n" in answer.out

    conclude(submitted, RunStatus.STOPPED, exit_code=75)
    found = run("submit", "runs/mine", "--follow", "--json")
    assert found.code == found.json["exit_code"] == 75
    assert found.json["num_restarts"] == 1


def test_a_run_that_failed_tells_its_own_reason(run: Run, submitted: RunFolder) -> None:
    conclude(
        submitted, RunStatus.FAILED, exit_code=7, problem="It diverged.", remedy="a lower --lr"
    )
    answer = run("submit", "runs/mine", "--follow")

    assert answer.code == 7
    assert "It diverged." in answer.err
    assert "a lower --lr" in answer.err


@pytest.mark.parametrize(
    ("state", "code", "said"),
    [
        ("FAILED", 6, "without a message from the run: bash: module: command not found"),
        ("CANCELLED", 1, "was cancelled at step 5"),
        ("TIMEOUT", 1, "met its time limit"),
        ("NODE_FAIL", 1, "lost its node"),
        ("OUT_OF_MEMORY", 6, "more host memory than it asked for"),
    ],
)
def test_a_job_that_ended_without_its_run(
    run: Run, submitted: RunFolder, slurm: Slurm, state: str, code: int, said: str
) -> None:
    conclude(submitted, RunStatus.RUNNING)
    (submitted.path / "slurm-42.out").write_text("hello\nbash: module: command not found\n")
    slurm.say(state)
    answer = run("submit", "runs/mine", "--follow")

    assert answer.code == code
    assert said in answer.err
    assert "  try: " in answer.err


@pytest.mark.parametrize(
    ("answer", "said", "is_cancelled"),
    [("y\n", "job 42: cancelled", True), ("\n", "goes on; follow it again", False)],
)
def test_ctrl_c_asks_before_it_cancels(
    submitted: RunFolder, slurm: Slurm, answer: str, said: str, is_cancelled: bool
) -> None:
    conclude(submitted, RunStatus.RUNNING)
    slurm.say("RUNNING")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tightfit", "submit", "runs/mine", "--follow"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        reported = process.stdout.readline()
        assert "job 42 runs on c1" in reported
        process.send_signal(signal.SIGINT)
        os.write(ours, answer.encode())
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)

    assert process.returncode == 130, rest
    assert "Cancel job 42? It saves first. [y/N]" in rest
    assert said in rest
    assert ("scancel 42" in slurm.calls.read_text()) == is_cancelled


def test_the_word_of_an_earlier_start_is_not_taken_for_this_jobs(
    run: Run, submitted: RunFolder, slurm: Slurm
) -> None:
    conclude(submitted, RunStatus.STOPPED, exit_code=75)
    later = SubmittedJob(job_id="42", partition="cpu", submitted_at="2027-01-01T00:00:00+00:00")
    write_job_file(submitted, later)
    slurm.say("FAILED")
    answer = run("submit", "runs/mine", "--follow")

    assert answer.code == 6
    assert "without a message from the run" in answer.err


class TestAsPlanned:
    def test_the_folders_plan_is_run_without_a_look_at_the_hardware(
        self, run: Run, job: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run("submit", str(job), "--on", "slurm:cpu", "--no-follow")
        assert slurm.num_submitted == 1
        before = Path("out/plan.json").read_bytes()
        from local_cases import stand_in_command

        monkeypatch.setattr(
            "tightfit.clusters.local.launcher.worker_command",
            lambda _plan, run, *_, **__: stand_in_command(RunFolder(path=run)),
        )
        Path("out/behaviour.json").write_text('{"num_steps": 6}')
        shutil.rmtree("slurm")  # nothing to ask any more
        answer = run("train", "out", "--as-planned")

        assert answer.code == 0, answer.err
        assert Path("out/plan.json").read_bytes() == before
        assert "step 6/6" in answer.err
        again = run("train", "out", "--as-planned")
        assert again.code == 0
        assert "is finished" in again.out

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (("--nodes", "2", "--rendezvous", "a:1"), "is for 1 nodes, not for 2"),
            (("--on", "cpu"), "--on cannot change"),
            (("--seq-len", "8"), "--seq-len cannot change"),
            (("--fresh",), "--fresh cannot change"),
        ],
    )
    def test_nothing_else_can_be_asked(
        self, run: Run, submitted: RunFolder, options: tuple[str, ...], said: str
    ) -> None:
        answer = run("train", str(submitted.path), "--as-planned", *options)

        assert answer.code == 2
        assert said in answer.err

    def test_a_recipe_has_no_plan(self, run: Run, job: Path) -> None:
        answer = run("train", str(job), "--as-planned")

        assert answer.code == 2
        assert "takes a run's folder" in answer.err
