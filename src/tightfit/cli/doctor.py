"""`tightfit doctor`: what is here, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.cli.flags import takes
from tightfit.cli.options import Json

EXAMPLES = """\b
Examples:
  tightfit doctor
  tightfit doctor --json
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFlags:
    """Options of `tightfit doctor`."""

    as_json: Json = False


@takes(DoctorFlags)
def doctor(flags: DoctorFlags) -> None:
    """Check this machine: GPUs, driver, memory, disk, packages, Slurm, Kubernetes, hub access.

    Every fault comes with its remedy. Needs neither a GPU nor torch.
    """
