"""Finding: one thing that a check looked at, its status, and what to do about it."""

from __future__ import annotations

from enum import Enum

from tightfit.core.frozen import Frozen


class Status(str, Enum):
    """How a finding stands, best first."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    FAULT = "fault"


class Finding(Frozen):
    """One line of the checkup."""

    area: str
    """`python`, `gpu`, `memory`, `disk`, `packages`, `cluster` or `hub`."""
    name: str
    status: Status
    detail: str
    remedy: str | None = None
    """The next step; every warning and fault has one."""
