"""Readers of config.json: families, nesting, quantization, and everything malformed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError
from tightfit.core.reading import parse_json
from tightfit.models.config import read_config
from tightfit.models.families.registry import FAMILIES
from tightfit.models.resolve import resolve_model
from tightfit.models.spec import ModelSpec, Role

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def read(config: Mapping[str, object], **changes: object) -> ModelSpec:
    return read_config({**config, **changes}, name="test", source="config.json")


def test_head_dim_is_read_not_derived() -> None:
    spec = read(LLAMA, head_dim=32)

    q_proj = spec.blocks[0].linears[0]
    assert (spec.head_dim, q_proj.out_features) == (32, 128)


def test_biases_are_counted_only_where_the_config_says() -> None:
    plain, biased = read(LLAMA), read(LLAMA, attention_bias=True, mlp_bias=True)

    assert biased.num_params - plain.num_params == 2 * ((64 + 32 + 32 + 64) + (128 + 128 + 64))


def test_transformers_5_spelling_of_dtype_and_rope_is_accepted() -> None:
    spec = read(
        LLAMA, dtype="bfloat16", rope_parameters={"rope_theta": 1e6, "rope_type": "default"}
    )

    assert spec.stored_dtype is Dtype.BF16
    assert read(LLAMA, torch_dtype="torch.float16").stored_dtype is Dtype.FP16
    assert read(LLAMA, torch_dtype="float8_e4m3fn").stored_dtype is None


@pytest.mark.parametrize(
    ("method", "bits", "stored"), [("gptq", 4, Dtype.GPTQ4), ("gptq", 3, None), ("awq", 4, None)]
)
def test_quantized_checkpoint_warns_and_is_not_stored_in_16_bit(
    method: str, bits: int, stored: Dtype | None
) -> None:
    packed = {"quant_method": method, "bits": bits}
    spec = read(LLAMA, torch_dtype="float16", quantization_config=packed)

    assert spec.stored_dtype is stored
    assert any(f"{method}, {bits} bits" in warning for warning in spec.warnings)
    assert spec.num_params == read(LLAMA).num_params


def test_multimodal_config_counts_its_text_part_and_fills_the_gaps_aloud() -> None:
    """The published gemma-3-4b-it config has little more in `text_config` than this."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    spec = read_config(
        {
            "model_type": "gemma3",
            "text_config": text,
            "vision_config": {},
            "torch_dtype": "bfloat16",
        },
        name="gemma-3-4b-it",
        source="config.json",
    )

    extra_vocab = (262_208 - 262_144) * 2560
    assert spec.num_params == 3_880_099_328 + extra_vocab
    assert spec.stored_dtype is Dtype.BF16
    assert any("language model" in warning for warning in spec.warnings)
    assert any("`num_attention_heads`" in warning for warning in spec.warnings)


def test_unknown_family_is_read_with_a_warning_that_names_it() -> None:
    spec = read(LLAMA, model_type="brandnew")

    assert spec.model_type == "brandnew"
    assert spec.num_params == read(LLAMA).num_params
    assert any("`brandnew`" in warning and "assumed" in warning for warning in spec.warnings)


def test_unknown_family_of_gpt_shape() -> None:
    config = {
        "model_type": "brandnew",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 100,
        "layer_norm_epsilon": 1e-5,
    }
    spec = read(config)

    assert not spec.is_gated_mlp
    assert not spec.is_rms_norm
    assert spec.intermediate_size == 256
    assert any("width" in warning for warning in spec.warnings)


def test_unknown_mixture_is_counted_as_one() -> None:
    spec = read(LLAMA, model_type="newmoe", num_experts=8, num_experts_per_tok=2)

    assert spec.num_active_params < spec.num_params
    assert any("Experts" in warning for warning in spec.warnings)


def test_known_family_does_not_warn() -> None:
    assert read(LLAMA).warnings == ()


def test_missing_keys_are_named_all_at_once() -> None:
    with pytest.raises(InvalidInputError, match=r"`num_hidden_layers`.*`vocab_size`"):
        read_config({"model_type": "llama", "hidden_size": 64}, name="x", source="config.json")


