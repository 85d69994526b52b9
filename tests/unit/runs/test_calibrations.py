"""Calibrations on disk: read back by host and device, never fatal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from made_calibrations import make_calibration
from tightfit.core.errors import SetupError
from tightfit.hardware.resolve import resolve_hardware
from tightfit.runs import store
from tightfit.runs.store import (
    apply_calibrations,
    calibration_path,
    read_calibration,
    write_calibration,
)


@pytest.fixture(autouse=True)
def _own_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_LEDGER", str(tmp_path / "data" / "ledger.sqlite"))


def test_read_back_by_device_and_host() -> None:
    found = make_calibration()
    path = write_calibration(found)

    assert read_calibration("H200-SXM").calibration == found
    assert read_calibration("H200-SXM").path == path
    assert read_calibration("A100-SXM4-80GB").calibration is None
    assert read_calibration("H200-SXM", "another-host").calibration is None
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_measuring_again_takes_the_place_of_the_last() -> None:
    write_calibration(make_calibration())
    again = make_calibration(context_bytes=123_456_789)
    write_calibration(again)

    assert read_calibration("H200-SXM").calibration == again


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "EOF"),
        ("{}", "gpu_name"),
        ('{"format": 9}', "format 1"),
        (json.dumps({"unheard": "of"}), "Field required"),
        ("\0" * 10, "Invalid JSON"),
    ],
)
def test_a_broken_file_is_named_and_not_used(text: str, why: str) -> None:
    path = write_calibration(make_calibration())
    path.write_text(text)

    stored = read_calibration("H200-SXM")

    assert stored.calibration is None
    assert stored.problem is not None
    assert str(path) in stored.problem
    assert why in stored.problem
    assert "tightfit calibrate" in stored.problem


def test_a_file_of_another_host_is_not_used() -> None:
    path = write_calibration(make_calibration(host="elsewhere"))
    here = calibration_path("H200-SXM")
    assert here is not None
    path.rename(here)

    stored = read_calibration("H200-SXM")

    assert stored.calibration is None
    assert "elsewhere" in (stored.problem or "")


def test_another_torch_is_told_and_the_rates_still_used(monkeypatch: pytest.MonkeyPatch) -> None:
    write_calibration(make_calibration(versions={"torch": "2.11.0"}))
    monkeypatch.setattr(store, "read_version", lambda _: "2.13.0")

    stored = read_calibration("H200-SXM")

    assert stored.calibration is not None
    assert "torch 2.11.0, now it is 2.13.0" in (stored.problem or "")


def test_this_machine_alone_gets_its_rates() -> None:
    write_calibration(make_calibration())
    words = resolve_hardware("H200")
    here = words.model_copy(update={"source": "here"})

    assert apply_calibrations(words) == words
    (group,) = apply_calibrations(here).groups
    assert group.node.gpu.measured == make_calibration().rates()


def test_a_broken_file_becomes_a_warning_of_the_cluster() -> None:
    write_calibration(make_calibration()).write_text("no")
    here = resolve_hardware("H200").model_copy(update={"source": "here"})

    found = apply_calibrations(here)

    assert found.groups == here.groups
    assert "is not used" in found.warnings[-1]


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TIGHTFIT_LEDGER", str(tmp_path / "file" / "ledger.sqlite"))

    with pytest.raises(SetupError) as reported:
        write_calibration(make_calibration())
    assert "TIGHTFIT_LEDGER" in reported.value.remedy


def test_without_a_home_nothing_is_found_and_nothing_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "ledger_path", lambda: None)

    assert read_calibration("H200-SXM").calibration is None
    with pytest.raises(SetupError):
        write_calibration(make_calibration())


def test_names_of_hosts_and_cards_stay_file_names() -> None:
    path = calibration_path("NVIDIA/../GeForce RTX 9090", "../evil\0host")
    assert path is not None
    assert path.parent.name == "calibrations"
    assert path.name == "evil-host--NVIDIA-..-GeForce-RTX-9090.json"
