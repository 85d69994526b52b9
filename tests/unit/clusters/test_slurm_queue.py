"""Jobs in the queue, by what Slurm 22.05 printed, and jobs watched to their end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from local_cases import Notes, make_run
from tightfit.clusters import follow
from tightfit.clusters.slurm import queue
from tightfit.clusters.slurm.queue import (
    JobState,
    JobStatus,
    cancel_jobs,
    find_queued,
    find_restart_cause,
    list_overriding,
    read_jobs,
    submit_script,
)
from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, UsageError, UserError

WIDTHS = (48, 24, 12, 80, 256)


def row(*fields: str) -> str:
    return "".join(text.ljust(width) for text, width in zip(fields, WIDTHS, strict=True)) + "\n"


SACCT = "14|COMPLETED|0:0|cpu01|None\n12|CANCELLED by 0|0:15|None assigned|None\n"
SCONTROL = (
    "JobId=13 ArrayJobId=9 ArrayTaskId=3 JobName=x JobState=NODE_FAIL Reason=NodeDown "
    "Restarts=2 ExitCode=1:0 NodeList=gpu01 BatchHost=gpu01\n"
)


class Slurm:
    """Recorded answers by command; an error where the answer is one."""

    def __init__(self, **answers: str | SetupError) -> None:
        self.answers = answers
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, arguments: Sequence[str], _timeout: float) -> str:
        self.asked.append(tuple(arguments))
        answer = self.answers.get(arguments[0], "")
        if isinstance(answer, SetupError):
            raise answer
        return answer


def refusal(text: str) -> SetupError:
    return SetupError(f"`sbatch` failed: sbatch: error: {text}", remedy="run by hand")


def test_jobs_and_array_tasks_in_the_queue() -> None:
    said = row("12", "PENDING", "1", "Resources", "(null)") + row(
        "13_4", "RUNNING", "0", "None", "gpu[01-02]"
    )
    first, second = read_jobs(["13", "12"], run=Slurm(squeue=said))

    assert (first.job_id, first.task, first.state) == ("13", 4, JobState.RUNNING)
    assert first.nodes == "gpu[01-02]"
    assert (second.state, second.reason, second.num_restarts) == (JobState.PENDING, "Resources", 1)
    assert second.exit_code is None


def test_jobs_that_have_left_the_queue_are_looked_up() -> None:
    gone = SetupError("`squeue` failed: Invalid job id specified", remedy="")
    slurm = Slurm(squeue=gone, sacct=SACCT)
    done, cancelled = read_jobs(["14", "12"], run=slurm)

    assert (done.state, done.exit_code) == (JobState.COMPLETED, 0)
    assert (cancelled.state, cancelled.exit_code, cancelled.nodes) == (JobState.CANCELLED, 143, "")


def test_without_accounting_the_controller_is_asked() -> None:
    gone = SetupError("`squeue` failed: Invalid job id specified", remedy="")
    none = SetupError("`sacct` failed: accounting is off", remedy="")
    (found,) = read_jobs(["9_3"], run=Slurm(squeue=gone, sacct=none, scontrol=SCONTROL))

    assert (found.job_id, found.task, found.state) == ("9", 3, JobState.NODE_FAIL)
    assert (found.num_restarts, found.exit_code) == (2, 1)


def test_a_forgotten_job_is_unknown_and_a_controller_that_is_away_is_an_error() -> None:
    (found,) = read_jobs(["77"], run=Slurm())
    assert found.state is JobState.UNKNOWN
    assert not found.state.is_over

    away = SetupError("`squeue` failed: Unable to contact slurm controller", remedy="")
    with pytest.raises(SetupError, match="contact"):
        read_jobs(["77"], run=Slurm(squeue=away))


def test_words_that_are_no_job_number_never_reach_slurm() -> None:
    slurm = Slurm()
    with pytest.raises(InvalidInputError):
        cancel_jobs(["--all"], run=slurm)
    cancel_jobs([], run=slurm)
    assert slurm.asked == []
    assert read_jobs([], run=slurm) == ()


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("BOOT_FAIL", JobState.NODE_FAIL),
        ("SPECIAL_EXIT", JobState.REQUEUED),
        ("OUT_OF_MEMORY", JobState.OUT_OF_MEMORY),
        ("DEADLINE", JobState.TIMEOUT),
        ("", JobState.UNKNOWN),
        ("NEW_WORD", JobState.UNKNOWN),
    ],
)
def test_states(text: str, state: JobState) -> None:
    assert queue.parse_state(text) is state


def test_a_job_number_with_its_cluster() -> None:
    assert submit_script(Path("job.sbatch"), run=Slurm(sbatch="123;hpc\n")) == "123"
    with pytest.raises(SetupError, match="no job number"):
        submit_script(Path("job.sbatch"), run=Slurm(sbatch="welcome\n"))


@pytest.mark.parametrize(
    ("said", "kind", "remedy"),
    [
        ("Batch job submission failed: Invalid account or account/partition combination specified",
         UsageError, "--account"),
        ("Batch job submission failed: Invalid qos specification", UsageError, "--qos"),
        ("Batch job submission failed: Invalid partition name specified", NotFoundError, "sinfo"),
        ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some "
         "limit)", UsageError, "--time-limit"),
        ("Batch job submission failed: Invalid feature specification", UsageError, "--constraint"),
        ("Batch job submission failed: Requested reservation is invalid", UsageError,
         "--reservation"),
        ("Memory specification can not be satisfied", UsageError, "%m"),
        ("Batch job submission failed: Requested node configuration is not available", UsageError,
         "sinfo"),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)",
         SetupError, "scontrol ping"),
        ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit, "
         "user's size and/or time limits)", UsageError, "--qos"),
        ("Batch job submission failed: Something new", SetupError, "run by hand"),
    ],
)  # fmt: skip
def test_refusals_become_one_message_with_a_remedy(
    said: str, kind: type[UserError], remedy: str
) -> None:
    with pytest.raises(kind) as error:
        submit_script(Path("job.sbatch"), run=Slurm(sbatch=refusal(said)))

    assert error.value.problem.startswith("Slurm refuses the job: ")
    assert "sbatch:" not in error.value.problem
    assert remedy in error.value.remedy


def test_what_slurm_would_do() -> None:
    reported = "sbatch: Job 5 to start at 2026-11-15T23:25:24 using 4 processors on nodes cpu01\n"
    assert queue.check_script(Path("x"), run=Slurm(sh=reported)).startswith("Job 5 to start at")
    with pytest.raises(UsageError, match="configuration"):
        queue.check_script(
            Path("x"),
            run=Slurm(sh="allocation failure: Requested node configuration is not available\n"),
        )


class Script:
    """Squeue's answers one after the other; the last for ever."""

    def __init__(self, *answers: str | SetupError) -> None:
        self.answers = list(answers)

    def __call__(self, arguments: Sequence[str], _timeout: float) -> str:
        if arguments[0] != "squeue":
            return ""
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, SetupError):
            raise answer
        return answer


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "FIRST_POLL_SECONDS", 0.0)
    monkeypatch.setattr(queue, "MAX_POLL_SECONDS", 0.0)


