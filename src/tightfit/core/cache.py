"""Where things that can be made again are kept: encoded data, unpacked models."""

from __future__ import annotations

import os
from pathlib import Path

from tightfit.core.errors import EnvironmentFaultError


def cache_folder() -> Path:
    """`TIGHTFIT_CACHE`, else `XDG_CACHE_HOME/tightfit`, else `~/.cache/tightfit`. Not made here.

    A relative `XDG_CACHE_HOME` is ignored, as the XDG base directory
    specification asks (specifications.freedesktop.org/basedir-spec, version 0.8).
    """
    if named := os.environ.get("TIGHTFIT_CACHE"):
        return Path(named).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if shared and Path(shared).is_absolute():
        return Path(shared) / "tightfit"
    try:
        return Path.home() / ".cache" / "tightfit"
    except RuntimeError as fault:  # no HOME and no entry in the password file, as in containers
        raise EnvironmentFaultError(
            "There is no home folder to keep encoded data in.",
            remedy="export TIGHTFIT_CACHE=/a/folder/with/space",
        ) from fault
