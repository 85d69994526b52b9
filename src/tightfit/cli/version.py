"""`tightfit version`: Print the version of tightfit and of Python."""

from __future__ import annotations

import platform

from tightfit.api.catalogue import VersionOptions
from tightfit.api.options.common import Output
from tightfit.cli.terminal.output import show_json, write_out
from tightfit.core.packages import __version__


def version(_options: VersionOptions, output: Output) -> None:
    """Print the version of tightfit and of the Python it runs in."""
    reported = {
        "tightfit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    if output.as_json:
        show_json(reported)
    else:
        write_out(f"tightfit {__version__} (Python {reported['python']}, {reported['platform']})\n")