@pytest.mark.usefixtures("_hasty")
def test_a_job_is_told_from_the_queue_to_its_end(tmp_path: Path) -> None:
    notes = Notes()
    away = SetupError("`squeue` failed: Socket timed out", remedy="")
    slurm = Script(
        row("7", "PENDING", "0", "Priority", ""),
        row("7", "PENDING", "0", "Priority", ""),
        away,
        row("7", "RUNNING", "0", "None", "gpu01"),
        row("7", "COMPLETING", "0", "None", "gpu01"),
        row("7", "PENDING", "1", "BeginTime", ""),
        row("7", "RUNNING", "1", "None", "gpu02"),
        row("7", "COMPLETED", "1", "None", "gpu02"),
    )
    last = queue.wait_for_job(make_run(tmp_path), "7", notes, ask=slurm)

    assert last.state is JobState.COMPLETED
    assert notes.said == [
        "job 7 waits (Priority)",
        "`squeue` failed: Socket timed out Asking again.",
        "job 7 runs on gpu01",
        "job 7 is ending",
        "job 7 waits (BeginTime), restart 1",
        "job 7 runs on gpu02, restart 1",
        "job 7: completed, restart 1",
    ]


# Of a real Slurm 22.05: a job whose node was switched off, and one that was preempted.
NODE_FAIL = "2026-11-18T20:54:03|NODE_FAIL|gpu02\n2026-11-18T20:54:35|PENDING|None assigned\n"
PREEMPTED = "2026-11-18T20:54:03|PREEMPTED|gpu01\n2026-11-18T20:54:31|RUNNING|gpu01\n"
REQUEUED = "2026-11-18T20:54:03|REQUEUED|cpu01\n2026-11-18T20:54:07|RUNNING|cpu01\n"
STEPD = (
    "slurmstepd-gpu01: error: *** JOB 7 ON gpu01 CANCELLED AT 2026-11-18T20:54:22 "
    "DUE TO PREEMPTION ***\n"
)
SAVED = "the time limit is near: saving\nended with 75: back to the queue (restart 1 of 10)\n"


