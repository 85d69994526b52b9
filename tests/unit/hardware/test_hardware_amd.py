"""AMD's cards of this machine, by recorded outputs of ROCm's tools, and by tools that fail."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import T4, FakeNvml

from tightfit.cli.app import main
from tightfit.core.errors import SetupError
from tightfit.core.findings import Status
from tightfit.core.units import GIB
from tightfit.hardware import amd
from tightfit.hardware.amd import AmdReading, parse_amd_smi, parse_rocm_smi, read_amd
from tightfit.hardware.catalogue import find_gpu
from tightfit.hardware.checkup import SystemProbes, run_checkup
from tightfit.hardware.command import CommandMissingError, CommandTimeoutError, RunCommand
from tightfit.hardware.local import probe_here
from tightfit.hardware.machine import TorchBuild, read_driver
from tightfit.hardware.types import Cluster

# `rocm-smi --showproductname --showuse --showmeminfo vram --json` of an RX 7900 XT, as posted in
# github.com/marimo-team/marimo issue 9237.
ROCM_SMI = """{
  "card0": {
    "GPU use (%)": "0",
    "VRAM Total Memory (B)": "21458059264",
    "VRAM Total Used Memory (B)": "27856896",
    "Card Series": "Radeon RX 7900 XT",
    "Card Model": "0x744c",
    "Card Vendor": "Advanced Micro Devices, Inc. [AMD/ATI]",
    "Card SKU": "D70401XT",
    "Subsystem ID": "0x471e",
    "Device Rev": "0xcc",
    "Node ID": "1",
    "GUID": "26967",
    "GFX Version": "gfx1100"
  }
}
"""
# The keys of older releases, with an MI250X's name and one of its dies' memory, as posted in
# github.com/wandb/wandb pull request 5449 (ROCm 5); `system` closes every such list.
OLD_ROCM_SMI = json.dumps(
    {
        f"card{number}": {
            "Card series": "AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2",
            "Card model": "0x0b0c",
            "GFX Version": "gfx90a",
            "VRAM Total Memory (B)": "68702699520",
            "VRAM Total Used Memory (B)": "11534336",
        }
        for number in range(8)
    }
    | {"system": {"Driver version": "6.3.6"}}
)
# `amd-smi static --asic --vram --json` and `metric --mem-usage --json` of ROCm 7: the text form of
# the first is in github.com/ROCm/rocm-systems pull request 2987, the JSON of an MI300X in public
# tests of programs that read it; ROCm 6 prints the list alone.
MI300X = {
    "gpu": 0,
    "asic": {
        "market_name": "AMD Instinct MI300X",
        "vendor_id": "0x1002",
        "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]",
        "subvendor_id": "0x1002",
        "device_id": "0x74a1",
        "subsystem_id": "0x74a1",
        "rev_id": "0x00",
        "asic_serial": "0x6F1F0A2B3C4D5E6F",
        "oam_id": 6,
        "num_compute_units": 304,
        "target_graphics_version": "gfx942",
    },
    "vram": {
        "type": "HBM3",
        "vendor": "N/A",
        "size": {"value": 196592, "unit": "MB"},
        "bit_width": 8192,
        "max_bandwidth": "N/A",
    },
}
STATIC = json.dumps({"gpu_data": [{**MI300X, "gpu": number} for number in range(8)]})
METRIC = json.dumps(
    {
        "gpu_data": [
            {
                "gpu": number,
                "mem_usage": {
                    "total_vram": {"value": 196592, "unit": "MB"},
                    "used_vram": {"value": 283, "unit": "MB"},
                    "free_vram": {"value": 196309, "unit": "MB"},
                },
            }
            for number in range(8)
        ]
    }
)
RUBBISH = (
    *("", "null", "[]", "{}", "0", '"card0"', "{{{", ROCM_SMI[:200], STATIC[:300], "\x00\xff"),
    *('{"card0": null}', '{"card0": {"VRAM Total Memory (B)": []}}', '{"gpu_data": 7}'),
    *('[{"asic": 1, "vram": {"size": {"value": "many", "unit": "MB"}}}]', "[" * 100_000),
    '{"card0": {"VRAM Total Memory (B)": "' + "9" * 5000 + '"}}',
    "Traceback (most recent call last):\n  File rocm_smi.py\nValueError",
)


def answering(**outputs: str | Exception) -> RunCommand:
    """The tools by name, `_` for `-`; a tool that is not named is not installed."""

    def run(arguments: Sequence[str], _seconds: float) -> str:
        name = "amdsmi" if arguments[0] == sys.executable else arguments[0].replace("-", "_")
        if name == "amd_smi":
            name += f"_{arguments[1]}"
        found = outputs.get(name)
        if found is None:
            raise CommandMissingError(f"{name} is not here.", remedy="install it")
        if isinstance(found, Exception):
            raise found
        return found

    return run


def read(tmp_path: Path, *, has_amdsmi: bool = False, **outputs: str | Exception) -> AmdReading:
    kfd = tmp_path / "kfd"
    kfd.touch()
    return read_amd(kfd=kfd, run=answering(**outputs), has_amdsmi=lambda: has_amdsmi)


def probe(found: AmdReading, environ: Mapping[str, str] | None = None) -> Cluster:
    return probe_here(
        read_gpus=lambda: read_driver(
            FakeNvml(is_missing=True), environ=environ or {}, ask_amd=lambda: found
        )
    )


def test_a_card_by_rocm_smi_is_planned_as_its_row(tmp_path: Path) -> None:
    found = read(tmp_path, rocm_smi="WARNING: AMD GPU device(s) in a low-power state\n" + ROCM_SMI)
    [group] = probe(found).groups
    assert group.node.gpu.name == "AMD Radeon RX 7900 XT"
    assert group.node.free_gpu_memory_bytes == 21458059264 - 27856896
    assert 19 * GIB < group.node.gpu.memory_bytes <= 21458059264
    assert probe(found).warnings == ()


def test_eight_cards_by_amd_smi_with_what_is_free(tmp_path: Path) -> None:
    found = read(tmp_path, amd_smi_static=STATIC, amd_smi_metric=METRIC)
    [group] = probe(found).groups
    assert group.node.gpu == find_gpu("MI300X")
    assert group.node.num_gpus == 8
    assert group.node.free_gpu_memory_bytes == 196309 * 2**20
    assert found.cards[0].uuid == "GPU-6f1f0a2b3c4d5e6f"
    assert parse_amd_smi(json.dumps([MI300X])) == [
        dataclasses.replace(found.cards[0], used_bytes=0)
    ]
    # What is used is not known where the second command fails.
    assert read(tmp_path, amd_smi_static=STATIC).cards[0].used_bytes == 0


def test_a_name_that_is_no_row_has_its_rates_by_the_likeness_of_one(tmp_path: Path) -> None:
    cluster = probe(read(tmp_path, rocm_smi=OLD_ROCM_SMI))
    [group] = cluster.groups
    assert group.node.num_gpus == 8
    assert group.node.gpu.peak_flops == find_gpu("MI250").peak_flops  # the slower of two alike
    assert "likeness of AMD MI250, for gfx90a" in cluster.warnings[0]
    old = json.dumps({"card0": {"Card Series": "AMD Radeon VII", "GFX Version": "gfx906",
                                "VRAM Total Memory (B)": str(16 * GIB)}})  # fmt: skip
    assert not probe(AmdReading(cards=tuple(parse_rocm_smi(old)))).groups[0].node.gpu.supports_bf16


def test_the_package_is_asked_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = SimpleNamespace(
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: ["first", "second"],
        amdsmi_get_gpu_vram_usage=lambda _: {"vram_total": 196592, "vram_used": 283},
        amdsmi_get_gpu_asic_info=lambda _: MI300X["asic"],
    )
    monkeypatch.setitem(sys.modules, "amdsmi", package)
    amd.main()
    found = read(tmp_path, has_amdsmi=True, amdsmi=capsys.readouterr().out, rocm_smi=ROCM_SMI)
    assert [card.name for card in found.cards] == ["AMD Instinct MI300X"] * 2
    assert found.cards[1].used_bytes == 283 * 2**20


@pytest.mark.parametrize("text", RUBBISH, ids=lambda text: repr(text[:20]))
@pytest.mark.parametrize("tool", ["rocm_smi", "amd_smi_static", "amdsmi"])
def test_rubbish_is_a_note(tool: str, text: str, tmp_path: Path) -> None:
    found = read(tmp_path, has_amdsmi=True, **{tool: text})
    assert found.cards == ()
    assert found.notes
    assert "CPU" in probe(found).groups[0].node.gpu.name


def test_the_next_tool_is_asked_where_one_fails_and_none_after_a_timeout(tmp_path: Path) -> None:
    failed = SetupError("`amd-smi` failed: no permission.", remedy="none")
    assert read(tmp_path, amd_smi_static=failed, rocm_smi=ROCM_SMI).cards
    hangs = CommandTimeoutError("`amd-smi` gave no answer in 10 s.", remedy="none")
    found = read(tmp_path, amd_smi_static=hangs, rocm_smi=ROCM_SMI)
    assert found.cards == ()
    assert "gave no answer" in found.notes[0]
    assert "neither" in read(tmp_path).notes[0]


def test_without_the_compute_driver_nothing_is_asked(tmp_path: Path) -> None:
    def fail(_arguments: Sequence[str], _seconds: float) -> str:
        raise AssertionError("a tool was started")

    assert read_amd(kfd=tmp_path / "none", run=fail) == AmdReading()
    here = read_driver(FakeNvml(cards=[T4]), environ={}, ask_amd=lambda: pytest.fail("asked"))
    assert [gpu.name for gpu in here.gpus] == ["Tesla T4"]


def test_graphics_inside_a_processor_are_left_out(tmp_path: Path) -> None:
    # The figures are those of a Radeon 680M: github.com/henrygd/beszel, agent/gpu_test.go.
    inside = json.dumps({"card0": {"Card Series": "Rembrandt [Radeon 680M]", "GFX Version":
                         "gfx1035", "VRAM Total Memory (B)": "536870912"}})  # fmt: skip
    cluster = probe(read(tmp_path, rocm_smi=inside))
    assert cluster.groups[0].node.gpu.is_cpu
    assert any("680M" in warning for warning in cluster.warnings)


@pytest.mark.parametrize(
    ("environ", "left"),
    [
        ({"HIP_VISIBLE_DEVICES": "0,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2"}, 1),
        ({"HIP_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_hidden_cards(environ: dict[str, str], left: int, tmp_path: Path) -> None:
    cluster = probe(read(tmp_path, amd_smi_static=STATIC), environ)
    gpu = cluster.groups[0].node.gpu
    assert (0 if gpu.is_cpu else cluster.groups[0].node.num_gpus) == left
    assert any("VISIBLE_DEVICES" in warning for warning in cluster.warnings)


def checkup(found: AmdReading, torch: TorchBuild | None) -> dict[str, Any]:
    here = SystemProbes(
        read_gpus=lambda: read_driver(FakeNvml(is_missing=True), environ={}, ask_amd=lambda: found),
        read_torch_build=lambda: torch,
        has_nvidia_card=lambda: False,
        environ={},
    )
    return {one.name: one for one in run_checkup(here).findings}


def test_doctor_names_the_cards_and_a_torch_that_cannot_use_them(tmp_path: Path) -> None:
    found = read(tmp_path, amd_smi_static=STATIC, amd_smi_metric=METRIC)
    findings = checkup(found, TorchBuild(version="2.11.0+cu126", cuda=(12, 6)))
    assert "MI300X" in findings["GPU 7"].detail
    assert "gfx942" in findings["GPU 7"].detail
    assert findings["torch and GPU"].status is Status.ERROR
    assert "ROCm" in findings["torch and GPU"].remedy
    assert findings["ROCm"].status is Status.INFO
    right = checkup(found, TorchBuild(version="2.11.0+rocm7.1", cuda=None, hip="7.1.0"))
    assert "torch and GPU" not in right
    silent = checkup(read(tmp_path, rocm_smi="{"), None)
    assert silent["AMD GPUs"].status is Status.WARNING


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands before all others, and a compute driver."""
    (tmp_path / "kfd").touch()
    commands = tmp_path / "bin"
    commands.mkdir()
    (tmp_path / "rocm.json").write_text(ROCM_SMI)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(amd, "TIMEOUT_SECONDS", 1.0)
    ask = partial(read_amd, kfd=tmp_path / "kfd", has_amdsmi=lambda: False)
    monkeypatch.setattr(read_driver, "__kwdefaults__", {"environ": None, "ask_amd": ask})
    return commands


def test_the_command_line_shows_and_plans_for_the_card(
    tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tools, "rocm-smi", f"cat {tools.parent / 'rocm.json'}")
    assert main(["hardware", "--on", "here"]) == 0
    assert "AMD Radeon RX 7900 XT" in capsys.readouterr().out
    assert main(["plan", "Qwen3-0.6B", "--seq-len", "512"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "RX 7900 XT" in shown
    assert "tightfit was not measured on ROCm" in shown


@pytest.mark.parametrize("script", ["sleep 30", "exit 3", "echo rubbish", "printf '{\"card0\": {'"])
def test_a_broken_tool_ends_in_the_cpu_and_a_note(
    script: str, tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tools, "rocm-smi", script)
    started = time.monotonic()
    assert main(["hardware", "--on", "here"]) == 0
    assert time.monotonic() - started < 15
    assert "could not be read by rocm-smi" in " ".join(capsys.readouterr().out.split())
