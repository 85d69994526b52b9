"""Every family as GGUF: llama.cpp's scores and tokens beside transformers' own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from small_models import FAMILIES, SENTENCES, make_family, make_llama, name_model_type
from tightfit.core.dtypes import find_plain_dtype
from tightfit.core.errors import InvalidInputError, SetupError, UsageError
from tightfit.export.convert import (
    convert_to_gguf,
    plan_conversion,
)
from tightfit.export.gguf_tokenizer import TEXTS, Scheme, compare_scheme, read_vocabulary
from tightfit.models.families.registry import FAMILIES as RECORDS
from tightfit.runtime.llama_cpp import LlamaModel

gguf: Any = pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
pytest.importorskip("xllamacpp", reason="pip install 'tightfit[gguf]'")
transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NUM_POSITIONS = 512
AGREES = 0.99

Maker = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """A family's folder, made once for all tests that change nothing in it."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_family(tmp_path_factory.mktemp("family") / family, family)
        return made[family]

    return get


@pytest.fixture(scope="module")
def make_file(make: Maker, tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """A family's GGUF, made once."""
    made: dict[tuple[str, str], Path] = {}

    def get(family: str, dtype: str = "f16") -> Path:
        if (family, dtype) not in made:
            target = tmp_path_factory.mktemp("file") / f"{family}.gguf"
            made[family, dtype] = export(make(family), target, dtype)
        return made[family, dtype]

    return get


def export(source: Path, target: Path, dtype: str = "f16", **settings: Any) -> Path:
    found = find_plain_dtype(dtype)
    assert found is not None
    return convert_to_gguf(source, target, dtype=found, **settings)


def to_folder(source: Path, target: Path, **settings: Any) -> Path:
    return Path(plan_conversion(str(source), to="hf", target=target, **settings).run().path)


def agreement(source: Path, file: Path, *, num_positions: int = NUM_POSITIONS) -> float:
    """How often both put the same token first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    numbers = np.random.default_rng(7).integers(4, model.config.vocab_size, num_positions)
    with torch.no_grad():
        ours = model(torch.from_numpy(numbers)[None]).logits[0].numpy()
    with LlamaModel(file, num_positions=num_positions) as llama:
        theirs = llama.logits(numbers.tolist())
    assert ours.shape == theirs.shape
    assert len(set(ours.argmax(-1))) > 20  # a model that always says the same proves nothing
    return float((ours.argmax(-1) == theirs.argmax(-1)).mean())


def metadata(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def test_every_family_with_a_layout_has_a_model_here(make: Maker) -> None:
    configs = [json.loads((make(family) / "config.json").read_text()) for family in FAMILIES]

    written = {name for name, record in RECORDS.items() if record.gguf is not None}
    assert {config["model_type"] for config in configs} == written


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same(
    make: Maker, make_file: Maker, family: str, dtype: str
) -> None:
    assert agreement(make(family), make_file(family, dtype)) >= AGREES


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_cuts_text_the_same(make: Maker, make_file: Maker, family: str) -> None:
    tokenizer = Tokenizer.from_file(str(make(family) / "tokenizer.json"))

    with LlamaModel(make_file(family), num_positions=32) as llama:
        for text in (*TEXTS, *SENTENCES):
            assert llama.tokenize(text) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("family", "model", "pre"),
    [
        ("llama", "llama", "default"),
        ("llama3", "gpt2", "llama-bpe"),
        ("qwen2", "gpt2", "qwen2"),
        ("gemma", "llama", "default"),
        ("gpt2", "gpt2", "gpt-2"),
        ("falcon", "gpt2", "falcon"),
        ("bloom", "gpt2", "bloom"),
    ],
)
def test_the_way_of_cutting_is_recognised(
    make_file: Maker, family: str, model: str, pre: str
) -> None:
    reported = metadata(make_file(family))

    assert (reported["tokenizer.ggml.model"], reported["tokenizer.ggml.pre"]) == (model, pre)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
FACTORS = {
    "long_factor": [1.0 + i for i in range(8)],
    "short_factor": [1.0 + i / 8 for i in range(8)],
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 256,
    **FACTORS,
}
PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
GEMMA3_LINEAR = {
    "full_attention": LINEAR | {"rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("llama", {"rope_parameters": LINEAR}, id="linear"),
        pytest.param("llama", {"rope_parameters": LLAMA3}, id="llama3-by-32"),
        pytest.param("llama", {"rope_parameters": YARN}, id="llama-yarn"),
        pytest.param("qwen2", {"rope_parameters": YARN}, id="qwen2-yarn"),
        pytest.param(
            "qwen3", {"rope_parameters": YARN | {"attention_factor": 1.3}}, id="yarn-with-factor"
        ),
        pytest.param(
            "phi3",
            {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256},
            id="longrope-long",
        ),
        pytest.param(
            "phi3",
            {
                "rope_parameters": LONGROPE | {"original_max_position_embeddings": 1024},
                "original_max_position_embeddings": 1024,
            },
            id="longrope-short",
        ),
        pytest.param("phi3", {"rope_parameters": PARTIAL}, id="part-of-a-head"),
        pytest.param("gemma3", {"rope_parameters": GEMMA3_LINEAR}, id="gemma3-linear"),
        pytest.param(
            "gemma3",
            {
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            id="gemma3-every-second",
        ),
        pytest.param("llama", {"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param("falcon-7b", {"multi_query": False}, id="falcon-all-heads"),
        pytest.param("gpt2", {"n_inner": 96}, id="gpt2-narrow"),
        pytest.param("gpt_oss", {"rope_parameters": YARN}, id="gpt-oss-yarn"),
        pytest.param(
            "olmo3",
            {"rope_parameters": GEMMA3_LINEAR | {"full_attention": YARN}},
            id="olmo3-yarn",
        ),
        pytest.param("granite", {"attention_bias": True, "mlp_bias": True}, id="granite-biases"),
        pytest.param("phi", {"rope_parameters": PARTIAL}, id="phi-half-a-head"),
        pytest.param("qwen3_5", {"linear_num_value_heads": 6}, id="three-values-to-a-key"),
        pytest.param("qwen3_5", {"linear_num_value_heads": 2}, id="a-value-to-a-key"),
        pytest.param("qwen3_next", {"linear_num_value_heads": 6}, id="next-three-values"),
        pytest.param("mpt", {"d_model": 96, "n_heads": 6, "attn_config": {}}, id="mpt-six-heads"),
        pytest.param("mixtral", {"num_local_experts": 8}, id="eight-experts"),
        pytest.param("gpt_neox", {"use_parallel_residual": False}, id="neox-in-sequence"),
        pytest.param("stablelm", {"use_parallel_residual": True}, id="stablelm-parallel"),
        pytest.param("stablelm", {"qk_layernorm": True}, id="stablelm-head-norms"),
        pytest.param("qwen2_moe", {"tie_word_embeddings": True}, id="tied-where-a-head-is-needed"),
    ],
)
def test_settings_that_change_the_arithmetic(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    source = make_family(tmp_path / "model", family, **changes)

    assert agreement(source, export(source, tmp_path / "model.gguf", "f32")) >= AGREES


@pytest.mark.parametrize("family", ["llama", "gemma", "falcon", "bloom"])
def test_a_layout_left_as_it_was_shows(
    make: Maker, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models are such that the tests above can fail."""
    monkeypatch.setattr("tightfit.runtime.gguf.file.find_layout_change", lambda *_: None)

    file = export(make(family), tmp_path / "model.gguf", "f32")

    assert agreement(make(family), file) < 0.9


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_values_are_those_of_the_folder(make: Maker, tmp_path: Path, dtype: str) -> None:
    """Matrices in the wanted format, vectors in 32 bit, rows of queries in Meta's order."""
    from safetensors.torch import load_file

    source = make("llama")
    stored = load_file(source / "model.safetensors")
    reader = gguf.GGUFReader(export(source, tmp_path / "model.gguf", dtype))
    found = {tensor.name: tensor for tensor in reader.tensors}

    wanted = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    down = stored["model.layers.1.mlp.down_proj.weight"].to(wanted)
    assert found["blk.1.ffn_down.weight"].data.tobytes() == down.view(torch.uint8).numpy().tobytes()
    norm = found["blk.0.attn_norm.weight"]
    assert norm.tensor_type.name == "F32"
    assert np.array_equal(norm.data, stored["model.layers.0.input_layernorm.weight"].numpy())
    rows = stored["model.layers.0.self_attn.k_proj.weight"].to(wanted)
    half = rows.shape[0] // 2 // 2
    second = rows[half].view(torch.uint8).numpy().tobytes()  # the pair of row 0, now beside it
    width = len(second)
    assert found["blk.0.attn_k.weight"].data.tobytes()[width : 2 * width] == second
    assert len(found) == len(stored)


def test_shards_and_pickles_give_the_same_file(make: Maker, tmp_path: Path) -> None:
    source = make("qwen2")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    files = {}
    for kind in ("sharded", "pickled"):
        folder = shutil.copytree(source, tmp_path / kind / "qwen2")
        (folder / "model.safetensors").unlink()
        if kind == "sharded":
            model.save_pretrained(folder, max_shard_size="100KB")
            assert len(list(folder.glob("*.safetensors"))) > 2
        else:
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
        files[kind] = export(folder, tmp_path / f"{kind}.gguf").read_bytes()
    whole = export(source, tmp_path / "whole.gguf").read_bytes()

    assert files["sharded"] == whole
    assert files["pickled"] == whole


SPARSE = [
    family
    for family in FAMILIES
    if (layout := RECORDS[name_model_type(family)].gguf) and layout.expert_inner_key
]


@pytest.mark.parametrize("family", SPARSE)
def test_experts_as_transformers_holds_them_in_memory(
    make: Maker, tmp_path: Path, family: str
) -> None:
    """In one tensor per layer, with gate and up in one; published checkpoints have each alone."""
    from safetensors.torch import save_file

    source = shutil.copytree(make(family), tmp_path / family)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, source / "model.safetensors", {"format": "pt"})

    before = export(make(family), tmp_path / "before.gguf").read_bytes()
    assert export(source, tmp_path / "after.gguf").read_bytes() == before


