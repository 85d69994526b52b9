"""Base classes of everything on disk: pydantic models that are frozen and refuse unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable; an unknown key is an error. Validators are built at first use: most classes that a
    command loads make no object in it."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class FiniteFrozen(Frozen):
    """The same, and no number is infinite or NaN."""

    model_config = ConfigDict(allow_inf_nan=False)
