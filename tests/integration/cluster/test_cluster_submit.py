"""`tightfit submit` on a real Slurm: followed, cancelled, cut off by its time limit, on two nodes.

GPUs are not needed: tiny models train on the CPU nodes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from slow_steps import SlowSteps
from small_models import make_llama
from tightfit.clusters.slurm.script import keep_salloc_options

if TYPE_CHECKING:
    from slurm_lab import SlurmLab

pytest_plugins = ("slurm_lab",)

GOLDEN = Path(__file__).parents[2] / "golden" / "sbatch"
PATIENCE_SECONDS = 180.0
NUM_STEPS = 24


@dataclass(slots=True, kw_only=True)
class Submission:
    """A recipe with its run folder, and the command that submits it."""

    home: Path
    model: Path
    changes: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    job_environment: dict[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.home / "run"

    def write(self) -> Submission:
        self.home.mkdir(parents=True, exist_ok=True)
        rows = [
            {"instruction": f"How many singers sing song {n}?", "output": f"{n} of them do."}
            for n in range(64)
        ]
        data = self.home / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        site = self.home / "site.yaml"
        shared = [str(self.home), str(self.model)]  # in /tmp, which nodes elsewhere do not share
        variables = {"OMP_NUM_THREADS": "1"} | self.job_environment
        site.write_text(f"environment: {json.dumps(variables)}\nshared: {json.dumps(shared)}\n")
        recipe = {
            "model": str(self.model),
            "data": str(data),
            "method": "lora",
            "seq_len": 96,
            "max_steps": NUM_STEPS,
            "effective_batch": 8,
            "packing": False,
            "learning_rate": 5e-3,
            "save_every": 4,
            "log_to": [],
            "output": str(self.run),
            "strategy": {"weights": "fp32", "compute": "fp32", "micro_batch": 2},
        }
        stated = {key: value for key, value in (recipe | self.changes).items() if value is not None}
        (self.home / "recipe.yaml").write_text(json.dumps(stated))
        return self

    @property
    def surroundings(self) -> dict[str, str]:
        own = {"TIGHTFIT_SITE": str(self.home / "site.yaml"), "XDG_CACHE_HOME": str(self.home)}
        return {**os.environ, **own, **self.environment}

    def start(self, *options: str, job: str = "recipe.yaml") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tightfit", "submit", job, *options],
            cwd=self.home,
            env=self.surroundings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run_verb(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tightfit", *words]
        return subprocess.run(
            command,
            cwd=self.home,
            env=self.surroundings,
            capture_output=True,
            text=True,
            check=False,
        )

    def submit(self, *options: str, job: str = "recipe.yaml") -> tuple[int, str]:
        process = self.start(*options, job=job)
        try:
            said, _ = process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
        return process.returncode, said

    @property
    def job_id(self) -> str:
        return str(json.loads((self.run / "slurm.json").read_text())["job_id"])

    def losses(self) -> dict[int, float]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return {record["step"]: record["loss"] for record in records if "grad_norm" in record}

    def reaches(self, step: int, process: subprocess.Popen[str] | None = None) -> bool:
        """Whether the step is done before patience, or the process that follows it, ends."""

        def is_over() -> bool:
            return step in self.losses() or (process is not None and process.poll() is not None)

        return wait_until(is_over, seconds=PATIENCE_SECONDS) and step in self.losses()

    def add_options(self, *options: str) -> None:
        """What sbatch is told last, and so goes by."""
        site = self.home / "site.yaml"
        site.write_text(site.read_text() + f"slurm: {{extra: {json.dumps(options)}}}\n")

    def has_resumed(self) -> bool:
        return '"resumed' in (self.run / "metrics.jsonl").read_text()

    def is_queued_again(self) -> bool:
        shown = slurm("scontrol", "-o", "show", "job", self.job_id)
        return re.search(r"Restarts=[1-9]", shown) is not None

    def log(self) -> str:
        found = sorted(self.run.glob("slurm-*.out")) + sorted(self.run.glob("node-*.out"))
        return "\n".join(
            path.read_text() for path in [*found, self.run / "log.txt"] if path.exists()
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def _no_jobs_left(lab: SlurmLab, tmp_path: Path) -> Iterator[None]:
    """Jobs of this test alone: somebody else may use the same cluster."""
    assert lab.is_up
    yield
    own = list_jobs(tmp_path)
    if own:
        slurm("scancel", *own)
    assert wait_until(lambda: not list_jobs(tmp_path), seconds=60)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path, lab: SlurmLab) -> Submission:
    """One node, followed from the queue to the report."""
    assert lab.is_up
    made = Submission(home=tmp_path_factory.mktemp("undisturbed"), model=model).write()
    code, said = made.submit("--on", "slurm:cpu")
    (made.home / "said.txt").write_text(said)
    assert code == 0, said + made.log()
    return made


def test_followed_to_the_end(undisturbed: Submission) -> None:
    said = (undisturbed.home / "said.txt").read_text()

    assert f"Submitted as job {undisturbed.job_id} to cpu" in said
    assert re.search(rf"job {undisturbed.job_id} runs on cpu0[12]", said)
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in said
    assert f"finished at step {NUM_STEPS}" in said
    assert "predicted" in said
    assert (undisturbed.run / "job.sbatch").is_file()
    assert (undisturbed.run / "adapter" / "adapter_model.safetensors").is_file()
    tokens = json.loads((undisturbed.run / "tokens.json").read_text())
    assert tokens["train"].startswith(str(undisturbed.run))
    assert sorted(undisturbed.losses()) == list(range(1, NUM_STEPS + 1))


def test_a_finished_run_is_not_submitted_again(undisturbed: Submission) -> None:
    before = undisturbed.job_id
    code, said = undisturbed.submit("--on", "slurm:cpu", "--json")

    assert code == 0
    assert json.loads(said)["exit_code"] == 0
    assert undisturbed.job_id == before


def test_cut_off_by_the_time_limit_it_goes_on_to_the_same_loss(
    tmp_path: Path, model: Path, undisturbed: Submission
) -> None:
    made, slow = slow_from(5, Submission(home=tmp_path, model=model))
    code, said = made.submit("--on", "slurm:cpu", "--time-limit", "10", "--no-follow")
    assert code == 0, said
    assert made.reaches(5), made.log()

    # Held still, so that the limit is met in the middle however fast the machine is.
    slurm("scancel", "--signal=STOP", made.job_id)
    slow.end()
    slurm("scontrol", "update", f"JobId={made.job_id}", "TimeLimit=1")
    log = made.run / f"slurm-{made.job_id}.out"
    assert wait_until(lambda: "the time limit is near" in log.read_text(), seconds=120), made.log()
    slurm("scancel", "--signal=CONT", made.job_id)
    assert wait_until(lambda: "back to the queue" in log.read_text(), seconds=60), made.log()
    slurm("scontrol", "update", f"JobId={made.job_id}", "TimeLimit=10")
    code, said = made.submit("--follow", job="run")

    assert code == 0, said + made.log()
    assert "restart 1: its time limit was near, and it had saved" in said
    assert made.has_resumed()
    assert made.losses() == pytest.approx(undisturbed.losses(), abs=1e-5)


def test_two_nodes_learn_what_one_does(
    tmp_path: Path, model: Path, undisturbed: Submission
) -> None:
    made = Submission(home=tmp_path, model=model).write()
    code, said = made.submit("--on", "slurm:cpu", "--nodes", "2")

    assert code == 0, said + made.log()
    assert "runs on cpu[01-02]" in said
    assert made.losses() == pytest.approx(undisturbed.losses(), abs=1e-4)


def test_left_alone_it_runs_on_and_cancelled_it_has_saved(tmp_path: Path, model: Path) -> None:
    made = Submission(home=tmp_path, model=model, changes={"max_steps": 5000}).write()
    process = made.start("--on", "slurm:cpu")
    assert made.reaches(2, process), made.log()
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)

    assert process.returncode == 130, said
    assert f"tightfit submit {made.run} --follow" in said
    assert slurm("squeue", "-h", "-j", made.job_id, "-o", "%T") == "RUNNING"
    code, said = made.submit("--on", "slurm:cpu", "--no-follow")
    assert code == 2
    assert "queued or running already" in said

    process = made.start("--follow", job="run")
    assert made.reaches(max(made.losses()) + 3, process), made.log()
    done = made.run_verb("cancel", "run")
    assert done.returncode == 0, done.stderr
    assert f"Cancelled job {made.job_id} on Slurm" in done.stdout
    said, _ = process.communicate(timeout=PATIENCE_SECONDS)

    assert process.returncode == 75, said
    assert "stopped at step" in said
    held = json.loads((made.run / "state.json").read_text())
    assert held["status"] == "stopped"
    assert (made.run / "checkpoints" / f"step-{held['step']:06d}").is_dir()
    assert "back to the queue" not in made.log()
    again = made.run_verb("cancel", made.job_id)
    assert (again.returncode, "is over" in again.stdout) == (0, True), again.stderr


def test_preempted_it_is_queued_again_and_goes_on(tmp_path: Path, model: Path) -> None:
    made = Submission(home=tmp_path, model=model, changes={"max_steps": 5000}).write()
    made.add_options("--partition=low", "--nodelist=cpu01")
    code, said = made.submit("--on", "slurm:cpu", "--no-follow")
    assert code == 0, said
    assert made.reaches(5), made.log()
    words = ["--partition=cpu", "--nodelist=cpu01", "--exclusive", "--wrap=sleep 5"]
    slurm("sbatch", "--output=/dev/null", f"--chdir={tmp_path}", *words)

    assert wait_until(made.has_resumed, seconds=PATIENCE_SECONDS), made.log()
    assert made.is_queued_again()


def test_after_the_loss_of_a_node_it_goes_on_to_the_same_loss(
    tmp_path: Path, model: Path, lab: SlurmLab, undisturbed: Submission
) -> None:
    made, slow = slow_from(5, Submission(home=tmp_path, model=model))
    made.add_options("--partition=gpu", "--nodelist=gpu01,gpu02")
    code, said = made.submit("--on", "slurm:cpu", "--nodes", "2", "--no-follow")
    assert code == 0, said
    assert made.reaches(5), made.log()
    try:
        lab.poweroff("gpu02")
        slow.end()
        assert wait_until(made.is_queued_again, seconds=PATIENCE_SECONDS), made.log()
    finally:
        lab.poweron("gpu02")
    code, said = made.submit("--follow", job="run")

    assert code == 0, said + made.log()
    assert made.has_resumed()
    assert made.losses() == pytest.approx(undisturbed.losses(), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "said", "code"),
    [
        (("--on", "slurm:gpuu"), "choose one of: cpu, gpu, low", 3),
        (("--on", "slurm:cpu", "--reservation", "nope"), "--reservation NAME", 2),
        (("--on", "slurm:cpu", "--constraint", "nope"), "--constraint with a feature", 2),
        (("--on", "slurm:cpu", "--time-limit", "3-00:00:00"), "exceeds the limit of cpu", 2),
        (("--on", "slurm:cpu", "--nodes", "9"), "at most 2 nodes", 2),
        (
            (
                "--on",
                "2xT4",
            ),
            "no cluster that takes jobs",
            2,
        ),
    ],
)
def test_refusals_have_a_remedy(
    tmp_path: Path, model: Path, options: tuple[str, ...], said: str, code: int
) -> None:
    made = Submission(home=tmp_path, model=model).write()
    got, words = made.submit(*options)

    assert got == code, words
    assert said in words
    assert "Traceback" not in words
    assert "  try: " in words


def test_a_run_in_a_folder_of_this_machine_alone_is_refused(tmp_path: Path, model: Path) -> None:
    made = Submission(home=tmp_path, model=model).write()
    for folder in ("/dev/shm/tightfit-run", "/proc/tightfit-run", "/tmp/tightfit-run"):
        code, said = made.submit("--on", "slurm:cpu", "--output", folder)

        assert code == 3, said
        assert f"No node would see the run folder {folder}" in said
        assert "--output" in said
        assert not Path(folder).exists()
    assert list_jobs(tmp_path) == []


def test_two_submissions_at_the_same_moment_are_two_runs(tmp_path: Path, model: Path) -> None:
    """Each asks for the nodes after it found no job of the other, and before it has one."""
    made = Submission(home=tmp_path, model=model, changes={"output": None}).write()
    made.environment = {"PYTHONPATH": str(meet_at("sinfo", tmp_path))}
    both = [made.start("--on", "slurm:cpu", "--no-follow", "--json") for _ in range(2)]
    said = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    found = [json.loads(text) for text in said]
    slurm("scancel", *(one["job_id"] for one in found))
    assert len({one["run"] for one in found}) == len({one["job_id"] for one in found}) == 2


def meet_at(command: str, home: Path) -> Path:
    """A folder for PYTHONPATH: whoever is about to start the command waits for another to.

    Before the start, as the command itself has seconds to answer in.
    """
    folder = home / "meeting"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        MEETING.format(command=command, folder=str(folder), seconds=PATIENCE_SECONDS / 2)
    )
    return folder


MEETING = """
import os, pathlib, sys, time
folder = pathlib.Path({folder!r})
def meet(event, given):
    if event == "subprocess.Popen" and os.path.basename(os.fspath(given[0])) == {command!r}:
        (folder / f"came.{{os.getpid()}}").touch()
        end = time.monotonic() + {seconds}
        while len(list(folder.glob("came.*"))) < 2:
            assert time.monotonic() < end, "nobody else came"
            time.sleep(0.05)
