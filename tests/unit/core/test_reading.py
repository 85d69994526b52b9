"""Files and JSON that a stranger made: bounded, or one error that names the limit."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tightfit.core.errors import InvalidInputError, SetupError
from tightfit.core.reading import (
    MAX_DEPTH,
    as_user_error,
    join_inside,
    parse_json,
    read_bytes,
    read_json_file,
    read_text,
)


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")

    for name, kind in (("pipe", "a pipe"), ("zero", "a device"), (".", "a folder")):
        with pytest.raises(InvalidInputError, match=f"is {kind}, not a file"):
            read_bytes(tmp_path / name)
    with pytest.raises(InvalidInputError, match="is not a file name"):
        read_bytes(tmp_path / "a\0b")


def test_a_refused_file_counts_as_one_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is a folder"):
        read_bytes(tmp_path)
    with pytest.raises(ValueError, match="is not valid JSON"):
        parse_json(b"{", source="it")


def test_a_file_is_read_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * 1024)

    assert read_bytes(path, most_bytes=1024) == b"a" * 1024
    path.write_bytes(b"a" * 1025)
    with pytest.raises(InvalidInputError, match="larger than 1 KiB"):
        read_bytes(path, most_bytes=1024)


def test_text_names_the_line_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo \xff\n")

    with pytest.raises(InvalidInputError, match="line 2 is not UTF-8"):
        read_text(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), f"more than {MAX_DEPTH} levels"),
        ("[" * 200_000, "nested too deeply"),
        ("9" * 101, "more than 100 digits"),
        ("9" * 5000, "more than 100 digits"),
        ("NaN", "not a finite number"),
        ("1e999", "not a finite number"),
        ('"\\ud800"', "half of a surrogate pair"),
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
    ],
)
def test_json_beyond_a_limit_is_one_error(text: str, words: str) -> None:
    for data in (text, text.encode()):
        with pytest.raises(InvalidInputError, match=words):
            parse_json(data, source="it")


def test_json_within_the_limits_is_what_the_library_reads(tmp_path: Path) -> None:
    tree = {"a": [1, -2.5, None, True, "\U0001f600"], "b": {"c": 10**99}}
    path = tmp_path / "tree.json"
    path.write_text(json.dumps(tree))

    assert read_json_file(path) == tree
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, source="it") is not None
    assert parse_json("[Infinity]", source="it", allows_infinity=True) == [float("inf")]


def test_repeated_keys_can_be_refused() -> None:
    assert parse_json('{"a": 1, "a": 2}', source="it") == {"a": 2}
    with pytest.raises(InvalidInputError, match="`a` is in it twice"):
        parse_json('{"a": 1, "a": 2}', source="it", allows_repeated_keys=False)


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", "..", "", ".", "a\0b", "x" * 300, "out/x", 5, None]
)
def test_names_in_files_stay_in_their_folder(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)

    with pytest.raises(InvalidInputError, match="home"):
        join_inside(folder, name)


def test_a_name_may_be_a_link_as_in_a_hub_cache(tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"
    (folder / "part").mkdir(parents=True)
    (folder / "model.safetensors").symlink_to("../blobs/1234")

    assert join_inside(folder, "model.safetensors") == folder / "model.safetensors"
    assert join_inside(folder, "part/model.safetensors").parent == folder / "part"


def test_errors_of_the_system_about_a_path_are_the_users() -> None:
    long = as_user_error(OSError(errno.ENAMETOOLONG, "File name too long", "a" * 300))
    denied = as_user_error(PermissionError(errno.EACCES, "Permission denied", "x"))

    assert isinstance(long, InvalidInputError)
    assert "at most 255" in long.remedy
    assert isinstance(denied, SetupError)
    assert as_user_error(OSError(errno.EIO, "Input/output error", "x")) is None
    assert as_user_error(OSError(errno.ENOENT, "no path is named")) is None
