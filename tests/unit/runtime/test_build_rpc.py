"""The command that builds the RPC backend: what it says where a step of it fails."""

from __future__ import annotations

import sys

import pytest

from tightfit.core.errors import EnvironmentFaultError
from tightfit.runtime import build_rpc


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('ERROR: no such release'); print('bye'); raise SystemExit(3)", "no such release"),
        ("raise SystemExit('No module named pip')", "No module named pip"),
        ("raise SystemExit(1)", "code 1"),
    ],
)
def test_a_step_that_fails_is_told_in_its_own_words(program: str, said: str) -> None:
    with pytest.raises(EnvironmentFaultError, match=said):
        build_rpc._run([sys.executable, "-c", program], remedy="another")
