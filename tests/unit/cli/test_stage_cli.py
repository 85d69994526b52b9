"""`tightfit stage` on this machine, and the verbs that use what it left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from conftest import Run

from cli_run import Answer
from small_models import make_llama
from stage_lab import make_model


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TIGHTFIT_SITE", str(tmp_path / "site.yaml"))
    monkeypatch.setenv("TIGHTFIT_STAGE", str(tmp_path / "disk"))
    (tmp_path / "site.yaml").write_text("{}")
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    make_model(folder, 20 << 20)
    return folder


def test_staged_listed_left_alone_and_cleaned(run: Run, place: Path, model: Path) -> None:
    first = run("stage", str(model), "--json")
    assert first.code == 0, first.err
    reported = first.json
    assert (reported["how"], reported["nodes"][0]["state"]) == ("all-read", "staged")
    assert reported["predicted_seconds"]["all-read"] > 0
    assert reported["measured_seconds"] > 0
    copy = Path(reported["nodes"][0]["path"])
    assert copy.parent.parent == place
    assert (copy / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()

    again = run("stage", str(model))
    assert "nothing to do: a whole copy is on every node already" in again.out
    listed = run("stage", "--list", columns=200)
    assert "20.0 MiB  whole" in listed.out
    assert run("stage", "--list", "--json").json["copies"][0]["source"] == str(model)
    assert "20.0 MiB" in run("stage", str(model), "--clean").out
    assert list(place.iterdir()) == []
    assert "Nothing of yours is staged" in run("stage", "--list").out


def test_predicted_beside_measured(run: Run, place: Path, model: Path) -> None:
    done = run("stage", str(model))

    assert place.is_dir()
    assert "predicted  measured" in done.out
    assert "one node reads the source itself" in done.out
    assert "20.0 MiB by all-read, predicted" in done.err


def test_a_dry_run_leaves_nothing(run: Run, place: Path, model: Path) -> None:
    done = run("stage", str(model), "--dry-run", "--json")

    assert done.json["nodes"][0]["state"] == "planned"
    assert done.json["predicted_seconds"]
    assert done.json["copy_seconds"] is None
    assert list(place.iterdir()) == []


def test_a_dry_clean_up_removes_nothing(
    run: Run, place: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(run("stage", str(model), "--json").json["nodes"][0]["path"])

    reported = run("stage", "--clean", "--dry-run", columns=200)
    listed = run("stage", str(model), "--clean", "--dry-run", "--json").json

    assert f"Would be removed in {place}: 20.0 MiB" in reported.out
    assert [found["path"] for found in listed["would_remove"]] == [str(copy)]
    assert (copy / "model.safetensors").is_file()
    monkeypatch.chdir(model.parent)
    shutil.rmtree(model)
    assert len(run("stage", f"./{model.name}", "--clean", "--json").json["removed"]) == 1
    assert not copy.exists()


def test_memory_kept_for_the_job(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIGHTFIT_STAGE", raising=False)
    done = run("stage", str(model), "--to", "/dev/shm", "--leave", "900TiB")

    assert done.code == 6
    assert "are to stay free for the job" in done.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "No model was named"),
        (["{model}", "--how", "chian"], 2, "Did you mean"),
        (["{model}", "--to", "relative"], 2, "not the same folder"),
        (["{model}", "--to", "/no/such/place"], 3, "There is no folder"),
        (["/no/such/model"], 3, ""),
        (["{model}", "--leave", "much"], 4, "not a size"),
        (["{model}", "--nodes", "a[1-"], 2, "cannot be read"),
        (["{model}", "--nodes", "a", "--on", "slurm:x"], 2, "both name nodes"),
        (["{model}", "--on", "k8s"], 2, "not known here"),
        (["--list", "--clean"], 2, "two commands"),
        (["{model}", "--nodes", "a", "--run-with", "ssh a"], 2, "does not contain {node}"),
        (["{model}", "--nodes", "a", "--run-with", "false {node}"], 6, "cannot be reached"),
        (["{model}", "--nodes", "a", "--run-with", "/no/ssh {node}"], 6, "does not start"),
    ],
)
def test_errors_are_one_message(
    run: Run, place: Path, model: Path, words: list[str], code: int, said: str
) -> None:
    assert place.is_dir()
    done: Answer = run("stage", *(word.replace("{model}", str(model)) for word in words))

    assert done.code == code, done.err
    assert said in done.err
    assert "try:" in done.err


def test_agents_on_other_nodes_are_started_and_end(
    run: Run, place: Path, model: Path, tmp_path: Path
) -> None:
    """The prefix here runs the agent on this very machine; the site's lines stand before it."""
    (tmp_path / "site.yaml").write_text("setup:\n  - export WAS_SET_UP=1\ninterface: lo\n")
    done = run("stage", str(model), "--nodes", "one", "--run-with", "env NODE={node}", "--json")

    assert done.code == 0, done.err
    assert done.json["nodes"][0]["node"] == "one"
    assert Path(done.json["nodes"][0]["path"]).parent.parent == place


def blank_weights(folder: Path) -> None:
    """Zeros in place of all values; header, size and time stay."""
    path = folder / "model.safetensors"
    facts = path.stat()
    with path.open("r+b") as stream:
        header = int.from_bytes(stream.read(8), "little")
        stream.seek(8 + header)
        stream.write(bytes(facts.st_size - 8 - header))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def test_generate_reads_the_copy_and_says_so(
    run: Run, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's values are wiped out behind its back: only the copy still knows them."""
    model = make_llama(tmp_path / "llama")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("what is it\n")

    def answer(name: str) -> tuple[str, str]:
        out = tmp_path / name
        words = ["--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "12"]
        done = run("generate", str(model), *words, "--engine", "transformers", "--device", "cpu")
        assert done.code == 0, done.err
        return out.read_text(), done.err

    before, said = answer("one.jsonl")
    assert "staged copy" not in said
    assert run("stage", str(model)).code == 0
    blank_weights(model)
    staged, said = answer("two.jsonl")
    assert f"read from the staged copy {place}" in said
    assert staged == before
    monkeypatch.setenv("TIGHTFIT_STAGE", "none")
    assert answer("three.jsonl")[0] != before
