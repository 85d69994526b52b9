"""`tightfit quantize`: what it refuses, where results go, and what survives an interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_run import run_here
from small_models import make_llama

pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
pytest.importorskip("xllamacpp", reason="pip install 'tightfit[gguf]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

KILLED_IN_Q4 = """
import os, signal, sys
from pathlib import Path
from tightfit.export.quantize.job import QuantizeRequest, quantize_model
from tightfit.export.formats import read_formats

def report(what, done, of):
    if what == "q4_k_m":
        os.kill(os.getpid(), signal.SIGKILL)

quantize_model(QuantizeRequest(
    model=sys.argv[1], out=Path(sys.argv[2]), formats=read_formats(sys.argv[3:]),
    with_importance=False, report=report,
))
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "tiny", hidden_size=256, intermediate_size=256)


def test_a_format_must_be_named_and_known(capsys: pytest.CaptureFixture[str]) -> None:
    none = run_here(["quantize", "x"], capsys)
    wrong = run_here(["quantize", "x", "--to", "q4_k_n"], capsys)

    assert none.code == wrong.code == 2
    assert "--to gptq-8|" in none.err
    assert "q4_k_m" in wrong.err


def test_an_adapter_is_to_be_merged_first(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(model)})
    )

    said = run_here(["quantize", str(adapter), "--to", "q8_0"], capsys)

    assert said.code == 4
    assert f"tightfit merge {adapter}" in said.err


def test_one_result_lies_beside_the_model_and_is_not_overwritten(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", str(model), "--to", "q8_0", "--no-verify", "--json"]

    first = run_here(words, capsys)
    again = run_here(words, capsys)
    forced = run_here([*words, "--force"], capsys)

    (row,) = first.json["rows"]
    assert first.code == forced.code == 0
    assert Path(row["path"]) == model.parent / "tiny-q8_0.gguf"
    assert row["standing"] == "made"
    assert 8.5 <= row["bits_per_weight"] < 10
    assert again.code == 2
    assert "--force" in again.err
    assert sorted(p.name for p in model.parent.iterdir()) == ["tiny", "tiny-q8_0.gguf"]


def test_a_gguf_file_is_no_source_of_gptq(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_here(["quantize", str(model), "--to", "q8_0", "--no-verify"], capsys)
    made = str(model.parent / "tiny-q8_0.gguf")

    other = run_here(["quantize", made, "--to", "gptq-4"], capsys)
    twice = run_here(["quantize", made, "--to", "q4_k_m", "--no-importance"], capsys)

    assert (other.code, twice.code) == (2, 4)
    assert "quantized already" in twice.err


def test_killed_in_the_middle_it_goes_on_where_it_was(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, names = tmp_path / "all", ["q8_0", "q4_k_m", "q2_k"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_Q4, str(model), str(out), *names],
        env={**os.environ, "TIGHTFIT_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert rows_of(out) == {"q8_0": "made"}
    first = (out / "tiny-q8_0.gguf").stat()
    assert not (out / "tiny-q4_k_m.gguf").exists()
    words = [word for name in names for word in ("--to", name)]
    words = ["quantize", str(model), *words, "--out", str(out), "--no-importance", "--no-verify"]

    done = run_here([*words, "--json"], capsys)

    assert done.code == 0
    assert rows_of(out) == {"q8_0": "made", "q4_k_m": "made", "q2_k": "made"}
    kept = (out / "tiny-q8_0.gguf").stat()
    assert (kept.st_ino, kept.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert sorted(p.name for p in out.iterdir()) == [
        "quantize.json", "tiny-q2_k.gguf", "tiny-q4_k_m.gguf", "tiny-q8_0.gguf",
    ]  # fmt: skip


def rows_of(out: Path) -> dict[str, str]:
    summary: dict[str, Any] = json.loads((out / "quantize.json").read_text())
    return {row["target"]: row["standing"] for row in summary["rows"]}


def test_other_settings_do_not_mix_with_what_is_there(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", str(model), "--to", "q8_0,q6_k", "--out", str(tmp_path / "all")]
    run_here([*words, "--no-importance", "--no-verify"], capsys)

    said = run_here([*words, "--no-importance", "--no-verify", "--rows", "7"], capsys)

    assert said.code == 2
    assert "--force" in said.err


def test_a_broken_result_loses_its_name(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random weights spread wide do not survive four bits: the real check says so."""
    words = ["quantize", str(model), "--to", "q4_k_m", "--no-importance", "--tokens", "256"]

    said = run_here([*words, "--json"], capsys)

    (row,) = said.json["rows"]
    assert said.code == 8
    assert row["standing"] == "rejected"
    assert row["check"]["top1_fraction"] < 0.8
    assert Path(row["path"]).name == "tiny-q4_k_m.gguf.rejected"
    assert not (model.parent / "tiny-q4_k_m.gguf").exists()


def test_one_that_cannot_be_made_does_not_keep_the_others_from_it(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quantize", str(model), "--to", "gptq-4,q8_0", "--gptq-tool", "gptqmodel"]

    said = run_here([*words, "--out", str(tmp_path / "all"), "--no-verify"], capsys)

    assert said.code == 1
    assert rows_of(tmp_path / "all") == {"gptq-4": "failed", "q8_0": "made"}
    assert "--python" in said.err
    assert "q8_0" in said.out
