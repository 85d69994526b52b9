"""Advice from a traced peak: what touches it, is legal there, and saves when traced."""

from __future__ import annotations

from typing import Any

import pytest
from planning_cases import make_cluster

from tightfit.api.training.settings import read_settings
from tightfit.core.attention import Attention
from tightfit.core.optimizers import Optimizer
from tightfit.core.profiles import Peak, PeakTensor
from tightfit.core.settings import Loss, Method, Sharding
from tightfit.core.strategy import Strategy
from tightfit.core.units import GIB
from tightfit.models.resolve import resolve_model
from tightfit.planning.advice import Alternative, judge_alternatives, list_alternatives
from tightfit.planning.rules import Case, find_violations
from tightfit.trace.result import Timeline, TracedMemory


def make_case(gpu: str = "A100-80GB", *, model: str = "Llama-2-7b", **fields: Any) -> Case:
    strategy = Strategy(**fields)
    node = make_cluster((max(strategy.gpus_per_node, 1), gpu)).groups[0].node
    return Case(spec=resolve_model(model), strategy=strategy, node=node, num_nodes=1)


def make_peak(stage: str = "steady step, backward", *tensors: PeakTensor, **gib: float) -> Peak:
    components = {name: int(size * GIB) for name, size in gib.items()}
    return Peak(stage=stage, op="aten.mm", module="", components=components, tensors=tensors)


def make_traced(peak_gib: float, *, survives_gib: float | None = None) -> TracedMemory:
    return TracedMemory(
        peak_allocated_bytes=int(peak_gib * GIB),
        peak_reserved_bytes=int(peak_gib * GIB),
        smallest_capacity_bytes=int((survives_gib or peak_gib) * GIB),
        stages=(),
        peak=make_peak(),
        timeline=Timeline(categories=(), bytes=(), stages=()),
        num_layers=32,
        num_traced_layers=4,
        seconds=1.0,
        versions={},
    )


def words_of(found: list[Alternative]) -> list[str]:
    return [alternative.words for alternative in found]


def test_temporaries_of_the_update_call_for_the_fused_optimizer() -> None:
    case = make_case(method=Method.FULL, optimizer=Optimizer.ADAMW_FOREACH)
    peak = make_peak("steady step, update", weights=12, gradients=12, optimizer=24, temporary=13)
    found = list_alternatives(case, peak)

    fused = next(alternative for alternative in found if alternative.words == "fused AdamW")
    assert fused.setting == {"optimizer": "adamw"}
    assert fused.strategy.optimizer is Optimizer.ADAMW
    in_backward = peak.model_copy(update={"stage": "steady step, backward"})
    assert "fused AdamW" not in words_of(list_alternatives(case, in_backward))
    assert "fused AdamW" not in words_of(list_alternatives(make_case(method=Method.FULL), peak))


def test_logits_call_for_a_loss_that_holds_fewer() -> None:
    peak = make_peak(weights=13, logits=8)
    found = words_of(list_alternatives(make_case(loss=Loss.PLAIN), peak))
    assert found.index("fused loss") < found.index("chunked loss")
    chunked = words_of(list_alternatives(make_case(loss=Loss.CHUNKED), peak))
    assert "chunked loss" not in chunked
    assert "fused loss" in chunked
    assert "loss" not in " ".join(words_of(list_alternatives(make_case(loss=Loss.FUSED), peak)))
    wide = make_case(loss=Loss.FUSED, loss_chunk_factor=4)
    [narrow] = [a for a in list_alternatives(wide, peak) if "loss" in a.words]
    assert (narrow.words, narrow.setting) == ("small loss chunks", {"loss_chunk_factor": "1"})
    # Granite scales its logits.
    granite = make_case(model="PowerLM-3b")
    assert "fused loss" not in words_of(list_alternatives(granite, peak))
    assert "chunked loss" in words_of(list_alternatives(granite, peak))


