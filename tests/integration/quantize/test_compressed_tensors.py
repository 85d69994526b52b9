"""compressed-tensors folders by the real quantizer, read by transformers alone and by us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from small_models import make_llama
from tightfit.core.errors import InvalidInputError
from tightfit.export.formats import ExportFormat, find_format, list_formats
from tightfit.export.quantize.job import QuantizeRequest, QuantizeStatus, quantize_model
from tightfit.runtime.compressed_tensors import rounds_activations
from tightfit.runtime.inference import load_for_inference
from tightfit.runtime.model_files import ArtefactKind, find_artefact

pytest.importorskip("auto_round", reason="pip install 'tightfit[quantize]'")
pytest.importorskip("compressed_tensors", reason="pip install 'tightfit[quantize]'")

library: Any = transformers
FORMATS = [record for record in list_formats() if record.scheme]
TOKENS = torch.arange(4, 100)[None]
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""FP4's sizes by the OCP specification; the fourth bit is the sign."""
TEXT = "The quick brown fox jumps over 1234567890 lazy dogs, and every singer is older. " * 40


def make_whole_llama(folder: Path, **changes: Any) -> Path:
    """Tied embeddings; every matrix has sides of multiples of 128, so all are quantized."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "initializer_range": 0.06}
    return make_llama(folder, **(sizes | {"tie_word_embeddings": True} | changes))


def scores_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        scores: torch.Tensor = model(input_ids=TOKENS).logits.float()
    return scores


def quantize(home: Path, record: ExportFormat) -> tuple[Path, Any]:
    text = home / "text.txt"
    text.write_text(TEXT)
    request = QuantizeRequest(
        model=str(home / "model"),
        formats=(record,),
        out=home / "out",
        calibrate=text,
        num_rows=4,
        iters=1 if record.tuning_steps else None,
        device="cpu",
    )
    return home / "out", quantize_model(request)


def unpack(stored: dict[str, torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as numbers and the scale of each, by the formats' definitions and no library."""
    scale = stored[f"{name}.weight_scale"]
    packed = stored.get(f"{name}.weight_packed")
    if packed is None:  # FP8, a scale per row
        codes = stored[f"{name}.weight"].float()
    elif packed.dtype is torch.int32:  # eight integers a word, the lowest bits first
        words = packed.long() & 0xFFFFFFFF
        codes = torch.stack([words >> 4 * place & 15 for place in range(8)], -1).flatten(1) - 8.0
    else:  # two floats a byte, the low half first
        halves = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
        codes = E2M1[halves & 7] * (1 - 2.0 * (halves >> 3))
    if scale.dtype is torch.uint8:  # a power of two
        steps = 2.0 ** (scale.float() - 127)
    else:
        steps = scale.float() / stored.get(f"{name}.weight_global_scale", torch.ones(1))
    return codes, steps.repeat_interleave(codes.shape[1] // steps.shape[1], 1)


def worst_error(record: ExportFormat, exact: torch.Tensor, codes: torch.Tensor) -> float:
    """Steps of the format's grid between the codes and the nearest values to `exact`."""
    if record.name == "fp8":
        nearest = exact.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        step = 2.0 ** (exact.abs().clamp_min(2.0**-6).log2().floor() - 3)
    elif record.scheme == "w4a16":
        nearest, step = exact.round().clamp(-8, 7), torch.ones(1)
    else:
        nearest = exact.sign() * E2M1[(exact.abs()[..., None] - E2M1).abs().argmin(-1)]
        step = torch.where(exact.abs() < 2, 0.5, torch.where(exact.abs() < 4, 1.0, 2.0))
    return float(((codes - nearest).abs() / step).max())


@pytest.mark.parametrize("record", FORMATS, ids=lambda record: record.name)
def test_codes_are_the_models_and_every_loader_reads_them_alike(
    record: ExportFormat, tmp_path: Path
) -> None:
    model = make_whole_llama(tmp_path / "model")

    out, summary = quantize(tmp_path, record)

    row = summary.rows[0]
    assert row.standing is QuantizeStatus.MADE
    assert not any("stay in 16 bits" in note for note in row.notes)
    stated = json.loads((out / "config.json").read_text())
    assert stated["dtype"] == "float16"
    assert stated["quantization_config"]["ignore"] == ["lm_head"]
    source, stored = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    artefact = find_artefact(str(out))
    loaded = load_for_inference(artefact, device="cpu")
    assert artefact.kind is ArtefactKind.COMPRESSED
    assert loaded.format == record.engine_name
    assert rounds_activations(loaded.model) == (record.scheme != "w4a16")
    ours = dict(loaded.model.named_parameters())
    assert not [name for name in ours if "weight_" in name]
    for name, weight in source.items():
        layer = name.removesuffix(".weight")
        if not layer.endswith("proj"):
            torch.testing.assert_close(ours[name].data, weight, rtol=1e-3, atol=1e-4)
            continue
        codes, steps = unpack(stored, layer)
        # compressed-tensors unpacks nvfp4 through 16 bits.
        rtol = 2**-7 if record.scheme == "nvfp4" else 1e-6
        torch.testing.assert_close(ours[name].data, codes * steps, rtol=rtol, atol=1e-8)
        assert worst_error(record, weight.float() / steps, codes) <= 1
        assert float((codes * steps - weight).norm() / weight.norm()) < 0.15

    # transformers says that it takes the folder's own settings, and `dequantize` alone from ours.
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        theirs, report = library.AutoModelForCausalLM.from_pretrained(
            out,
            dtype=torch.float32,
            quantization_config=library.CompressedTensorsConfig(dequantize=True),
            output_loading_info=True,
        )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for module in theirs.modules():  # what unpacking switches off
        if scheme := getattr(module, "quantization_scheme", None):
            module.quantization_enabled = scheme.input_activations is not None
    assert correlate(scores_of(theirs.float()), scores_of(loaded.model)) > 0.9999


def test_matrices_that_do_not_divide_stay_in_16_bits(tmp_path: Path) -> None:
    make_whole_llama(tmp_path / "model", intermediate_size=400)

    out, summary = quantize(tmp_path, find_format("mxfp4"))

    assert any("down_proj" in note for note in summary.rows[0].notes)
    stated = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.layers.0.mlp.down_proj"} <= set(stated)
    loaded = load_for_inference(find_artefact(str(out)), device="cpu")
    assert torch.isfinite(scores_of(loaded.model)).all()


def correlate(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


def test_models_without_linear_layers_are_refused(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")  # for its tokenizer
    config = library.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=400, n_positions=64)
    library.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")

    with pytest.raises(InvalidInputError, match="no plain linear layers"):
        quantize(tmp_path, FORMATS[0])
    assert not (tmp_path / "out").exists()
