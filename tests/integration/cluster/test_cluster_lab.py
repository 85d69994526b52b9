"""The lab itself: sessions take turns, leave each other's jobs alone, and never skip in silence."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from namespaces import PACKAGES, open_hosts
from slurm_lab import SlurmLab, list_jobs, take_turn

pytest_plugins = ("slurm_lab",)

HOLD = """
import sys, time
from pathlib import Path
from slurm_lab import take_turn
with take_turn(Path(sys.argv[1]), lambda: None, seconds=60):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another session, which has the folder."""
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    support = Path(__file__).parents[2] / "support"
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=support) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_sessions_take_turns(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    reported: list[str] = []

    def announce() -> None:
        reported.append("waiting")

    too_late = pytest.raises(RuntimeError, match="another session")
    with too_late, take_turn(tmp_path, announce, seconds=0.3):
        pass
    holder.kill()
    with take_turn(tmp_path, announce, seconds=60):
        assert reported[0] == "waiting"


def test_jobs_of_others_are_left_alone(lab: SlurmLab) -> None:
    assert lab.is_up
    theirs = submit_sleep()
    try:
        session = SlurmLab()
        session.up()
        ours = submit_sleep()
        session.cancel_all()
        assert theirs in list_jobs()
        assert ours not in list_jobs()
    finally:
        subprocess.run(["scancel", theirs], check=True)


def submit_sleep() -> str:
    words = ["sbatch", "--parsable", "--output=/dev/null", "--partition=low", "--wrap=sleep 600"]
    return subprocess.check_output(words, text=True).strip()


def test_hosts_that_cannot_be_made_fail_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in (
        *(tool for tool, package in PACKAGES.items() if package != "iproute2"),
        "sh",
        "cat",
    ):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    monkeypatch.setenv("PATH", str(tools))
    failed = pytest.raises(pytest.fail.Exception, match="apt-get install -y iproute2")
    with failed, open_hosts(tmp_path / "hosts", "a"):
        pass
