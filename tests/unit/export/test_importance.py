"""Importance: the sums themselves, the names they get, and that they help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from small_models import SENTENCES, make_family, make_llama, name_model_type
from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError
from tightfit.export.convert import convert_to_gguf
from tightfit.export.formats import Q4_K_M
from tightfit.export.quantize.calibration import (
    Calibration,
    measure_importance,
    read_calibration,
    read_importance,
)
from tightfit.export.quantize.gguf import plan_mixture, quantize_rows
from tightfit.models.families.registry import FAMILIES
from tightfit.runtime.model_files import find_artefact

gguf = pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("importance") / "model")


def make_calibration() -> Calibration:
    rows = np.random.default_rng(1).integers(4, 300, (3, 40)).astype(np.int32)
    return Calibration(rows=rows, source="chance")


def test_it_is_the_mean_square_of_each_input(model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    calibration = make_calibration()

    found = read_importance(measure_importance(model, calibration, architecture="llama"))

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    norm = loaded.model.layers[1].input_layernorm
    squares = []
    with torch.no_grad():
        for row in calibration.rows:
            states = loaded(
                torch.as_tensor(row, dtype=torch.long)[None], output_hidden_states=True
            ).hidden_states
            squares.append(norm(states[1])[0].square())
    expected = torch.cat(squares).mean(0).numpy()
    for part in ("attn_q", "attn_k", "attn_v"):
        np.testing.assert_allclose(found.values[f"blk.1.{part}.weight"], expected, rtol=1e-4)
    assert found.num_chunks == 3


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "bloom"])
def test_families_without_sdpa(tmp_path: Path, family: str) -> None:
    source = make_family(tmp_path / family, family)
    architecture = FAMILIES[name_model_type(family)].architecture

    found = read_importance(
        measure_importance(source, make_calibration(), architecture=architecture)
    )

    assert "blk.1.attn_output.weight" in found.values


def test_every_quantized_matrix_but_embedding_and_head_has_one(model: Path, tmp_path: Path) -> None:
    plain = convert_to_gguf(model, tmp_path / "m.gguf", dtype=Dtype.FP32)
    wanted = set(plan_mixture(gguf.GGUFReader(plain), Q4_K_M).types)

    found = read_importance(measure_importance(model, make_calibration(), architecture="llama"))

    assert wanted - set(found.values) == {"token_embd.weight", "output.weight"}


def test_it_is_measured_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure_importance(model, make_calibration(), architecture="llama")
    monkeypatch.setattr(
        "tightfit.export.quantize.calibration.load_base", lambda *_: pytest.fail("loaded")
    )

    assert measure_importance(model, make_calibration(), architecture="llama") == first


def test_inputs_that_matter_are_rounded_better() -> None:
    from gguf import quants

    values = np.random.default_rng(2).normal(size=(32, 256)).astype(np.float32)
    weights = np.ones(256, np.float32)
    weights[::4] = 100.0
    kind = gguf.GGMLQuantizationType.Q4_K

    def error(importance: Any) -> float:
        packed = quantize_rows(values, kind, importance).reshape(32, -1)
        return float((weights * (quants.dequantize(packed, kind) - values) ** 2).sum())

    assert error(weights) < 0.8 * error(None)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 40)

    with pytest.raises(InvalidInputError, match=r"bad\.gguf"):
        read_importance(path)


def test_rows_of_conversations_are_rendered_and_filled(model: Path, tmp_path: Path) -> None:
    import json

    data = tmp_path / "rows.jsonl"
    lines = [json.dumps({"instruction": s, "input": "", "output": s}) for s in SENTENCES * 40]
    data.write_text("\n".join(f"{line}" for line in lines))

    found = read_calibration(find_artefact(str(model)), data, num_rows=4, max_positions=128)

    assert found.rows.shape == (4, 128)
    assert (found.rows == 1).any()  # <|im_start|>: the model's template was used
    assert any("is little" in note for note in found.notes)


def test_too_little_data_is_refused(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "short.txt"
    data.write_text("Nothing much.")

    with pytest.raises(InvalidInputError, match="at least 512"):
        read_calibration(find_artefact(str(model)), data, num_rows=4)


def test_without_data_there_is_text_and_a_hint(model: Path) -> None:
    found = read_calibration(find_artefact(str(model)), None, num_rows=20)

    assert found.rows.shape == (20, 512)
    assert "--calibrate" in found.notes[0]