def test_experts_in_mxfp4_stay_as_they_are(make: Maker, tmp_path: Path) -> None:
    """Beside transformers' own arithmetic of the codes, and gguf's of the file."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = shutil.copytree(make("gpt_oss"), tmp_path / "gpt-oss")
    state = load_file(source / "model.safetensors")
    random, values = torch.Generator().manual_seed(5), {}
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = state.pop(name).shape
        size = (experts, rows, width // 32)
        codes = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=random)
        scales = torch.randint(121, 124, size, dtype=torch.uint8, generator=random)
        state |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
    save_file(state, source / "model.safetensors", {"format": "pt"})
    change_config(source, quantization_config={"quant_method": "mxfp4"})

    made = plan_conversion(str(source)).run()

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(made.path).tensors}
    for layer in range(2):
        up_and_gate = values[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        down = values[f"model.layers.{layer}.mlp.experts.down_proj"]
        parts = {"gate": up_and_gate[..., ::2], "up": up_and_gate[..., 1::2], "down": down}
        for part, expected in parts.items():
            found = tensors[f"blk.{layer}.ffn_{part}_exps.weight"]
            assert found.tensor_type.name == "MXFP4"
            unpacked = gguf.quants.dequantize(found.data, found.tensor_type)
            assert np.array_equal(unpacked, expected.transpose(1, 2).numpy()), part
    with LlamaModel(Path(made.path), num_positions=32) as llama:
        assert np.isfinite(llama.logits(list(range(4, 36)))).all()
    assert made.next_command == f"tightfit verify {source} {made.path}"


def test_an_expert_that_is_lost_is_missed(make: Maker, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(make("qwen3_moe"), tmp_path / "model")
    state = load_file(source / "model.safetensors")
    del state["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(state, source / "model.safetensors", {"format": "pt"})

    with pytest.raises(InvalidInputError, match=r"5 of the 6 matrices of blk\.1\.ffn_up_exps"):
        export(source, tmp_path / "model.gguf")


def test_words_beside_the_weights_go_along(make: Maker, tmp_path: Path) -> None:
    source = shutil.copytree(make("llama3"), tmp_path / "My-Model")
    stops = {"eos_token_id": [2, 0, 7]}
    (source / "generation_config.json").write_text(json.dumps(stops))

    reported = metadata(export(source, tmp_path / "model.gguf"))

    assert reported["general.name"] == "My-Model"
    assert reported["general.file_type"] == gguf.LlamaFileType.MOSTLY_F16
    assert reported["general.quantization_version"] == gguf.GGML_QUANT_VERSION
    assert reported["tokenizer.chat_template"] == (source / "chat_template.jinja").read_text()
    marks = {reported[f"tokenizer.ggml.{name}_token_id"] for name in ("eos", "eot", "eom")}
    assert marks == {2, 0, 7}
    assert reported["tokenizer.ggml.add_bos_token"] is False
    config = json.loads((source / "config.json").read_text())
    assert len(reported["tokenizer.ggml.tokens"]) == config["vocab_size"]
    assert reported["tokenizer.ggml.token_type"][-3:] == [gguf.TokenType.UNUSED] * 3
    assert reported["tokenizer.ggml.token_type"][:4] == [gguf.TokenType.CONTROL] * 4


def test_a_begin_token_is_written_where_the_tokenizer_puts_one(make_file: Maker) -> None:
    reported = metadata(make_file("gemma"))

    assert reported["tokenizer.ggml.add_bos_token"] is True
    assert reported["tokenizer.ggml.add_space_prefix"] is False
    assert reported["tokenizer.ggml.bos_token_id"] == 2


def test_a_name_that_llama_cpp_reads_rules_into(make: Maker, tmp_path: Path) -> None:
    """It fails to load a model called phi3 whose vocabulary is not Phi-3's."""
    source = shutil.copytree(make("qwen2"), tmp_path / "distilled-from-Phi-3-mini")

    assert agreement(source, export(source, tmp_path / "model.gguf", "f32")) >= AGREES


