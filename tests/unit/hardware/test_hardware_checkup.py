"""The checkup: a bare machine, a healthy one, and each error with its remedy."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fake_nvml import H100, MIB, T4, V100, Card, FakeNvml

from machine_pace import allow
from tightfit.core.errors import SetupError
from tightfit.core.findings import Finding, Status
from tightfit.core.units import GIB
from tightfit.hardware.checkup import (
    Checkup,
    SystemProbes,
    has_nvidia_card,
    has_nvswitch,
    oldest_capability,
    run_checkup,
)
from tightfit.hardware.machine import (
    Machine,
    TorchBuild,
    parse_torch_build,
    read_driver,
    read_free_disk,
    read_torch_build,
    read_version,
)

ROOMY = Machine(
    memory_bytes=512 * GIB,
    available_memory_bytes=500 * GIB,
    memory_limit_bytes=None,
    num_cores=64,
    num_usable_cores=64,
    shm_bytes=256 * GIB,
    shm_free_bytes=256 * GIB,
    locked_memory_limit_bytes=None,
)
CUDA_126 = TorchBuild(version="2.11.0+cu126", cuda=(12, 6))


def _no_command(arguments: Sequence[str], _seconds: float) -> str:
    raise SetupError(f"`{arguments[0]}` is not on this machine.", remedy="install it")


HEALTHY = SystemProbes(
    read_gpus=lambda: read_driver(FakeNvml(cards=[T4]), environ={}),
    read_host=lambda: ROOMY,
    read_free_disk=lambda _path: 500 * GIB,
    read_version=lambda _name: "1.0.0",
    read_torch_build=lambda: CUDA_126,
    has_nvidia_card=lambda: True,
    has_nvswitch=lambda: False,
    list_process_names=frozenset,
    has_file=lambda _path: False,
    run=_no_command,
    environ={"HOME": "/home/ada"},
)


def _with_cards(*cards: Card, driver: str = "550.54.15") -> SystemProbes:
    return dataclasses.replace(
        HEALTHY, read_gpus=lambda: read_driver(FakeNvml(cards=cards, driver=driver), environ={})
    )


def _find(checkup: Checkup, name: str) -> Finding:
    [finding] = [finding for finding in checkup.findings if finding.name == name]
    return finding


def _bad(checkup: Checkup) -> set[str]:
    return {
        finding.name
        for finding in checkup.findings
        if finding.status in (Status.WARNING, Status.ERROR)
    }


def test_a_healthy_machine_has_nothing_to_complain_of() -> None:
    # flash-attn is the one companion that a T4 cannot use.
    here = dataclasses.replace(
        HEALTHY, read_version=lambda name: None if name == "flash-attn" else "1.0"
    )
    checkup = run_checkup(here)
    assert _bad(checkup) == set()
    assert checkup.exit_code == 0


def test_a_bare_machine_works_and_is_no_error() -> None:
    here = dataclasses.replace(
        HEALTHY,
        read_gpus=lambda: read_driver(FakeNvml(is_missing=True), environ={}),
        has_nvidia_card=lambda: False,
        read_version=lambda _name: None,
        read_torch_build=lambda: None,
    )
    checkup = run_checkup(here)
    assert checkup.worst is Status.INFO
    assert checkup.exit_code == 0
    assert "planning needs none" in _find(checkup, "GPUs").detail
    assert _find(checkup, "torch").status is Status.INFO


def test_the_real_machine_answers_fast_without_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    before = set(sys.modules)
    started = time.process_time()
    checkup = run_checkup()
    assert time.process_time() - started < allow(2)
    assert "torch" not in set(sys.modules) - before
    assert {"python", "gpu", "memory", "disk", "packages", "cluster", "hub"} == {
        finding.area for finding in checkup.findings
    }


def test_the_real_machine_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor a network or a command, which take no processor time of ours."""
    monkeypatch.setenv("PATH", str(tmp_path))
    probe = (
        "import time; from tightfit.hardware.checkup import run_checkup\n"
        "started = time.perf_counter(); run_checkup(); print(time.perf_counter() - started)"
    )

    def seconds() -> float:
        """In a process of its own: what was waited for once may be kept."""
        return float(subprocess.check_output([sys.executable, "-c", probe], text=True))

    # A pause of the machine spoils one.
    assert any(seconds() < allow(2) for _ in range(3))


