"""The command that builds the RPC backend: what it unpacks, and what it says where a step fails."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest

from tightfit.core.errors import SetupError
from tightfit.runtime import build_rpc


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('ERROR: no such release'); print('bye'); raise SystemExit(3)", "no such release"),
        ("raise SystemExit('No module named pip')", "No module named pip"),
        ("raise SystemExit(1)", "code 1"),
    ],
)
def test_a_step_that_fails_is_told_in_its_own_words(program: str, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        build_rpc._run([sys.executable, "-c", program], remedy="another")


def test_plain_files_of_one_folder_are_unpacked_and_nothing_leads_out(tmp_path: Path) -> None:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name in ("top/ggml/src/a.cpp", "top/ggml/../../../out", "top/other/b.cpp", "/abs"):
            part = tarfile.TarInfo(name)
            part.size = 3
            archive.addfile(part, io.BytesIO(b"int"))
        link = tarfile.TarInfo("top/ggml/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    held.seek(0)
    home = tmp_path / "a" / "b" / "home"
    home.mkdir(parents=True)
    with tarfile.open(fileobj=held) as archive:
        build_rpc.unpack_files(archive, "top/ggml", home)
    assert [p for p in tmp_path.rglob("*") if not p.is_dir()] == [home / "top/ggml/src/a.cpp"]
    assert (home / "top/ggml/src/a.cpp").read_bytes() == b"int"
