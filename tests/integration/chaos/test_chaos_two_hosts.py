"""Two hosts that share a folder and a cable: one is lost, comes back, and nothing is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiny_jobs import PATIENCE_SECONDS, Job, kill_tree, wait_for

pytest_plugins = ("chaos_fixtures",)

NUM_STEPS = 40
PORT = 29_511
UNSKIP = "sudo -E python -m pytest tests/integration/chaos/test_chaos_two_hosts.py"


class Hosts:
    """Two network namespaces with a cable between them."""

    def __init__(self) -> None:
        self.names = [f"tf{os.getpid()}a", f"tf{os.getpid()}b"]
        self.addresses = ["10.231.7.1", "10.231.7.2"]

    def open(self) -> None:
        first, second = self.names
        for name in self.names:
            _ip("netns", "add", name)
        ends = f"cable0 netns {first} type veth peer cable0 netns {second}"
        _ip("link", "add", *ends.split())
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable0")
            _ip("-n", name, "link", "set", "cable0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def start(self, job: Job, number: int) -> subprocess.Popen[str]:
        options = [
            "--on", "cpu", "--nodes", "2", "--rendezvous", f"{self.addresses[0]}:{PORT}",
            "--node-rank", str(number), "--local-addr", self.addresses[number],
            "--interface", "cable0",
        ]  # fmt: skip
        there = ["ip", "netns", "exec", self.names[number]]
        log = job.home / f"host{number}.txt"
        with log.open("a") as stream:
            return subprocess.Popen(
                [*there, *job.command(*options)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
                env=job.surroundings(),
                start_new_session=True,
            )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    try:
        made.open()
    except (OSError, subprocess.CalledProcessError) as error:
        made.close()
        pytest.skip(f"network namespaces cannot be made here ({error}); un-skip: {UNSKIP}")
    yield made
    made.close()


def make_job(home: Path, model: Path, data: Path) -> Job:
    changes = {"max_steps": NUM_STEPS, "save_every": 2, "learning_rate": 1e-3}
    return Job(home=home, model=model, data=data, changes=changes).write()


def test_a_host_is_lost_and_comes_back(
    tmp_path: Path, model: Path, data: Path, hosts: Hosts
) -> None:
    undisturbed = make_job(tmp_path / "undisturbed", model, data)
    undisturbed.finish("--on", "cpu")
    job = make_job(tmp_path / "job", model, data)
    slow = job.slow_from(5)  # or it may be over before the host is lost
    running = [hosts.start(job, 0), hosts.start(job, 1)]
    try:
        assert wait_for(lambda: job.last_step() >= 5, running[1]), tell(job)
        kill_tree(running[1])
        slow.end()
        running[1] = hosts.start(job, 1)
        codes = [process.wait(timeout=PATIENCE_SECONDS) for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                kill_tree(process)

    assert codes == [0, 0], tell(job)
    assert any(r["text"].startswith("resumed") for r in job.records("event")), tell(job)
    assert sorted(job.losses()) == list(range(1, NUM_STEPS + 1))
    assert job.losses() == pytest.approx(undisturbed.losses(), abs=1e-4)
    assert (job.run / "adapter" / "adapter_model.safetensors").is_file()


def tell(job: Job) -> str:
    said = [path.read_text() for path in sorted(job.home.glob("host*.txt"))]
    return "\n".join([*said, job.log()[-6000:]])