def test_every_warning_and_error_has_a_remedy_and_the_json_comes_back() -> None:
    sick = Card(
        name="Tesla T4",
        total_bytes=15360 * MIB,
        free_bytes=10 * MIB,
        compute_capability=(7, 5),
        processes=((77, 15 * GIB),),
        ecc_errors=3,
        slowdown_reasons=0x40 | 0x80,
    )
    here = dataclasses.replace(
        _with_cards(sick),
        read_host=lambda: dataclasses.replace(
            ROOMY,
            shm_bytes=64 * MIB,
            shm_free_bytes=64 * MIB,
            memory_limit_bytes=4 * GIB,
            num_usable_cores=1,
            has_infiniband=True,
            locked_memory_limit_bytes=8 * MIB,
        ),
        read_free_disk=lambda _path: 50 * MIB,
        read_torch_build=lambda: TorchBuild(version="2.11.0+cpu", cuda=None),
    )
    checkup = run_checkup(here)
    assert _bad(checkup) == {
        "GPU 0 in use",
        "GPU 0 memory errors",
        "GPU 0 slowed",
        "RAM",
        "cores",
        "/dev/shm",
        "locked memory",
        "model cache",
        "this folder",
        "temporary files",
        "torch and GPU",
        "flash-attn",
    }
    for finding in checkup.findings:
        if finding.status in (Status.WARNING, Status.ERROR):
            assert finding.remedy, finding.name
    assert checkup.exit_code == 6
    assert checkup.count(Status.ERROR) == 6
    assert Checkup.model_validate(json.loads(checkup.model_dump_json())) == checkup


@pytest.mark.parametrize(
    ("card", "formats"),
    [
        (T4, "fp16 yes, bf16 no, int8 yes, fp8 no"),
        (V100, "fp16 yes, bf16 no, int8 no, fp8 no"),
        (H100, "fp16 yes, bf16 yes, int8 yes, fp8 yes"),
    ],
)
def test_each_card_says_what_it_multiplies(card: Card, formats: str) -> None:
    assert formats in _find(run_checkup(_with_cards(card)), "GPU 0").detail


def test_a_card_whose_driver_does_not_answer_is_an_error() -> None:
    here = dataclasses.replace(
        HEALTHY, read_gpus=lambda: read_driver(FakeNvml(is_missing=True), environ={})
    )
    assert _find(run_checkup(here), "driver").status is Status.ERROR


def test_hidden_gpus_are_pointed_out() -> None:
    here = dataclasses.replace(
        HEALTHY,
        read_gpus=lambda: read_driver(
            FakeNvml(cards=[T4, V100]), environ={"CUDA_VISIBLE_DEVICES": "1"}
        ),
    )
    assert _find(run_checkup(here), "visible GPUs").status is Status.WARNING


def test_eight_h100_without_a_fabric_manager_are_an_error() -> None:
    finding = _find(run_checkup(_with_cards(*[H100] * 8)), "fabric manager")
    assert finding.status is Status.ERROR
    assert "nvidia-fabricmanager" in (finding.remedy or "")


def test_a_fabric_that_is_up_is_well_even_if_its_service_is_out_of_sight() -> None:
    complete = dataclasses.replace(H100, fabric_state=3)
    checkup = run_checkup(_with_cards(*[complete] * 8))
    assert _find(checkup, "fabric manager").status is Status.OK
    assert _find(checkup, "DCGM").status is Status.INFO


def test_a_fabric_manager_that_is_stuck_is_an_error() -> None:
    stuck = dataclasses.replace(H100, fabric_state=2)
    here = dataclasses.replace(
        _with_cards(*[stuck] * 8),
        list_process_names=lambda: frozenset({"nv-fabricmanager", "nv-hostengine"}),
    )
    checkup = run_checkup(here)
    assert _find(checkup, "fabric manager").status is Status.ERROR
    assert _find(checkup, "DCGM").status is Status.OK


A100 = Card(
    name="NVIDIA A100-SXM4-80GB",
    total_bytes=81920 * MIB,
    compute_capability=(8, 0),
    num_nvlinks=12,
    ecc_errors=0,
)
"""Ampere: NVML answers `Not Supported` when asked for the fabric's state."""
CONTAINER = frozenset({"tini", "bash", "python3", "sleep"})
"""What `ps -e -o comm` shows in a container of its own."""
HOST = frozenset({"systemd", "kthreadd", "ksoftirqd/0", "nvidia-persistenced", "sshd"})


@pytest.mark.parametrize(
    ("state", "processes", "status"),
    [
        (None, CONTAINER, Status.INFO),
        (0, CONTAINER, Status.INFO),
        (None, HOST, Status.ERROR),
        (None, HOST | {"nv-fabricmanager"}, Status.OK),
        (1, CONTAINER, Status.ERROR),
    ],
)
def test_what_a_container_cannot_see_is_no_error(
    state: int | None, processes: frozenset[str], status: Status
) -> None:
    cards = [dataclasses.replace(A100, fabric_state=state)] * 8
    here = dataclasses.replace(_with_cards(*cards), list_process_names=lambda: processes)

    checkup = run_checkup(here)

    finding = _find(checkup, "fabric manager")
    assert finding.status is status
    assert ("error 802" in finding.detail) == (status is Status.ERROR)


