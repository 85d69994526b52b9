"""Votes: on the disk for good, each pair once, and nothing lost to a crash or a full disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tightfit.core.errors import SetupError
from tightfit.serving.page.votes import (
    Vote,
    VoteChoice,
    VoteFile,
    VoteSettings,
    append_vote,
    check_votes_path,
    read_votes,
)


def make_vote(
    id: str = "1", *, vote: VoteChoice = VoteChoice.A, names: tuple[str, str] = ("x", "y")
) -> Vote:
    return Vote(
        id=id,
        time="2026-01-01T00:00:00+00:00",
        prompt="Say\nit — «so»",
        system="",
        settings=VoteSettings(temperature=0.5, top_p=0.9, max_new_tokens=64, seed=7),
        name_a=names[0],
        name_b=names[1],
        answer_a="one\nline\u2028more",
        answer_b="two",
        vote=vote,
        blind=True,
        left="b",
    )


def _append_many(path: Path, start: int) -> None:
    for number in range(start, start + 25):
        append_vote(path, make_vote(str(number)))


def test_a_line_is_plain_json_with_all_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    append_vote(path, make_vote())

    (line,) = path.read_text(encoding="utf-8").split("\n")[:-1]
    row = json.loads(line)

    assert row["vote"] == "a"
    assert row["blind"] is True
    assert row["left"] == "b"
    assert row["prompt"] == "Say\nit — «so»"
    assert row["answer_a"] == "one\nline\u2028more"
    assert row["settings"] == {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 64, "seed": 7}
    assert {"time", "system", "answer_b", "name_a", "name_b"} <= set(row)


def test_it_is_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "votes.jsonl"
    sizes: list[int] = []
    real = os.fsync

    def note(handle: int) -> None:
        sizes.append(os.fstat(handle).st_size)
        real(handle)

    monkeypatch.setattr(os, "fsync", note)
    VoteFile(path).cast(make_vote())

    assert sizes[0] == path.stat().st_size > 0


def test_writers_in_several_processes_lose_and_mix_nothing(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_append_many, args=(path, start)) for start in (0, 25, 50)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert sorted(int(vote.id) for vote in read_votes(path)) == list(range(75))
    assert path.read_bytes().count(b"\n") == 75


def test_a_pair_is_voted_on_once_also_by_two_clicks_at_once_and_after_a_restart(
    tmp_path: Path,
) -> None:
    box = VoteFile(tmp_path / "votes.jsonl")
    results: list[bool] = []
    clicks = [
        threading.Thread(target=lambda: results.append(box.cast(make_vote()))) for _ in range(8)
    ]
    for click in clicks:
        click.start()
    for click in clicks:
        click.join()

    assert sorted(results) == [False] * 7 + [True]
    assert not VoteFile(box.path).cast(make_vote(vote=VoteChoice.B))
    assert box.count("x", "y").total() == 1


def test_a_line_that_was_cut_off_spoils_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    append_vote(path, make_vote("1"))
    with path.open("ab") as stream:
        stream.write(b'{"id": "2", "time": "20')
    append_vote(path, make_vote("3"))

    assert [vote.id for vote in read_votes(path)] == ["1", "3"]


def test_counts_go_by_model_whichever_was_called_a(tmp_path: Path) -> None:
    box = VoteFile(tmp_path / "votes.jsonl")
    box.cast(make_vote("1", vote=VoteChoice.A))
    box.cast(make_vote("2", vote=VoteChoice.B, names=("y", "x")))  # x again
    box.cast(make_vote("3", vote=VoteChoice.TIE, names=("y", "x")))
    box.cast(make_vote("4", vote=VoteChoice.BOTH_BAD))
    box.cast(make_vote("5", vote=VoteChoice.B, names=("x", "another")))

    tally = box.count("x", "y")

    assert [tally[choice] for choice in VoteChoice] == [2, 0, 1, 1]


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs a POSIX system: run it on Linux")
def test_a_disk_that_fills_up_leaves_the_earlier_votes_whole(tmp_path: Path) -> None:
    path = tmp_path / "votes.jsonl"
    append_vote(path, make_vote("1"))
    before = path.read_bytes()
    script = f"""
import resource, signal, sys
from pathlib import Path
from tightfit.core.errors import SetupError
from tightfit.serving.page.votes import append_vote, read_votes
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path({str(path)!r})
vote = next(read_votes(path))
resource.setrlimit(resource.RLIMIT_FSIZE, ({len(before) + 40}, {len(before) + 40}))
try:
    append_vote(path, vote)
except SetupError as error:
    print(error.remedy)
"""
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert "--votes FILE" in said.stdout
    assert path.read_bytes() == before


def test_a_place_that_takes_no_votes_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "votes.jsonl"):
        with pytest.raises(SetupError, match="Cannot keep votes"):
            check_votes_path(path)
    check_votes_path(tmp_path / "votes.jsonl")
    assert not (tmp_path / "votes.jsonl").exists()
