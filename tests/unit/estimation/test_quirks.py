"""Quirks: what other software keeps, against what its source code or a count says."""

from __future__ import annotations

from tightfit.core.strategy import Quirks, Strategy
from tightfit.estimation.activations import (
    ActivationBytes,
    estimate_activation_bytes,
    estimate_layer_bytes,
    estimate_loss_bytes,
    list_layers,
)
from tightfit.estimation.memory import estimate_moments, peak_moment
from tightfit.estimation.state import estimate_state_bytes
from tightfit.models.resolve import resolve_model

LLAMA = resolve_model("meta-llama/Llama-2-7b-hf")
TOKENS = 2048
NARROW = Quirks(narrow_loss=True)


def _activations(strategy: Strategy) -> ActivationBytes:
    return estimate_activation_bytes(LLAMA, strategy, list_layers(LLAMA, strategy))


def test_fsdp1_pins_inputs_and_gradients_of_recomputed_frozen_layers() -> None:
    plain = Strategy(sharding="fsdp", gpus_per_node=2)
    pinned = plain.model_copy(
        update={"quirks": Quirks(flat_shards=True, reentrant=True, recomputes_shards=True)}
    )
    before = _activations(plain).first_layer
    after = _activations(pinned).first_layer
    assert before == TOKENS * 2 * 4096
    assert after == TOKENS * 2 * 4096 * 32 * 2  # an input and its gradient for each layer
    full = pinned.model_copy(update={"method": "full"})
    assert _activations(full).first_layer == before


def test_dropout_keeps_a_mask_per_adapter_as_measured() -> None:
    # h200_steps.json: Llama-2-7b, fp32 adapters everywhere, 2048 tokens: +2.14 GiB
    kept = Strategy(adapter_dtype="fp32", checkpointing=False)
    dropped = kept.model_copy(update={"lora_dropout": 0.05})
    peaks = [peak_moment(estimate_moments(LLAMA, s)).allocated_bytes for s in (kept, dropped)]
    assert abs((peaks[1] - peaks[0]) / 2**30 - 2.14) < 0.1


def test_old_bitsandbytes_keeps_inputs_unless_checkpoints_are_reentrant() -> None:
    kept = [
        _activations(Strategy(weights="nf4", quirks=quirks)).kept
        for quirks in (
            Quirks(),
            Quirks(keeps_quantized_inputs=True),
            Quirks(keeps_quantized_inputs=True, reentrant=True),
        )
    ]
    assert kept[1] > kept[0] == kept[2]


def test_a_padding_mask_repeats_grouped_keys() -> None:
    """As a window does that is no longer than the row; ours without a mask are left as they are."""
    masked = Quirks(padding_mask=True)
    for model, seq_len, quirks, is_repeated in (
        ("Llama-3.2-1B", 2048, Quirks(), False),
        ("Llama-3.2-1B", 2048, masked, True),
        ("Mistral-7B-v0.1", 4095, Quirks(), False),
        ("Mistral-7B-v0.1", 4096, Quirks(), True),
    ):
        spec = resolve_model(model)
        strategy = Strategy(micro_batch=2, seq_len=seq_len, quirks=quirks)
        repeating = strategy.model_copy(update={"repeat_keys": True})
        saved, repeated = (
            estimate_layer_bytes(spec, spec.blocks[0], one).saved for one in (strategy, repeating)
        )
        wider = 2 * 2 * (spec.num_heads - spec.num_kv_heads) * spec.head_dim
        assert repeated - saved == (0 if is_repeated else wider), (model, seq_len)


def test_mixed_flat_parameters_accumulate_gradients_of_the_whole_model() -> None:
    quirks = Quirks(flat_shards=True, mixes_frozen=True, no_sync=True)
    mixed = Strategy(sharding="fsdp", gpus_per_node=2, quirks=quirks)
    state = estimate_state_bytes(LLAMA, mixed)
    assert state.accumulated >= 2 * LLAMA.num_params
    assert state.gradients * 2 - state.accumulated in range(-2, 3)


def test_a_loss_without_upcast_takes_half() -> None:
    table = TOKENS * LLAMA.vocab_size
    narrow = estimate_loss_bytes(LLAMA, Strategy(quirks=NARROW))
    assert narrow.forward == narrow.backward == 6 * table
    assert estimate_loss_bytes(LLAMA, Strategy()).backward == 12 * table
    cast = estimate_loss_bytes(LLAMA, Strategy(quirks=NARROW, autocast=True))
    assert cast.backward == 12 * table


def test_compiling_keeps_two_thirds_of_a_trained_layer() -> None:
    # counted under torch's min-cut partitioner: 42.4 and 29.1 bytes per hidden unit
    eager, compiled = (
        _activations(Strategy(method="full", checkpointing=False, compile=compiled)).kept
        for compiled in (False, True)
    )
    assert 0.62 < compiled / eager < 0.75


def test_plans_from_before_a_quirk_was_renamed_are_read() -> None:
    """Their strategy lists every quirk, off or not."""
    old = Strategy().model_dump(mode="json")
    old["quirks"] = {k: v for k, v in old["quirks"].items() if k != "padding_mask"}
    old["quirks"]["equal_rows"] = False
    assert Strategy.model_validate(old) == Strategy()
