"""What `tightfit doctor` accepts."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.cli.flags.options import Json

EXAMPLES = """\b
Examples:
  tightfit doctor
  tightfit doctor --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFlags:
    """Check this machine; each fault with its remedy.

    Looks at GPUs and driver, memory, disk, packages, Slurm, Kubernetes and hub access. Needs
    neither a GPU nor torch. The exit code tells the worst finding: 0 for remarks, 6 for faults.
    """

    as_json: Json = False
