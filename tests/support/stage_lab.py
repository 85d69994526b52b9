"""Four hosts and a storage host on shaped links, one model on the storage: staging for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from namespaces import DEVICE, Hosts, open_hosts

NODES = ("n1", "n2", "n3", "n4")
STORAGE = "storage"
PORT = 7700
MODEL_BYTES = 64 << 20
SHARED_DISK = Path(__file__).with_name("shared_disk.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Rates in bytes per second."""

    name: str
    storage: float
    """What the storage host sends, to all together."""
    link: float
    """What a node sends, and what it receives."""


SCENARIOS = (
    Scenario(name="storage is the bottleneck", storage=20e6, link=50e6),
    Scenario(name="links are the bottleneck", storage=100e6, link=12.5e6),
    Scenario(name="balanced", storage=40e6, link=20e6),
)


class StageLab:
    """The hosts, with the model at the same path on each."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.origin = folder / "origin"
        self.shared = folder / "shared"

    def open(self) -> None:
        self.origin.mkdir()
        self.shared.mkdir()
        make_model(self.origin, MODEL_BYTES)
        python, script = sys.executable, str(SHARED_DISK)
        address = self.hosts[STORAGE].address
        self._wait(STORAGE, [python, script, "serve", str(self.origin), address, str(PORT)])
        for node in NODES:
            self._wait(node, [python, script, "mount", address, str(PORT), str(self.shared)])

    def _wait(self, host: str, argv: Sequence[str]) -> None:
        process = self.hosts.start(host, argv)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == b"ready\n", line + process.stdout.read()

    def shape(self, scenario: Scenario) -> None:
        self.hosts.shape(STORAGE, 8 * scenario.storage, is_towards=False)
        for node in NODES:
            self.hosts.shape(node, 8 * scenario.link)

    def command(self, *more: str, nodes: Sequence[str] = NODES) -> list[str]:
        """`tightfit stage` on the first host."""
        words = [sys.executable, "-m", "tightfit.cli.app", "stage", *more]
        words += ["--nodes", ",".join(nodes), "--run-with", self.hosts.prefix]
        return [*words, "--interface", DEVICE, "--leave", "0", "--json"]

    def stage(self, *more: str, nodes: Sequence[str] = NODES) -> Any:
        """Stage the model; the document that the command prints."""
        done = self.run(str(self.shared), *more, nodes=nodes)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def run(self, *more: str, nodes: Sequence[str] = NODES) -> subprocess.CompletedProcess[str]:
        return self.hosts.on(NODES[0], self.command(*more, nodes=nodes), seconds=300)

    def clean(self) -> None:
        done = self.run("--clean")
        assert done.returncode == 0, done.stdout + done.stderr

    def digest_copies(self) -> set[str]:
        """Of the weights of each node's copy."""
        pattern = "sha256sum /dev/shm/tightfit-*/*/model.safetensors"
        found = [self.hosts.on(node, ["sh", "-c", pattern]).stdout.split() for node in NODES]
        return {words[0] if words else "missing" for words in found}


def make_model(folder: Path, num_bytes: int) -> None:
    """A folder that looks like a model; its values mean nothing."""
    header = json.dumps(
        {"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}
    )
    text = header.encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        left = num_bytes
        while left:
            left -= stream.write(os.urandom(min(left, 1 << 22)))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")


@contextmanager
def open_lab(folder: Path, *, shm_bytes: int = 4 * MODEL_BYTES) -> Iterator[StageLab]:
    """The lab for a while; the test fails where namespaces cannot be made."""
    test_file = "tests/integration/cluster/test_cluster_stage.py"
    with open_hosts(
        folder / "hosts", STORAGE, *NODES, shm_bytes=shm_bytes, test_file=test_file
    ) as hosts:
        lab = StageLab(hosts, folder)
        lab.open()
        yield lab
