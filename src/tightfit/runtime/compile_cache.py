"""Where torch keeps compiled code: a folder of the user's own, bounded in size.

torch's default is `/tmp/torchinductor_USER`, which anybody may have made before; and what is read
back from there is unpickled, and run.
"""

from __future__ import annotations

import atexit
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from tightfit.core.errors import UserError
from tightfit.core.files import cache_folder, temporary_folder
from tightfit.core.units import GIB

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's own; triton's kernels that torch compiles are kept there too."""
MOST_BYTES = 2 * GIB
SPARED_SECONDS = 3600.0
"""Files used this recently may be in use, and stay."""


def keep_compiled_code() -> Path:
    """Have torch keep what it compiles; call before the first compilation. Returns the folder.

    A folder that the user names in `TORCHINDUCTOR_CACHE_DIR` is left as it is. Where none is safe,
    it is one that ends with this process.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    try:
        # With the user's number: a cache may be shared by a group.
        folder = cache_folder() / f"compiled-{os.getuid()}"
    except UserError:  # no home folder
        folder = None
    if folder is not None and _is_own(folder):
        trim(folder)
    else:
        until_exit = ExitStack()
        folder = until_exit.enter_context(temporary_folder(name="tightfit-compiled"))
        atexit.register(until_exit.close)
    os.environ[CACHE_VARIABLE] = str(folder)
    return folder


def _is_own(folder: Path) -> bool:
    """Make the folder; whether nobody else can write in it or replace it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return False
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):  # others may have written there
            return False
        folder.chmod(0o700)
        return os.access(folder, os.W_OK) and all(map(_is_kept, folder.resolve().parents))
    except OSError:
        return False


def _is_kept(parent: Path) -> bool:
    """Whether others cannot rename what lies in it."""
    mode = parent.stat().st_mode
    return not mode & stat.S_IWOTH or bool(mode & stat.S_ISVTX)


def trim(folder: Path, *, most_bytes: int = MOST_BYTES) -> None:
    """Remove what was not used for longest until the rest takes `most_bytes`."""
    files = sorted(_list_files(folder))
    excess = sum(size for _, size, _ in files) - most_bytes
    for used, size, path in files:
        if excess <= 0 or time.time() - used < SPARED_SECONDS:
            return
        with suppress(OSError):  # another process removes it too
            path.unlink()
        excess -= size


def _list_files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """When each was used, its size, and where it is."""
    for path in folder.rglob("*"):
        with suppress(OSError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode):
                yield max(found.st_atime, found.st_mtime), found.st_size, path
