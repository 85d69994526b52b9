"""Rows and files without end: refused early, in little time and memory; progress is told on."""

from __future__ import annotations

import gzip
import io
import itertools
import lzma
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from machine_pace import allow
from tightfit.core.errors import InvalidInputError, SetupError, UsageError
from tightfit.data import readers
from tightfit.data.profile import profile_dataset
from tightfit.data.readers import ReadMeter, ReadProgress, Row, iter_lines
from tightfit.data.sources import read_rows

MIB = 2**20


def write(path: Path, pieces: Iterable[bytes]) -> Path:
    with path.open("wb") as stream:
        for piece in pieces:
            stream.write(piece)
    return path


def endless(head: bytes, num_mib: int) -> Iterable[bytes]:
    yield head
    for _ in range(num_mib):
        yield b"a" * MIB
    yield b'"}'


@pytest.mark.parametrize(("name", "head"), [("a.jsonl", b'{"text": "'), ("a.txt", b"")])
def test_a_row_of_200_mib_is_refused_within_seconds_and_little_memory(
    tmp_path: Path, name: str, head: bytes
) -> None:
    path = write(tmp_path / name, endless(head, 200))
    probe = (
        "import sys, time; from tightfit.data.sources import read_rows\n"
        "try: list(read_rows(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "status = open('/proc/self/status').read()\n"  # ru_maxrss would count the parent's
        "print(int(status.split('VmHWM:')[1].split()[0]) // 1024)\n"
        "print(time.process_time())"  # of the whole process; not of a machine that stands still
    )
    out = subprocess.check_output([sys.executable, "-c", probe, str(path)], text=True)
    message, peak_mib, seconds = out.splitlines()
    assert float(seconds) < allow(10)
    assert message.startswith("InvalidInputError")
    assert "line 1 begins" in message
    assert int(peak_mib) < 600


def test_long_rows_cost_linear_time(tmp_path: Path) -> None:
    def seconds(path: Path) -> float:
        started = time.process_time()
        assert sum(1 for _ in read_rows(path)) == 1
        return time.process_time() - started

    for name, head, tail in (("a.jsonl", b"", b""), ("b.json", b"[", b"]")):
        path = write(tmp_path / name, [head, *endless(b'{"text": "', 40), tail])
        # Copying what is held for each chunk of 256 KiB took over a minute.
        assert seconds(path) < allow(5)


def test_lines_are_those_of_split_wherever_chunks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"one\n\ntwo and more\n\n\nthree\r\nfour"
    for size in range(1, 12):
        monkeypatch.setattr(readers, "_CHUNK_BYTES", size)
        found = list(iter_lines(io.BytesIO(text), Path("a")))
        assert found == text.split(b"\n")
        assert list(iter_lines(io.BytesIO(text + b"\n"), Path("a"))) == text.split(b"\n")


def test_a_json_text_beyond_memory_names_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_JSON_BYTES", MIB)
    path = write(tmp_path / "a.json", [b"[", *endless(b'{"text": "', 2), b"]"])
    with pytest.raises(InvalidInputError, match="one JSON text of more than") as caught:
        list(read_rows(path))
    assert "jq -c" in caught.value.remedy


@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.gz", "a.txt.xz"])
@pytest.mark.parametrize("filling", [b" ", b"\n", b"a", b"\0"])
def test_a_bomb_ends_early(tmp_path: Path, name: str, filling: bytes) -> None:
    pack = gzip.compress if name.endswith(".gz") else lzma.compress
    path = write(tmp_path / name, [pack(filling * (128 * MIB))])
    started = time.process_time()
    with pytest.raises(InvalidInputError):
        list(read_rows(path))
    assert time.process_time() - started < allow(6)


def test_a_bomb_of_good_rows_ends_too(tmp_path: Path) -> None:
    row = b'{"text": "' + b"a" * 4000 + b'"}\n'
    path = write(tmp_path / "a.jsonl.gz", [gzip.compress(row * 32_000)])
    with pytest.raises(InvalidInputError, match="unpacks to more than 100 times"):
        list(read_rows(path))


def test_an_ordinary_compressed_file_is_no_bomb(tmp_path: Path) -> None:
    rows = b"".join(b'{"text": "row %d of many"}\n' % number for number in range(900_000))
    path = write(tmp_path / "a.jsonl.gz", [gzip.compress(rows, 1)])
    assert len(rows) > 20 * MIB
    assert sum(1 for _ in read_rows(path)) == 900_000


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_progress_tells_rows_and_bytes_several_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rows = b"".join(b'{"text": "row %d"}\n' % number for number in range(30_000))
    data = gzip.compress(rows) if name.endswith(".gz") else rows
    paths = [write(tmp_path / f"{number}{name}", [data]) for number in range(2)]
    monkeypatch.setattr(readers, "_EVERY_SECONDS", 0.0)
    seen: list[ReadProgress] = []
    profile_dataset(paths, seq_len=64, progress=seen.append)
    assert len(seen) > 100
    for before, after in itertools.pairwise(seen):
        assert after.num_rows >= before.num_rows
        assert after.num_bytes >= before.num_bytes
    assert seen[-1] == ReadProgress(60_000, 2 * len(data), 2 * len(data))
    assert seen[-1].fraction == 1.0


def test_progress_comes_about_five_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("tightfit.data.readers.time.monotonic", lambda: now)
    seen: list[ReadProgress] = []
    watched = ReadMeter(seen.append, total_bytes=1000)
    for step in range(1000):  # ten seconds of reading, a hundredth each
        now = 100.0 + step / 100
        watched.move_to(step)
    assert 40 <= len(seen) <= 50


@pytest.mark.parametrize("name", ["", " ", "\n"])
def test_an_empty_name_does_not_mean_this_folder(name: str) -> None:
    with pytest.raises(UsageError):
        list(read_rows(name))


def test_a_missing_file_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(Exception, match="There is no data file") as caught:
        list(read_rows("data/train.jsonl"))
    remedy = getattr(caught.value, "remedy", "")
    assert str(tmp_path / "here" / "data") in remedy
    assert "a path in a recipe starts at the recipe's folder" in remedy


def test_no_permission_is_an_error_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", [b'{"text": "a"}\n'])

    def refuse(self: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(SetupError, match="permission denied") as caught:
        list(read_rows(path))
    assert caught.value.exit_code == 6


def test_rows_keep_their_numbers_over_long_lines(tmp_path: Path) -> None:
    long = b'{"text": "' + b"b" * (3 * MIB) + b'"}\n'
    path = write(tmp_path / "a.jsonl", [b'{"text": "a"}\n', long, b"\n", b'{"text": "c"}'])
    rows: list[Row] = list(read_rows(path))
    assert [row.number for row in rows] == [1, 2, 4]
