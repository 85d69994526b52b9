"""Finding: one thing that a check looked at, its status, and what to do about it."""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict


class Status(str, Enum):
    """How a finding stands, best first."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    FAULT = "fault"


class Finding(BaseModel):
    """One line of the checkup."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    area: str
    """`python`, `gpu`, `memory`, `disk`, `packages`, `cluster` or `hub`."""
    name: str
    status: Status
    detail: str
    remedy: str | None = None
    """The next step; every warning and fault has one."""
