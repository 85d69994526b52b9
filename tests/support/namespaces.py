"""Hosts as namespaces: each with a network, a name, mounts and a /dev/shm of its own.

They hang on one switch (a bridge in a namespace of its own, so that nothing shows on the
machine). Each is held by a process that ends when its stdin closes: were the test killed,
the hosts would go with it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

DEVICE = "eth0"
SUBNET = "10.231.9"
PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
"""What the hosts are made with, and Debian's packages that have it."""
_HOLD = "echo ready; exec cat >/dev/null"
_UNSHARE = ("unshare", "--net", "--mount", "--uts", "--propagation", "private")


@dataclass(slots=True, kw_only=True)
class Host:
    """One of them; `rank` counts from 0."""

    name: str
    rank: int
    holder: subprocess.Popen[bytes]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.rank + 1}"

    @property
    def port(self) -> str:
        """The switch's end of its cable."""
        return f"port{self.rank}"


class Hosts:
    """Several hosts that share the file system, each with DEVICE on one switch."""

    def __init__(self, folder: Path, names: Sequence[str], *, shm_bytes: int | None = None) -> None:
        self.folder = folder
        self.names = tuple(names)
        self.shm_bytes = shm_bytes
        self.hosts: dict[str, Host] = {}
        self._switch: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    @property
    def prefix(self) -> str:
        """For `start_on` and `--run-with`: what follows runs on {node}."""
        return f"{self.folder / 'on'} {{node}}"

    @property
    def first_address(self) -> str:
        return self.hosts[self.names[0]].address

    def open(self) -> Hosts:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._switch = self._hold()
        self.switch("ip link add sw0 type bridge", "ip link set sw0 up")
        for rank, name in enumerate(self.names):
            self.hosts[name] = Host(name=name, rank=rank, holder=self._hold())
            self._plug(self.hosts[name])
        for name in self.names:
            self.name_everyone(name)
            if self.shm_bytes is not None:
                self.mount_own(name, "/dev/shm", num_bytes=self.shm_bytes)
        self._write_prefix()
        return self

    def close(self) -> None:
        for process in self._started:
            _end(process)
        for host in self.hosts.values():
            self.power_off(host.name)
            _end(host.holder)
        if self._switch is not None:
            _end(self._switch)
        self.hosts.clear()

    def _hold(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*_UNSHARE, "sh", "-c", _HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._started.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            _, said = process.communicate(timeout=10)
            raise OSError(f"unshare: {said.decode().strip()}")
        return process

    def _plug(self, host: Host) -> None:
        assert self._switch is not None
        self.switch(
            f"ip link add {host.port} type veth peer {DEVICE} netns {host.holder.pid}",
            f"ip link set {host.port} master sw0",
            f"ip link set {host.port} up",
        )
        self.do(
            host.name,
            f"ip addr add {host.address}/24 dev {DEVICE}",
            f"ip link set {DEVICE} up",
            "ip link set lo up",
            f"hostname {host.name}",
        )

    def _write_prefix(self) -> None:
        """`on NAME command`: enters the host with its own environment."""
        cases = []
        for host in self.hosts.values():
            sets = " ".join(shlex.quote(f"{k}={v}") for k, v in host.environment.items())
            cases.append(f"{host.name}) exec nsenter -t {host.holder.pid} -n -m -u env {sets} ")
        enter = "\n".join(f'  {case}"$@" ;;' for case in cases)
        unknown = '  *) echo "no host $name" >&2; exit 255 ;;'
        path = self.folder / "on"
        path.write_text(f'#!/bin/sh\nname=$1; shift\ncase "$name" in\n{enter}\n{unknown}\nesac\n')
        path.chmod(0o755)

    def set_environment(self, name: str, values: Mapping[str, str]) -> None:
        """For everything that is started there from now on."""
        self.hosts[name].environment.update(values)
        self._write_prefix()

    def switch(self, *commands: str) -> None:
        """Run commands at the switch."""
        assert self._switch is not None
        for command in commands:
            _run(["nsenter", "-t", str(self._switch.pid), "-n", *shlex.split(command)])

    def do(self, name: str, *commands: str) -> None:
        """Run commands on a host; each must succeed."""
        for command in commands:
            _run(self.command(name, *shlex.split(command)))

    def command(self, name: str, *argv: str) -> list[str]:
        """The words that run `argv` on a host."""
        pid = str(self.hosts[name].holder.pid)
        sets = [f"{key}={value}" for key, value in self.hosts[name].environment.items()]
        return ["nsenter", "-t", pid, "-n", "-m", "-u", "env", *sets, *argv]

    def on(
        self, name: str, argv: Sequence[str], *, seconds: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(name, *argv), capture_output=True, text=True, timeout=seconds, check=False
        )

    def start(self, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Something that goes on there until `close`."""
        process = subprocess.Popen(
            self.command(name, *argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def write_file(self, name: str, path: str, text: str) -> None:
        """A file of /etc as this host alone sees it."""
        mine = self.folder / f"{name}-{path.strip('/').replace('/', '-')}-{time.monotonic_ns()}"
        mine.write_text(text)
        self.do(name, f"mount --bind {mine} {path}")

    def name_everyone(self, name: str, *, without: Sequence[str] = (), lines: str = "") -> None:
        """/etc/hosts with all hosts but those; no resolver."""
        known = "".join(
            f"{host.address} {host.name}\n"
            for host in self.hosts.values()
            if host.name not in without
        )
        self.write_file(name, "/etc/hosts", f"127.0.0.1 localhost\n{known}{lines}")
        self.write_file(name, "/etc/resolv.conf", "options timeout:1 attempts:1\n")

    def mount_own(self, name: str, path: str, *, num_bytes: int = 1 << 26) -> None:
        """A folder with this host's own files in it, in memory."""
        self.do(name, f"mount -t tmpfs -o size={num_bytes} own {path}")

    def shape(self, name: str, bits_per_second: float, *, is_towards: bool | None = None) -> None:
        """Limit its link: what it receives (True), what it sends (False), or both (None)."""
        rate = f"rate {bits_per_second:.0f}bit burst 64kb latency 60ms"
        if is_towards is not False:
            self.switch(f"tc qdisc replace dev {self[name].port} root tbf {rate}")
        if is_towards is not True:
            self.do(name, f"tc qdisc replace dev {DEVICE} root tbf {rate}")

    def swallow_all(self, name: str) -> None:
        """Nothing that others send reaches this host; what it sends still leaves."""
        self.switch(f"tc qdisc replace dev {self[name].port} root blackhole")

    def swallow_ip(self, name: str) -> None:
        """The same for IP alone: neighbours are still found, as behind a filtering router."""
        self._swallow(name, "match u32 0 0")

    def swallow_port(self, name: str, port: int) -> None:
        """A firewall that drops without a word what is sent to that port of this host."""
        self._swallow(name, f"match ip dport {port} 0xffff")

    def _swallow(self, name: str, match: str) -> None:
        dev = self[name].port
        self.switch(
            f"tc qdisc add dev {dev} root handle 1: htb default 1 r2q 10000",
            f"tc class add dev {dev} parent 1: classid 1:1 htb rate 100gbit quantum 60000",
            f"tc class add dev {dev} parent 1: classid 1:2 htb rate 100gbit quantum 60000",
            f"tc qdisc add dev {dev} parent 1:2 handle 20: blackhole",
            f"tc filter add dev {dev} parent 1: protocol ip u32 {match} flowid 1:2",
        )

    def power_off(self, name: str) -> None:
        """kill -9 for all that runs there; the host itself stays."""
        holder = self.hosts[name].holder.pid
        for pid in list_processes(holder):
            if pid != holder:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def list_processes(holder: int) -> list[int]:
    """All that are in the same network namespace."""
    found = []
    with suppress(OSError):
        here = Path(f"/proc/{holder}/ns/net").readlink()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (entry / "ns/net").readlink() == here:
                    found.append(int(entry.name))
    return found


def _run(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{shlex.join(words)}: {done.stderr.strip()}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _find_remedy(again: str) -> str:
    missing = [package for tool, package in PACKAGES.items() if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return f"as root, which may make namespaces: sudo -E {again}"
    if missing:
        return f"apt-get install -y {' '.join(dict.fromkeys(missing))}"
    return (
        "a container that may make namespaces, mounts and network devices: docker run --privileged"
    )


@contextmanager
def open_hosts(
    folder: Path, *names: str, shm_bytes: int | None = None, test_file: str = ""
) -> Iterator[Hosts]:
    """Hosts for a while; where they cannot be made the test fails and says what is missing."""
    hosts = Hosts(folder, names, shm_bytes=shm_bytes)
    try:
        try:
            hosts.open()
        except OSError as error:
            remedy = _find_remedy(f"{sys.executable} -m pytest {test_file}".strip())
            pytest.fail(f"hosts cannot be made here: {error}. Try: {remedy}", pytrace=False)
        yield hosts
    finally:
        hosts.close()
