"""Which engine is chosen from what is asked, what is installed and what the artefact is."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import SetupError, UsageError
from tightfit.engines.open import (
    RECORDS,
    EngineChoice,
    EngineRequest,
    InstalledEngines,
    choose_engine,
    open_engine,
    read_gptq_bits,
)
from tightfit.runtime.model_files import Artefact, ArtefactKind

EVERY = frozenset(RECORDS)
ALL = InstalledEngines(engines=EVERY)
HERE = InstalledEngines(engines=EVERY - {"vllm"})
GPU_BOX = InstalledEngines(engines=EVERY, gpu_names=("NVIDIA H100", "NVIDIA H100"), num_gpus=2)
HALF_INSTALLED = InstalledEngines(engines=EVERY - {"vllm"}, gpu_names=("NVIDIA H100",))


def choose(
    kind: ArtefactKind, installed: InstalledEngines = HERE, *, bits: int | None = None, **asked: Any
) -> EngineChoice:
    artefact = Artefact(name="it", kind=kind, path=Path("it"), tokenizer=Path("it"))
    request = EngineRequest(artefact=artefact, **asked)
    return choose_engine(request, installed, gptq_bits=bits)


@pytest.mark.parametrize("kind", [k for k in ArtefactKind if k is not ArtefactKind.GGUF])
def test_folders_and_adapters_run_on_transformers(kind: ArtefactKind) -> None:
    choice = choose(kind)
    assert (choice.engine, choice.device) == ("transformers", "cpu")
    assert "no CUDA GPU here" in choice.why


def test_a_gguf_runs_on_llama() -> None:
    choice = choose(ArtefactKind.GGUF, GPU_BOX)
    assert (choice.engine, choice.device) == ("llama.cpp", "cuda")
    assert "2 GPUs (NVIDIA H100)" in choice.why


def test_a_gguf_may_be_unpacked_for_transformers() -> None:
    choice = choose(ArtefactKind.GGUF, engine="transformers", weights=Dtype.BF16)
    assert choice.engine == "transformers"
    assert "dequantized" in choice.why


@pytest.mark.parametrize(
    ("kind", "bits", "asked", "engine"),
    [
        (ArtefactKind.MODEL, None, {}, "vllm"),
        (ArtefactKind.GPTQ, 4, {}, "vllm"),
        (ArtefactKind.GPTQ, 8, {}, "vllm"),
        (ArtefactKind.GPTQ, 3, {}, "transformers"),
        (ArtefactKind.GPTQ, None, {}, "transformers"),
        (ArtefactKind.ADAPTER, None, {}, "transformers"),
        (ArtefactKind.ADAPTER, None, {"engine": "vllm"}, "vllm"),
        (ArtefactKind.MODEL, None, {"weights": Dtype.NF4}, "transformers"),
        (ArtefactKind.MODEL, None, {"weights": Dtype.BF16}, "vllm"),
        (ArtefactKind.MODEL, None, {"device": "cpu"}, "transformers"),
        (ArtefactKind.MODEL, None, {"needs_logits": True}, "transformers"),
    ],
)
def test_vllm_is_taken_unasked_only_where_nothing_is_lost(
    kind: ArtefactKind, bits: int | None, asked: dict[str, Any], engine: str
) -> None:
    assert choose(kind, GPU_BOX, bits=bits, **asked).engine == engine


def test_vllm_without_a_gpu_is_not_taken() -> None:
    assert choose(ArtefactKind.MODEL, ALL).engine == "transformers"
    with pytest.raises(SetupError, match="needs a GPU"):
        choose(ArtefactKind.MODEL, ALL, engine="vllm")


def test_a_gpu_that_the_software_cannot_use_is_told() -> None:
    """The classic: torch's CPU build on a GPU machine."""
    for kind, library in ((ArtefactKind.MODEL, "torch"), (ArtefactKind.GGUF, "llama.cpp")):
        choice = choose(kind, HALF_INSTALLED)
        assert choice.device == "cpu"
        assert "NVIDIA H100" in choice.why
        assert library in choice.why
        assert "--device cpu" in choice.why
        with pytest.raises(SetupError, match="NVIDIA H100"):
            choose(kind, HALF_INSTALLED, device="cuda")
        assert "as asked" in choose(kind, HALF_INSTALLED, device="cpu").why


def test_one_gpu_by_number() -> None:
    assert choose(ArtefactKind.MODEL, GPU_BOX, device="cuda:1").device == "cuda:1"
    with pytest.raises(UsageError, match="2 can be seen"):
        choose(ArtefactKind.MODEL, GPU_BOX, device="cuda:2")


@pytest.mark.parametrize(
    ("kind", "asked", "words"),
    [
        (ArtefactKind.MODEL, {"engine": "llama.cpp"}, "GGUF"),
        (ArtefactKind.MODEL, {"engine": "lama"}, "not known"),
        (ArtefactKind.MODEL, {"hosts": ("a:1",)}, "--hosts"),
        (ArtefactKind.MODEL, {"threads": 2}, "--threads"),
        (ArtefactKind.GGUF, {"weights": Dtype.NF4}, "--weights nf4"),
        (ArtefactKind.GGUF, {"engine": "vllm"}, "GGUF"),
        (ArtefactKind.GPTQ, {"engine": "vllm"}, "4 or 8 bits"),
        (ArtefactKind.MODEL, {"engine": "vllm", "needs_logits": True}, "logits"),
    ],
)
def test_contradictions_are_refused(kind: ArtefactKind, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        choose(kind, GPU_BOX, **asked)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("kind", "engine", "remedy"),
    [
        (ArtefactKind.GGUF, "auto", "tightfit[gguf]"),
        (ArtefactKind.MODEL, "auto", "tightfit[train]"),
        (ArtefactKind.MODEL, "vllm", "environment of its own"),
    ],
)
def test_what_is_missing_comes_with_how_to_get_it(
    kind: ArtefactKind, engine: str, remedy: str
) -> None:
    bare = InstalledEngines(engines=frozenset())
    with pytest.raises(SetupError, match="not installed") as caught:
        choose(kind, bare, engine=engine)
    assert remedy in caught.value.remedy


def test_bits_are_read_from_the_folders_config(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": 3}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    artefact = Artefact(name="it", kind=ArtefactKind.GPTQ, path=tmp_path, tokenizer=tmp_path)
    assert read_gptq_bits(artefact) == 3
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert read_gptq_bits(artefact) is None


def test_a_new_engine_is_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[EngineRequest, str]] = []
    module = types.ModuleType("toy_engine")
    module.open_toy = lambda request, *, why: opened.append((request, why))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_engine", module)
    toy = replace(
        RECORDS["transformers"],
        name="toy",
        opener="toy_engine:open_toy",
        is_installed=lambda: True,
        check=lambda _request, _gptq_bits: None,
        count_gpus=lambda: 0,
    )
    monkeypatch.setitem(RECORDS, "toy", toy)
    artefact = Artefact(name="it", kind=ArtefactKind.MODEL, path=tmp_path, tokenizer=tmp_path)

    open_engine(EngineRequest(artefact=artefact, engine="toy", device="cpu", needs_logits=True))

    ((request, why),) = opened
    assert (request.engine, request.device) == ("toy", "cpu")
    assert why == "toy, as asked; on the CPU, as asked."
