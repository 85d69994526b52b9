"""Hosts as namespaces: all right passes with figures, and each planted error is named in time."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from namespaces import DEVICE, Hosts, list_processes, open_hosts
from tiny_jobs import Job, kill_tree, make_data, make_model

PORT = 29_544
MOST_SECONDS = 60.0
"""What users are promised, on a busy machine as well."""
PATIENCE_SECONDS = 60.0
THIS = "tests/integration/cluster/test_cluster_preflight.py"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with open_hosts(tmp_path / "hosts", "a", "b", test_file=THIS) as made:
        yield made


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


class Told:
    """A finished preflight: its document, its exit code, its time."""

    def __init__(self, done: subprocess.CompletedProcess[str], seconds: float) -> None:
        self.seconds = seconds
        self.code = done.returncode
        assert done.stdout, done.stderr
        self.report: dict[str, Any] = json.loads(done.stdout)

    def of(self, area: str, *statuses: str) -> list[dict[str, Any]]:
        found = [f for f in self.report["findings"] if f["area"] == area]
        return [f for f in found if not statuses or f["status"] in statuses]

    def errors(self) -> list[tuple[str, str]]:
        return [(f["area"], f["detail"]) for f in self.report["findings"] if f["status"] == "error"]


def preflight(hosts: Hosts, *options: str, nodes: str = "a,b") -> Told:
    words = ["preflight", "--nodes", nodes, "--run-with", hosts.prefix, "--port", str(PORT)]
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "tightfit", *words, *options, "--json"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    reported = Told(done, time.monotonic() - begin)
    for finding in reported.report["findings"]:
        assert finding["remedy"] or finding["status"] in ("ok", "info"), finding
    assert reported.seconds < MOST_SECONDS
    return reported


def errors_of(told: Told, *areas: str) -> dict[str, str]:
    """The detail of the one error that each of the areas has, and no other area."""
    assert told.code == 6
    assert sorted(found for found, _ in told.errors()) == sorted(areas), told.errors()
    return dict(told.errors())


def only_error(told: Told, area: str) -> str:
    return errors_of(told, area)[area]


def test_all_is_right(hosts: Hosts, tmp_path: Path) -> None:
    reported = preflight(hosts, "--shared", str(tmp_path))

    assert reported.code == 0
    assert reported.errors() == []
    areas = {finding["area"] for finding in reported.report["findings"]}
    assert areas >= {"nodes", "versions", "clock", "names", "interface", "port", "network",
                     "bandwidth", "folder", "gpu", "machine"}  # fmt: skip
    links = {(link["source"], link["target"]): link for link in reported.report["links"]}
    assert set(links) == {("a", "b"), ("b", "a")}
    for link in links.values():
        assert link["bytes_per_second"] > 1e6
        assert 0 < link["rtt_seconds"] < 5, "a cable inside this machine, however busy it is"
        assert link["lost_fraction"] < 0.05
    assert reported.report["all_reduce"]["backend"] == "gloo"
    assert reported.report["all_reduce"]["bus_bytes_per_second"] > 1e6
    assert not list(tmp_path.glob(".tightfit-preflight*"))
    assert reported.report["nodes"][1]["options"] == [
        "--nodes", "2", "--rendezvous", f"{hosts.first_address}:{PORT}", "--node-rank", "1",
        "--local-addr", hosts["b"].address, "--interface", DEVICE,
    ]  # fmt: skip


def test_errors_of_several_areas_and_no_other(hosts: Hosts, shared: Path) -> None:
    """A device that is not there, a taken port, a name that one node lacks, a private folder."""
    code = f"import socket,time; s=socket.create_server(('',{PORT})); print(flush=True); s.accept()"
    holder = hosts.start("a", [sys.executable, "-c", code])
    assert holder.stdout is not None
    holder.stdout.readline()
    hosts.name_everyone("a", without=["b"])
    hosts.mount_own("b", str(shared))
    reported = preflight(hosts, "--interface", "ib7", "--shared", str(shared))

    details = errors_of(reported, "interface", "port", "names", "folder")
    assert "ib7" in details["interface"]
    assert f"--interface {DEVICE}" in reported.of("interface", "error")[0]["remedy"]
    assert f"pid {holder.pid}" in details["port"]
    assert "cannot resolve b" in details["names"]
    assert f"{hosts['b'].address} b" in reported.of("names", "error")[0]["remedy"]
    assert "not shared: b" in details["folder"]
    assert reported.report["nodes"][0]["interface"] == DEVICE


def test_other_errors_of_the_same_areas(hosts: Hosts, shared: Path) -> None:
    """A device that leads nowhere, a filtered port, a wrong address, a folder one cannot write."""
    for name in "a", "b":
        address = f"10.5.0.{hosts[name].rank + 1}/24"
        hosts.do(name, "ip link add v0 type veth peer name v1", f"ip addr add {address} dev v0",
                 "ip link set v1 up", "ip link set v0 up")  # fmt: skip
    hosts.swallow_port("a", PORT)
    hosts.name_everyone("b", without=["a"], lines="10.231.9.77 a\n")
    hosts.do("b", f"mount --bind {shared} {shared}", f"mount -o remount,ro,bind {shared}")
    reported = preflight(hosts, "--interface", "v0", "--shared", str(shared))

    details = errors_of(reported, "interface", "port", "names", "folder")
    assert "v0" in details["interface"]
    assert f"--interface {DEVICE}" in reported.of("interface", "error")[0]["remedy"]
    assert f"from b to port {PORT} of a" in details["port"]
    assert "without a word" in details["port"]
    assert "10.231.9.77, which is not a's address" in details["names"]
    assert "b sees it, but cannot write" in details["folder"]


def test_what_deserves_a_warning_is_no_error(hosts: Hosts) -> None:
    """Own names as Debian has them: 127.0.1.1 on one node, nothing on the other. A slow link."""
    hosts.name_everyone("a", without=["a"], lines="127.0.1.1 a\n")
    hosts.name_everyone("b", without=["b"])
    hosts.shape("b", 50e6)
    reported = preflight(hosts)

    assert reported.code == 0, reported.errors()
    details = [finding["detail"] for finding in reported.of("names", "warning")]
    assert any("its own name a resolves to 127.0.1.1" in detail for detail in details)
    assert any("cannot resolve its own name b" in detail for detail in details)
    assert reported.report["all_reduce"]["error"] is None
    warning = reported.of("bandwidth", "warning")[0]
    assert "plans assume 10 Gb/s" in warning["detail"]
    assert "--network" in warning["remedy"]
    for link in reported.report["links"]:
        assert 1e6 < link["bytes_per_second"] < 8e6


def test_an_interface_that_is_down(hosts: Hosts) -> None:
    hosts.do("b", "ip link add v0 type veth peer name v1")
    hosts.do("a", "ip link add v0 type veth peer name v1")
    reported = preflight(hosts, "--interface", "v0")

    assert "v0 of b is down" in only_error(reported, "interface")
    assert reported.report["nodes"][0]["interface"] == DEVICE
    assert reported.report["all_reduce"]["bus_bytes_per_second"] > 1e6


def test_one_way_everything_is_lost(hosts: Hosts) -> None:
    hosts.swallow_ip("a")
    detail = only_error(preflight(hosts), "network")

    assert detail.startswith("one-way: everything b sends to a is lost")


def test_one_way_much_is_lost(hosts: Hosts) -> None:
    hosts.shape("b", 200_000, is_towards=True)
    reported = preflight(hosts)

    assert reported.code == 6
    assert [f["name"] for f in reported.of("network", "error")] == ["a to b"], reported.errors()
    assert "one-way" in reported.of("network", "error")[0]["detail"]


def test_a_cable_that_is_cut(hosts: Hosts) -> None:
    hosts.swallow_all("b")

    assert "nothing passes" in only_error(preflight(hosts), "network")


def test_large_packets_that_are_lost(hosts: Hosts) -> None:
    """Nodes set to jumbo frames, a switch that has none."""
    for name in "a", "b":
        hosts.do(name, f"ip link set {DEVICE} mtu 9000")
    reported = preflight(hosts)

    assert reported.code == 6
    assert any("MTU 9000" in finding["detail"] for finding in reported.of("network", "error"))


def test_versions_and_clocks_that_differ(hosts: Hosts, tmp_path: Path) -> None:
    """Node b has another torch, another tightfit and a clock that is 7 s ahead."""
    other = tmp_path / "other"
    (other / "torch-2.6.0.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0\n"
    (other / "torch-2.6.0.dist-info" / "METADATA").write_text(metadata)
    (other / "sitecustomize.py").write_text(
        "import time, tightfit.core.packages\nreal = time.time\ntime.time = lambda: real() + 7.0\n"
        "tightfit.core.packages.__version__ = '0.0.9'\n"
    )
    hosts.set_environment("b", {"PYTHONPATH": str(other)})
    reported = preflight(hosts)

    assert reported.code == 6
    errors = {finding["name"]: finding["detail"] for finding in reported.of("versions", "error")}
    assert set(errors) == {"torch", "tightfit"}
    assert "2.6.0 on b" in errors["torch"]
    assert "0.0.9 on b" in errors["tightfit"]
    found = re.match(r"b is ([\d.]+) s ahead of a", reported.of("clock", "warning")[0]["detail"])
    assert found is not None
    assert float(found[1]) == pytest.approx(7.0, abs=1.0)


def test_a_node_that_is_not_there(hosts: Hosts) -> None:
    reported = preflight(hosts, nodes="a,c")

    assert reported.code == 6
    details = [finding["detail"] for finding in reported.of("nodes", "error")]
    assert details == ["the agent does not start there: ended with exit code 255: no host c"]


def test_everything_is_wrong_at_once(hosts: Hosts, shared: Path) -> None:
    """A resolver that hangs, a dead link, a wrong device, a taken port, a private folder."""
    hosts.mount_own("b", str(shared))
    for name in "a", "b":
        hosts.write_file(name, "/etc/resolv.conf", "nameserver 10.231.9.99\n")
        hosts.write_file(name, "/etc/hosts", "127.0.0.1 localhost\n")
    hosts.start("a", [sys.executable, "-m", "http.server", str(PORT)])
    hosts.swallow_ip("a")
    reported = preflight(hosts, "--shared", str(shared), "--interface", "ib7", nodes="a,b,missing")

    assert reported.code == 6
    assert {area for area, _ in reported.errors()} >= {"nodes", "names", "interface", "port",
                                                   "network", "folder"}  # fmt: skip
    details = [finding["detail"] for finding in reported.of("names")]
    assert any("looking up" in detail or "no answer at all" in detail for detail in details)


def test_three_nodes_and_one_bad_link(tmp_path: Path) -> None:
    with open_hosts(tmp_path / "hosts", "a", "b", "c", test_file=THIS) as hosts:
        hosts.do("c", f"ip route add blackhole {hosts['b'].address}/32")
        reported = preflight(hosts, nodes="a,b,c")

    assert reported.code == 6
    found = [f for f in reported.of("network", "error") if {"b", "c"} <= set(f["name"].split())]
    assert len(found) == len(reported.of("network", "error")) == 1, reported.errors()
    assert "one-way" in found[0]["detail"]


def test_nothing_outlives_a_killed_preflight(hosts: Hosts) -> None:
    words = ["preflight", "--nodes", "a,b", "--run-with", hosts.prefix]
    command = [sys.executable, "-m", "tightfit", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while b"loss in each" not in process.stderr.readline():
            assert process.poll() is None
        assert any("collective" in word for word in running_on(hosts, "a"))
        process.kill()
    end = time.monotonic() + PATIENCE_SECONDS
    while left := [*running_on(hosts, "a"), *running_on(hosts, "b")]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def running_on(hosts: Hosts, name: str) -> list[str]:
    holder = hosts[name].holder.pid
    found = []
    for pid in list_processes(holder):
        with suppress(psutil.Error):  # a zombie does not run
            if pid != holder:
                found.append(shlex.join(psutil.Process(pid).cmdline()))
    return found


def test_training_with_what_preflight_recommends(hosts: Hosts, tmp_path: Path) -> None:
    """Own names resolve as Debian has them, where torchrun left alone would fail."""
    for name in "a", "b":
        hosts.name_everyone(name, without=["a", "b"], lines=f"127.0.1.1 {name}\n")
    reported = preflight(hosts, "--shared", str(tmp_path))
    options = [node["options"] for node in reported.report["nodes"]]
    job = Job(
        home=tmp_path / "job",
        model=make_model(tmp_path / "model"),
        data=make_data(tmp_path / "train.jsonl"),
        changes={"max_steps": 6, "save_every": 3},
    ).write()
    running = []
    for name, given in zip("ab", options, strict=True):
        with (job.home / f"host-{name}.txt").open("w") as log:
            running.append(
                subprocess.Popen(
                    hosts.command(name, *job.command("--on", "cpu", *given)),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=job.surroundings(),
                    start_new_session=True,
                )
            )
    try:
        codes = [process.wait(timeout=600) for process in running]
    finally:
        for process in running:
            if process.poll() is None:
                kill_tree(process)
    said = "\n".join(path.read_text() for path in job.home.glob("host-*.txt"))
    assert codes == [0, 0], said + job.log()[-4000:]
    assert sorted(job.losses()) == [1, 2, 3, 4, 5, 6]
