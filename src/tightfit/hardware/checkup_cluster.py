"""Slurm, Kubernetes and the model hub: reachable or not, and with which rights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tightfit.core.errors import EnvironmentFaultError
from tightfit.hardware.findings import Finding, Status
from tightfit.hardware.machine import model_cache
from tightfit.hardware.surroundings import Surroundings

TIMEOUT_SECONDS = 3.0
_TRUE = ("1", "true", "yes", "on")
_TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def check_slurm(here: Surroundings) -> list[Finding]:
    """Whether `sinfo` answers, and with which partitions."""
    try:
        version = here.run(("sinfo", "--version"), TIMEOUT_SECONDS).strip()
    except EnvironmentFaultError:
        return [_found("Slurm", Status.INFO, "not on this machine")]
    try:
        partitions = here.run(("sinfo", "-h", "-o", "%R"), TIMEOUT_SECONDS).split()
    except EnvironmentFaultError as fault:
        detail = f"{version} is installed, but its controller does not answer: {fault.problem}"
        return [_found("Slurm", Status.WARNING, detail, "scontrol ping    (is slurmctld up?)")]
    names = ", ".join(dict.fromkeys(partitions)) or "none that this user may use"
    return [_found("Slurm", Status.OK, f"{version}; partitions: {names}")]


def check_kubernetes(here: Surroundings) -> list[Finding]:
    """Whether `kubectl` answers. Silence is a warning only where a cluster is configured."""
    try:
        here.run(("kubectl", "version", "--client"), TIMEOUT_SECONDS)
    except EnvironmentFaultError:
        return [_found("Kubernetes", Status.INFO, "no kubectl on this machine")]
    try:
        ask = ("kubectl", "get", "nodes", "-o", "name", "--request-timeout=2s")
        nodes = here.run(ask, TIMEOUT_SECONDS).split()
    except EnvironmentFaultError as fault:
        if not _is_configured(here):
            return [_found("Kubernetes", Status.INFO, "kubectl is here, no cluster is configured")]
        detail = f"the configured cluster does not answer: {fault.problem}"
        return [_found("Kubernetes", Status.WARNING, detail, "kubectl cluster-info")]
    return [_found("Kubernetes", Status.OK, f"{len(nodes)} nodes")]


def _is_configured(here: Surroundings) -> bool:
    paths = here.environ.get("KUBECONFIG", "").split(":")
    home = here.environ.get("HOME", "")
    candidates = [*filter(None, paths), f"{home}/.kube/config"]
    return "KUBERNETES_SERVICE_HOST" in here.environ or any(
        here.has_file(Path(path)) for path in candidates
    )


def check_hub(here: Surroundings) -> Iterator[Finding]:
    """Token and offline switches. The token itself is never shown."""
    where = _token_place(here)
    yield Finding(
        area="hub",
        name="token",
        status=Status.OK if where else Status.INFO,
        detail=f"found in {where}" if where else "none; gated models cannot be downloaded",
        remedy=None if where else "hf auth login",
    )
    offline = [name for name in _OFFLINE_VARIABLES if _is_on(here.environ, name)]
    yield Finding(
        area="hub",
        name="offline mode",
        status=Status.INFO if offline else Status.OK,
        detail=f"on, by {', '.join(offline)}: only cached models" if offline else "off",
        remedy=f"to download: unset {' '.join(offline)}" if offline else None,
    )


def _token_place(here: Surroundings) -> str | None:
    for name in _TOKEN_VARIABLES:
        if here.environ.get(name, "").strip():
            return f"the variable {name}"
    stated = here.environ.get("HF_TOKEN_PATH")
    home = here.environ.get("HF_HOME")
    base = model_cache({"HF_HOME": home} if home else {**here.environ, **_NO_HUB}).parent
    path = Path(stated) if stated else base / "token"
    return f"the file {path}" if here.has_file(path) else None


_NO_HUB = {"HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": ""}
"""The token stays at its default place where only the cache was moved."""


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().casefold() in _TRUE


def _found(name: str, status: Status, detail: str, remedy: str | None = None) -> Finding:
    return Finding(area="cluster", name=name, status=status, detail=detail, remedy=remedy)
