"""The child process in which llama.cpp opens a file first."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tightfit.core.errors import InvalidInputError, SetupError, UserError
from tightfit.runtime import llama_cpp


@pytest.mark.parametrize(
    ("ended_by", "error"), [(signal.SIGKILL, SetupError), (signal.SIGSEGV, InvalidInputError)]
)
def test_a_child_that_was_killed_says_nothing_about_the_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ended_by: signal.Signals,
    error: type[UserError],
) -> None:
    """A result that crashes llama.cpp is rejected; one whose trial was killed is not."""
    run = subprocess.run

    def end(_: list[str], **more: Any) -> Any:
        return run(["bash", "-c", f"kill -{int(ended_by)} $$"], **more)

    monkeypatch.setattr(subprocess, "run", end)
    monkeypatch.setattr(llama_cpp, "installed_release", lambda: "any")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(error):
        llama_cpp.check_opens(tmp_path / "a.gguf")
