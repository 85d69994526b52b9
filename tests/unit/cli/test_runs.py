"""`tightfit runs`: list, show, compare, draw."""

from __future__ import annotations

import builtins
import socket
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from test_cli_startup import HEAVY, loaded_by

from made_runs import make_plan, make_records, make_run
from tightfit.runs.run_folder import RunStatus


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with three runs in runs/."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "first", updated_at="2026-01-01T00:00:00+00:00")
    make_run(
        tmp_path / "runs" / "second",
        plan=make_plan(micro_batch=2),
        records=make_records(40),
        status=RunStatus.STOPPED,
        updated_at="2026-02-01T00:00:00+00:00",
    )
    make_run(
        tmp_path / "runs" / "team" / "third",
        records=[],
        status=RunStatus.RUNNING,
        pid=2**22 + 7,  # above the kernel's highest
        host=socket.gethostname(),
        updated_at="2026-03-01T00:00:00+00:00",
    )
    return tmp_path


def test_runs_are_listed_newest_first(run: Run, folder: Path) -> None:
    reported = run("runs", "--json").json["runs"]
    assert [Path(found["path"]).name for found in reported] == ["third", "second", "first"]
    assert [found["status"] for found in reported] == ["died", "stopped", "finished"]

    for columns in (60, 80, 100):
        answer = run("runs", columns=columns)
        assert answer.code == 0
        assert max(map(len, answer.out.splitlines())) <= columns
        assert answer.out.index("died") < answer.out.index("stopped") < answer.out.index("finished")
    assert str(folder) not in answer.out


def test_an_empty_place_says_how_to_begin(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = run("runs")
    assert answer.code == 0
    assert "tightfit train" in answer.out
    assert run("runs", "--json").json == {"runs": []}


@pytest.mark.usefixtures("folder")
def test_one_run_is_shown_in_full(run: Run) -> None:
    reported = run("runs", "first", "--json").json
    assert reported["eval_after"]["step"] == 160
    assert reported["compared"][0]["error_percent"] is not None

    text = run("runs", "first").out
    for word in ("finished", "perplexity", "Predicted beside measured", "data wait", "pads", "MFU"):
        assert word in text
    for found in reported["compared"]:
        assert f"{found['error_percent']:+.1f}%" in text
    assert run("runs", "runs/first", "--json").json == reported
    assert run("runs", "first", "first").out == text


def test_a_folder_with_one_run_is_still_a_list(run: Run, folder: Path) -> None:
    reported = run("runs", str(folder / "runs" / "team"), "--json").json["runs"]
    assert [found["name"] for found in reported] == ["third"]


@pytest.mark.usefixtures("folder")
def test_two_runs_are_compared(run: Run) -> None:
    reported = run("runs", "first", "second", "--json").json
    assert reported["differing"]["micro_batch"] == ["4", "2"]
    assert "seq_len" not in reported["differing"]
    assert [found["name"] for found in reported["runs"]] == ["first", "second"]

    text = run("runs", "first", "second").out
    assert "micro_batch" in text
    assert "learning_rate" not in text
    assert "160 of 160" in text
    assert "40 of 160" in text


@pytest.mark.usefixtures("folder")
def test_files_are_written_and_announced(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'tightfit[plot]' un-skips this")
    image, page, plots = tmp_path / "a.png", tmp_path / "a.html", tmp_path / "b.HTML"
    answer = run("runs", "first", "--plot", str(image), "--html", str(page), "--json")
    assert answer.json["name"] == "first"
    assert answer.err == f"wrote {image}\nwrote {page}\n"
    assert image.read_bytes()[:4] == b"\x89PNG"
    assert "</html>" in page.read_text()

    assert run("runs", "--plot", str(plots)).code == 0  # all that are listed
    assert all(name in plots.read_text() for name in ("first", "second", "third"))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["frist"], 3, "first"),
        (["."], 0, ""),
        ([""], 2, "empty value"),
        (["first", "--plot", "a.gif"], 2, "--plot a.png"),
        (["first", "--html", "a.png"], 2, "--html a.html"),
        (["first", "--html", ""], 2, "empty value"),
        (["first", "--html", "missing/a.html"], 6, "mkdir -p missing"),
        (["a\0b"], 2, "NUL byte"),
        (["x" * 5000], 2, "5,000 characters"),
    ],
)
def test_errors_by_kind(run: Run, argv: list[str], code: int, said: str) -> None:
    answer = run("runs", *argv)
    assert answer.code == code, answer.err
    assert said in answer.err


def test_a_folder_without_runs_is_not_found(run: Run, tmp_path: Path) -> None:
    answer = run("runs", str(tmp_path))
    assert answer.code == 3
    assert "no run in" in answer.err


def test_a_picture_of_nothing_or_of_too_many_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("runs", "--plot", "a.html").code == 2
    for number in range(9):
        make_run(tmp_path / "runs" / f"run-{number}", records=[])
    answer = run("runs", "--html", "a.html")
    assert answer.code == 2
    assert "here are 9" in answer.err


def test_a_broken_run_does_not_hide_the_others(run: Run, folder: Path) -> None:
    (folder / "runs" / "second" / "plan.json").write_text('{"half":')
    answer = run("runs")
    assert answer.code == 0
    assert "unreadable" in answer.out
    assert "finished" in answer.out
    reported = run("runs", "--json").json["runs"]
    assert [("error" in found) for found in reported] == [False, False, True]
    assert run("runs", "second").code == 4
    assert run("runs", "first", "second").code == 4


def test_nothing_a_terminal_would_obey_gets_out(run: Run, folder: Path) -> None:
    make_run(folder / "runs" / "red\x1b[31m", status=RunStatus.FAILED, problem="\x1b]0;x\x07[b]")
    for argv in (["runs"], ["runs", "red\x1b[31m"], ["runs", "first", "red\x1b[31m"]):
        answer = run(*argv)
        assert answer.code == 0
        assert "\x1b" not in answer.out
    assert "[b]" in run("runs", "red\x1b[31m").out


@pytest.mark.usefixtures("folder")
def test_without_matplotlib_the_remedy_names_the_extra(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    answer = run("runs", "first", "--plot", "a.png")
    assert answer.code == 6
    assert "tightfit[plot]" in answer.err
    assert run("runs", "first", "--plot", "a.html").code == 0


@pytest.mark.usefixtures("folder")
def test_neither_list_nor_report_needs_anything_heavy() -> None:
    argv = ["runs", "first"]
    assert HEAVY.isdisjoint(loaded_by(f"from tightfit.cli.app import main; main({argv!r})"))
    argv = ["runs", "--json"]
    assert "rich" not in loaded_by(f"from tightfit.cli.app import main; main({argv!r})")
