"""A child's last words are there for every thread, also while another one ends the child."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from tightfit.core.child_process import ChildProcess


def test_last_words_are_read_while_another_thread_ends_the_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other would close the file between the look at its size and the reading."""
    child = ChildProcess(["sh", "-c", "echo all is lost >&2"])
    assert list(child) == []
    assert child.wait(60) == 0
    ends: list[Future[None]] = []
    read_size = os.fstat
    with ThreadPoolExecutor() as pool:

        def end_before_size_is_read(descriptor: int) -> os.stat_result:
            if not ends:
                ends.append(pool.submit(child.end, seconds=0.0))
                assert not wait(ends, timeout=0.3).done
            return read_size(descriptor)

        monkeypatch.setattr(os, "fstat", end_before_size_is_read)
        assert child.last_line == "all is lost"
        ends[0].result(timeout=60)
    assert child.last_line == "all is lost"
