"""The real Slurm that cluster tests run on, as an object and as a fixture of the whole session.

A test file takes the fixture `lab` with `pytest_plugins = ("slurm_lab",)`.
PYTEST_DONT_REWRITE: it asserts nothing, and files import its names before pytest does.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "integration" / "cluster" / "slurm_lab.sh"
CONFIGURATION = Path("/etc/slurm")
"""Whoever holds its lock may use the lab: a machine has one, wherever its state is."""
TURN_SECONDS = 3600.0
"""For another session to finish its tests."""
UP_SECONDS = 600.0
"""With the packages to fetch and mariadb to make; usually 60, and 2 where all is there."""
NODES = ("gpu01", "gpu02", "big01", "cpu01", "cpu02")


class SlurmLab:
    """slurmctld and five slurmd in namespaces of this machine.

    `gpu01` and `gpu02` have one V100 each, `big01` two A100, the others none; partitions are
    `cpu`, `gpu` and `low`, which holds all of them and gives way to both. Every node sees this
    machine's files; its /dev/shm and /local are its own.
    """

    def __init__(self, *, has_accounting: bool | None = None) -> None:
        asked = os.environ.get("SLURM_LAB_ACCOUNTING", "0") == "1"
        self.has_accounting = asked if has_accounting is None else has_accounting
        self._found: set[str] = set()
        """Jobs that were in the queue before: somebody else's."""

    def up(self) -> None:
        """Start what is not running, and turn on every node that is off."""
        self._script("up", seconds=UP_SECONDS)
        self._found = list_jobs()

    def down(self) -> None:
        self._script("down", seconds=120)

    @property
    def is_up(self) -> bool:
        return subprocess.run([SCRIPT, "is-up"], check=False).returncode == 0

    def poweroff(self, node: str) -> None:
        """As if the plug was pulled: its processes are gone, and its peers hear nothing."""
        self._script("poweroff", node)

    def poweron(self, node: str) -> None:
        self._script("poweron", node)

    def unplug(self, node: str) -> None:
        """Only the network cable."""
        self._script("unplug", node)

    def plug(self, node: str) -> None:
        self._script("plug", node)

    def on(
        self, node: str, argv: Sequence[str], *, seconds: float = 60, env: Mapping[str, str] = {}
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, beside Slurm."""
        return subprocess.run(
            [str(SCRIPT), "on", node, *argv],
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**os.environ, **env},
            check=False,
        )

    def state(self, node: str) -> str:
        """As sinfo calls it: `idle`, `mixed`, `down*`."""
        asked = ["sinfo", "-h", "-N", "-n", node, "-o", "%T"]
        return subprocess.check_output(asked, text=True).split()[0]

    def cancel_all(self) -> None:
        """Leave no job behind that came into the queue since this lab was opened."""
        own = list_jobs() - self._found
        if own:
            subprocess.run(["scancel", *sorted(own)], check=False, capture_output=True)
        wait_until(lambda: list_jobs() <= self._found, seconds=60)

    def _script(self, *words: str, seconds: float = 60) -> None:
        wanted = "1" if self.has_accounting else "0"
        # A file, not a pipe: daemons may keep it open after the script has ended.
        with tempfile.TemporaryFile("w+") as said:
            done = subprocess.run(
                [str(SCRIPT), *words],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                env={**os.environ, "SLURM_LAB_ACCOUNTING": wanted},
                check=False,
            )
            said.seek(0)
            lines = said.read().strip().splitlines()
        if done.returncode != 0:
            raise RuntimeError(lines[-1] if lines else f"slurm lab: {words} gave {done.returncode}")


def wait_until(is_so: Callable[[], bool], *, seconds: float) -> bool:
    """Look five times a second; False where it never came true."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if is_so():
            return True
        time.sleep(0.2)
    return is_so()


def list_jobs() -> set[str]:
    """The numbers of all jobs in the queue."""
    return set(subprocess.check_output(["squeue", "-h", "-o", "%A"], text=True).split())


@contextmanager
def take_turn(folder: Path, announce: Callable[[], None], *, seconds: float) -> Iterator[None]:
    """Hold the folder's lock, which ends with this process at the latest; wait for one's turn."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)

    def is_ours() -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        if not is_ours():
            announce()
            if not wait_until(is_ours, seconds=seconds):
                raise RuntimeError(f"another session has held {folder} for {seconds:.0f} s")
        yield
    finally:
        os.close(handle)


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Iterator[SlurmLab]:
    """The lab with all nodes on, for one session at a time. One that was up before is left up."""

    def announce() -> None:
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print("\nthe Slurm lab is in use by another session: waiting for it", flush=True)

    try:
        with take_turn(CONFIGURATION, announce, seconds=TURN_SECONDS):
            yield from _open_lab()
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        pytest.fail(f"the Slurm lab does not work: {error}", pytrace=False)


def _open_lab() -> Iterator[SlurmLab]:
    made = SlurmLab()
    was_up = made.is_up
    try:
        made.up()
        yield made
    finally:
        if not was_up:
            made.down()
