"""`tightfit convert` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_run import run_here
from small_models import make_family, make_llama

pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
pytest.importorskip("xllamacpp", reason="pip install 'tightfit[gguf]'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Capture = pytest.CaptureFixture[str]


def test_there_and_back(tmp_path: Path, capsys: Capture) -> None:
    source = make_family(tmp_path / "tiny", "llama3")

    there = run_here(["convert", str(source), "--to", "gguf", "--dtype", "f32"], capsys)
    file = tmp_path / "tiny-f32.gguf"
    back = run_here(["convert", str(file), "--json"], capsys)

    assert (there.code, back.code) == (0, 0), there.err + back.err
    assert "is a Hugging Face folder" in there.err
    assert "of disk" in there.err
    assert f"next: tightfit verify {source} {file}" in there.out.replace("\n", " ")
    made = back.json
    assert made["source_kind"] == "gguf"
    assert made["path"] == str(tmp_path / "tiny-f32-hf")
    assert made["dtype"] == "f32"
    folder = tmp_path / "tiny-f32-hf"
    assert made["size_bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert (folder / "model.safetensors").is_file()
    assert made["peak_host_bytes"] > 0


def test_nothing_is_overwritten_unless_told(tmp_path: Path, capsys: Capture) -> None:
    source = make_llama(tmp_path / "tiny")
    precious = tmp_path / "tiny-f16.gguf"
    precious.write_text("precious")

    refused = run_here(["convert", str(source)], capsys)
    assert refused.code == 2
    assert "--force" in refused.err
    assert precious.read_text() == "precious"
    assert run_here(["convert", str(source), "--force"], capsys).code == 0
    assert precious.read_bytes()[:4] == b"GGUF"
    own = run_here(["convert", str(precious), "--out", str(tmp_path), "--force"], capsys)
    assert own.code == 2  # the folder holds the source
    assert precious.exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--to", "hf"], 2, "is a Hugging Face folder already"),
        (["--to", "onnx"], 2, "--to gguf|hf|gguf-lora"),
        (["--dtype", "f8"], 2, "--dtype f16|bf16|f32"),
        (["--out", ""], 2, "--out"),
        (["--out", "model"], 2, "--out model.gguf"),
    ],
)
def test_words_it_does_not_take(
    tmp_path: Path, capsys: Capture, words: list[str], code: int, said: str
) -> None:
    source = make_llama(tmp_path / "tiny")

    answer = run_here(["convert", str(source), *words], capsys)

    assert answer.code == code
    assert said in answer.err
    assert "Traceback" not in answer.err


def test_what_it_cannot_convert_is_named(tmp_path: Path, capsys: Capture) -> None:
    base = make_llama(tmp_path / "base")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    packed = make_llama(tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (packed / "config.json").write_text(json.dumps(config))

    merge_first = run_here(["convert", str(adapter)], capsys)
    quantized = run_here(["convert", str(packed), "--json"], capsys)
    nowhere = run_here(["convert", str(tmp_path / "nothing.gguf")], capsys)

    assert f"merge first: tightfit merge {adapter}" in merge_first.err
    assert "is quantized (gptq)" in quantized.json["error"]
    assert nowhere.code == 3
    assert not list(tmp_path.glob("*.gguf"))


def test_an_adapter_becomes_a_file_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = make_llama(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    get_peft_model(model, LoraConfig(r=4)).save_pretrained(str(tmp_path / "tuned"))

    answer = run_here(["convert", str(tmp_path / "tuned"), "--to", "gguf-lora"], capsys)

    assert answer.code == 0, answer.err
    assert (tmp_path / "tuned-lora-f32.gguf").read_bytes()[:4] == b"GGUF"
    assert "--lora tuned-lora-f32.gguf" in " ".join(answer.out.split())
    assert f"next: tightfit convert {base} --to gguf" in answer.out.replace("\n", " ")


def test_a_folder_of_one_gguf_is_that_file(tmp_path: Path, capsys: Capture) -> None:
    source = make_family(tmp_path / "tiny", "gpt2")
    home = tmp_path / "files"
    home.mkdir()
    out = home / "model.gguf"
    assert run_here(["convert", str(source), "--out", str(out)], capsys).code == 0

    answer = run_here(["convert", str(home), "--out", str(tmp_path / "back"), "--json"], capsys)

    assert answer.json["source_kind"] == "gguf"
    (home / "other.gguf").write_bytes(out.read_bytes())
    assert "holds 2 GGUF files" in run_here(["convert", str(home)], capsys).err
