"""Which hardware is meant where `--on` was not given: this machine, else what the verb says."""

from __future__ import annotations

from tightfit.core.errors import UsageError, UserError
from tightfit.hardware.resolve import resolve_hardware
from tightfit.hardware.types import Cluster

DEFAULT_CARD = "RTX-4090"
"""What an estimate is made against where no GPU is here and none was named."""


def choose_cluster_or_card(on: str | None) -> tuple[Cluster, tuple[str, ...]]:
    """For an estimate, which is useful without any GPU: a common card, and a note that says so."""
    found = _find(on)
    if found is not None:
        return found, () if on else ("Estimated on this machine (--on was not given).",)
    cluster = resolve_hardware(DEFAULT_CARD)
    card = cluster.groups[0].node.gpu.name
    return cluster, (f"No GPU is here and --on was not given: estimated on one {card}.",)


def choose_cluster(on: str | None, *, command: str) -> Cluster:
    """For a plan, which is made for hardware that exists."""
    found = _find(on)
    if found is None:
        raise UsageError(
            "No GPU is here, and --on was not given.",
            remedy=f"{command} --on 4xV100-32GB    (--on cpu for this machine; --buy to be told "
            "what to rent)",
        )
    return found


def _find(on: str | None) -> Cluster | None:
    """What was named, else the GPUs of this machine. Its CPU is used only where it is asked for:
    who plans on a laptop mostly plans for another machine."""
    if on is not None:
        return with_measured_rates(resolve_hardware(on))
    try:
        cluster = resolve_hardware("here")
    except UserError:
        return None
    return None if cluster.groups[0].node.gpu.is_cpu else with_measured_rates(cluster)


def with_measured_rates(cluster: Cluster) -> Cluster:
    """This machine by what `tightfit calibrate` found; hardware that is only named as it is."""
    if cluster.source != "here":
        return cluster
    from tightfit.ledger.calibrations import apply_calibrations

    return apply_calibrations(cluster)
