"""`tightfit version`: what is installed."""

from __future__ import annotations

import platform
import sys

from tightfit import __version__
from tightfit.cli.flags.version import VersionFlags
from tightfit.cli.json_output import show_json


def version(flags: VersionFlags) -> None:
    """Print the version of tightfit and of the Python it runs in."""
    told = {
        "tightfit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if flags.as_json:
        show_json(told)
    else:
        sys.stdout.write(f"tightfit {__version__} (Python {told['python']}, {told['platform']})\n")
