"""A real Ray of two nodes, on a network that has nothing but loopback.

`python ray_lab.py` is the cluster: it says its address and ends when its stdin closes, so that it
goes with the test, however that ends.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SELF = str(Path(__file__).absolute())
HOST = "127.0.0.1"
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "node_ip_address": HOST}


class RayLab:
    """Commands run in the cluster's network, with its address and a token of its own."""

    def __init__(self, folder: Path) -> None:
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "TIGHTFIT_LEDGER": str(folder / "ledger.sqlite"),
        }
        self._holder = subprocess.Popen(
            ["unshare", "--net", sys.executable, SELF],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self.environment,
            text=True,
        )
        assert self._holder.stdout is not None
        lines = iter(self._holder.stdout.readline, "")
        address = next((line for line in lines if line.startswith(HOST)), None)
        assert address is not None, "Ray did not start"
        self.environment["RAY_ADDRESS"] = address.strip()

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["nsenter", "--net", "--target", str(self._holder.pid), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
            text=True,
        )

    def close(self) -> None:
        try:
            self._holder.communicate(timeout=60)  # closes its stdin, and waits
        finally:
            self._holder.kill()


@pytest.fixture(scope="module")
def ray_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayLab]:
    lab = RayLab(tmp_path_factory.mktemp("ray"))
    yield lab
    lab.close()


def _hold() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    from ray.cluster_utils import Cluster

    head: dict[str, Any] = {**NODE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**NODE)
        print(cluster.address, flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    _hold()