def test_a_tied_head_that_differs_is_a_head(make: Maker, tmp_path: Path) -> None:
    """transformers keeps both where the weights hold both; so must the file."""
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(make("qwen2"), tmp_path / "qwen2")
    state = load_file(source / "model.safetensors")
    head = state["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(state | {"lm_head.weight": head}, source / "model.safetensors", {"format": "pt"})

    assert agreement(source, export(source, tmp_path / "model.gguf", "f32")) >= AGREES


def test_buffers_of_old_checkpoints_are_left_out(make: Maker, tmp_path: Path) -> None:
    """As Pythia's files have them."""
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(make("gpt_neox"), tmp_path / "gpt_neox")
    state = load_file(source / "model.safetensors")
    for layer in range(2):
        start = f"gpt_neox.layers.{layer}.attention"
        state[f"{start}.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
        state[f"{start}.masked_bias"] = torch.tensor(-1e9)
        state[f"{start}.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(state, source / "model.safetensors", {"format": "pt"})

    before = export(make("gpt_neox"), tmp_path / "before.gguf").read_bytes()
    assert export(source, tmp_path / "after.gguf").read_bytes() == before


def test_gpt2_of_the_hub_has_names_without_a_prefix(make: Maker, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(make("gpt2"), tmp_path / "gpt2")
    state = load_file(source / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in state.items()}
    bare["h.0.attn.bias"] = torch.ones(4, 4)
    save_file(bare, source / "model.safetensors", {"format": "pt"})

    before = export(make("gpt2"), tmp_path / "before.gguf").read_bytes()
    assert export(source, tmp_path / "after.gguf").read_bytes() == before


# Refusals


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, r"family mamba.*"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantized"),
        ({"hidden_act": "relu"}, "activation relu"),
        ({"num_hidden_layers": 3}, "Layer 2 of the model lacks"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a model that writes text"),
        ({"tie_word_embeddings": False, "num_hidden_layers": 1}, "layers.1"),
    ],
)
def test_what_cannot_be_right_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    source = make_llama(tmp_path / "llama")
    change_config(source, **changes)

    with pytest.raises(InvalidInputError, match=said):
        export(source, tmp_path / "model.gguf")
    assert list(tmp_path.glob("*.gguf*")) == []


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "layers without experts"),
        ("qwen3", {"attention_bias": True}, "biases in its attention"),
        ("qwen3_moe", {"rope_parameters": LLAMA3}, "each rotary frequency"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "last of every 2 layers"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1]}, "layer 3 with rotary positions"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("olmo3", {"layer_types": ["full_attention"] * 4}, "last of every 4 layers"),
        ("cohere", {"use_qk_norm": True}, "norms over queries"),
        ("cohere2", {"layer_types": ["sliding_attention"] * 4}, "last of every 4 layers"),
        ("mpt", {"attn_config": {"softmax_scale": 1.0}}, "softmax_scale"),
    ],
)
def test_what_llama_cpp_would_ignore_is_refused(
    make: Maker, tmp_path: Path, family: str, changes: dict[str, Any], said: str
) -> None:
    source = shutil.copytree(make(family), tmp_path / family)
    change_config(source, **changes)

    with pytest.raises(InvalidInputError, match=said):
        export(source, tmp_path / "model.gguf")


