"""What ran out of memory here before is not proposed again."""

from __future__ import annotations

from planning_cases import make_cluster, make_request

from tightfit.core.strategy import Strategy
from tightfit.estimation.memory import estimate_step_peak_bytes
from tightfit.planning.filter import KnownOutcome
from tightfit.planning.search import search

CLUSTER = make_cluster((1, "RTX 4090"))
REQUEST = make_request(method="lora")
BEST = search(REQUEST, CLUSTER).plans[0]


def _outcome(**fields: object) -> KnownOutcome:
    reported: dict[str, object] = {
        "model_name": BEST.model.name,
        "gpu_name": BEST.hardware.node.gpu.name,
        "strategy": BEST.strategy,
        "status": "out-of-memory",
        "peak_bytes": None,
        "date": "2026-03-04T10:00:00",
    }
    return KnownOutcome(**(reported | fields))  # type: ignore[arg-type]


def _need(strategy: Strategy) -> int:
    return estimate_step_peak_bytes(REQUEST.spec, strategy)


def test_what_failed_and_all_that_needs_as_much_is_left_out() -> None:
    result = search(REQUEST, CLUSTER, known=[_outcome()])
    assert result.plans
    assert all(_need(plan.strategy) < _need(BEST.strategy) for plan in result.plans)


def test_the_reason_names_the_date() -> None:
    smallest = BEST.strategy.model_copy(
        update={"micro_batch": 1, "checkpointing": True, "grad_accum": 16}
    )
    result = search(REQUEST, CLUSTER, known=[_outcome(strategy=smallest)])
    reasons = [found.reason for found in result.excluded if found.rule == "ran-out-before"]
    assert reasons
    assert all("2026-03-04" in reason for reason in reasons)


def test_another_card_or_model_or_a_success_says_nothing() -> None:
    known = [
        _outcome(gpu_name="Tesla T4"),
        _outcome(model_name="another"),
        _outcome(status="finished"),
    ]
    assert search(REQUEST, CLUSTER, known=known).plans[0].strategy == BEST.strategy


def test_a_later_success_at_the_same_need_undoes_a_failure() -> None:
    later = _outcome(status="finished", date="2026-03-05T10:00:00")
    earlier = _outcome(status="finished", date="2026-03-03T10:00:00")
    assert search(REQUEST, CLUSTER, known=[_outcome(), later]).plans[0].strategy == BEST.strategy
    assert search(REQUEST, CLUSTER, known=[_outcome(), earlier]).plans[0].strategy != BEST.strategy
