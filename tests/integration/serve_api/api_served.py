"""Two tiny models and one server of both, for all tests of the folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import tightfit
from api_processes import ServerProcess, server_process
from small_models import make_llama
from tightfit.core.dtypes import Dtype
from tightfit.export.convert import convert_to_gguf

HERMES = Path(tightfit.__file__).parent / "catalogue" / "templates" / "hermes.jinja"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model folder, and the same as GGUF."""
    home = tmp_path_factory.mktemp("served")
    folder = make_llama(home / "tiny")
    shutil.copy(HERMES, folder / "chat_template.jinja")  # it takes tools
    target = home / "tiny-file.gguf"
    return folder, convert_to_gguf(folder, target, dtype=Dtype.FP32)


@pytest.fixture(scope="session")
def server(
    tiny: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    ready_file = tmp_path_factory.mktemp("ready") / "ready.json"
    words = (*tiny, "--name", "plain", "--name", "gguf", "--ready-file", ready_file)
    with server_process(*words, "--max-queue", 500) as running:
        assert json.loads(ready_file.read_text()) == running.ready
        yield running
