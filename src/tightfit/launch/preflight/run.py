"""A whole preflight: ask the nodes, judge, report."""

from __future__ import annotations

import shlex

from tightfit.launch.preflight.crew import AGENT, Start
from tightfit.launch.preflight.gather import Gathering, Request, Tell
from tightfit.launch.preflight.report import PreflightReport, conclude
from tightfit.launch.site import Site

DROPPED_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
"""A job's own, which torch would follow in place of what it is told."""


def plan_start(site: Site, prefix: str) -> Start:
    """The agent's command as the site starts everything: set-up lines first, then its Python."""
    argv = (*_container(site), site.interpreter, "-m", AGENT)
    unset = [word for name in DROPPED_VARIABLES for word in ("-u", name)]
    if site.setup:
        lines = "\n".join([*site.setup, f"exec {shlex.join(argv)}"])
        argv = ("bash", "-c", lines)
    if site.container_image is not None and prefix.startswith("srun "):
        prefix = f"{prefix} --container-image={shlex.quote(site.container_image)}"
    return Start(prefix=prefix, argv=("env", *unset, *argv), env=site.environment)


def _container(site: Site) -> list[str]:
    """Words before the command; an image alone is srun's to start (Pyxis)."""
    return shlex.split(site.container) if site.container and not site.container_image else []


def run_preflight(request: Request, tell: Tell) -> PreflightReport:
    """In less than a minute, whatever is wrong."""
    return conclude(Gathering(request, tell).run())
