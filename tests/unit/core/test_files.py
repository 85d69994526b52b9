"""Writing a file never destroys anything but the regular file it is meant to replace."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from tightfit.core.errors import InvalidInputError, SetupError, UsageError
from tightfit.core.files import write_atomic


def _no_litter(folder: Path) -> bool:
    return not [item for item in folder.iterdir() if item.name.startswith(".")]


def test_text_and_bytes_arrive_whole(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a.txt", "grün\n")
    write_atomic(tmp_path / "b.bin", b"\x00\x01")
    assert (tmp_path / "a.txt").read_bytes() == "grün\n".encode()
    assert (tmp_path / "b.bin").read_bytes() == b"\x00\x01"
    assert _no_litter(tmp_path)


def test_a_device_is_refused_and_stays() -> None:
    # A terminal of our own: unlike /dev/null, nobody misses it should this test fail.
    keeper, terminal = os.openpty()
    try:
        device = Path(os.ttyname(terminal))
        with pytest.raises(SetupError) as caught:
            write_atomic(device, "x")
        assert "a device" in caught.value.problem
        assert "--json" in caught.value.remedy
        assert stat.S_ISCHR(device.stat().st_mode)
    finally:
        os.close(keeper)
        os.close(terminal)


def test_a_pipe_and_a_socket_are_refused_and_stay(tmp_path: Path) -> None:
    pipe, bound = tmp_path / "pipe", tmp_path / "s"
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(bound))
        for path, kind in ((pipe, "a pipe"), (bound, "a socket")):
            with pytest.raises(SetupError) as caught:
                write_atomic(path, "x")
            assert kind in caught.value.problem
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert stat.S_ISSOCK(bound.stat().st_mode)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError) as caught:
        write_atomic(tmp_path, "x")
    assert "a folder" in caught.value.problem


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    real = tmp_path / "real" / "plan.json"
    real.parent.mkdir()
    real.write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(real)
    write_atomic(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert _no_litter(real.parent)


def test_a_link_to_nothing_makes_its_target(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "later.json")
    write_atomic(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "later.json").read_text() == "new"


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(SetupError) as caught:
        write_atomic(tmp_path / "a", "x")
    assert "circle" in caught.value.problem


def test_the_mode_of_a_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.write_text("old")
    path.chmod(0o640)
    write_atomic(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    fresh = tmp_path / "fresh.json"
    before = os.umask(0o027)
    try:
        write_atomic(fresh, "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o640


def test_a_missing_folder_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(SetupError) as caught:
        write_atomic(tmp_path / "no such" / "plan.json", "x")
    assert caught.value.remedy == f"mkdir -p '{tmp_path}/no such'"
    assert not (tmp_path / "no such").exists()


@pytest.mark.parametrize("name", ["", "."])
def test_no_name_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError):
        write_atomic(Path(name), "x")


def test_odd_names_are_errors_shown_harmlessly(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError):
        write_atomic(tmp_path / "a\0b", "x")
    with pytest.raises(SetupError) as caught:
        write_atomic(tmp_path / "no\x1b[31m\nfolder" / "x", "x")
    assert "\x1b" not in caught.value.problem
    assert "\n" not in caught.value.problem
    with pytest.raises(SetupError):
        write_atomic(tmp_path / ("x" * 300), "x")