@pytest.mark.parametrize(
    "value",
    [0, -1, 10**9, 10**5000, True, "64", 64.0, float("nan"), float("inf"), [64], {"a": 1}],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("key", [key for key in LLAMA if key != "model_type"])
def test_every_number_is_checked_and_named(key: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=key) as caught:
        read(LLAMA, **{key: value})

    assert caught.value.remedy


def test_heads_must_share_evenly() -> None:
    with pytest.raises(InvalidInputError, match="does not divide"):
        read(LLAMA, num_attention_heads=5)
    with pytest.raises(InvalidInputError, match="does not divide"):
        read(LLAMA, num_key_value_heads=3)


def test_more_experts_per_token_than_experts_is_refused() -> None:
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4}
    with pytest.raises(InvalidInputError, match="num_experts_per_tok"):
        read(mixtral)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"model_type": "llama", "hidden_size": 40',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"hidden_size": ' + b"9" * 6000 + b"}",
        b"nul",
    ],
    ids=["empty", "brace", "truncated", "binary", "deep-list", "deep-dict", "huge-int", "word"],
)
def test_malformed_files_are_one_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(InvalidInputError) as caught:
        resolve_model(str(tmp_path / "config.json"))

    assert "config.json" in caught.value.problem


@pytest.mark.parametrize("top", [[], "llama", 7, None, True, 1.5, {}, {"model_type": None}])
def test_json_that_is_no_config(top: object) -> None:
    with pytest.raises(InvalidInputError):
        read_config(parse_json(json.dumps(top).encode(), source="c"), name="x", source="c")


@pytest.mark.parametrize("model_type", [5, ["llama"], {}, "\ud800", "a\nb", "x" * 500])
def test_model_type_must_be_a_word(model_type: object) -> None:
    with pytest.raises(InvalidInputError, match="model_type"):
        read(LLAMA, model_type=model_type)


def test_experts_are_not_targets_for_lora() -> None:
    """transformers 5 keeps experts as bare 3-D parameters, which no adapter finds by name."""
    names = resolve_model("Mixtral-8x7B").module_names

    assert names == ("q_proj", "k_proj", "v_proj", "o_proj")


def test_sparse_layers_follow_step_and_list() -> None:
    config = {
        **LLAMA,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    }
    dense, sparse = read(config).blocks

    assert (dense.num_layers, sparse.num_layers) == (4, 2)
    assert {part.role for part in dense.linears} == {Role.ATTENTION, Role.MLP}


def test_opt_350m_has_a_narrow_embedding() -> None:
    """facebook/opt-350m: 331,196,416 parameters."""
    spec = read(
        {
            "model_type": "opt",
            "hidden_size": 1024,
            "word_embed_proj_dim": 512,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "do_layer_norm_before": False,
        }
    )

    assert spec.num_params == 331_196_416


@pytest.mark.parametrize(
    ("vocab", "expected"), [(130_528, 6_173_286_400), (150_528, 6_255_206_400)]
)
def test_first_chatglm_6b(vocab: int, expected: int) -> None:
    """THUDM/chatglm-6b after and before its vocabulary was cut; both totals are widely printed."""
    config = {
        "model_type": "chatglm",
        "hidden_size": 4096,
        "inner_hidden_size": 16384,
        "num_layers": 28,
        "num_attention_heads": 32,
        "vocab_size": vocab,
        "max_sequence_length": 2048,
    }

    assert read(config).num_params == expected


def test_registry_covers_the_families_we_promise() -> None:
    promised = """llama mistral mixtral qwen qwen2 qwen3 qwen3_moe gemma gemma2 gemma3 gemma3_text
        phi phi3 gpt2 gpt_neox gpt_bigcode bloom falcon codegen t5 gpt_oss baichuan chatglm granite
        granitemoe stablelm opt gptj mpt"""

    assert set(promised.split()) <= {name for name, family in FAMILIES.items() if family.read}