def test_an_unknown_family_hears_the_known_ones(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "llama")
    change_config(source, model_type="qwen")

    with pytest.raises(InvalidInputError, match=r"Did you mean.*`qwen2`") as caught:
        export(source, tmp_path / "model.gguf")
    assert "bloom, cohere" in caught.value.remedy


def test_values_too_large_for_half_precision(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = make_llama(tmp_path / "llama")
    state = load_file(source / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"][3, 5] = 1e6
    save_file(state, source / "model.safetensors", {"format": "pt"})

    with pytest.raises(InvalidInputError, match="beyond 65,504") as caught:
        export(source, tmp_path / "model.gguf", "f16")
    assert "--dtype bf16" in caught.value.remedy
    assert list(tmp_path.glob("*.gguf*")) == []
    export(source, tmp_path / "model.gguf", "bf16")
    state["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(state, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidInputError, match="no numbers"):
        export(source, tmp_path / "other.gguf", "bf16")


def test_a_tokenizer_that_llama_cpp_cannot_follow(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "llama")
    path = source / "tokenizer.json"
    document = json.loads(path.read_text())
    document["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(document))

    with pytest.raises(InvalidInputError, match=r"no way of cutting text.*Hello world"):
        export(source, tmp_path / "model.gguf")


def test_another_way_of_cutting_is_found_by_trying(tmp_path: Path) -> None:
    """A form that is not in the table, and cuts as one that is."""
    source = make_llama(tmp_path / "llama")
    path = source / "tokenizer.json"
    document = json.loads(path.read_text())
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    in_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    parts = [split, in_bytes | {"trim_offsets": True}]
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    path.write_text(json.dumps(document))

    made = plan_conversion(str(source)).run()

    assert metadata(Path(made.path))["tokenizer.ggml.pre"] == "gpt-2"


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    source = make_llama(tmp_path / "llama", vocab_size=300)

    with pytest.raises(InvalidInputError, match="rows for 300"):
        export(source, tmp_path / "model.gguf")


def test_a_full_disk_is_seen_before_writing(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=10_000))

    with pytest.raises(SetupError, match="free"):
        export(make("gpt2"), tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_the_old_file_and_no_litter(make: Maker, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    target.write_bytes(b"old")

    def interrupt(_what: str, done: int, of: int) -> None:
        if done > of / 2:
            raise KeyboardInterrupt

    with pytest.raises(UsageError, match="there already"):
        export(make("gpt2"), target)
    replacing = plan_conversion(str(make("gpt2")), to="gguf", target=target, force=True)
    with pytest.raises(KeyboardInterrupt):
        replacing.run(interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert target.read_bytes() == b"old"
    assert replacing.run().path == str(target)
    assert target.read_bytes()[:4] == b"GGUF"


def test_two_writers_of_one_file(make: Maker, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"

    def start_another(_what: str, _done: int, _of: int) -> None:
        with pytest.raises(UsageError, match="right now"):
            export(make("gpt2"), target)

    assert agreement(make("gpt2"), export(make("gpt2"), target, report=start_another)) >= AGREES


UNIGRAM_SPECIALS = ("<unk>", "<|im_start|>", "<|im_end|>", "<pad>")


def list_scored_pieces() -> list[tuple[str, float]]:
    """Single characters and the words of our sentences, no two sums of scores alike.

    A trained vocabulary differs from run to run, and may hold two lengths of one repeated
    sign: a longer run of it is then cut equally well in two orders, and libraries choose.
    """
    letters = sorted({letter for text in TEXTS for letter in text.replace(" ", "\u2581")})
    words = {word.strip(".,!?") for text in SENTENCES for word in text.split()}
    pieces = [*letters[:250], *sorted(f"\u2581{word}" for word in words if word.isalpha())]
    scored = [(piece, -9.0 / len(piece) - 0.00117 * n) for n, piece in enumerate(pieces)]
    return [*((name, 0.0) for name in UNIGRAM_SPECIALS), *scored]


def test_pieces_by_likelihood(tmp_path: Path) -> None:
    """A Unigram tokenizer is written as llama.cpp's `t5` kind, scores and all."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    source = make_llama(tmp_path / "llama")
    tokenizer = Tokenizer(models.Unigram(list_scored_pieces(), unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in UNIGRAM_SPECIALS])
    tokenizer.save(str(source / "tokenizer.json"))
    settings = {"unk_token": "<unk>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))

    file = export(source, tmp_path / "model.gguf", "f32")
    back = to_folder(file, tmp_path / "back")

    assert metadata(file)["tokenizer.ggml.model"] == "t5"
    again = Tokenizer.from_file(str(back / "tokenizer.json"))
    with LlamaModel(file, num_positions=32) as llama:
        for text in SENTENCES:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert llama.tokenize(text) == ids
            assert again.encode(text, add_special_tokens=False).ids == ids


def test_the_wrong_way_of_cutting_is_seen(make: Maker) -> None:
    """The vocabulary has tokens of several digits, which `smollm` would never make."""
    source = make("gpt2")
    rows = json.loads((source / "config.json").read_text())["vocab_size"]
    vocabulary, tokenizer = read_vocabulary(source, rows)

    right, _ = compare_scheme(vocabulary, Scheme(model="gpt2", pre="gpt-2"), tokenizer.encode)
    wrong, _ = compare_scheme(vocabulary, Scheme(model="gpt2", pre="smollm"), tokenizer.encode)
    unknown, _ = compare_scheme(vocabulary, Scheme(model="gpt2", pre="none"), tokenizer.encode)

    assert right is None
    assert wrong is not None
    assert "33" in wrong.problem
    assert unknown is not None
