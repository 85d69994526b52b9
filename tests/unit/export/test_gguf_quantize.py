"""GGUF quantization: llama.cpp's mixtures, ggml's own codes, and files that llama.cpp loads."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from small_models import FAMILIES, TEMPLATE, make_family, make_llama, name_model_type
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.export import formats
from tightfit.export.convert import convert_to_gguf
from tightfit.export.formats import ExportFormat, list_formats, read_formats
from tightfit.export.quantize.calibration import Importance
from tightfit.export.quantize.gguf import (
    ModelFacts,
    Shape,
    choose_mixture,
    fit_width,
    quantize_rows,
    requantize_gguf,
)
from tightfit.models.families.registry import FAMILIES as RECORDS
from tightfit.runtime.llama_cpp import LlamaModel

gguf = pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
pytest.importorskip("xllamacpp", reason="pip install 'tightfit[gguf]'")

Q14_MORE = (0, 1, 2, 3, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35, 36, 37, 38, 39)
Q70_MORE = (*range(10), *range(12, 70, 3), *range(70, 80))
ALL_70 = tuple(range(80))
ALL_14 = tuple(range(40))
# What llama.cpp's own quantizer gives these two models, beside its main type. Source:
# tests/snapshots/qwen3-14b.schema and meta-llama-3.1-70b-instruct.schema, llama.cpp b21e4de.
PUBLISHED: dict[tuple[str, ExportFormat], dict[tuple[str, str], tuple[int, ...]]] = {
    ("qwen3-14b", formats.Q2_K): {
        ("attn_output", "Q3_K"): ALL_14,
        ("attn_v", "Q4_K"): ALL_14,
        ("ffn_down", "Q3_K"): ALL_14,
    },
    ("qwen3-14b", formats.Q3_K_M): {
        ("attn_output", "Q4_K"): ALL_14,
        ("attn_v", "Q5_K"): (0, 1),
        ("attn_v", "Q4_K"): ALL_14[2:],
        ("ffn_down", "Q5_K"): (0, 1),
        ("ffn_down", "Q4_K"): ALL_14[2:],
    },
    ("qwen3-14b", formats.Q4_K_M): {
        ("attn_v", "Q6_K"): Q14_MORE,
        ("ffn_down", "Q6_K"): Q14_MORE,
    },
    ("qwen3-14b", formats.Q5_K_M): {
        ("attn_v", "Q6_K"): Q14_MORE,
        ("ffn_down", "Q6_K"): Q14_MORE,
    },
    ("qwen3-14b", formats.Q6_K): {},
    ("llama-70b", formats.Q2_K): {
        ("attn_output", "Q3_K"): ALL_70,
        ("attn_v", "Q5_K"): ALL_70,
        ("ffn_down", "Q3_K"): ALL_70,
    },
    ("llama-70b", formats.Q3_K_M): {
        ("attn_output", "Q4_K"): ALL_70,
        ("attn_v", "Q5_K"): ALL_70,
        ("ffn_down", "Q5_K"): ALL_70[:5],
        ("ffn_down", "Q4_K"): ALL_70[5:],
    },
    ("llama-70b", formats.Q4_K_M): {
        ("attn_v", "Q6_K"): Q70_MORE,
        ("attn_v", "Q5_K"): tuple(sorted(set(ALL_70) - set(Q70_MORE))),
        ("ffn_down", "Q6_K"): Q70_MORE,
    },
    ("llama-70b", formats.Q5_K_M): {
        ("attn_v", "Q6_K"): Q70_MORE,
        ("ffn_down", "Q6_K"): Q70_MORE,
    },
    ("llama-70b", formats.Q6_K): {},
}
MODELS = {
    "qwen3-14b": (
        ModelFacts(architecture="qwen3", num_layers=40, num_heads=40, num_kv_heads=8),
        5120,
        17408,
    ),
    "llama-70b": (
        ModelFacts(architecture="llama", num_layers=80, num_heads=64, num_kv_heads=8),
        8192,
        28672,
    ),
}
MAIN = {
    formats.Q8_0: "Q8_0",
    formats.Q6_K: "Q6_K",
    formats.Q5_K_M: "Q5_K",
    formats.Q4_K_M: "Q4_K",
    formats.Q3_K_M: "Q3_K",
    formats.Q2_K: "Q2_K",
}


def list_tensors(facts: ModelFacts, width: int, inner: int, *, is_tied: bool) -> dict[str, Shape]:
    shapes = {
        "attn_q": (width, width),
        "attn_k": (width // 8, width),
        "attn_v": (width // 8, width),
        "attn_output": (width, width),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
        "attn_norm": (width,),
    }
    names = ["token_embd.weight"] if is_tied else ["token_embd.weight", "output.weight"]
    found: dict[str, Shape] = dict.fromkeys(names, (1024, width))
    for layer in range(facts.num_layers):
        found |= {f"blk.{layer}.{part}.weight": shape for part, shape in shapes.items()}
    return found


@pytest.mark.parametrize(("model", "target"), sorted(PUBLISHED, key=str))
def test_the_mixture_is_the_one_llama_cpp_publishes(model: str, target: ExportFormat) -> None:
    facts, width, inner = MODELS[model]
    tensors = list_tensors(facts, width, inner, is_tied=False)

    mixture = choose_mixture(tensors, facts, target)

    expected = {name: MAIN[target] for name in tensors if not name.endswith("_norm.weight")} | {
        "output.weight": "Q6_K"
    }
    for (part, kind), layers in PUBLISHED[model, target].items():
        expected |= {f"blk.{layer}.{part}.weight": kind for layer in layers}
    assert dict(mixture.types) == expected
    assert not mixture.fallen


def test_a_tied_embedding_is_quantized_as_the_head_it_is() -> None:
    facts, width, inner = MODELS["qwen3-14b"]

    mixture = choose_mixture(list_tensors(facts, width, inner, is_tied=True), facts, formats.Q4_K_M)

    assert mixture.types["token_embd.weight"] == "Q6_K"


def test_eight_experts_keep_keys_and_values_at_eight_bits() -> None:
    facts, width, inner = MODELS["qwen3-14b"]
    facts = replace(facts, num_experts=8)
    tensors = list_tensors(facts, width, inner, is_tied=False)
    tensors["blk.0.ffn_gate_inp.weight"] = (8, width)

    types = choose_mixture(tensors, facts, formats.Q4_K_M).types

    assert {types["blk.5.attn_k.weight"], types["blk.5.attn_v.weight"]} == {"Q8_0"}
    assert types["blk.5.attn_output.weight"] == "Q5_K"
    assert "blk.0.ffn_gate_inp.weight" not in types


def test_falcon_has_rules_of_its_own() -> None:
    facts = ModelFacts(architecture="falcon", num_layers=32, num_heads=71, num_kv_heads=1)
    tensors = {"output.weight": (1024, 4096)}
    tensors |= {f"blk.{layer}.ffn_down.weight": (4096, 4096) for layer in range(32)}

    types = choose_mixture(tensors, facts, formats.Q4_K_M).types

    assert types["output.weight"] == "Q8_0"
    assert [types[f"blk.{layer}.ffn_down.weight"] for layer in (0, 1, 2, 4, 5)] == [
        "Q6_K", "Q6_K", "Q5_K", "Q4_K", "Q4_K",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "width", "given"),
    [("Q4_K", 512, "Q4_K"), ("Q4_K", 576, "Q5_0"), ("Q2_K", 576, "Q4_0"), ("Q6_K", 96, "Q8_0"),
     ("Q5_K", 32, "Q5_1"), ("Q8_0", 33, "F16"), ("Q4_K", 100, "F16")],
)  # fmt: skip
def test_odd_widths_fall_back(kind: str, width: int, given: str) -> None:
    assert fit_width(kind, width) == given


def draw(rows: int, width: int) -> NDArray[np.float32]:
    return np.random.default_rng(7).normal(size=(rows, width)).astype(np.float32)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q5_1", "Q8_0"])
def test_codes_are_those_of_the_reference_in_python(name: str) -> None:
    from gguf import quants

    kind, values = gguf.GGMLQuantizationType[name], draw(24, 576)

    assert quantize_rows(values, kind).tobytes() == quants.quantize(values, kind).tobytes()


def test_more_bits_lose_less() -> None:
    from gguf import quants

    values = draw(16, 512)
    errors = []
    for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0"):
        kind = gguf.GGMLQuantizationType[name]
        unpacked = quants.dequantize(quantize_rows(values, kind).reshape(16, -1), kind)
        errors.append(float(np.sqrt(np.mean((unpacked - values) ** 2))))

    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.5
    assert errors[-1] < 0.01


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, one width a multiple of 256 and one not, as a GGUF file in fp32."""
    home = tmp_path_factory.mktemp("plain")
    folder = make_llama(
        home / "model", hidden_size=256, intermediate_size=288, initializer_range=0.05
    )
    return convert_to_gguf(folder, home / "model-f32.gguf", dtype=Dtype.FP32)


