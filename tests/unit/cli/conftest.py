"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cli_run import Answer, run_here


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run one command line in this process, piped, 100 columns wide unless told."""
    monkeypatch.delenv("TIGHTFIT_DEBUG", raising=False)

    def run_line(*argv: str, columns: int = 100) -> Answer:
        monkeypatch.setenv("COLUMNS", str(columns))
        return run_here(argv, capsys)

    return run_line


Run = Callable[..., Answer]
