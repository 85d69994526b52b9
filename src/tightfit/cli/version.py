"""`tightfit version`: what is installed."""

from __future__ import annotations

import platform

from tightfit.cli.flags.catalogue import VersionFlags
from tightfit.cli.terminal.output import show_json, write_out
from tightfit.core.version import __version__


def version(flags: VersionFlags) -> None:
    """Print the version of tightfit and of the Python it runs in."""
    reported = {
        "tightfit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if flags.as_json:
        show_json(reported)
    else:
        write_out(f"tightfit {__version__} (Python {reported['python']}, {reported['platform']})\n")
