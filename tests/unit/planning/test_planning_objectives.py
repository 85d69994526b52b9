"""Plans of preference objectives: pairs, the reference as a lever, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from planning_cases import SHORT_ROWS, make_cluster, make_request

from tightfit.api.estimate import estimate
from tightfit.api.plan import plan as plan_job
from tightfit.core.objectives import Objective
from tightfit.core.strategy import Strategy
from tightfit.estimation.result import Verdict
from tightfit.planning.fallback import list_fallbacks
from tightfit.planning.plan import Plan
from tightfit.planning.rules import Case, find_violations
from tightfit.planning.search import SearchResult, search

PREFERENCES = [one for one in Objective if one is not Objective.SFT]
COPIED = [one for one in PREFERENCES if one.record.needs_reference]
of_each = pytest.mark.parametrize("objective", PREFERENCES)


def plan(
    objective: Objective, *cards: Any, fixed: dict[str, Any] | None = None, **request: Any
) -> SearchResult:
    return search(
        make_request(fixed={"objective": objective} | (fixed or {}), **request),
        make_cluster(*(cards or ((1, "A100-80GB"),))),
    )


def first(found: SearchResult) -> Plan:
    assert found.plans, found.failure
    return found.plans[0]


@of_each
def test_every_plan_is_of_the_objective_and_says_so(objective: Objective) -> None:
    found = plan(objective, (4, "V100-32GB"))
    assert len({one.strategy.method for one in found.plans}) == 2
    for one in found.plans:
        assert one.strategy.objective is objective
        assert one.summary.startswith(f"{objective.value} ")
        assert Plan.model_validate_json(one.model_dump_json()) == one
        asks = one.strategy.runs_reference or one.strategy.precompute_reference
        assert asks == objective.record.needs_reference
        assert any("reference" in line for line in one.why) == asks or one is not found.plans[0]


@of_each
def test_a_pair_needs_the_memory_and_time_of_its_sequences(objective: Objective) -> None:
    """Without a reference a step of pairs is a step of twice as many sequences."""
    strategy = {"micro_batch": 2, "grad_accum": 2, "checkpointing": False, "loss": "plain"}
    fixed = {**strategy, "precompute_reference": objective.record.needs_reference}
    pairs = first(plan(objective, fixed=fixed, method="lora", effective_batch=4))
    times = objective.record.num_sequences
    answers = make_request(
        fixed={**strategy, "micro_batch": 2 * times}, method="lora", effective_batch=4 * times
    )
    plain = first(search(answers, make_cluster((1, "A100-80GB"))))
    ours, theirs = pairs.estimate, plain.estimate
    assert ours.gpu.peak_allocated_bytes == theirs.gpu.peak_allocated_bytes
    if not objective.record.needs_kl:
        assert ours.time.seconds_per_step == pytest.approx(theirs.time.seconds_per_step)
        assert ours.time.tokens_per_second == pytest.approx(theirs.time.tokens_per_second)


@pytest.mark.parametrize("objective", COPIED)
def test_the_reference_is_computed_before_training_where_that_is_less_work(
    objective: Objective,
) -> None:
    """Over several epochs, and not for a run that ends before it has seen the rows once."""
    job: dict[str, Any] = {"profile": SHORT_ROWS, "method": "lora"}
    thrice = first(plan(objective, num_epochs=3, **job))
    short = first(plan(objective, max_steps=50, **job))
    assert thrice.strategy.precompute_reference
    assert not short.strategy.precompute_reference
    (won,) = (line for line in thrice.why if line.startswith("reference before training:"))
    assert "x faster" in won
    before = thrice.estimate.time.reference_seconds_per_step
    assert thrice.estimate.time.run_seconds(3) == pytest.approx(
        (3 * thrice.estimate.time.seconds_per_step + before)
        * (thrice.estimate.time.steps_per_epoch or 0)
    )


@pytest.mark.parametrize("objective", COPIED)
def test_full_tuning_copies_the_reference_unless_it_is_computed_before(
    objective: Objective,
) -> None:
    job: dict[str, Any] = {"method": "full", "model": "Llama-3.2-1B"}
    both = [
        first(plan(objective, fixed={"precompute_reference": is_before}, **job))
        for is_before in (False, True)
    ]
    held = [one.estimate.gpu.components.get("reference", 0) for one in both]
    assert held == [2 * both[0].model.num_params, 0]
    assert first(plan(objective, **job)).strategy.precompute_reference


def test_adapters_have_no_copy_and_out_of_memory_drops_one() -> None:
    lora = first(plan(Objective.DPO, fixed={"precompute_reference": False}, method="lora"))
    assert "reference" not in lora.estimate.gpu.components
    copied = first(
        plan(
            Objective.DPO,
            fixed={"precompute_reference": False, "loss_chunk_factor": 1},
            method="full",
            model="Llama-3.2-1B",
        )
    )
    less = list_fallbacks(copied)[0]
    assert less.strategy.precompute_reference
    assert less.why == ("after out of memory, reference before training: -2.3 GiB per GPU",)


def test_the_fused_loss_needs_no_kernels() -> None:
    """It is torch's own: it runs on a CPU, and on a card too old for Triton."""
    for card in ("P100-PCIE-16GB", "A100-80GB"):
        node = make_cluster((1, card)).groups[0].node
        for objective, is_illegal in ((Objective.DPO, False), (Objective.SFT, card[0] == "P")):
            strategy = Strategy(objective=objective, loss="fused", weights="fp32", compute="fp32")
            case = Case(
                spec=make_request("Llama-3.2-1B").spec, strategy=strategy, node=node, num_nodes=1
            )
            found = [violation.rule for violation in find_violations(case)]
            assert ("triton-capability" in found) == is_illegal, (card, objective)


@pytest.mark.parametrize("objective", [Objective.DPO, Objective.IPO, Objective.KTO])
def test_trl_runs_the_reference_beside_what_the_model_keeps(objective: Objective) -> None:
    """And objectives that nobody looked at there are refused."""
    job: dict[str, Any] = {
        "on": "A100-80GB",
        "method": "lora",
        "weights": "bf16",
        "micro_batch": 2,
        "seq_len": 1024,
        "objective": objective.value,
        "checkpointing": False,
        "trainer": "trl",
    }
    late, before = (
        estimate("Llama-2-7b", **job, precompute_reference=is_before).estimate
        for is_before in (False, True)
    )
    assert late.gpu.peak_allocated_bytes > before.gpu.peak_allocated_bytes
    assert late.gpu.peak_phase == "reference"
    refused = estimate("Llama-2-7b", **job | {"objective": "orpo"}).estimate
    assert refused.verdict is Verdict.ILLEGAL
    assert "TRL 1.16 was not looked at for orpo" in refused.reason
    found = plan_job("Llama-2-7b", on="A100-80GB", trainer="trl", objective=objective.value)
    assert not any(one.strategy.packing for one in found.plans)
