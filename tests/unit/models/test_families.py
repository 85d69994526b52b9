"""Every family's record says what the installed transformers says."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
)

from tightfit.core.attention import AttentionFeature
from tightfit.models.attention import read_attention_extras
from tightfit.models.families.registry import FAMILIES, find_family

WITHOUT_A_CLASS = {"baichuan", "chatglm", "qwen", "RefinedWeb", "RefinedWebModel"}
"""Code on the hub only."""
KNOWN = sorted(
    name for name, family in FAMILIES.items() if family.is_known and name not in WITHOUT_A_CLASS
)


# GPT-BigCode's modelling file uses torch.jit.script, which torch 2.13 deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model_type", KNOWN)
def test_attention_is_as_the_model_class_says(model_type: str) -> None:
    auto: Any = AutoConfig  # not annotated
    config = auto.for_model(model_type)
    text, family = config.get_text_config(), find_family(model_type)
    mappings: Any = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    model_class = mappings[bool(config.is_encoder_decoder)][type(config)]

    assert family.has_sdpa == model_class._supports_sdpa
    assert family.has_flash == model_class._supports_flash_attn
    assert family.accepts_custom_attention == (
        model_class._can_set_attn_implementation() or family.own_attention
    )
    parameters = inspect.signature(model_class.forward).parameters
    assert family.takes_positions == ("position_ids" in parameters)
    assert family.default_softcap == bool(getattr(text, "attn_logit_softcapping", None))
    if not any(hasattr(text, name) for name in ("attention_dropout", "attn_pdrop")):
        return
    # The first that is stated counts: GPT-BigCode has both names.
    dropout = getattr(text, "attn_pdrop", None) or getattr(text, "attention_dropout", None) or 0.0
    assert family.default_attention_dropout == dropout


def test_liger_kernels_are_those_of_the_installed_package() -> None:
    monkey_patch = pytest.importorskip(
        "liger_kernel.transformers.monkey_patch",
        reason="pip install 'tightfit[kernels]' on a machine with a GPU",
        exc_type=ImportError,
    )
    ours = {name for name, family in FAMILIES.items() if family.has_liger}
    assert ours <= set(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN)


def test_a_model_type_belongs_to_one_family() -> None:
    distinct = {id(family): family for family in FAMILIES.values()}.values()
    names = [name for family in distinct for name in family.model_types]
    assert len(names) == len(set(names)) == len(FAMILIES)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, set()),
        ({"attention_dropout": 0.1}, {AttentionFeature.DROPOUT}),
        ({"attn_pdrop": 0.0}, set()),
        ({"layer_types": ["chunked_attention"]}, {AttentionFeature.CHUNKS}),
        ({"use_bidirectional_attention": True}, {AttentionFeature.BIDIRECTIONAL}),
    ],
)
def test_what_a_config_adds(config: dict[str, object], expected: set[AttentionFeature]) -> None:
    assert read_attention_extras(config, find_family("llama")) == expected


def test_a_silent_config_has_its_family_s_dropout() -> None:
    assert read_attention_extras({}, find_family("gpt2")) == {AttentionFeature.DROPOUT}
