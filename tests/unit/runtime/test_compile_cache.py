"""The folder for compiled code: the user's own, safe, bounded, and read by the next process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tightfit.runtime.compile_cache import CACHE_VARIABLE, keep_compiled_code, trim

COMPILE_TWICE = """
import json
import os
from tightfit.runtime.compile_cache import keep_compiled_code
keep_compiled_code()
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from tightfit.runtime import flex_attention

config.cpp_cache_precompile_headers = False  # dearer than what is compiled here
for _ in range(2):
    if os.fork():  # two processes with the imports of one
        assert os.wait()[1] == 0
        continue
    with torch.no_grad():
        flex_attention._compiled()[1](torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8), torch.randn(2))
    layer = torch.nn.Linear(8, 8)
    torch.compile(layer.forward)(torch.randn(3, 8)).sum().backward()
    print(json.dumps(counters["inductor"]), flush=True)
    os._exit(0)
"""
FEW_TRIALS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
"""Without a compiler's run for each set of vector instructions."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    monkeypatch.setenv("TIGHTFIT_CACHE", str(home))
    # setenv first, so that what is set by the call is taken back too
    monkeypatch.setenv(CACHE_VARIABLE, "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return home / f"compiled-{os.getuid()}"


def test_the_second_process_compiles_nothing(cache: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_TWICE],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | FEW_TRIALS,
    )
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    misses = [run.get("fxgraph_cache_miss", 0) for run in runs]
    assert misses[0] >= 3
    assert misses[1] == 0
    assert runs[1]["fxgraph_cache_hit"] == misses[0]
    assert any(cache.iterdir())
    assert all(path.stat().st_uid == os.getuid() for path in cache.rglob("*"))


def test_its_owner_alone_can_read_it(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o755)
    assert keep_compiled_code() == cache
    assert cache.stat().st_mode & 0o777 == 0o700


def test_the_users_own_choice_stays(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "/elsewhere")
    assert keep_compiled_code() == Path("/elsewhere")
    assert not cache.exists()


@pytest.mark.parametrize("fault", ["another's", "link", "open", "open parent", "a file"])
def test_what_another_could_write_is_not_read(
    fault: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.parent.mkdir()
    if fault == "another's":
        cache.mkdir()
        uid = os.getuid() + 1
        cache = cache.rename(cache.with_name(f"compiled-{uid}"))
        monkeypatch.setattr("os.getuid", lambda: uid)
    elif fault == "link":
        (cache.parent / "there").mkdir()
        cache.symlink_to(cache.parent / "there")
    elif fault == "open":
        cache.mkdir()
        cache.chmod(0o777)
    elif fault == "open parent":
        cache.parent.chmod(0o777)
    else:
        cache.write_text("")
    chosen = keep_compiled_code()
    assert cache not in (chosen, *chosen.parents)
    assert chosen.stat().st_mode & 0o777 == 0o700
    assert os.environ[CACHE_VARIABLE] == str(chosen)


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    now = time.time()
    for name, age in (("new", 10), ("old", 9e4), ("older", 9e5), ("oldest", 9e6)):
        path = tmp_path / "folder" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
        os.utime(path, (now - age, now - age))
    trim(path.parent, most_bytes=250)
    assert {path.name for path in path.parent.iterdir()} == {"new", "old"}
    trim(path.parent, most_bytes=0)
    assert {path.name for path in path.parent.iterdir()} == {"new"}
