"""`tightfit models`, `hardware`, `doctor`, `version`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from conftest import Run

from tightfit.cli import doctor
from tightfit.core.findings import Finding, Status
from tightfit.core.packages import __version__
from tightfit.hardware.checkup import Checkup
from tightfit.models.catalogue import list_models


def test_every_model_is_listed_whole_at_80_columns(run: Run) -> None:
    answer = run("models", columns=80)
    assert answer.code == 0
    text = answer.out.replace("\n", "")
    names = [row.model for row in list_models()]
    assert len(names) > 75
    missing = [name for name in names if name not in text and len(name) < 30]
    assert missing == []
    assert max(len(line) for line in answer.out.splitlines()) <= 80


def test_a_word_searches_and_a_name_shows(run: Run) -> None:
    listed = run("models", "qwen3", "--json").json["models"]
    assert len(listed) > 5
    assert all("qwen3" in row["name"].lower() for row in listed)

    one = run("models", "Llama-2-7b", "--json").json
    assert one["num_params"] == 6_738_415_616
    assert sum(part["num_params"] for part in one["count"]) == one["num_params"]
    assert one["catalogue"]["config_source"]


def test_a_tied_head_is_explained(run: Run) -> None:
    assert "tied to the embedding, counted once" in run("models", "gpt2", columns=160).out


def test_a_folder_is_shown(run: Run, tmp_path: Path) -> None:
    config = files("tightfit.catalogue").joinpath("models/openai-community--gpt2.json")
    (tmp_path / "config.json").write_text(config.read_text())
    assert run("models", str(tmp_path), "--json").json["num_params"] == 124_439_808


def test_gpus_are_listed_searched_and_shown_with_sources(run: Run) -> None:
    everything = run("hardware", "--json").json["gpus"]
    assert len(everything) >= 30

    some = run("hardware", "a100", "--json").json["gpus"]
    assert {gpu["name"] for gpu in some} < {gpu["name"] for gpu in everything}
    assert all("A100" in gpu["name"] for gpu in some)

    one = run("hardware", "T4", "--json").json
    assert one["compute_capability"] == [7, 5]
    assert all(number["source"] for number in one["numbers"])

    text = run("hardware", "T4").out
    for number in one["numbers"]:
        assert number["label"] in text
    assert "Sources" in text


def test_a_cluster_is_shown_as_it_was_understood(run: Run) -> None:
    reported = run("hardware", "--on", "6xT4 + 2xRTX6000", "--json").json
    assert [group["node"]["num_gpus"] for group in reported["groups"]] == [6, 2]
    text = run("hardware", "--on", "6xT4 + 2xRTX6000").out
    assert "8 GPUs" in text
    assert "6 x Tesla T4" in text


def test_doctor_answers_on_any_machine(run: Run) -> None:
    answer = run("doctor", "--json")
    reported = answer.json
    assert answer.code == reported["exit_code"]
    assert answer.code in (0, 6)
    assert {"python", "gpu", "memory", "disk", "packages"} <= {
        f["area"] for f in reported["findings"]
    }
    for finding in reported["findings"]:
        if finding["status"] in ("warning", "error"):
            assert finding["remedy"]


def test_doctor_tells_errors_by_its_exit_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Finding(
        area="disk", name="model cache", status=Status.ERROR, detail="full", remedy="make room"
    )
    checkup = Checkup(findings=(found,), worst=Status.ERROR, exit_code=6)
    monkeypatch.setattr(doctor, "api_doctor", lambda _flags: checkup)

    answer = run("doctor")
    assert answer.code == 6
    assert "try: make room" in answer.out
    assert "1 error, 0 warnings." in answer.out


@pytest.mark.parametrize("argv", [("version",), ("--version",)])
def test_version(run: Run, argv: tuple[str, ...]) -> None:
    answer = run(*argv)
    assert answer.code == 0
    assert answer.out.startswith(f"tightfit {__version__}")
    assert run("version", "--json").json["tightfit"] == __version__
