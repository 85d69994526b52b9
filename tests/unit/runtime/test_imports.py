"""What a training process imports, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, sys
from tightfit.core.strategy import Strategy
from tightfit.runtime.libraries import fast_imports

with fast_imports([Strategy(method="lora", weights=sys.argv[1])]):
    assert not gc.isenabled()
    import peft
assert gc.isenabled()
assert gc.get_freeze_count() > 100_000, "the libraries are never looked at again"
from peft.import_utils import is_bnb_available
print(is_bnb_available(), bool(sys.modules.get("bitsandbytes")))
"""


@pytest.mark.parametrize(("weights", "said"), [("bf16", "False False"), ("nf4", "True True")])
def test_bitsandbytes_is_there_only_for_what_wants_it(weights: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, weights], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == said
