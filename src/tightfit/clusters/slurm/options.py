"""Options of `submit` that Slurm alone takes; they win over site.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from tightfit.core.options import text_option


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    account: str | None = text_option("NAME", "Slurm: whom to charge.", example="proj042")
    qos: str | None = text_option("NAME", "Slurm: quality of service.", example="normal")
    constraint: str | None = text_option("FEATURES", "Slurm: what nodes must have.", example="ib")
    reservation: str | None = text_option("NAME", "Slurm: nodes set aside.", example="course")
