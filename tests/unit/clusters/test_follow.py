"""Followers of growing and of replaced files."""

from __future__ import annotations

from pathlib import Path

from stand_in_worker import make_step
from tightfit.clusters.follow import LineFollower, MetricsFollower
from tightfit.runs.metrics import EventRecord, append_record, drop_after_step


def steps(follower: MetricsFollower) -> list[int]:
    return [record.step for record in follower.read()]


def add(path: Path, text: str) -> None:
    with path.open("a") as stream:
        stream.write(text)


def test_each_record_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    follower = MetricsFollower(path)
    assert follower.read() == []
    append_record(path, make_step(1))
    append_record(path, make_step(2))
    assert steps(follower) == [1, 2]
    append_record(path, make_step(3))
    assert steps(follower) == [3]
    assert steps(follower) == []


def test_a_half_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = make_step(1).model_dump_json() + "\n"
    path.write_text(whole[:30])
    follower = MetricsFollower(path)
    assert steps(follower) == []
    add(path, whole[30:])
    assert steps(follower) == [1]


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('nonsense\n{"kind": "step"}\n[]\n')
    append_record(path, make_step(4))
    assert steps(MetricsFollower(path)) == [4]


def test_a_resumed_run_tells_only_the_steps_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(1, 6):
        append_record(path, make_step(step))
    follower = MetricsFollower(path)
    assert steps(follower) == [1, 2, 3, 4, 5]
    drop_after_step(path, 3)
    append_record(path, EventRecord(step=3, text="resumed"))
    append_record(path, make_step(4))
    assert steps(follower) == [3, 4]
    append_record(path, make_step(5))
    assert steps(follower) == [5]


def test_a_second_replacement_is_followed_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append_record(path, make_step(step))
    follower = MetricsFollower(path, skip_existing=True)
    drop_after_step(path, 2)
    assert steps(follower) == []
    drop_after_step(path, 1)
    append_record(path, make_step(2))
    append_record(path, make_step(3))
    # Step 2 was told before and its line is the same; step 3 was taken back and comes again.
    assert steps(follower) == [3]


def test_existing_lines_can_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("old\n")
    follower = LineFollower(path, skip_existing=True)
    add(path, "new\n")
    assert follower.read() == ["new"]
