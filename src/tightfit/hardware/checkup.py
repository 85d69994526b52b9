"""The checkup behind `tightfit doctor`: what is here, what is wrong, and what to do about it.

Each finding is `ok`, `info` (worth knowing), `warning` (works, but badly or not for
long) or `fault` (something will not work). The exit code is 6 where there is a fault,
and 0 otherwise: warnings do not fail a script. Nothing heavy is imported: torch and
its companions are known by their installed metadata alone.
"""

from __future__ import annotations

import platform
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from pydantic import BaseModel, ConfigDict

from tightfit.core.errors import EnvironmentFaultError
from tightfit.hardware.checkup_cluster import check_hub, check_kubernetes, check_slurm
from tightfit.hardware.checkup_gpus import check_gpus, check_services
from tightfit.hardware.checkup_machine import check_disks, check_machine
from tightfit.hardware.checkup_packages import check_packages
from tightfit.hardware.findings import Finding, Status
from tightfit.hardware.surroundings import Surroundings

__all__ = ["Checkup", "Finding", "Status", "run_checkup"]


class Checkup(BaseModel):
    """All findings, in the order they are shown."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    findings: tuple[Finding, ...]
    worst: Status
    exit_code: int
    """6 where there is a fault, else 0."""

    def count(self, status: Status) -> int:
        return Counter(finding.status for finding in self.findings)[status]


def run_checkup(surroundings: Surroundings | None = None) -> Checkup:
    """Look at everything. Takes a few seconds at most, whatever hangs."""
    here = surroundings or Surroundings()
    # The two that wait for a network run beside the rest.
    with ThreadPoolExecutor(max_workers=2) as pool:
        slurm = pool.submit(check_slurm, here)
        kubernetes = pool.submit(check_kubernetes, here)
        driver = here.read_gpus()
        findings = [
            *_check_python(here),
            *check_gpus(here, driver),
            *check_services(here, driver),
            *check_machine(here, driver),
            *check_disks(here),
            *check_packages(here, driver),
            *slurm.result(),
            *kubernetes.result(),
            *check_hub(here),
        ]
    return _conclude(findings)


def _check_python(here: Surroundings) -> Iterator[Finding]:
    version = ".".join(map(str, here.python_version))
    place = "a virtual environment" if sys.prefix != sys.base_prefix else "the system's Python"
    yield Finding(
        area="python",
        name="Python",
        status=Status.OK,
        detail=f"{version} in {place}, on {platform.system()} {platform.release()}",
    )


def _conclude(findings: list[Finding]) -> Checkup:
    worst = max((finding.status for finding in findings), key=list(Status).index)
    code = EnvironmentFaultError.exit_code if worst is Status.FAULT else 0
    return Checkup(findings=tuple(findings), worst=worst, exit_code=code)
