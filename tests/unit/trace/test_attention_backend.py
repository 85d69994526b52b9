"""Which attention kernel a card takes: the case table, read off torch's sdp_utils.cpp by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tightfit.trace.attention import (
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    AttentionCall,
    AttentionOptions,
    SoftwareVersions,
    describe_attention_call,
    find_default_cudnn,
    prefers_cudnn,
    select_attention_backend,
)

V100, T4, A100, RTX3090, RTX4090, H100, B200 = (
    (7, 0),
    (7, 5),
    (8, 0),
    (8, 6),
    (8, 9),
    (9, 0),
    (10, 0),
)
AMPERE_UP = (A100, RTX3090, RTX4090, H100, B200)
TORCH_211 = SoftwareVersions(torch=(2, 11), cudnn=91900)


def make_call(**changes: Any) -> AttentionCall:
    """A training call of a Llama-like layer."""
    plain: dict[str, Any] = {
        "dtype": "bfloat16",
        "num_heads": 32,
        "num_key_heads": 32,
        "num_value_heads": 32,
        "width": 128,
        "value_width": 128,
        "num_queries": 2048,
        "num_keys": 2048,
        "has_mask": False,
        "is_causal": True,
        "is_grouped": False,
        "needs_gradient": True,
    }
    if "width" in changes:
        changes.setdefault("value_width", changes["width"])
    if changes.get("is_grouped"):
        changes |= {"num_key_heads": 8, "num_value_heads": 8}
    if changes.get("has_mask"):
        changes.setdefault("is_causal", False)
    return AttentionCall(**(plain | changes))


@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_without_a_mask_runs_flash_or_cudnn_from_ampere_on(
    dtype: str, width: int
) -> None:
    for card in AMPERE_UP:
        for is_grouped in (False, True):
            call = make_call(dtype=dtype, width=width, is_grouped=is_grouped)
            # cuDNN takes 256 wide heads on Hopper; on Blackwell no more than 128.
            has_cudnn = card == H100 or (card == B200 and width <= 128)
            expected = CUDNN if has_cudnn else FLASH
            assert select_attention_backend(call, card, TORCH_211) == expected, (card, is_grouped)


@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_mask_takes_flash_away(dtype: str, width: int) -> None:
    for card in AMPERE_UP:
        call = make_call(dtype=dtype, width=width, has_mask=True)
        has_cudnn = card == H100 or (card == B200 and width <= 128)
        assert select_attention_backend(call, card, TORCH_211) == (
            CUDNN if has_cudnn else EFFICIENT
        )
        grouped = make_call(dtype=dtype, width=width, has_mask=True, is_grouped=True)
        assert select_attention_backend(grouped, card, TORCH_211) == (CUDNN if has_cudnn else MATH)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_fp32_runs_efficient_everywhere_and_math_when_grouped(width: int, has_mask: bool) -> None:
    for card in (V100, T4, *AMPERE_UP):
        call = make_call(dtype="float32", width=width, has_mask=has_mask)
        assert select_attention_backend(call, card, TORCH_211) == EFFICIENT
        grouped = make_call(dtype="float32", width=width, has_mask=has_mask, is_grouped=True)
        assert select_attention_backend(grouped, card, TORCH_211) == MATH


@pytest.mark.parametrize("card", [V100, T4])
def test_volta_and_turing_have_the_efficient_kernel_for_fp16_alone(card: tuple[int, int]) -> None:
    for has_mask in (False, True):
        assert select_attention_backend(
            make_call(dtype="float16", has_mask=has_mask), card, TORCH_211
        ) == (EFFICIENT)
        grouped = make_call(dtype="float16", has_mask=has_mask, is_grouped=True)
        assert select_attention_backend(grouped, card, TORCH_211) == MATH
        assert select_attention_backend(make_call(has_mask=has_mask), card, TORCH_211) == MATH


def test_small_cores_train_no_flash_between_192_and_224_wide() -> None:
    for card, width, gradient, expected in (
        (RTX3090, 224, True, EFFICIENT),
        (RTX3090, 224, False, FLASH),
        (RTX3090, 256, True, FLASH),
        (A100, 224, True, FLASH),
    ):
        call = make_call(width=width, needs_gradient=gradient)
        assert select_attention_backend(call, card, TORCH_211) == expected
    dropped = make_call(width=256, dropout=0.1)
    assert select_attention_backend(dropped, RTX4090, TORCH_211) == EFFICIENT


def test_what_kernels_cannot_read_goes_to_the_next() -> None:
    # Heads of 80 are no multiple of 32 but of 8; of 100 they suit nobody but flash, which pads.
    assert select_attention_backend(make_call(width=80), H100, TORCH_211) == CUDNN
    assert select_attention_backend(make_call(width=100), H100, TORCH_211) == FLASH
    assert select_attention_backend(make_call(width=100, has_mask=True), A100, TORCH_211) == MATH
    # DeepSeek's keys are wider than its values.
    wide = make_call(width=192, value_width=128)
    assert select_attention_backend(wide, B200, TORCH_211) == CUDNN
    assert select_attention_backend(wide, A100, TORCH_211) == EFFICIENT
    # One query against a cache is not square, so not flash's causal, and needs none.
    decode = make_call(num_queries=1, is_causal=False, needs_gradient=False)
    assert select_attention_backend(decode, A100, TORCH_211) == FLASH
    assert select_attention_backend(make_call(num_queries=16), A100, TORCH_211) == EFFICIENT
    assert select_attention_backend(make_call(is_dense=False), H100, TORCH_211) == MATH


def test_cudnn_is_preferred_where_torch_and_cudnn_allow_it() -> None:
    wheels = {
        minor: SoftwareVersions(torch=(2, minor), cudnn=find_default_cudnn((2, minor)))
        for minor in range(8, 14)
    }
    assert [minor for minor in wheels if prefers_cudnn(H100, wheels[minor])] == [9, 11, 12, 13]
    assert prefers_cudnn(H100, SoftwareVersions(torch=(2, 10), cudnn=91501))
    assert not prefers_cudnn(A100, wheels[13])
    # From 2.12 dropout must be a multiple of a sixteenth.
    dropped = make_call(dropout=0.1)
    assert select_attention_backend(dropped, H100, wheels[11]) == CUDNN
    assert select_attention_backend(dropped, H100, wheels[12]) == FLASH
    assert select_attention_backend(make_call(dropout=0.125), H100, wheels[12]) == CUDNN


def test_torchs_own_choice_on_the_cpu_agrees_where_the_rules_are_shared() -> None:
    """A second implementation: torch's checks of heads and shapes, which all devices share."""
    query = torch.empty(2, 8, 16, 64, dtype=torch.bfloat16)
    for num_keys, grouped in ((8, False), (2, True), (3, True), (2, False)):
        key = torch.empty(2, num_keys, 16, 64, dtype=torch.bfloat16)
        fused = torch._fused_sdp_choice(query, key, key, enable_gqa=grouped)
        call = describe_attention_call(query, key, key, AttentionOptions(enable_gqa=grouped))
        is_fused = select_attention_backend(call, A100, TORCH_211) == FLASH
        assert is_fused == (fused == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)
