"""Settings of the user's own: which one leaves no plan, and which one only costs time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planning_cases import make_cluster, make_request

from tightfit.planning.search import find_conflicting_settings, search

RTX_4090 = make_cluster((1, "RTX-4090"))
H200 = make_cluster((1, "H200"))


def _find(fixed: dict[str, Any], **more: Any) -> tuple[str, ...]:
    request = make_request(method="lora", fixed=fixed, **more)
    assert not search(request, RTX_4090).plans
    return find_conflicting_settings(request, RTX_4090, list(fixed))


def test_the_one_setting_that_leaves_no_plan_is_found() -> None:
    fixed = {"packing": False, "micro_batch": 64, "lora_rank": 8}
    assert _find(fixed) == ("micro_batch",)


def test_settings_that_only_together_leave_no_plan_are_found_together_and_no_other() -> None:
    """Either of two is too much: one of them left out is not enough."""
    fixed = {"packing": True, "micro_batch": 64, "lora_rank": 8, "fp8_gradients": True}
    assert _find(fixed) == ("micro_batch", "fp8_gradients")


def test_of_two_that_would_do_the_first_is_found() -> None:
    """Eight sequences fit with recomputing, and fewer of them without."""
    fixed = {"checkpointing": False, "micro_batch": 8}
    assert _find(fixed) == ("checkpointing",)
    assert _find(dict(reversed(fixed.items()))) == ("micro_batch",)


def test_what_the_hardware_lacks_is_no_error_of_a_setting() -> None:
    assert _find({"packing": True}, model="Llama-2-70b") == ()


def test_only_what_is_named_is_blamed() -> None:
    request = make_request(method="lora", fixed={"micro_batch": 64})
    assert find_conflicting_settings(request, RTX_4090, []) == ()
    assert find_conflicting_settings(request, RTX_4090, ["packing"]) == ()


def test_a_lever_that_was_asked_for_and_costs_time_is_warned_of() -> None:
    asked = make_request("t5-small", method="full", fixed={"fp8_gradients": True})
    slow = search(asked, H200).plans[0]
    [warning] = [line for line in slow.warnings if line.startswith("fp8 gradients: asked for")]
    assert warning.endswith("leave fp8_gradients out")
    fast = search(replace(asked, fixed={}), H200).plans[0]
    assert fast.estimate.time.tokens_per_second > 2 * slow.estimate.time.tokens_per_second


@pytest.mark.parametrize("fixed", [{}, {"checkpointing": True}])
def test_no_word_of_a_lever_that_makes_the_job_fit(fixed: dict[str, Any]) -> None:
    """On a T4 it does; nor of one that nobody asked for."""
    request = make_request(method="qlora", fixed=fixed)
    plan = search(request, make_cluster((1, "T4"))).plans[0]
    assert plan.strategy.checkpointing
    assert not any("asked for" in line for line in plan.warnings)


@pytest.mark.parametrize(
    ("fixed", "leave"),
    [
        ({"checkpointing": True}, "leave checkpointing out"),
        ({"recomputed_layers": 8}, "leave recomputed_layers out"),
        (
            {"checkpointing": True, "recomputed_layers": 8},
            "leave checkpointing and recomputed_layers out",
        ),
    ],
)
def test_a_lever_that_is_not_needed_is_warned_of_once_it_is_asked_for(
    fixed: dict[str, Any], leave: str
) -> None:
    plan = search(make_request(method="lora", fixed={**fixed, "micro_batch": 1}), H200).plans[0]
    reported = [line for line in plan.warnings if line.startswith("recomputing activations: asked")]
    assert [line.partition(": leave")[2] for line in reported] == [leave.removeprefix("leave")]
