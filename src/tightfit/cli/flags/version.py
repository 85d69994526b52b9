"""What `tightfit version` accepts."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.cli.flags.options import Json

EXAMPLES = """\b
Examples:
  tightfit version
  tightfit version --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFlags:
    """Print the version of tightfit and of Python."""

    as_json: Json = False
