"""A disk that fails, fills up, is slow or stops, and a clock that jumps, through `faults.c`."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
COMPILER = shutil.which("cc")
NEEDS_COMPILER = "needs a C compiler; un-skip: apt-get install gcc libc6-dev"
_NUMBERS = ("operations", "first", "last", "error", "kinds", "delay_us", "clock_ahead_s", "stopped")
FOREVER = 2**62
STOP = -1
"""In place of an errno: the process waits until it is killed."""


class Kind(IntFlag):
    """Of operations that change something."""

    WRITE = 1
    SYNC = 2
    RENAME = 4
    OPEN = 8
    MAKE = 16
    REMOVE = 32


@dataclass(frozen=True, slots=True)
class Faults:
    """What the processes started with `environment` meet in `folder`."""

    folder: Path
    control: Path
    library: Path

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self.library),
            "TIGHTFIT_FAULTS": str(self.control),
            "TIGHTFIT_FAULTS_FOLDER": str(self.folder),
        }

    def set(self, **numbers: int) -> None:
        """Anew: what is not named is 0."""
        with self.control.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as shared:
            shared[:] = struct.pack("8q", *(numbers.get(name, 0) for name in _NUMBERS))

    def read(self, name: str) -> int:
        numbers: tuple[int, ...] = struct.unpack("8q", self.control.read_bytes())
        return numbers[_NUMBERS.index(name)]


def make_faults(home: Path, folder: Path) -> Faults:
    """The library, compiled, and a control file in `home`, for what happens in `folder`."""
    assert COMPILER is not None
    library, control = home / "faults.so", home / "faults"
    command = [COMPILER, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    control.write_bytes(bytes(8 * len(_NUMBERS)))
    folder.mkdir(parents=True, exist_ok=True)
    return Faults(folder.resolve(), control, library)
