"""Asking the tracer: answers as they come, remembered, and every way in which it can die."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from tightfit.trace.tracer import Tracer, TraceResponse
from trace_cases import record_full_tuning, trace

ANSWER = TraceResponse(traced=trace(record_full_tuning(num_layers=2, tokens=64)))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def make_worker(folder: Path, body: str) -> str:
    """A program that counts its starts and then does `body` for every line."""
    (folder / "answer.json").write_text(ANSWER.model_dump_json())
    (folder / "stand_in_worker.py").write_text(
        "import json, os, signal, sys, time\n"
        f"open({str(folder / 'starts')!r}, 'a').write('x')\n"
        f"ANSWER = open({str(folder / 'answer.json')!r}).read()\n"
        "for line in sys.stdin:\n"
        "    job = json.loads(line)\n" + textwrap.indent(textwrap.dedent(body), "    ")
    )
    return "stand_in_worker"


def ask(module: str, *jobs: dict[str, Any], **settings: Any) -> list[TraceResponse]:
    return Tracer(module=module, **settings).ask(jobs)


def test_one_answer_per_job_in_order(tmp_path: Path) -> None:
    module = make_worker(
        tmp_path, "print(json.dumps({'problem': job['name']}) if job['name'] else ANSWER)"
    )
    report: list[int] = []
    answers = Tracer(module=module).ask([{"name": "a"}, {"name": ""}, {"name": "b"}], report.append)
    assert [answer.problem for answer in answers] == ["a", "", "b"]
    assert answers[1] == ANSWER
    assert report == [1, 2, 3]


def test_what_was_traced_is_not_traced_again(tmp_path: Path) -> None:
    module = make_worker(tmp_path, "print(ANSWER)")
    assert ask(module, {"name": "a"}) == ask(module, {"name": "a"}) == [ANSWER]
    assert (tmp_path / "starts").read_text() == "x"
    ask(module, {"name": "other"})
    ask(module, {"name": "a"}, uses_cache=False)
    assert (tmp_path / "starts").read_text() == "xxx"


@pytest.mark.parametrize("kind", ["pipe", "huge", "deep", "link"])
def test_a_hostile_file_in_the_cache_is_no_answer(kind: str, tmp_path: Path) -> None:
    module = make_worker(tmp_path, "print(ANSWER)")
    ask(module, {"name": "a"})
    (remembered,) = (tmp_path / "cache" / "traces").iterdir()
    remembered.unlink()
    if kind == "pipe":
        os.mkfifo(remembered)
    elif kind == "huge":
        with remembered.open("wb") as stream:
            stream.truncate(2**40)
    elif kind == "deep":
        remembered.write_text('{"traced":' * 100_000)
    else:
        remembered.symlink_to("/dev/zero")
    assert ask(module, {"name": "a"}) == [ANSWER]
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_failure_is_not_remembered(tmp_path: Path) -> None:
    module = make_worker(tmp_path, "print(json.dumps({'problem': 'no'}))")
    ask(module, {"name": "a"})
    ask(module, {"name": "a"})
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_broken_memory_is_made_anew(tmp_path: Path) -> None:
    module = make_worker(tmp_path, "print(ANSWER)")
    ask(module, {"name": "a"})
    for path in (tmp_path / "cache" / "traces").iterdir():
        path.write_text("{ not JSON")
    assert ask(module, {"name": "a"}) == [ANSWER]


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "file" / "below"))
    tracer = Tracer(module=make_worker(tmp_path, "print(ANSWER)"))
    assert tracer.ask([{"name": "a"}, {"name": "b"}]) == [ANSWER, ANSWER]
    (error,) = tracer.write_errors
    assert "Not a directory" in error


def test_what_can_be_kept_is_no_error(tmp_path: Path) -> None:
    tracer = Tracer(module=make_worker(tmp_path, "print(ANSWER)"))
    tracer.ask([{"name": "a"}])
    assert tracer.write_errors == []


def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    (tmp_path / "pid").touch()
    body = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    body += "print(ANSWER, flush=True)\nif job['name']: time.sleep(600)"

    def interrupt(_done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tracer(module=make_worker(tmp_path, body)).ask([{"name": "a"}, {"name": "b"}], interrupt)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
        ("sys.exit('libfoo is missing')", "libfoo is missing"),
        ("print('{\"traced\": 3}'); break", "cannot be read"),
        ("raise MemoryError", "MemoryError"),
    ],
)
def test_a_tracer_that_dies_answers_with_its_death(tmp_path: Path, body: str, word: str) -> None:
    answers = ask(make_worker(tmp_path, body), {"name": "a"}, {"name": "b"})
    assert len(answers) == 2
    assert answers[0].traced is None
    assert word in answers[0].problem


def test_answers_before_a_death_count(tmp_path: Path) -> None:
    body = "print(ANSWER, flush=True) if job['name'] == 'a' else os.abort()"
    answers = ask(make_worker(tmp_path, body), {"name": "a"}, {"name": "b"})
    assert answers[0] == ANSWER
    assert "signal 6" in answers[1].problem


def test_a_tracer_that_hangs_is_ended(tmp_path: Path) -> None:
    answers = ask(make_worker(tmp_path, "time.sleep(600)"), {"name": "a"}, timeout_seconds=1.0)
    assert "killed" in answers[0].problem