@pytest.mark.parametrize(
    ("sacct", "sinfo", "log", "cause"),
    [
        (NODE_FAIL, "", "", "its node was lost (gpu02)"),
        (PREEMPTED, "", "", "it was preempted (gpu01)"),
        ("", "", STEPD, "it was preempted"),
        (REQUEUED, "", SAVED, "its time limit was near, and it had saved"),
        ("", "", "ended with 137: back to the queue (restart 1 of 5)\n", "with exit code 137"),
        ("", "gpu02 down*\n", "", "its node was lost (gpu02)"),
        ("", "gpu02 idle\n", "step 1\n", ""),
    ],
)
def test_why_a_job_was_queued_again(
    tmp_path: Path, sacct: str, sinfo: str, log: str, cause: str
) -> None:
    status = JobStatus(job_id="7", task=None, state=JobState.PENDING, num_restarts=1)
    path = tmp_path / "slurm-7.out"
    path.write_text(log)
    found = find_restart_cause(status, path, "gpu02", run=Slurm(sacct=sacct, sinfo=sinfo))

    assert cause in found
    assert bool(cause) == bool(found)


def test_each_restart_has_its_own_cause(tmp_path: Path) -> None:
    status = JobStatus(job_id="7", task=None, state=JobState.PENDING, num_restarts=2)
    path = tmp_path / "slurm-7.out"
    path.write_text(SAVED + "step 9\n")
    assert find_restart_cause(status, path, "", run=Slurm()) == ""
    path.write_text(SAVED + "ended with 75: back to the queue (restart 2 of 10)\n")
    assert find_restart_cause(status, path, "", run=Slurm()) == "it ended with exit code 75"


@pytest.mark.usefixtures("_hasty")
def test_the_follower_says_why_once(tmp_path: Path) -> None:
    class Accounted(Script):
        def __call__(self, arguments: Sequence[str], timeout: float) -> str:
            return NODE_FAIL if arguments[0] == "sacct" else super().__call__(arguments, timeout)

    notes = Notes()
    slurm = Accounted(
        row("7", "RUNNING", "0", "None", "gpu02"),
        row("7", "PENDING", "1", "BeginTime", ""),
        row("7", "RUNNING", "1", "None", "gpu01"),
        row("7", "COMPLETED", "1", "None", "gpu01"),
    )
    queue.wait_for_job(make_run(tmp_path), "7", notes, ask=slurm)
    assert notes.said[1] == "job 7, restart 1: its node was lost (gpu02)"
    assert sum("lost" in text for text in notes.said) == 1


@pytest.mark.usefixtures("_hasty")
def test_a_preempted_job_that_is_queued_again_is_not_over(tmp_path: Path) -> None:
    slurm = Script(
        row("7", "PREEMPTED", "0", "None", ""),
        row("7", "PENDING", "1", "BeginTime", ""),
        row("7", "FAILED", "1", "NonZeroExitCode", "gpu01"),
    )

    assert queue.wait_for_job(make_run(tmp_path), "7", Notes(), ask=slurm).num_restarts == 1


@pytest.mark.usefixtures("_hasty")
def test_a_job_that_slurm_forgot_ends_the_watch(tmp_path: Path) -> None:
    last = queue.wait_for_job(make_run(tmp_path), "7", Notes(), ask=Script(""))

    assert last.state is JobState.UNKNOWN


def test_variables_that_would_overrule_the_script_are_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --partition=gpu\n#SBATCH --mem=4M\n#SBATCH --requeue\n")
    said = {"SBATCH_PARTITION": "low", "SBATCH_MEM_PER_CPU": "1", "SBATCH_NO_REQUEUE": "1"}
    for name, value in {**said, "SBATCH_ACCOUNT": "proj042"}.items():
        monkeypatch.setenv(name, value)
    slurm = Slurm(env="7\n")

    assert submit_script(script, run=slurm) == "7"
    unset = {word for word in slurm.asked[0] if word.startswith("--unset=")}
    assert unset == {f"--unset={name}" for name in said}  # the account is the user's to say
    assert slurm.asked[0][-3:] == ("sbatch", "--parsable", str(script))
    assert list_overriding("#SBATCH --account=a\n", {"SBATCH_ACCOUNT": "b"}) == ["SBATCH_ACCOUNT"]


def test_a_job_is_found_by_the_file_it_was_submitted_from() -> None:
    script = Path("/runs/a | b/job.sbatch")
    said = f"7|cpu|{script}\n12|gpu|{script}\n13|gpu|/runs/other/job.sbatch\n14|gpu|(null)\nodd\n"

    assert find_queued(script, run=Slurm(squeue=said)) == ("12", "gpu")
    assert find_queued(Path("/runs/none"), run=Slurm(squeue=said)) is None
    old = SetupError("`squeue` failed: unrecognized option '--me'", remedy="")
    assert find_queued(script, run=Slurm(squeue=old)) is None