def test_boxes_without_switches_need_no_fabric_manager() -> None:
    for cards in ([H100], [V100] * 8, [dataclasses.replace(H100, fabric_state=0)] * 4):
        names = {finding.name for finding in run_checkup(_with_cards(*cards)).findings}
        assert "fabric manager" not in names


@pytest.mark.parametrize(
    ("version", "cuda", "card", "driver", "error"),
    [
        ("2.13.0+cu130", (13, 0), T4, "580.65.06", None),
        ("2.13.0+cu130", (13, 0), T4, "550.54.15", "torch and driver"),
        ("2.9.0+cu128", (12, 8), T4, "525.60.13", None),
        ("2.6.0+cu124", (12, 4), T4, "470.82.01", "torch and driver"),
        ("2.13.0+cu130", (13, 0), V100, "580.65.06", "torch and Tesla V100-SXM2-32GB"),
        ("2.11.0+cu128", (12, 8), V100, "580.65.06", "torch and Tesla V100-SXM2-32GB"),
        ("2.10.0+cu128", (12, 8), V100, "580.65.06", None),
        ("2.13.0+cu126", (12, 6), V100, "580.65.06", None),
        ("2.6.0+cu124", (12, 4), "B200", "580.65.06", "torch and NVIDIA B200"),
        ("2.8.0+cu128", (12, 8), "B200", "580.65.06", None),
    ],
)
def test_torch_is_held_against_driver_and_card(
    version: str, cuda: tuple[int, int], card: Card | str, driver: str, error: str | None
) -> None:
    if isinstance(card, str):
        card = Card(name="NVIDIA B200", total_bytes=183359 * MIB, compute_capability=(10, 0))
    here = dataclasses.replace(
        _with_cards(card, driver=driver),
        read_torch_build=lambda: TorchBuild(version=version, cuda=cuda),
    )
    checkup = run_checkup(here)
    errors = {finding.name for finding in checkup.findings if finding.status is Status.ERROR}
    assert errors == ({error} if error else set())


def test_a_cpu_torch_beside_a_gpu_is_an_error_whose_remedy_suits_the_card() -> None:
    cpu = TorchBuild(version="2.13.0+cpu", cuda=None)
    for card, driver, wheel in (
        (V100, "580.65.06", "cu126"),
        (T4, "580.65.06", "cu130"),
        (T4, "550.54.15", "cu128"),
    ):
        here = dataclasses.replace(_with_cards(card, driver=driver), read_torch_build=lambda: cpu)
        finding = _find(run_checkup(here), "torch and GPU")
        assert finding.status is Status.ERROR
        assert (finding.remedy or "").endswith(wheel)


def test_the_remedy_for_an_old_card_would_help_it() -> None:
    assert oldest_capability(CUDA_126) <= (7, 0)


def test_the_installed_torch_is_read_without_importing_it() -> None:
    version = read_version("torch")
    build = read_torch_build()
    assert (build.version if build else None) == version


def test_torch_builds_are_read_from_their_version_file() -> None:
    text = "__version__ = '2.9.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    assert parse_torch_build("2.9.0+cu128", text).cuda == (12, 8)
    assert parse_torch_build("2.0", "cuda = '11.8'\nhip = None\n").cuda == (11, 8)
    assert parse_torch_build("2.9", "cuda: Optional[str] = None\nhip = '6.4'\n").hip == "6.4"


@pytest.mark.parametrize(
    ("size", "status"),
    [
        (64 * MIB, Status.ERROR),
        (512 * MIB, Status.WARNING),
        (16 * GIB, Status.OK),
        (None, Status.ERROR),
    ],
)
def test_shared_memory(size: int | None, status: Status) -> None:
    machine = dataclasses.replace(ROOMY, shm_bytes=size, shm_free_bytes=size)
    checkup = run_checkup(dataclasses.replace(HEALTHY, read_host=lambda: machine))
    assert _find(checkup, "/dev/shm").status is status


def test_a_containers_memory_limit_is_shown() -> None:
    machine = dataclasses.replace(ROOMY, memory_limit_bytes=32 * GIB)
    finding = _find(run_checkup(dataclasses.replace(HEALTHY, read_host=lambda: machine)), "RAM")
    assert finding.status is Status.INFO
    assert "32.0 GiB, a limit" in finding.detail


