"""What a plan says of itself: its levers and the stages of its job."""

from __future__ import annotations

from planning_cases import make_cluster, make_request

from tightfit.planning.plan import list_stages
from tightfit.planning.search import search


def test_recomputation_is_told_with_its_price() -> None:
    plan = search(make_request(), make_cluster((1, "T4"))).plans[0]
    line = next(text for text in plan.why if text.startswith("recomputing activations"))
    assert "x slower" in line
    assert "without it the job does not fit" in line


def test_stages_keep_the_largest_moment() -> None:
    plan = search(make_request(), make_cluster((1, "A100-80GB"))).plans[0]
    stages = list_stages(plan.estimate)
    moments = {phase.name: phase.peak_reserved_bytes for phase in plan.estimate.phases}
    assert stages["backward"] == max(moments["backward"], moments["backward_end"])
    assert "inference" not in stages
