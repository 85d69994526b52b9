"""One tiny model and one file of rows for all tests of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_jobs import make_data, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "train.jsonl")
