"""What the hostile tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trials import Trials
from word_model import plant_model

StartTrials = Callable[..., Trials]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config, tokenizer and a made-up weight: nothing here loads it."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    plant_model(folder)
    return folder


@pytest.fixture
def trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[StartTrials]:
    """Trials of a kind, with caches and ledgers of their own; judged when the test ends."""
    for name, value in {
        "TIGHTFIT_CACHE": str(tmp_path / "cache"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TIGHTFIT_DEBUG", raising=False)
    started: list[Trials] = []

    def start(kind: str, *, num_short: int = 200) -> Trials:
        started.append(Trials(kind, tmp_path, capsys, num_short=num_short))
        return started[-1]

    yield start
    for one in started:
        one.check()
