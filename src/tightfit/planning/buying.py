"""What to rent: the cheapest catalogue hardware that does a job, GPU by GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tightfit.core.errors import DoesNotFitError
from tightfit.estimation.result import Verdict
from tightfit.hardware.catalogue import list_gpus
from tightfit.hardware.types import Cluster, Gpu, Node, NodeGroup
from tightfit.planning.plan import HOURS_PER_MONTH, Plan, estimate_cost, find_price, list_stages
from tightfit.planning.request import JobRequest
from tightfit.planning.search import search

COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One way to rent the job: its plan and its price."""

    gpu: Gpu
    num_gpus: int
    plan: Plan
    usd_per_hour: float
    usd_per_run: float | None
    """None where no dataset was given."""
    usd_per_million_tokens: float
    usd_per_month: float
    price_source: str
    stages: dict[str, int]
    """Peak bytes per GPU by stage of the job, for the chart."""

    @property
    def price(self) -> float:
        """What offers are sorted by: the run where its length is known, else a million tokens."""
        return self.usd_per_million_tokens if self.usd_per_run is None else self.usd_per_run


def buying_guide(
    request: JobRequest,
    *,
    gpus: Iterable[Gpu] | None = None,
    max_gpus: int = 8,
    clouds: Iterable[str] | None = None,
) -> list[Offer]:
    """The cheapest way per GPU model, cheapest first: one node of 1, 2, 4 or 8 GPUs.

    Prices are the cheapest cloud's median on-demand rate; host, disk and traffic are
    left out. The search is coarse: no offload, the levers that nearly always win.
    Raises DoesNotFitError where nothing in the catalogue does the job.
    """
    allowed = None if clouds is None else frozenset(clouds)
    # What the user fixed, less what belongs to the hardware they have.
    layout = ("num_nodes", "gpus_per_node", "sharding", "offload")
    fixed = {name: value for name, value in request.fixed.items() if name not in layout}
    free = replace(request, fixed=fixed)
    tried = list_gpus() if gpus is None else list(gpus)
    priced = [gpu for gpu in tried if find_price(gpu, clouds=allowed) is not None]
    found = (_cheapest_offer(free, gpu, max_gpus=max_gpus, clouds=allowed) for gpu in priced)
    offers = [offer for offer in found if offer is not None]
    if not offers:
        raise _refuse(free, [gpu for gpu in tried if gpu.prices], max_gpus)
    return sorted(offers, key=lambda offer: (offer.price, offer.gpu.name))


def _refuse(request: JobRequest, tried: list[Gpu], max_gpus: int) -> DoesNotFitError:
    """Say what the largest node of all lacks."""
    problem = "No GPU with a price was given."
    remedy = "use --method qlora, a shorter --seq-len, or more GPUs per node"
    if tried:
        gpu = max(tried, key=lambda gpu: gpu.memory_bytes)
        found = search(request, _rent(gpu, max_gpus), num_plans=1, is_coarse=True)
        problem = f"No node of up to {max_gpus} GPUs does this job. {found.failure or ''}".rstrip()
        if found.failure and found.shortfall is None:
            remedy = "change or leave out the setting that this names"
    return DoesNotFitError(problem, remedy=remedy)


def _rent(gpu: Gpu, count: int) -> Cluster:
    node = Node(gpu=gpu, num_gpus=count)
    group = NodeGroup(name=f"{count}x{gpu.name}", node=node, num_nodes=1)
    return Cluster(groups=(group,), source="catalogue")


def _cheapest_offer(
    request: JobRequest, gpu: Gpu, *, max_gpus: int, clouds: frozenset[str] | None
) -> Offer | None:
    """Try more GPUs while that is cheaper; a tight fit counts only where nothing better does."""

    def preference(offer: Offer) -> tuple[bool, float]:
        return (offer.plan.estimate.verdict is not Verdict.FITS, offer.price)

    best: Offer | None = None
    for count in COUNTS:
        if count > max_gpus:
            break
        offer = _offer(request, gpu, count, clouds)
        if offer is None:
            continue
        if best is None or preference(offer) < preference(best):
            best = offer
        elif best.plan.estimate.verdict is Verdict.FITS:
            break
    return best


def _offer(
    request: JobRequest, gpu: Gpu, count: int, clouds: frozenset[str] | None
) -> Offer | None:
    plans = search(request, _rent(gpu, count), num_plans=1, is_coarse=True).plans
    if not plans:
        return None
    plan = plans[0]
    cost = estimate_cost(
        gpu=gpu,
        num_gpus=count,
        estimate=plan.estimate,
        num_epochs=plan.num_epochs,
        clouds=clouds,
    )
    if cost is None:
        return None
    tokens_per_hour = plan.estimate.time.tokens_per_second * 3600
    return Offer(
        gpu=gpu,
        num_gpus=count,
        plan=plan.model_copy(update={"cost": cost}),
        usd_per_hour=cost.usd_per_hour,
        usd_per_run=cost.usd_per_run,
        usd_per_million_tokens=cost.usd_per_hour / tokens_per_hour * 1e6,
        usd_per_month=cost.usd_per_hour * HOURS_PER_MONTH,
        price_source=cost.source,
        stages=list_stages(plan.estimate),
    )
