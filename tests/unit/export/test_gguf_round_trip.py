"""From a folder to GGUF and back: values, settings, tokens and words are what they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from small_models import FAMILIES, make_family, name_model_type
from tightfit.core.dtypes import Dtype, find_plain_dtype
from tightfit.core.errors import InvalidInputError
from tightfit.export.convert import (
    convert_to_gguf,
    plan_conversion,
)
from tightfit.export.gguf_tokenizer import TEXTS
from tightfit.models.families.registry import FAMILIES as RECORDS
from tightfit.runtime.llama_cpp import LlamaModel

gguf: Any = pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
pytest.importorskip("xllamacpp", reason="pip install 'tightfit[gguf]'")
transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

GEMMA_STEP = 2**-23
"""Gemma's norms are stored with one added, which costs the last bit of 32."""


def there_and_back(source: Path, home: Path, dtype: str = "f32", **settings: Any) -> Path:
    file = convert_to_gguf(source, home / "a.gguf", dtype=find_plain_dtype(dtype) or Dtype.FP32)
    return to_folder(file, home / "back", **settings)


def to_folder(source: Path, target: Path, **settings: Any) -> Path:
    return Path(plan_conversion(str(source), to="hf", target=target, **settings).run().path)


def load_state(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return state


def scores(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    numbers = np.random.default_rng(7).integers(4, model.config.vocab_size, 200)
    with torch.no_grad():
        found: torch.Tensor = model(torch.from_numpy(numbers)[None]).logits
    return found


def load_values(folder: Path) -> dict[str, torch.Tensor]:
    """As transformers names them, whatever the file says."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    values: dict[str, torch.Tensor] = model.state_dict()
    return values


def is_converted_back(family: str) -> bool:
    layout = RECORDS[name_model_type(family)].gguf
    return layout is not None and layout.read_settings is not None


@pytest.mark.parametrize("family", [name for name in FAMILIES if is_converted_back(name)])
def test_values_come_back_bit_for_bit(tmp_path: Path, family: str) -> None:
    source = make_family(tmp_path / "source", family)

    back = there_and_back(source, tmp_path)

    before, after = load_values(source), load_values(back)
    assert before.keys() == after.keys()
    for name, value in before.items():
        if family.startswith("gemma") and name.endswith("norm.weight"):
            assert torch.allclose(value, after[name], rtol=0, atol=GEMMA_STEP), name
        else:
            assert torch.equal(value, after[name]), name
    # The same numbers under other settings would be another model.
    assert torch.allclose(scores(source), scores(back), atol=1e-5)


ROPES = {
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.3,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_scaling_comes_back(tmp_path: Path, kind: str) -> None:
    source = make_family(tmp_path / "source", "qwen3" if kind == "yarn" else "llama")
    path = source / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rope_parameters": ROPES[kind]}))

    back = there_and_back(source, tmp_path)

    assert torch.allclose(scores(source), scores(back), atol=1e-5)


def test_longrope_comes_back(tmp_path: Path) -> None:
    factors = {"long_factor": [1.0 + i for i in range(8)], "short_factor": [1.5] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors}
    source = make_family(
        tmp_path / "source",
        "phi3",
        rope_parameters=rope | {"original_max_position_embeddings": 128},
        original_max_position_embeddings=128,
    )

    assert torch.allclose(scores(source), scores(there_and_back(source, tmp_path)), atol=1e-5)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "gemma", "gpt2", "falcon", "bloom"])
def test_tokens_and_words_come_back(tmp_path: Path, family: str) -> None:
    source = make_family(tmp_path / "source", family)
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')

    back = there_and_back(source, tmp_path)

    before = Tokenizer.from_file(str(source / "tokenizer.json"))
    after = Tokenizer.from_file(str(back / "tokenizer.json"))
    for text in (*TEXTS, "  begins with spaces", "cafe\u0301"):
        assert before.encode(text).ids == after.encode(text).ids, text
        assert before.decode(before.encode(text).ids) == after.decode(after.encode(text).ids)
    assert (back / "chat_template.jinja").read_text() == (
        source / "chat_template.jinja"
    ).read_text()
    stops = json.loads((back / "generation_config.json").read_text())["eos_token_id"]
    assert set(stops) == {1, 2}
    theirs = transformers.AutoTokenizer.from_pretrained(back)
    assert theirs.encode(TEXTS[0]) == after.encode(TEXTS[0]).ids


def test_spaces_as_sentencepiece_and_llama_cpp_have_them(tmp_path: Path) -> None:
    """A GGUF cannot say that a first space is kept; the folder then cuts as llama.cpp does."""
    source = make_family(tmp_path / "source", "llama")

    back = there_and_back(source, tmp_path)

    tokenizer = Tokenizer.from_file(str(back / "tokenizer.json"))
    with LlamaModel(tmp_path / "a.gguf", num_positions=32) as llama:
        for text in (*TEXTS, "  begins with spaces", "a<s>b </s> c"):
            assert llama.tokenize(text) == tokenizer.encode(text, add_special_tokens=False).ids


def test_and_forth_again_gives_the_same_tensors(tmp_path: Path) -> None:
    """What cuts text as SentencePiece does needs no note, and loses nothing any more."""
    back = there_and_back(make_family(tmp_path / "llama", "llama"), tmp_path)
    made = plan_conversion(str(back), dtype="f32", target=tmp_path / "b.gguf").run()

    def tensors(file: Path) -> dict[str, bytes]:
        return {t.name: t.data.tobytes() for t in gguf.GGUFReader(file).tensors}

    assert made.notes == ()
    assert tensors(tmp_path / "b.gguf") == tensors(tmp_path / "a.gguf")


@pytest.mark.parametrize(("stored", "wanted"), [("f16", "float16"), ("bf16", "bfloat16")])
def test_half_precision_is_kept_unless_told(tmp_path: Path, stored: str, wanted: str) -> None:
    source = make_family(tmp_path / "source", "qwen2")

    back = there_and_back(source, tmp_path, stored)

    config = json.loads((back / "config.json").read_text())
    state = load_state(back)
    assert config["dtype"] == wanted
    assert {str(value.dtype) for value in state.values()} == {f"torch.{wanted}"}
    wide = to_folder(tmp_path / "a.gguf", tmp_path / "wide", dtype="f32")
    name = "model.layers.0.mlp.up_proj.weight"
    half = load_state(source)[name].to(getattr(torch, wanted))
    assert torch.equal(load_state(wide)[name], half.float())


def test_a_quantized_file_is_unpacked_and_says_so(tmp_path: Path) -> None:
    """Against gguf's own arithmetic, and llama.cpp's scores of the quantized file."""
    from tightfit.runtime.gguf.unpack import plan_unpack

    source = make_family(tmp_path / "source", "qwen2")
    plain = convert_to_gguf(source, tmp_path / "a.gguf", dtype=Dtype.FP32)
    packed = quantize_by_hand(plain, tmp_path / "q.gguf")

    notes = plan_unpack(packed).write(tmp_path / "back")

    assert "quantized (Q8_0)" in notes[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32
    )
    numbers = np.random.default_rng(7).integers(4, model.config.vocab_size, 64).tolist()
    with torch.no_grad():
        ours = model(torch.tensor([numbers])).logits[0].numpy()
    with LlamaModel(packed, num_positions=64) as llama:
        theirs = llama.logits(numbers)
    assert (ours.argmax(-1) == theirs.argmax(-1)).mean() > 0.9


def quantize_by_hand(plain: Path, target: Path) -> Path:
    """Q8_0 by gguf's Python code, with everything else copied."""
    reader = gguf.GGUFReader(plain)
    writer = gguf.GGUFWriter(target, "qwen2")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kinds = field.types
        writer.add_key_value(
            name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None
        )
    kind = gguf.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        else:
            data = gguf.quants.quantize(np.array(tensor.data), kind)
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_a_tensor_that_is_lost_is_missed(tmp_path: Path) -> None:
    from tightfit.runtime.gguf.file import GgufFile
    from tightfit.runtime.gguf.unpack import plan_unpack

    source = make_family(tmp_path / "source", "qwen3")
    file = convert_to_gguf(source, tmp_path / "a.gguf")
    lost = {"blk.1.attn_q_norm.weight"}
    read = GgufFile.__init__

    def forgetful(self: GgufFile, path: Path) -> None:
        read(self, path)
        self.tensors = {name: place for name, place in self.tensors.items() if name not in lost}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GgufFile, "__init__", forgetful)
        with pytest.raises(InvalidInputError, match=r"lacks model\.layers\.1\.self_attn\.q_norm"):
            plan_unpack(file)


def test_a_file_cut_short_leaves_nothing(tmp_path: Path) -> None:
    source = make_family(tmp_path / "source", "gpt2")
    file = convert_to_gguf(source, tmp_path / "a.gguf")
    whole = file.read_bytes()

    file.write_bytes(whole[: len(whole) - 100_000])
    with pytest.raises(InvalidInputError, match="cut short"):
        to_folder(file, tmp_path / "back")
    file.write_bytes(whole[:-100])
    with pytest.raises(InvalidInputError, match="cut short"):
        to_folder(file, tmp_path / "back")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "a.gguf"}


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    source = make_family(tmp_path / "source", "gpt2")
    file = convert_to_gguf(source, tmp_path / "a.gguf")
    file.write_bytes(file.read_bytes().replace(b"gpt2", b"rwkv"))

    with pytest.raises(InvalidInputError, match="architecture rwkv") as caught:
        to_folder(file, tmp_path / "back")
    assert "bloom, falcon" in caught.value.remedy
