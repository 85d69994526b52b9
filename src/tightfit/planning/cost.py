"""What a plan's hardware costs to rent, at the catalogue's prices."""

from __future__ import annotations

from tightfit.estimate.result import Estimate
from tightfit.hardware.types import Gpu, Price
from tightfit.planning.plan import Cost

HOURS_PER_MONTH = 730
"""As the clouds bill a month: 8760 / 12."""


def find_price(gpu: Gpu, *, clouds: frozenset[str] | None = None) -> Price | None:
    """The cheapest cloud by its own median on-demand price; only `clouds` where they are named."""
    return gpu.cheapest_at(clouds)


def estimate_cost(
    *,
    gpu: Gpu,
    num_gpus: int,
    estimate: Estimate,
    num_epochs: float,
    clouds: frozenset[str] | None = None,
) -> Cost | None:
    """Rent of `num_gpus` for the run. Leaves out host, disk, traffic and the time to set up."""
    price = find_price(gpu, clouds=clouds)
    if price is None:
        return None
    usd_per_hour = price.usd_per_gpu_hour * num_gpus
    epoch = estimate.time.seconds_per_epoch
    return Cost(
        usd_per_hour=usd_per_hour,
        usd_per_run=None if epoch is None else usd_per_hour * epoch * num_epochs / 3600,
        source=f"{price.cloud}, {price.date}, median on demand: {price.source}",
    )
