"""A GGUF file becomes a folder once: same logits as the model it was written from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_models import make_model

from tightfit.core.dtypes import Dtype
from tightfit.core.errors import InvalidInputError, SetupError
from tightfit.core.strategy import Strategy
from tightfit.runtime import model_files
from tightfit.runtime.load import load_base
from tightfit.runtime.model_files import locate_model

PLAIN = Strategy(weights=Dtype.FP32, compute=Dtype.FP32)
IDS = torch.arange(3, 19)[None]
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleave(matrix: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rotary halves to pairs, as llama.cpp's convert_hf_to_gguf.py permutes q and k."""
    half = matrix.shape[0] // num_heads // 2
    turned = matrix.reshape(num_heads, 2, half, *matrix.shape[1:]).swapaxes(1, 2)
    return np.asarray(turned.reshape(matrix.shape))


def write_gguf(path: Path) -> Any:
    """A llama in llama.cpp's own layout; returns the model it came from."""
    model = make_model("llama")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<pad>", "<s>", "</s>", *(chr(0x100 + i) for i in range(config.vocab_size - 4)), "ĀĀ"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ā Ā"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        parts = stem.split(".")
        is_layer = "layers" in parts
        ours = _NAMES[".".join(parts[3:]) if is_layer else stem]
        values = tensor.numpy()
        if ours in heads:
            values = interleave(values, heads[ours])
        writer.add_tensor(f"blk.{parts[2]}.{ours}.weight" if is_layer else f"{ours}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))


def test_a_gguf_answers_as_its_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    model = write_gguf(path).eval()
    capfd.readouterr()
    folder = locate_model(str(path))
    said = capfd.readouterr()
    loaded: Any = load_base(folder, PLAIN, torch.device("cpu"))
    loaded.eval()

    assert (said.out, said.err) == ("", "")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in folder.iterdir()
    }
    with torch.no_grad():
        assert torch.allclose(loaded(IDS).logits, model(IDS).logits, atol=1e-5)
    monkeypatch.setattr(model_files, "_write_gguf", None)  # a second time would fail
    assert locate_model(str(path)) == folder
    assert locate_model(str(tmp_path)) == folder, "the only GGUF of a folder"
    assert not list(folder.parent.glob("*.partial"))


def test_a_killed_conversion_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)

    def interrupt(_: Path, folder: Path, *__: Any) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(model_files, "_write_gguf", interrupt)
        with pytest.raises(KeyboardInterrupt):
            locate_model(str(path))
    assert list((tmp_path / "cache" / "models").iterdir()) == []
    assert (locate_model(str(path)) / "model.safetensors").is_file()


def test_invalid_files_and_full_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(InvalidInputError):
        locate_model(str(cut))

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SetupError, match="free"):
        locate_model(str(path))
