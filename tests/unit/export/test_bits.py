"""nf4 and int8 folders: loaded by transformers itself, with everything the model speaks with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from small_models import make_llama
from tightfit.core.dtypes import Dtype
from tightfit.export.quantize.bitsandbytes import save_quantized

pytest.importorskip("bitsandbytes", reason="pip install 'tightfit[bits]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*_check_is_size.*:FutureWarning"),
]


@pytest.mark.parametrize(
    ("dtype", "least", "most_bytes"),
    [(Dtype.NF4, 0.9, 0.2), (Dtype.INT8, 0.99, 0.35)],
)
def test_transformers_loads_it_and_it_says_nearly_the_same(
    tmp_path: Path, dtype: Dtype, least: float, most_bytes: float
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = make_llama(
        tmp_path / "model", hidden_size=256, intermediate_size=512, initializer_range=0.05
    )
    folder = tmp_path / "packed"
    folder.mkdir()

    save_quantized(model, model, dtype, folder)

    tokens = torch.arange(4, 100)[None]
    with torch.no_grad():
        before: Any = AutoModelForCausalLM.from_pretrained(model)(tokens).logits
        packed: Any = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
        after = packed(tokens).logits.float()
    together = torch.corrcoef(torch.stack([before.flatten(), after.flatten()]))
    assert float(together[0, 1]) > least
    old, new = size(model), size(folder)
    assert new < most_bytes * old + 2 * 2 * packed.config.vocab_size * 256
    config = json.loads((folder / "config.json").read_text())
    original = json.loads((model / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "bitsandbytes"
    assert config["use_cache"] == original["use_cache"]
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (model / name).read_bytes()
    assert AutoTokenizer.from_pretrained(folder).chat_template


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
