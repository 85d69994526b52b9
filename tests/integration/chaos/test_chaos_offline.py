"""A run with local files asks nobody: no connection, no name looked up, no network at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tiny_jobs import Job

pytest_plugins = ("chaos_fixtures",)

TRAP = """
import os, socket

def _note(what):
    with open(os.environ["TRAP_FILE"], "a") as stream:
        stream.write(f"{what}\\n")
    raise OSError(f"the test forbids {what}")

def _is_near(family, address):
    return family == socket.AF_UNIX or str(address[0]) in ("127.0.0.1", "::1", "localhost")

class _Socket(socket.socket):
    def connect(self, address):
        if not _is_near(self.family, address):
            _note(f"connect {address}")
        return super().connect(address)

    def connect_ex(self, address):
        if not _is_near(self.family, address):
            _note(f"connect {address}")
        return super().connect_ex(address)

    def sendto(self, data, *rest):
        if not _is_near(self.family, rest[-1]):
            _note(f"sendto {rest[-1]}")
        return super().sendto(data, *rest)

_look_up = socket.getaddrinfo

def _getaddrinfo(host, *rest, **more):
    if host not in (None, "", "localhost", "127.0.0.1", "::1", socket.gethostname()):
        _note(f"getaddrinfo {host}")
    return _look_up(host, *rest, **more)

socket.socket = _Socket
socket.getaddrinfo = _getaddrinfo
"""
NEEDS_NAMESPACE = "run as root, or: sysctl kernel.unprivileged_userns_clone=1"


def test_no_network(tmp_path: Path, model: Path, data: Path) -> None:
    """Python's sockets are watched; whatever else could open one finds no network."""
    trap, caught = tmp_path / "trap", tmp_path / "caught.txt"
    trap.mkdir()
    (trap / "sitecustomize.py").write_text(TRAP)
    job = Job(
        home=tmp_path / "job",
        model=model,
        data=data,
        changes={"max_steps": 4, "eval_fraction": 0.1, "log_to": ["tensorboard"]},
        environment={"PYTHONPATH": str(trap), "TRAP_FILE": str(caught)},
    ).write()
    check_trap(job, caught)
    cut_off = ["unshare", "-rn", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
    if subprocess.run([*cut_off, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"network namespaces are not permitted; un-skip: {NEEDS_NAMESPACE}")

    job.finish("--on", "2xcpu", command=[*cut_off, *job.command("--on", "2xcpu")])

    assert not caught.exists(), caught.read_text()
    assert len(job.losses()) == 4


def check_trap(job: Job, caught: Path) -> None:
    """It catches what a hub would be asked with."""
    ask = "import urllib.request as r; r.urlopen('http://192.0.2.1/')"
    subprocess.run(
        [sys.executable, "-c", ask], env=job.surroundings(), capture_output=True, check=False
    )
    assert "192.0.2.1" in caught.read_text()
    caught.unlink()
