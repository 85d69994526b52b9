"""Every family's record says what the installed transformers says."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)

from tightfit.core.attention import AttentionFeature
from tightfit.models.attention import needs_of, read_attention_extras
from tightfit.models.config import read_config
from tightfit.models.families.registry import FAMILIES, find_family
from tightfit.runtime.packed_masks import hand_positions_to_masks
from tiny_configs import TINY

WITHOUT_A_CLASS = {"baichuan", "chatglm", "qwen", "RefinedWeb", "RefinedWebModel"}
"""Code on the hub only."""
KNOWN = sorted(
    name for name, family in FAMILIES.items() if family.is_known and name not in WITHOUT_A_CLASS
)


# GPT-BigCode's modelling file uses torch.jit.script, which torch 2.13 deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model_type", KNOWN)
def test_a_record_is_as_the_model_class_says(model_type: str) -> None:
    auto: Any = AutoConfig  # not annotated
    config = auto.for_model(model_type)
    text, family = config.get_text_config(), find_family(model_type)
    mappings: Any = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
    model_class = mappings[bool(config.is_encoder_decoder)][type(config)]

    assert family.has_sdpa == model_class._supports_sdpa
    has_narrow_values = getattr(text, "v_head_dim", 0) < getattr(text, "qk_head_dim", 0)
    assert family.has_flash == (model_class._supports_flash_attn and not has_narrow_values)
    assert family.accepts_custom_attention == (
        model_class._can_set_attn_implementation() or family.own_attention
    )
    parameters = inspect.signature(model_class.forward).parameters
    is_plain = model_type not in TINY or _attends_token_by_token(model_type)
    assert not family.takes_positions or "position_ids" in parameters
    if model_type in TINY:
        assert family.takes_positions == (is_plain and "position_ids" in parameters)
    module = inspect.getmodule(model_class)
    assert family.has_router_loss == hasattr(module, "load_balancing_loss_func")
    assert family.default_softcap == bool(getattr(text, "attn_logit_softcapping", None))
    if not any(hasattr(text, name) for name in ("attention_dropout", "attn_pdrop")):
        return
    # The first that is stated counts: GPT-BigCode has both names.
    dropout = getattr(text, "attn_pdrop", None) or getattr(text, "attention_dropout", None) or 0.0
    assert family.default_attention_dropout == dropout


def _attends_token_by_token(model_type: str) -> bool:
    """Without a state that runs on, or chunks that are counted from the row's start."""
    kinds = getattr(_make_config(model_type), "layer_types", None) or []
    return set(kinds) <= {"full_attention", "sliding_attention"}


def _make_config(model_type: str) -> Any:
    auto: Any = AutoConfig
    return auto.for_model(model_type, **TINY[model_type])


def _make_model(model_type: str) -> Any:
    """In eager attention, with weights large enough for every token to matter."""
    auto: Any = AutoModelForCausalLM
    config = _make_config(model_type)
    config.use_cache = (
        False  # with a cache, transformers takes restarted positions for one document
    )
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15)
    return model


DECODERS = [name for name in TINY if name not in ("t5", "mt5")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model_type", DECODERS)
def test_documents_in_a_row_stay_apart_where_the_record_says_so(model_type: str) -> None:
    """By their positions alone, which the mask reads, without a kernel that is given bounds."""
    config = {"model_type": model_type} | TINY[model_type]
    can_pack = needs_of(read_config(config, name="", source="")).can_pack
    model = _make_model(model_type)
    is_helped = not find_family(model_type).mask_reads_positions
    documents = [torch.randint(3, 64, (size,)) for size in (7, 3, 9)]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    extra = {"position_ids": positions} if "position_ids" in _parameters(model) else {}
    with torch.no_grad():
        row = torch.cat(documents)[None]
        mixed = model(input_ids=row, **extra).logits[0]
        if is_helped:  # as for training
            hand_positions_to_masks(model)
            extra = {"position_ids": positions}
        packed = model(input_ids=row, **extra).logits[0]
        apart = torch.cat([model(input_ids=document[None]).logits[0] for document in documents])

    difference = float((packed - apart).abs().max())
    assert difference < 1e-4 if can_pack else difference > 1e-2
    if is_helped:
        assert float((mixed - apart).abs().max()) > 1e-2, "its masks read positions now"


def _parameters(model: Any) -> Any:
    return inspect.signature(model.forward).parameters


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model_type", DECODERS)
def test_the_head_s_output_is_scaled_where_the_record_says_so(model_type: str) -> None:
    model, seen = _make_model(model_type), []
    model.get_output_embeddings().register_forward_hook(lambda *call: seen.append(call[2]))
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 12)[None]).logits
    spec = read_config({"model_type": model_type} | TINY[model_type], name="", source="")
    is_changed = find_family(model_type).scales_logits or spec.has_logit_softcap

    assert torch.allclose(seen[0], logits, atol=1e-5) != is_changed


def test_liger_kernels_are_those_of_the_installed_package() -> None:
    monkey_patch = pytest.importorskip(
        "liger_kernel.transformers.monkey_patch",
        reason="pip install 'tightfit[kernels]' on a machine with a GPU",
        exc_type=ImportError,
    )
    ours = {name for name, family in FAMILIES.items() if family.has_liger}
    assert ours == {*monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN} & {*FAMILIES}


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model_type", TINY)
def test_what_no_gradient_reaches_is_what_the_class_freezes(model_type: str) -> None:
    auto: Any = AutoModelForCausalLM
    config = _make_config(model_type)
    if config.is_encoder_decoder:
        auto = AutoModelForSeq2SeqLM
    with torch.device("meta"):
        model = auto.from_config(config)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert {name.rpartition(".")[2] for name in frozen} == {*find_family(model_type).frozen}
