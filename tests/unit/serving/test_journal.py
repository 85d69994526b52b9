"""The journal: whatever is cut off it, the answers come out whole, once and in order."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.core.errors import SetupError, UsageError
from tightfit.serving.generate.journal import AnswerKey, journal_path, open_journal

SETTINGS = {"prompts": "d1", "model": "m1", "temperature": 0.7}


def row_of(key: AnswerKey) -> dict[str, Any]:
    return {"prompt_index": key.prompt, "sample": key.sample, "text": f"ä\n{key.prompt}" * 3}


def write_all(out: Path, keys: Sequence[AnswerKey], *, is_complete: bool = True) -> int:
    """Answer what is not there yet, in the given order; how many that were."""
    num_new = 0
    with open_journal(out, SETTINGS, seed=1) as journal:
        for key in keys:
            num_new += key not in journal
            journal.add(key, row_of(key))
        journal.finish(is_complete=is_complete)
    return num_new


keys_out_of_order = st.sets(st.tuples(st.integers(0, 30), st.integers(0, 2)), min_size=1).flatmap(
    lambda found: st.permutations([AnswerKey(*pair) for pair in sorted(found)])
)


@given(keys=keys_out_of_order, data=st.data())
def test_a_journal_cut_anywhere_gives_the_same_file(
    keys: list[AnswerKey], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    whole = folder / "whole.jsonl"
    write_all(whole, keys, is_complete=False)
    journal = journal_path(whole).read_bytes()
    cut = data.draw(st.integers(0, len(journal)), label="cut at")
    out = folder / "out.jsonl"
    journal_path(out).write_bytes(journal[:cut])

    num_lines = max(0, journal[:cut].count(b"\n") - 1)  # the header is no answer
    assert write_all(out, keys[::-1]) == len(keys) - num_lines

    assert out.read_bytes() == whole.read_bytes()
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [(row["prompt_index"], row["sample"]) for row in rows] == sorted(keys)


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_never_passes_for_an_answer(
    place: int, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("bits")
    out, keys = folder / "out.jsonl", [AnswerKey(0, 0), AnswerKey(1, 0), AnswerKey(2, 0)]
    write_all(out, keys, is_complete=False)
    expected = out.read_bytes()
    journal = bytearray(journal_path(out).read_bytes())
    journal[place % len(journal)] ^= 1 << bit
    journal_path(out).write_bytes(bytes(journal))

    with contextlib.suppress(UsageError):  # where the head itself was hit: --fresh
        write_all(out, keys)
    assert out.read_bytes() == expected


def test_a_run_that_goes_on_keeps_the_seed_it_drew(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with open_journal(out, SETTINGS, seed=None) as first:
        drawn = first.seed
    with open_journal(out, SETTINGS, seed=None) as again:
        assert again.seed == drawn
    with open_journal(tmp_path / "other.jsonl", SETTINGS, seed=5) as stated:
        assert stated.seed == 5


def test_other_settings_are_refused_by_name_and_fresh_begins_again(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write_all(out, [AnswerKey(0, 0)], is_complete=False)

    with pytest.raises(UsageError, match=r"temperature was 0\.7, now 0\.9") as caught:
        open_journal(out, SETTINGS | {"temperature": 0.9}, seed=None)
    assert "--fresh" in caught.value.remedy
    before = out.read_bytes()
    with open_journal(out, SETTINGS | {"temperature": 0.9}, seed=None, is_fresh=True) as journal:
        assert journal.num_done == 0
        assert out.read_bytes() == before, "the old answers stay until the new ones are there"


def test_a_finished_output_is_known_again_and_a_changed_one_is_not_overwritten(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out.jsonl"
    write_all(out, [AnswerKey(0, 0)])

    with open_journal(out, SETTINGS, seed=None) as journal:
        assert journal.is_finished
    assert journal_path(out).stat().st_size < 500, "answers are not kept twice"
    out.write_text("mine\n", encoding="utf-8")
    with pytest.raises(UsageError, match="changed since"):
        open_journal(out, SETTINGS, seed=None)
    assert out.read_text("utf-8") == "mine\n"
    out.unlink()
    with open_journal(out, SETTINGS, seed=None) as journal:
        assert not journal.is_finished
        assert journal.num_done == 0


def test_a_file_of_the_user_is_not_replaced_unasked(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n", encoding="utf-8")

    with pytest.raises(UsageError, match="exists already"):
        open_journal(out, SETTINGS, seed=None)
    assert out.read_text("utf-8") == "mine\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl"], "no litter"


def test_failures_leave_the_journal_for_another_try(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    write_all(out, [AnswerKey(0, 0), AnswerKey(2, 0)], is_complete=False)

    assert write_all(out, [AnswerKey(0, 0), AnswerKey(1, 0), AnswerKey(2, 0)]) == 1
    indices = [json.loads(line)["prompt_index"] for line in out.read_text("utf-8").splitlines()]
    assert indices == [0, 1, 2]


def test_two_processes_do_not_write_one_journal(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    program = (
        "import sys; from pathlib import Path\n"
        "from tightfit.serving.generate.journal import open_journal\n"
        f"with open_journal(Path({str(out)!r}), {SETTINGS!r}, seed=1) as j:\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="Another"):
            open_journal(out, SETTINGS, seed=1)
        holder.kill()
    open_journal(out, SETTINGS, seed=1).close()  # a kill lets go


def test_a_missing_folder_is_told_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(SetupError) as caught:
        open_journal(tmp_path / "no" / "out.jsonl", SETTINGS, seed=None)
    assert "mkdir -p" in caught.value.remedy


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs /dev/full: run the tests on Linux"
)
def test_a_full_disk_is_told_and_leaves_no_torn_line(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with open_journal(out, SETTINGS, seed=None) as journal:
        journal.add(AnswerKey(0, 0), row_of(AnswerKey(0, 0)))
        before = journal_path(out).read_bytes()
        kept, journal._handle = journal._handle, os.open("/dev/full", os.O_RDWR)
        with pytest.raises(SetupError, match="No space left"):
            journal.add(AnswerKey(1, 0), row_of(AnswerKey(1, 0)))
        os.close(journal._handle)
        journal._handle = kept
        journal.add(AnswerKey(1, 0), row_of(AnswerKey(1, 0)))
    assert journal_path(out).read_bytes().startswith(before)
    with open_journal(out, SETTINGS, seed=None) as again:
        assert again.num_done == 2