sys.addaudithook(meet)
"""


def test_a_fresh_run_waits_for_the_old_ones_job_and_keeps_its_files(
    tmp_path: Path, model: Path
) -> None:
    made = Submission(home=tmp_path, model=model, changes={"max_steps": 5000}).write()
    assert made.submit("--on", "slurm:cpu", "--no-follow")[0] == 0
    assert made.reaches(2), made.log()
    code, said = made.submit("--on", "slurm:cpu", "--no-follow", "--fresh")
    assert code == 2, said
    assert f"scancel {made.job_id}" in said

    slurm("scancel", made.job_id)
    assert wait_until(lambda: not list_jobs(tmp_path), seconds=60)
    wrong = made.submit("--on", "slurm:cpu", "--no-follow", "--fresh", "--nodes", "9")
    assert wrong[0] == 2, wrong[1]
    assert 2 in made.losses()
    code, said = made.submit("--on", "slurm:cpu", "--no-follow", "--fresh")
    assert code == 0, said
    assert (tmp_path / "run.before-1" / "checkpoints").is_dir()
    assert made.reaches(1), made.log()


def test_salloc_knows_the_options_that_preflight_passes_on() -> None:
    def is_known(option: str) -> bool:
        done = subprocess.run(
            ["salloc", option, "--usage"], capture_output=True, text=True, check=False
        )
        return not re.search(r"unrecognized option|invalid option", done.stderr)

    for option in ("--account", "--exclusive", "--mem", "--mail-type", "--comment", "-C", "-N"):
        assert is_known(option), option
        assert keep_salloc_options([option]) == [option]
    for option in ("--requeue", "--output", "--open-mode", "--export", "--wrap", "-o", "-a"):
        assert not is_known(option), option
        assert keep_salloc_options([option]) == []


def test_preflight_asks_for_nodes_whatever_sbatch_is_told(tmp_path: Path, model: Path) -> None:
    made = Submission(home=tmp_path, model=model).write()
    made.add_options("--requeue", "--output=/dev/null", "--comment='of the site'", "-w cpu01")
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", "preflight", "--on", "slurm:cpu", "--num-nodes", "1"],
        cwd=tmp_path,
        env=made.surroundings,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )

    assert "salloc: error" not in done.stderr, done.stderr
    assert "unrecognized" not in done.stderr, done.stderr
    assert "cpu01" in done.stdout, done.stderr
    assert "Traceback" not in done.stderr


def test_preflight_in_an_allocation(tmp_path: Path) -> None:
    """Two nodes are taken for a while, looked at by srun, and given back."""
    words = ["preflight", "--on", "slurm:cpu", "--num-nodes", "2", "--shared", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", *words, "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.stdout, done.stderr
    reported = json.loads(done.stdout)

    assert done.returncode == 0, [f for f in reported["findings"] if f["status"] == "error"]
    assert [node["name"] for node in reported["nodes"]] == ["cpu01", "cpu02"]
    assert reported["all_reduce"]["bus_bytes_per_second"] > 1e6
    # A job that is being cleared away is listed for a while.
    assert wait_until(lambda: not slurm("squeue", "-h", "-n", "tightfit-preflight"), seconds=60)


def test_dry_run_submits_nothing_and_asks_slurm(tmp_path: Path, model: Path) -> None:
    made = Submission(home=tmp_path, model=model).write()
    code, said = made.submit("--on", "slurm:cpu", "--dry-run")

    assert code == 0, said
    assert "#SBATCH --partition=cpu" in said
    assert "to start at" in said
    assert not made.run.exists()
    assert list_jobs(tmp_path) == []


def test_slurm_takes_the_golden_scripts(tmp_path: Path) -> None:
    """As far as this cluster can: the partition, GPUs and sizes of the lab in their place."""
    num_tested = 0
    for path in sorted(GOLDEN.glob("*.sbatch")):
        text = path.read_text()
        if "--container" in text:
            text = re.sub(r"^  '?--container.*\n", "", text, flags=re.MULTILINE)
        changes = {
            r"--partition=\w+": "--partition=low",
            r"--gres=gpu:.*:?\d+": "--gres=gpu:1",
            r"--nodes=\d+$": "--nodes=2" if "--nodes=1\n" not in text else "--nodes=1",
            r"--(mem|cpus-per-task)=\d+": r"--\g<2>=4",
            r"--time=.*": "--time=10",
            r"--(account|qos|reservation|constraint)=.*": "--comment=x",
        }
        for pattern, instead in changes.items():
            text = re.sub(rf"(#SBATCH ){pattern}", rf"\g<1>{instead}", text, flags=re.MULTILINE)
        script = tmp_path / path.name
        script.write_text(text)
        done = subprocess.run(
            ["sbatch", "--test-only", script], capture_output=True, text=True, check=False
        )

        assert done.returncode == 0, f"{path.name}: {done.stderr}"
        num_tested += 1
    assert num_tested >= 8


def slow_from(step: int, made: Submission) -> tuple[Submission, SlowSteps]:
    """Written with steps that take a second from there on: or the job may be over too early."""
    slow = SlowSteps(made.home / "slow")
    slow.begin(step)
    made.job_environment |= slow.environment
    return made.write(), slow


def wait_until(is_so: Callable[[], bool], *, seconds: float) -> bool:
    from slurm_lab import wait_until as wait

    return wait(is_so, seconds=seconds)


def list_jobs(folder: Path) -> list[str]:
    """Jobs in the queue that were submitted from inside the folder."""
    rows = [line.split("|") for line in slurm("squeue", "-h", "-o", "%A|%Z").splitlines()]
    return [job_id for job_id, home in rows if Path(home).is_relative_to(folder)]


def slurm(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