def _answers(table: dict[str, str | None]) -> Callable[[Sequence[str], float], str]:
    def run(arguments: Sequence[str], seconds: float) -> str:
        assert seconds <= 3
        answer = table.get(" ".join(arguments[:2]))
        if answer is None:
            raise SetupError(f"`{arguments[0]}` failed: refused", remedy="try")
        return answer

    return run


def test_slurm_and_kubernetes_answer_or_not() -> None:
    up = _answers(
        {
            "sinfo --version": "slurm 24.05.4\n",
            "sinfo -h": "gpu\nlow\n",
            "kubectl version": "v1.32",
            "kubectl get": "node/a\nnode/b\n",
        }
    )
    checkup = run_checkup(dataclasses.replace(HEALTHY, run=up))
    assert "partitions: gpu, low" in _find(checkup, "Slurm").detail
    assert _find(checkup, "Kubernetes").detail == "2 nodes"

    down = _answers({"sinfo --version": "slurm 24.05.4\n", "kubectl version": "v1.32"})
    checkup = run_checkup(dataclasses.replace(HEALTHY, run=down))
    assert _find(checkup, "Slurm").status is Status.WARNING
    assert _find(checkup, "Kubernetes").status is Status.INFO
    configured = dataclasses.replace(
        HEALTHY, run=down, has_file=lambda path: path == Path("/home/ada/.kube/config")
    )
    assert _find(run_checkup(configured), "Kubernetes").status is Status.WARNING


def test_the_token_is_found_and_never_shown() -> None:
    secret = "hf_" + "q" * 30
    by_variable = dataclasses.replace(HEALTHY, environ={"HOME": "/home/ada", "HF_TOKEN": secret})
    checkup = run_checkup(by_variable)
    assert _find(checkup, "token").status is Status.OK
    assert secret not in checkup.model_dump_json()
    by_file = dataclasses.replace(
        HEALTHY,
        environ={"HF_HOME": "/data/hf"},
        has_file=lambda path: path == Path("/data/hf/token"),
    )
    assert "/data/hf/token" in _find(run_checkup(by_file), "token").detail


def test_a_model_cache_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("")
    here = dataclasses.replace(HEALTHY, environ={"HF_HOME": str(tmp_path / "hf")})
    checkup = run_checkup(here)
    finding = _find(checkup, "model cache")
    assert finding.status is Status.ERROR
    assert str(tmp_path / "hf") in finding.detail
    assert "HF_HOME" in (finding.remedy or "")
    assert checkup.exit_code == SetupError.exit_code


def test_a_model_cache_yet_to_be_made_is_no_error(tmp_path: Path) -> None:
    here = dataclasses.replace(HEALTHY, environ={"HF_HOME": str(tmp_path / "not" / "yet")})
    assert _find(run_checkup(here), "model cache").status is Status.OK


def test_a_home_of_nobody_is_no_crash() -> None:
    here = dataclasses.replace(HEALTHY, environ={"HF_HOME": "~no-such-user/hf"})
    assert _find(run_checkup(here), "model cache").detail


def test_a_deleted_folder_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    relative = dataclasses.replace(
        HEALTHY, environ={"HF_HOME": "cache"}, read_free_disk=read_free_disk
    )
    for here in (HEALTHY, relative):
        finding = _find(run_checkup(here), "this folder")
        assert finding.status is Status.ERROR
        assert "deleted" in finding.detail


def test_offline_mode_is_shown() -> None:
    here = dataclasses.replace(
        HEALTHY, environ={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "0"}
    )
    finding = _find(run_checkup(here), "offline mode")
    assert finding.status is Status.INFO
    assert "HF_HUB_OFFLINE" in finding.detail
    assert "TRANSFORMERS_OFFLINE" not in finding.detail


def test_cards_on_the_bus_and_switches_are_found(tmp_path: Path) -> None:
    assert not has_nvidia_card(tmp_path / "none")
    audio = tmp_path / "pci" / "0000:01:00.1"
    audio.mkdir(parents=True)
    (audio / "vendor").write_text("0x10de\n")
    (audio / "class").write_text("0x040300\n")
    assert not has_nvidia_card(tmp_path / "pci"), "its sound function is no GPU"
    card = tmp_path / "pci" / "0000:01:00.0"
    card.mkdir()
    (card / "vendor").write_text("0x10de\n")
    (card / "class").write_text("0x030200\n")
    assert has_nvidia_card(tmp_path / "pci")
    assert not has_nvswitch(tmp_path)
    (tmp_path / "nvidia-nvswitch0").touch()
    assert has_nvswitch(tmp_path)
