"""The parity check across formats: a GGUF file made well passes, one made badly is caught."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from small_models import make_llama
from tightfit.core.dtypes import Dtype
from tightfit.export.convert import convert_to_gguf
from tightfit.export.formats import StepKind
from tightfit.export.verify.verdict import Comparison
from tightfit.export.verify.verify import VerifyRequest, verify_models
from tightfit.runtime.llama_cpp import has_llama
from tightfit.runtime.model_files import find_artefact

pytestmark = pytest.mark.skipif(
    not has_llama(), reason="needs llama.cpp: pip install 'tightfit[gguf]'"
)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIGHTFIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("gguf") / "model")


def convert(folder: Path, target: Path) -> Path:
    return convert_to_gguf(folder, target, dtype=Dtype.FP16)


def check(reference: Path, other: Path) -> Comparison:
    verdict = verify_models(
        VerifyRequest(
            reference=find_artefact(str(reference)),
            others=(find_artefact(str(other)),),
            num_tokens=600,
            prompts=("How many singers are there?",),
            device="cpu",
            threads=1,
        )
    )
    (row,) = verdict.rows
    return row


def texts(row: Comparison) -> str:
    return "\n".join(finding.detail for finding in row.findings)


def test_a_good_file_passes(model: Path, tmp_path: Path) -> None:
    row = check(model, convert(model, tmp_path / "model.gguf"))

    assert row.is_good, texts(row)
    assert (row.kind, row.format) == (StepKind.FORMAT, "F16")
    assert row.engine == "llama.cpp"
    assert row.top1_fraction is not None
    assert row.top1_fraction >= 0.99
    assert row.tokenizer_same
    assert row.template_same


def _edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _permute(folder: Path) -> None:
    """What a converter does that forgets, or repeats, the change of rotary layout."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if heads is not None:
            rows, width = value.shape
            halves = value.view(heads, 2, rows // heads // 2, width)
            tensors[name] = halves.transpose(1, 2).reshape(rows, width).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _zero(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(128, 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _other_base(folder: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    _edit_json(folder / "config.json", rope_parameters=rope)


def _scaled(folder: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    _edit_json(folder / "config.json", rope_parameters=rope)


def _no_end_of_turn(folder: Path) -> None:
    _edit_json(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    _edit_json(folder / "config.json", eos_token_id=0)
    _edit_json(folder / "generation_config.json", eos_token_id=0)


def _template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|im_start|>", "<|im_start|> "))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_permute, "rows of q and k"),
        (_zero, "most likely token"),
        (_other_base, "rope's base is 500000"),
        (_scaled, "rope is scaled by 4"),
        (_no_end_of_turn, "no longer end"),
        (_template, "chat template writes another text"),
    ],
)
def test_a_bad_file_is_caught(
    model: Path, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    damage(folder)

    row = check(model, convert(folder, tmp_path / "model.gguf"))

    assert not row.is_good
    assert says in texts(row)


def test_a_truncated_file_is_caught(model: Path, tmp_path: Path) -> None:
    path = convert(model, tmp_path / "model.gguf")
    other = find_artefact(str(path))
    path.write_bytes(path.read_bytes()[:-20_000])

    verdict = verify_models(
        VerifyRequest(
            reference=find_artefact(str(model)), others=(other,), num_tokens=64, prompts=()
        )
    )

    assert not verdict.is_good
    assert verdict.rows[0].num_positions == 0
