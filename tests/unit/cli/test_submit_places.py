"""`tightfit submit`: where a run is put, and that nothing is lost or mixed on the way there."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from conftest import Run

from submit_world import SINFO, Slurm, write_site
from tightfit.api.training.recipe import RunRecipe
from tightfit.api.training.run_folder import claim_folder, name_folder
from tightfit.clusters.slurm import backend as slurm_backend
from tightfit.core.recipe import read_recipe
from tightfit.runs.run_folder import RunFolder

pytest_plugins = ("submit_world",)
pytestmark = pytest.mark.usefixtures("own_world")

TO_CPU = ("--on", "slurm:cpu", "--no-follow")
NUM_AT_ONCE = 16


@pytest.fixture
def unnamed(job: Path) -> Path:
    """A recipe that names no folder."""
    recipe = json.loads(job.read_text())
    del recipe["output"]
    job.write_text(json.dumps(recipe))
    return job


def list_files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def list_warnings(answer: dict[str, Any]) -> list[str]:
    """Those of its notes that are about files."""
    return [note for note in answer["notes"] if "Every node must see" in note]


def test_a_fresh_run_that_cannot_be_planned_leaves_the_old_one_as_it_is(
    run: Run, job: Path, slurm: Slurm
) -> None:
    run("submit", str(job), *TO_CPU)
    slurm.say("CANCELLED")
    old, beside = list_files(Path("out")), sorted(Path().iterdir())
    for wrong in (("--time-limit", "2:00:00"), ("--nodes", "3"), ("--set", "micro_batch=100000")):
        answer = run("submit", str(job), *TO_CPU, "--fresh", *wrong)

        assert answer.code in (2, 5), answer.err
        assert list_files(Path("out")) == old
        assert sorted(Path().iterdir()) == beside
    assert slurm.num_submitted == 1


def test_a_fresh_run_is_whole_and_so_is_the_old_one(run: Run, job: Path, slurm: Slurm) -> None:
    run("submit", str(job), *TO_CPU)
    slurm.say("CANCELLED")
    Path("out/checkpoints").mkdir()
    answer = run("submit", str(job), *TO_CPU, "--fresh")

    assert answer.code == 0, answer.err
    assert "the old run is kept in" in answer.err
    assert Path("out.before-1/checkpoints").is_dir()
    assert not Path("out/checkpoints").exists()
    tokens = Path(RunFolder(path=Path("out")).read_tokens().train)
    assert tokens.is_relative_to(Path("out").absolute())
    assert (tokens / "description.json").is_file()
    assert not list(Path().glob(".out.*"))
    assert slurm.num_submitted == 2


def test_a_fresh_run_does_not_pull_the_folder_from_under_a_job(
    run: Run, job: Path, slurm: Slurm
) -> None:
    run("submit", str(job), *TO_CPU)
    answer = run("submit", str(job), *TO_CPU, "--fresh")

    assert answer.code == 2
    assert "scancel 42" in answer.err
    assert not Path("out.before-1").exists()
    assert slurm.num_submitted == 1


def test_folders_claimed_at_the_same_moment_are_different_ones(
    unnamed: Path, tmp_path: Path
) -> None:
    wanted = RunRecipe(recipe=read_recipe(unnamed))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "model-lora-2").symlink_to(tmp_path / "gone")
    together = Barrier(NUM_AT_ONCE)

    def claim(_: int) -> Path:
        together.wait()
        return claim_folder(wanted, "lora", home=tmp_path / "runs")

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        claimed = list(pool.map(claim, range(NUM_AT_ONCE)))
    names = {path.name for path in claimed}
    assert names == {f"model-lora-{number}" for number in range(1, NUM_AT_ONCE + 2)} - {
        "model-lora-2"
    }


def test_two_submissions_at_the_same_moment_share_no_folder(unnamed: Path, slurm: Slurm) -> None:
    slurm.wait_for(2)  # neither has a job when the other looks for one
    words = [sys.executable, "-m", "tightfit", "submit", str(unnamed), *TO_CPU, "--json"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]

    assert [process.returncode for process in both] == [0, 0]
    assert len({json.loads(text)["run"] for text in said}) == slurm.num_submitted == 2


def test_a_failure_leaves_no_folder_behind(run: Run, unnamed: Path, slurm: Slurm) -> None:
    answer = run("submit", str(unnamed), *TO_CPU, "--time-limit", "2:00:00")

    assert answer.code == 2, answer.err
    assert list(Path("runs").iterdir()) == []
    assert name_folder(RunRecipe(recipe=read_recipe(unnamed)), "lora") == Path("runs/model-lora-1")
    assert slurm.num_submitted == 0


@pytest.mark.parametrize("folder", ["/proc/x", "/sys/x/y", "/dev/null/x"])
@pytest.mark.usefixtures("slurm")
def test_a_folder_that_cannot_be_made_is_not_blamed_on_the_cache(
    run: Run, job: Path, tmp_path: Path, folder: str
) -> None:
    write_site(tmp_path, f"runs: {Path(folder).parent}\n")  # even if the site trusts it
    answer = run("submit", str(job), *TO_CPU, "--output", folder)

    assert answer.code in (2, 6), answer.err
    assert "--output" in answer.err
    assert "TIGHTFIT_CACHE" not in answer.err


class TestFilesThatNodesSee:
    @pytest.fixture(autouse=True)
    def _no_word_of_the_site(self, own_world: None, tmp_path: Path) -> None:  # noqa: ARG002
        (tmp_path / "config" / "tightfit" / "site.yaml").unlink()

    @pytest.fixture
    def on_a_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As if all of this machine was one plain disk, without a /tmp of its own."""
        mounts = [SimpleNamespace(mountpoint="/", fstype="ext4")]
        monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)
        monkeypatch.setattr(slurm_backend, "OWN_FOLDERS", ())

    @pytest.mark.parametrize("folder", ["/dev/shm/run", "/tmp/run", "/proc/run"])
    def test_a_run_in_this_machines_own_folder_is_refused(
        self, run: Run, job: Path, slurm: Slurm, folder: str
    ) -> None:
        answer = run("submit", str(job), *TO_CPU, "--output", folder)

        assert answer.code == 3, answer.err
        assert f"No node would see the run folder {folder}" in answer.err
        assert "--output FOLDER" in answer.err
        assert "`runs:` in site.yaml" in answer.err
        assert not Path(folder).exists()
        assert slurm.num_submitted == 0

    @pytest.mark.usefixtures("slurm")
    def test_so_is_a_model(
        self, run: Run, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(slurm_backend, "OWN_FOLDERS", (tmp_path / "model",))
        site = tmp_path / "config" / "tightfit" / "site.yaml"
        site.write_text(f"runs: {tmp_path / 'runs'}\n")
        answer = run("submit", str(job), *TO_CPU, "--output", str(tmp_path / "runs" / "a"))

        assert answer.code == 3
        assert f"No node would see the model {tmp_path / 'model'}" in answer.err

    @pytest.mark.usefixtures("on_a_disk")
    def test_where_it_cannot_be_told_the_job_goes_with_a_warning(
        self, run: Run, job: Path, tmp_path: Path, slurm: Slurm
    ) -> None:
        answer = run("submit", str(job), *TO_CPU, "--json")

        assert answer.code == 0, answer.err
        (note,) = list_warnings(answer.json)
        assert f"Every node must see the run folder {tmp_path / 'out'}" in note
        assert f"the model {tmp_path / 'model'}" in note
        assert "preflight" in note
        assert slurm.num_submitted == 1

    @pytest.mark.usefixtures("on_a_disk", "slurm")
    def test_the_sites_word_is_enough(self, run: Run, job: Path, tmp_path: Path) -> None:
        write_site(tmp_path, "")

        assert list_warnings(run("submit", str(job), *TO_CPU, "--json").json) == []

    @pytest.mark.usefixtures("slurm")
    def test_a_network_file_system_needs_no_word(
        self, run: Run, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mounts = [
            SimpleNamespace(mountpoint="/", fstype="tmpfs"),
            SimpleNamespace(mountpoint=str(tmp_path), fstype="nfs4"),
        ]
        monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)

        assert list_warnings(run("submit", str(job), *TO_CPU, "--json").json) == []

    def test_a_cluster_of_this_machine_alone_sees_its_own_files(
        self, run: Run, job: Path, tmp_path: Path, slurm: Slurm
    ) -> None:
        own = SINFO.splitlines()[0].replace("c1|", f"{socket.gethostname()}|") + "\n"
        (tmp_path / "slurm" / "nodes.txt").write_text(own)
        answer = run("submit", str(job), *TO_CPU, "--json")

        assert answer.code == 0, answer.err
        assert list_warnings(answer.json) == []
        assert slurm.num_submitted == 1
