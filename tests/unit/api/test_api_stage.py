"""stage, list_staged and clean_staged as Python calls, on this machine alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from stage_lab import make_model
from tightfit.api.stage import clean_staged, list_staged, stage
from tightfit.core.errors import NotFoundError, UsageError


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TIGHTFIT_SITE", raising=False)
    (tmp_path / "disk").mkdir()
    folder = tmp_path / "model"
    folder.mkdir()
    make_model(folder, 1 << 20)
    return folder


def test_staged_listed_and_removed(model: Path, tmp_path: Path) -> None:
    disk = str(tmp_path / "disk")
    result = stage(str(model), to=disk)

    assert [node.state for node in result.nodes] == ["staged"]
    assert result.find_error() is None
    copied = Path(result.nodes[0].path) / "model.safetensors"
    assert copied.read_bytes() == (model / "model.safetensors").read_bytes()
    assert stage(str(model), to=disk).nodes[0].state == "already there"

    (found,) = list_staged(to=disk).copies
    assert found.copy.state == "whole"
    assert clean_staged(to=disk, dry_run=True).copies == (found,)
    assert copied.exists()
    (removed,) = clean_staged(str(model), to=disk).copies
    assert removed.copy.key == found.copy.key
    assert not copied.exists()
    assert list_staged(to=disk).copies == ()


def test_what_cannot_be_staged(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No model was named"):
        stage(to=str(tmp_path))
    with pytest.raises(UsageError, match="--how"):
        stage(str(model), to=str(tmp_path), how="teleport")
    with pytest.raises(NotFoundError):
        stage(str(tmp_path / "none"), to=str(tmp_path))
