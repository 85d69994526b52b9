"""A farm's file operations on a real folder: one winner, whole files, the server's clock."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tightfit.farming.folder import ChunkLayout
from tightfit.farming.leases import Leases
from tightfit.farming.store import FolderStore


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    for name in ("tmp", "done", "lease", "workers", "taken", "full"):
        (tmp_path / name).mkdir()
    return FolderStore(tmp_path)


def race(count: int, call: Any) -> list[bool]:
    """What each of many callers at once got."""
    start, results = threading.Barrier(count), [False] * count

    def run(number: int) -> None:
        start.wait()
        results[number] = call(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_of_many_who_create_one_wins(store: FolderStore) -> None:
    for turn in range(20):
        won = race(8, lambda number, turn=turn: store.create(f"lease/0/{turn}", b"%d" % number))
        assert sum(won) == 1
        seen = store.look(f"lease/0/{turn}")
        assert seen is not None
        assert seen.content == b"%d" % won.index(True)


def test_of_many_who_publish_one_wins_and_is_whole(store: FolderStore) -> None:
    for turn in range(10):
        won = race(
            8, lambda number, turn=turn: store.publish(f"done/0/{turn}", b"%d" % number * 50_000)
        )
        assert sum(won) == 1
        seen = store.look(f"done/0/{turn}")
        assert seen is not None
        assert seen.content == b"%d" % won.index(True) * 50_000
    assert store.names("tmp") == [], "what was not published is gone"


def test_a_lost_reply_to_link_is_known_for_a_success(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS client that hears nothing asks again, and is told of its own first try."""
    link = os.link

    def link_twice(source: Any, target: Any, **folders: Any) -> None:
        link(source, target, **folders)
        link(source, target, **folders)

    monkeypatch.setattr("os.link", link_twice)

    assert store.publish("done/0/1", b"ours")
    monkeypatch.undo()
    assert not store.publish("done/0/1", b"another's")
    seen = store.look("done/0/1")
    assert seen is not None
    assert seen.content == b"ours"


def test_a_farm_that_is_gone_does_not_come_back(store: FolderStore, tmp_path: Path) -> None:
    (tmp_path / "lease").rmdir()

    with pytest.raises(FileNotFoundError):
        store.create("lease/000000/00000000.0")
    assert store.names("lease/000000") == []
    assert store.look("lease/000000/x") is None


def test_nothing_gets_into_another_farm_of_the_same_name(
    store: FolderStore, tmp_path: Path
) -> None:
    """`--fresh` while a worker of the former farm runs: its answers are to other questions."""
    aside = tmp_path.with_name("aside")
    tmp_path.rename(aside)
    for name in ("tmp", "done", "lease", "workers"):
        (tmp_path / name).mkdir(parents=True)

    assert not store.is_at(tmp_path)
    assert store.create("lease/000000/00000000.0")
    assert store.publish("done/000000/00000000", b"to another question")
    store.replace("workers/w.json", b"{}")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(list(aside.glob("done/*/*"))) == 1


def test_beats_are_of_the_files_own_clock(
    store: FolderStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the clock of this node says: it is never asked."""

    def refuse() -> float:
        raise AssertionError("a node's own clock was asked")

    monkeypatch.setattr(time, "time", refuse)
    import random

    shape = ChunkLayout(num_prompts=2, prompts_per_chunk=1)
    dead = Leases(store, shape, "dead", seconds=60, rng=random.Random(1))
    heir = Leases(store, shape, "heir", seconds=60, rng=random.Random(2))
    dead.join()
    heir.join()
    assert [dead.claim_fresh(), dead.claim_fresh(), dead.claim_fresh()][-1] is None
    first = heir.beat()
    assert heir.claim_left() is None, "it has just been there"
    # Made old by hand: a lease short enough to wait for could end before we look.
    os.utime(tmp_path / "workers" / "dead.beat", (first - 61, first - 61))
    time.sleep(0.05)  # more than a tick of the clock that files are dated by
    taken = heir.claim_left()

    assert taken is not None
    assert taken.generation == 1
    assert taken.note.deaths == 1
    assert heir.beat() > first
