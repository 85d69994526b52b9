"""site.yaml, and how a node finds its address."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from local_cases import make_run
from tightfit.clusters.local.launcher import lock_run
from tightfit.clusters.nodes import probe_address
from tightfit.clusters.site import KubernetesSite, Site, SlurmSite, find_site_file, read_site
from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError, UsageError

EXAMPLE = Path(__file__).parents[3] / "docs" / "site.example.yaml"


def write(folder: Path, text: str) -> Path:
    path = folder / "site.yaml"
    path.write_text(text)
    return path


def test_the_example_holds_every_key() -> None:
    site = read_site(EXAMPLE)
    left_out = {"container"}  # two ways of it stand there as comments

    assert set(Site.model_fields) - site.model_fields_set == left_out
    assert site.slurm.model_fields_set == set(SlurmSite.model_fields)
    assert site.kubernetes.model_fields_set == set(KubernetesSite.model_fields)


def test_without_a_file_there_are_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIGHTFIT_SITE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    assert read_site() == Site()
    assert read_site().interpreter == sys.executable


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_site_file({"TIGHTFIT_SITE": "/a.yaml", "XDG_CONFIG_HOME": "/x"}) == Path("/a.yaml")
    assert find_site_file({"XDG_CONFIG_HOME": "/x"}) == Path("/x/tightfit/site.yaml")
    monkeypatch.setenv("TIGHTFIT_SITE", str(tmp_path / "gone.yaml"))
    with pytest.raises(NotFoundError, match=r"\$TIGHTFIT_SITE names"):  # named, so it is meant
        read_site()


def test_numbers_and_blocks_of_lines_as_people_write_them(tmp_path: Path) -> None:
    text = "setup: |\n  module load a\n  module load b\nenvironment: {OMP_NUM_THREADS: 8}\nslurm:\n"
    site = read_site(write(tmp_path, text))

    assert site.setup == ("module load a", "module load b")
    assert site.environment == {"OMP_NUM_THREADS": "8"}
    assert site.slurm == SlurmSite()


def test_all_errors_at_once(tmp_path: Path) -> None:
    text = (
        "slurm: {acount: x, qos: 'two words', extra: [exclusive], warn_seconds: soon}\n"
        "environment: {'not a name': 1}\nrun_on_node: ssh\n"
        "kubernetes: {volumes: [{name: a, mount: /b}]}\n"
    )
    with pytest.raises(InvalidInputError) as error:
        read_site(write(tmp_path, text))

    said = error.value.problem
    assert "7 errors" in said
    for part in ("acount", "account", "qos", "exclusive", "warn_seconds", "not a name",
                 "{node}", "volume `a`"):  # fmt: skip
        assert part in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shared: here\n", "`shared` holds absolute paths, not `here`"),
        ("slurm: {extra: ['--comment=\"a b']}\n", "`slurm.extra` has an open quote"),
    ],
)
def test_what_no_node_could_use_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        read_site(write(tmp_path, text))
    assert said in error.value.problem


@pytest.mark.parametrize("text", ["- a\n", "just words\n", "a: [\n"])
def test_what_is_no_site_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInputError):
        read_site(write(tmp_path, text))


def test_a_container_is_an_image_or_a_command() -> None:
    image = Site(container="reg/x:1")
    command = Site(container="apptainer exec x.sif")

    assert (image.container_image, command.container_image) == ("reg/x:1", None)
    assert image.interpreter == "python3"


def test_the_way_to_a_peer_is_found_without_other_tools() -> None:
    own = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family.name == "AF_INET" and not entry.address.startswith("127.")
    }
    if not own:
        pytest.skip("this machine has no network; un-skip: ip link add dummy0 type dummy")
    address, device = next(iter(own.items()))

    assert probe_address(address, None) == (address, device)
    assert probe_address("peer", device) == (address, device)


def test_a_name_that_leads_nowhere_and_a_device_that_is_not_there() -> None:
    with pytest.raises(SetupError, match="finds no route"):
        probe_address("no-such-node.invalid", None)
    with pytest.raises(SetupError, match="no network device"):
        probe_address("peer", "nosuch0")


def test_the_module_prints_address_and_device_or_one_message() -> None:
    command = [sys.executable, "-m", "tightfit.clusters.nodes", "peer", "lo"]
    assert subprocess.check_output(command, text=True) == "127.0.0.1 lo\n"

    failed = subprocess.run([*command[:-1], "nosuch0"], capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (6, "")
    assert "  try: " in failed.stderr


def test_a_batch_job_waits_for_the_lock_of_a_node_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    handle = os.open(run.path / "launcher.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(UsageError), lock_run(run):
        pass
    # By its own descriptor: a thread of another test may sleep meanwhile.
    monkeypatch.setattr("time.sleep", lambda _seconds: fcntl.flock(handle, fcntl.LOCK_UN))
    with lock_run(run, wait_seconds=60):
        pass


def test_a_file_system_without_locks_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_handle: int, _how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with lock_run(make_run(tmp_path / "run")):
        pass
