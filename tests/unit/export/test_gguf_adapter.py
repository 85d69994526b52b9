"""LoRA adapters as GGUF files: llama.cpp with base and adapter says what peft says."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from merge_cases import ADAPTERS, load_adapted, load_plain, make_adapter, make_base

from small_models import FAMILIES, make_family, name_model_type
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.export.convert import convert_to_gguf, plan_conversion
from tightfit.models.families.registry import FAMILIES as RECORDS
from tightfit.runtime.llama_cpp import LlamaModel

gguf: Any = pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
xllamacpp: Any = pytest.importorskip("xllamacpp", reason="pip install 'tightfit[gguf]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:peft")

NUM_POSITIONS = 96
AGREES = 0.97
WRITTEN = ("plain", "rslora", "patterns", "head", "some-layers", "parameters")
"""Kinds of adapters; the others hold more than low-rank changes of matrices."""


LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
"""Of DeepSeek's attention, where llama.cpp adds no adapter."""
SPARSE = [
    family
    for family in FAMILIES
    if (layout := RECORDS[name_model_type(family)].gguf) and layout.expert_inner_key
]


def to_gguf_lora(adapter: Path, target: Path, **settings: Any) -> Path:
    made = plan_conversion(str(adapter), to="gguf-lora", target=target, **settings).run()
    return Path(made.path)


def llama_scores(base: Path, adapter: Path | None, numbers: list[int]) -> Any:
    """The scores of llama.cpp with the adapter, by llama.h."""
    with LlamaModel(base, num_positions=len(numbers)) as llama:
        if adapter is not None:
            library = llama._library
            library.llama_adapter_lora_init.restype = ctypes.c_void_p
            library.llama_adapter_lora_init.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
            loaded = library.llama_adapter_lora_init(llama._model, str(adapter).encode())
            assert loaded, "llama.cpp cannot load the adapter"
            library.llama_set_adapters_lora.argtypes = [
                *(ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)),
                *(ctypes.c_size_t, ctypes.POINTER(ctypes.c_float)),
            ]
            adapters, scales = (ctypes.c_void_p * 1)(loaded), (ctypes.c_float * 1)(1.0)
            assert library.llama_set_adapters_lora(llama._context, adapters, 1, scales) == 0
        return llama.logits(numbers)


def assert_same(base: Path, adapter: Path, home: Path) -> None:
    """Base and adapter in llama.cpp beside both in peft."""
    file = convert_to_gguf(base, home / "base.gguf", dtype=Dtype.FP32)
    written = to_gguf_lora(adapter, home / "adapter.gguf")
    numbers = np.random.default_rng(7).integers(4, 300, NUM_POSITIONS).tolist()
    with torch.no_grad():
        truth = load_adapted(base, adapter)(torch.tensor([numbers])).logits[0].numpy().argmax(-1)
    plain = llama_scores(file, None, numbers).argmax(-1)
    found = llama_scores(file, written, numbers).argmax(-1)
    assert (truth == plain).mean() < 0.9, "the adapter does nothing"
    assert (truth == found).mean() >= AGREES


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str) -> None:
    base = make_family(tmp_path / "base", family)
    settings: dict[str, Any] = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8}
    excluded = RECORDS[name_model_type(family)].lora_excludes
    settings["exclude_modules"] = [*LATENT, *excluded]
    adapter = make_adapter(tmp_path / "adapter", base, **settings)

    assert_same(base, adapter, tmp_path)


@pytest.mark.parametrize("name", LATENT)
def test_an_adapter_of_latent_attention_is_refused(tmp_path: Path, name: str) -> None:
    base = make_family(tmp_path / "base", "deepseek_v3")
    adapter = make_adapter(tmp_path / "adapter", base, target_modules=[name])

    with pytest.raises(InvalidInputError, match=rf"{name}.weight, which llama.cpp does not"):
        to_gguf_lora(adapter, tmp_path / "adapter.gguf")


@pytest.mark.parametrize("family", SPARSE)
def test_adapted_experts(tmp_path: Path, family: str) -> None:
    base = make_family(tmp_path / "base", family)
    settings: dict[str, Any] = {"target_modules": ["q_proj"], "r": 4, "lora_alpha": 4}
    settings["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    adapter = make_adapter(tmp_path / "adapter", base, **settings)

    assert_same(base, adapter, tmp_path)


@pytest.mark.parametrize("name", WRITTEN)
def test_every_kind_of_adapter(tmp_path: Path, name: str) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS[name])

    assert_same(base, adapter, tmp_path)


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name not in WRITTEN])
def test_adapters_that_hold_more_are_refused(tmp_path: Path, name: str) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS[name])

    with pytest.raises(InvalidInputError, match=r"The adapter .*low-rank") as caught:
        to_gguf_lora(adapter, tmp_path / "adapter.gguf")
    assert "tightfit merge" in caught.value.remedy
    assert not (tmp_path / "adapter.gguf").exists()


def test_a_head_that_is_the_embedding_too_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "tied")
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS["head"])

    with pytest.raises(InvalidInputError, match="embedding and head in one"):
        to_gguf_lora(adapter, tmp_path / "adapter.gguf")


def test_greedy_answers_of_llama_cpps_server(tmp_path: Path) -> None:
    """By the parameters that its users set."""
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS["plain"])
    file = convert_to_gguf(base, tmp_path / "base.gguf", dtype=Dtype.FP32)
    written = to_gguf_lora(adapter, tmp_path / "adapter.gguf")
    prompt = np.random.default_rng(3).integers(4, 300, 12).tolist()
    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = 128, 1, 1
    loaded = xllamacpp.CommonAdapterLoraInfo()
    loaded.path, loaded.scale = str(written), 1.0
    settings.lora_adapters = [loaded]
    server = xllamacpp.Server(settings)
    body = {
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "verbose": True,
        "return_tokens": True,
    }

    answer = server.handle_completions(body)

    model = load_adapted(base, adapter)
    limits = {"min_new_tokens": 16, "max_new_tokens": 16, "do_sample": False}
    with torch.no_grad():
        truth = model.generate(input_ids=torch.tensor([prompt]), **limits)[0, len(prompt) :]
        plain = load_plain(base).generate(input_ids=torch.tensor([prompt]), **limits)
    assert answer["__verbose"]["tokens"] == truth.tolist()
    assert answer["__verbose"]["tokens"] != plain[0, len(prompt) :].tolist()


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS["patterns"])

    conversion = plan_conversion(str(adapter), to="gguf-lora", dtype="f16")
    made = conversion.run()

    reader = gguf.GGUFReader(made.path)
    stated = {name: field.contents() for name, field in reader.fields.items()}
    assert made.path == str(tmp_path / "adapter-lora-f16.gguf")
    assert made.size_bytes <= conversion.forecast.disk_bytes
    assert (stated["general.type"], stated["adapter.type"]) == ("adapter", "lora")
    assert stated["general.architecture"] == "llama"
    assert "--lora adapter-lora-f16.gguf" in made.notes[0]
    names = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert names["blk.0.attn_q.weight.lora_a"] == [64, 4]
    assert names["blk.0.attn_q.weight.lora_b"] == [4, 64]
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F16"}


def test_the_file_is_no_model(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, **ADAPTERS["rslora"])
    file = to_gguf_lora(adapter, tmp_path / "adapter.gguf")

    with pytest.raises(InvalidInputError, match="is an adapter, not a model"):
        plan_conversion(str(file), to="hf")


def test_a_model_is_no_adapter(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama")

    with pytest.raises(UsageError, match="not an adapter"):
        plan_conversion(str(base), to="gguf-lora")