def test_activations_call_for_recomputing_them() -> None:
    peak = make_peak(weights=13, activations=30)
    found = {a.words: a for a in list_alternatives(make_case(checkpointing=False), peak)}
    assert found["checkpointing"].setting == {"checkpointing": "true"}
    assert found["checkpointing of 16 layers"].setting == {
        "checkpointing": "true",
        "recomputed_layers": "16",
    }
    some = make_case(checkpointing=True, recomputed_layers=20)
    rest = {a.words: a for a in list_alternatives(some, peak)}
    assert rest["checkpointing"].setting["recomputed_layers"] == "32"
    assert rest["checkpointing"].expected_bytes > 0
    assert "checkpointing of 16 layers" not in rest
    assert "checkpointing" not in words_of(list_alternatives(make_case(), peak))


def test_scores_in_memory_call_for_sdpa() -> None:
    scores = PeakTensor(
        num_bytes=10 * GIB,
        count=32,
        category="activations",
        op="aten._softmax",
        module="model.layers.*.self_attn",
        shape=(2, 32, 2048, 2048),
        dtype="float32",
    )
    peak = make_peak("steady step, backward", scores, weights=13, activations=12)
    eager = make_case(attention=Attention.EAGER)
    assert "sdpa attention" in words_of(list_alternatives(eager, peak))
    assert "sdpa attention" not in words_of(list_alternatives(make_case(), peak))
    square_weights = peak.model_copy(
        update={"tensors": (scores.model_copy(update={"category": "weights"}),)}
    )
    assert "sdpa attention" not in words_of(list_alternatives(eager, square_weights))
    # On a V100, SDPA needs whole keys for grouped heads, or holds the scores itself.
    early = make_case(
        "V100-32GB", model="Llama-3.2-1B", attention="eager", weights="fp16", compute="fp16",
        adapter_dtype="fp32", autocast=True,
    )  # fmt: skip
    found = {a.words: a for a in list_alternatives(early, peak)}
    assert found["sdpa attention"].strategy.repeat_keys
    soft_capped = make_case(model="gemma-2-2b", attention=Attention.EAGER)
    assert "sdpa attention" not in words_of(list_alternatives(soft_capped, peak))


def test_state_calls_for_8_bits_or_shards() -> None:
    peak = make_peak(weights=13, gradients=13, optimizer=26, activations=1)
    alone = list_alternatives(make_case(method=Method.FULL), peak)
    assert words_of(alone)[0] == "8-bit optimizer state"
    assert alone[0].expected_bytes == pytest.approx(13 * GIB)  # bf16 moments become one byte each
    many = make_case(method=Method.FULL, sharding=Sharding.DDP, gpus_per_node=8)
    assert words_of(list_alternatives(many, peak))[0] == "fsdp"
    sharded = make_case(method=Method.FULL, sharding=Sharding.FSDP, gpus_per_node=8)
    found = words_of(list_alternatives(sharded, peak))
    assert "fsdp" not in found
    assert "8-bit optimizer state" not in found  # fails on FSDP's shards
    zero = make_case(method=Method.FULL, sharding=Sharding.ZERO2, gpus_per_node=8)
    assert "zero3" in words_of(list_alternatives(zero, peak))


def test_the_batch_is_halved_and_its_sequences_stay() -> None:
    peak = make_peak(weights=13, activations=10, logits=4)
    for size, steps, expected in ((8, 2, (4, 4)), (3, 2, (1, 6)), (6, 1, (3, 2)), (5, 1, (1, 5))):
        found = list_alternatives(make_case(micro_batch=size, grad_accum=steps), peak)
        half = next(a for a in found if a.words.startswith("micro-batch"))
        assert (half.strategy.micro_batch, half.strategy.grad_accum) == expected
    assert not any(
        words.startswith("micro-batch") for words in words_of(list_alternatives(make_case(), peak))
    )


def test_weights_of_adapters_call_for_nf4() -> None:
    peak = make_peak(weights=13, activations=2)
    found = list_alternatives(make_case(), peak)
    assert found[0].words == "nf4 weights"
    assert found[0].setting == {"weights": "nf4"}
    for other in (make_case(method=Method.FULL), make_case(weights="nf4")):
        assert "nf4 weights" not in words_of(list_alternatives(other, peak))


