"""Encodings kept by content: found again, or written whole under a name of their own first."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tightfit.core.errors import EnvironmentFaultError, UserError
from tightfit.data.report import DataReport
from tightfit.data.token_store import TokenStore

REPORT_FILE = "report.json"
_PARTIAL = ".partial"
_STALE_SECONDS = 2 * 24 * 3600


def find_encoding(home: Path) -> tuple[TokenStore, TokenStore | None, DataReport] | None:
    """A finished encoding; None where there is none, or none that can be read whole."""
    try:
        report = DataReport.model_validate_json((home / REPORT_FILE).read_bytes())
        held_out = TokenStore(home / "eval") if report.eval is not None else None
        return TokenStore(home / "train"), held_out, report
    except (OSError, ValueError, UserError):
        return None


@contextmanager
def new_encoding(home: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `home` at the end, whole or not at all.

    Two processes may write at once: each in a folder of its own, and the first
    to finish wins, for both hold the same.
    """
    partial = home.parent / f"{home.name}.{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL}"
    try:
        partial.mkdir(parents=True)
        _sweep(home.parent)
        yield partial
        _sync(partial)
        _install(partial, home)
        _sync(home.parent)
    except OSError as fault:
        raise _cannot_write(home, fault) from fault
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _install(partial: Path, home: Path) -> None:
    try:
        partial.rename(home)
    except OSError as fault:
        if fault.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if find_encoding(home) is None:  # what lies there is broken: move it out of the way
            broken = home.with_name(f"{home.name}.{secrets.token_hex(4)}{_PARTIAL}")
            home.rename(broken)
            partial.rename(home)
            shutil.rmtree(broken, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left days ago."""
    for path in folder.glob(f"*{_PARTIAL}"):
        try:
            is_stale = time.time() - path.stat().st_mtime > _STALE_SECONDS
        except OSError:
            continue
        if is_stale:
            shutil.rmtree(path, ignore_errors=True)


def _sync(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # some file systems do not open folders
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def _cannot_write(home: Path, fault: OSError) -> EnvironmentFaultError:
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentFaultError(
            f"The disk is full while writing encoded data under {home.parent}.",
            remedy="free some space, or export TIGHTFIT_CACHE=/a/folder/with/space",
        )
    return EnvironmentFaultError(
        f"Cannot write encoded data under {home.parent}: {fault.strerror or fault}.",
        remedy="export TIGHTFIT_CACHE=/a/folder/you/can/write",
    )