def test_the_file_loads_in_llama_cpp_and_says_nearly_the_same(plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "model-q8_0.gguf"
    tokens = list(range(4, 68))

    mixture, _ = requantize_gguf(plain, target, formats.Q8_0)

    with LlamaModel(plain) as model:
        before = model.logits(tokens)
    with LlamaModel(target) as model:
        after = model.logits(tokens)
    assert float(np.corrcoef(before.ravel(), after.ravel())[0, 1]) > 0.999
    assert len(mixture.types) == 16  # 7 in each of two layers, the embedding, the head
    assert target.stat().st_size < 0.35 * plain.stat().st_size


def test_metadata_travels_and_names_the_importance(plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    importance = Importance(
        values={"blk.0.ffn_up.weight": np.ones(256, np.float32)},
        dataset="rows.jsonl",
        num_chunks=3,
    )

    mixture, num_weighted = requantize_gguf(plain, target, formats.Q4_K_M, importance=importance)

    old, new = read_fields(plain), read_fields(target)
    changed = {key for key in old | new if old.get(key) != new.get(key)}
    assert changed == {
        "general.file_type",
        "quantize.imatrix.dataset",
        "quantize.imatrix.entries_count",
        "quantize.imatrix.chunks_count",
    }
    assert new["general.file_type"] == 15  # LLAMA_FTYPE_MOSTLY_Q4_K_M in llama.h
    assert new["tokenizer.chat_template"] == TEMPLATE
    assert new["quantize.imatrix.chunks_count"] == 3
    assert num_weighted == 1
    # Only ffn_down's rows, of 288 values, do not divide into blocks of 256.
    assert set(mixture.fallen) == {"blk.0.ffn_down.weight", "blk.1.ffn_down.weight"}


def read_fields(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}


def test_threads_and_slices_change_nothing(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, several = tmp_path / "one.gguf", tmp_path / "several.gguf"

    requantize_gguf(plain, one, formats.Q3_K_M)
    monkeypatch.setattr("tightfit.export.quantize.gguf.SLICE_VALUES", 5000)
    requantize_gguf(plain, several, formats.Q3_K_M, num_threads=3)

    assert one.read_bytes() == several.read_bytes()


def test_an_interrupt_leaves_nothing(plain: Path, tmp_path: Path) -> None:
    def stop(_done: int, _of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        requantize_gguf(plain, tmp_path / "out.gguf", formats.Q8_0, report=stop)

    assert list(tmp_path.iterdir()) == []


def test_a_quantized_file_is_not_quantized_again(plain: Path, tmp_path: Path) -> None:
    first = tmp_path / "first.gguf"
    requantize_gguf(plain, first, formats.Q8_0)

    with pytest.raises(InvalidInputError, match="quantized already"):
        requantize_gguf(first, tmp_path / "second.gguf", formats.Q4_K_M)


def test_values_that_are_no_numbers_are_refused(plain: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(plain.read_bytes())
    tensor = next(t for t in gguf.GGUFReader(plain).tensors if t.name == "blk.1.ffn_up.weight")
    with broken.open("r+b") as stream:
        stream.seek(int(tensor.data_offset))
        stream.write(np.float32(np.nan).tobytes())

    with pytest.raises(InvalidInputError, match=r"blk\.1\.ffn_up\.weight"):
        requantize_gguf(broken, tmp_path / "out.gguf", formats.Q8_0)
    assert list(tmp_path.iterdir()) == [broken]


def test_targets_are_read_by_name_once_each() -> None:
    assert read_formats(["Q4_K_M,nf4", "q4_k_m"]) == (formats.Q4_K_M, formats.NF4)
    assert read_formats(["all"]) == list_formats()
    with pytest.raises(UsageError, match="q4_k_m"):
        read_formats(["q4_k_n"])


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_quantized_each_by_itself(tmp_path: Path, family: str) -> None:
    """Tensors of three dimensions: llama.cpp computes from them what it does from their values."""
    layout = RECORDS[name_model_type(family)].gguf
    if layout is None or layout.expert_inner_key is None:
        return
    changes = {"hidden_size": 256, layout.expert_inner_key: 256}
    source = make_family(tmp_path / "model", family, **changes)
    plain = convert_to_gguf(source, tmp_path / "plain.gguf", dtype=Dtype.FP32)

    requantize_gguf(plain, tmp_path / "q4.gguf", formats.Q4_K_M)

    quantized = gguf.GGUFReader(tmp_path / "q4.gguf")
    kinds = {t.tensor_type.name for t in quantized.tensors if t.name.endswith("_exps.weight")}
    assert kinds <= {"Q4_K", "Q6_K"}
    assert len(kinds) > 0
    unpacked = write_unpacked(quantized, plain, tmp_path / "unpacked.gguf")
    numbers = np.random.default_rng(7).integers(4, 300, 64).tolist()
    found = [scores_of(file, numbers) for file in (tmp_path / "q4.gguf", unpacked)]
    # llama.cpp rounds activations to 8 bit; beside the original's scores it is below 0.4.
    assert (found[0].argmax(-1) == found[1].argmax(-1)).mean() > 0.75


def scores_of(file: Path, numbers: list[int]) -> Any:
    with LlamaModel(file, num_positions=len(numbers)) as llama:
        return llama.logits(numbers)


def write_unpacked(quantized: Any, plain: Path, target: Path) -> Path:
    """The plain file with the quantized one's values, dequantized by gguf's Python code."""
    shutil.copy(plain, target)
    copy = gguf.GGUFReader(target, mode="r+")
    packed = {tensor.name: tensor for tensor in quantized.tensors}
    for tensor in copy.tensors:
        found = packed[tensor.name]
        tensor.data[...] = gguf.quants.dequantize(found.data, found.tensor_type)
    copy.data.flush()
    return target