@pytest.mark.parametrize("gpu", ["A100-80GB", "V100-32GB", "T4"])
@pytest.mark.parametrize("method", list(Method))
def test_all_are_legal_few_and_can_be_typed(gpu: str, method: Method) -> None:
    half = {} if gpu == "A100-80GB" else {"compute": "fp16", "adapter_dtype": "fp32"}
    weights = "bf16" if gpu == "A100-80GB" else "fp32" if method is Method.FULL else "fp16"
    case = make_case(
        gpu, method=method, weights=weights, micro_batch=8, checkpointing=False,
        optimizer="adamw-foreach", sharding="ddp", gpus_per_node=4, autocast=bool(half), **half,
    )  # fmt: skip
    peak = make_peak(
        "first step, update", weights=9, gradients=9, optimizer=9, activations=9, logits=9,
        temporary=9,
    )  # fmt: skip
    found = list_alternatives(case, peak)
    assert 1 <= len(found) <= 5
    assert [a.expected_bytes for a in found] == sorted(
        (a.expected_bytes for a in found), reverse=True
    )
    for alternative in found:
        changed = Case(spec=case.spec, strategy=alternative.strategy, node=case.node, num_nodes=1)
        assert find_violations(changed) == []
        # What is told is what was traced, through the very reader of `--set`.
        typed = read_settings([f"{name}={value}" for name, value in alternative.setting.items()])
        assert case.strategy.model_copy(update=typed) == alternative.strategy


def test_what_is_no_part_of_the_peak_is_not_proposed() -> None:
    case = make_case(checkpointing=False, micro_batch=4)
    peak = make_peak(weights=13, activations=0.1, logits=0.1)
    assert words_of(list_alternatives(case, peak)) == ["nf4 weights"]


def test_the_trace_has_the_last_word() -> None:
    peak = make_peak(weights=13, activations=10, logits=10)
    case = make_case(checkpointing=False, micro_batch=4)
    after = {
        "chunked loss": make_traced(30, survives_gib=31),
        "fused loss": make_traced(39.5),  # 1.25%: not worth saying
        "checkpointing": make_traced(20),
        "nf4 weights": None,
        "micro-batch 2 x 2": make_traced(45),
    }
    asked: list[Strategy] = []
    alternatives = list_alternatives(case, peak)
    by_strategy = {id(a.strategy): a.words for a in alternatives}

    def trace(strategy: Strategy) -> TracedMemory | None:
        asked.append(strategy)
        return after[by_strategy[id(strategy)]]

    before = make_traced(40)
    advice = judge_alternatives(alternatives, trace, before=before, capacity_bytes=30 * GIB)

    assert len(asked) == len(alternatives) == 5
    savings = [one.saving_bytes for one in advice]
    assert savings == sorted(savings, reverse=True)
    reported = {one.words: one for one in advice}
    assert "micro-batch 2 x 2" not in reported
    assert "fused loss" not in reported
    assert reported["checkpointing"].saving_bytes == 20 * GIB
    assert reported["checkpointing"].new_peak_bytes == 20 * GIB
    assert reported["checkpointing"].makes_it_fit
    assert not reported["chunked loss"].makes_it_fit


def test_what_fitted_before_is_not_said_to_fit_now() -> None:
    alternatives = list_alternatives(make_case(), make_peak(weights=13))
    for capacity, fits in ((50, False), (30, True), (10, False)):
        advice = judge_alternatives(
            alternatives,
            lambda _: make_traced(20, survives_gib=21),
            before=make_traced(40, survives_gib=41),
            capacity_bytes=capacity * GIB,
        )
        assert [one.makes_it_fit for one in advice] == [fits]
    tight = judge_alternatives(
        alternatives,
        lambda _: make_traced(20, survives_gib=21),
        before=make_traced(40, survives_gib=41),
        capacity_bytes=int(20.5 * GIB),
    )
    assert not tight[0].makes_it_fit  # tensors alone would fit, the allocator's holes do not
