"""`tightfit version`: what is installed."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass

from tightfit import __version__
from tightfit.cli.flags import takes
from tightfit.cli.options import Json
from tightfit.cli.screen import show_json

EXAMPLES = """\b
Examples:
  tightfit version
  tightfit version --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFlags:
    """Options of `tightfit version`."""

    as_json: Json = False


@takes(VersionFlags)
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
