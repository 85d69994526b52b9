"""An encoder-decoder through the same commands: T5 learns to say the first words again."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORDS = ["river", "stone", "cloud", "lamp", "chair", "forest", "bread", "window", "letter", "road"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors
    from transformers import T5Config, T5ForConditionalGeneration, set_seed

    folder = tmp_path / "tiny-t5"
    vocabulary = {word: at for at, word in enumerate(["<pad>", "<unk>", "</s>", *WORDS])}
    vocabulary |= {word: len(vocabulary) + at for at, word in enumerate(["Summarize", "this:"])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<unk>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
    )
    set_seed(0)
    make_config: Any = T5Config
    make_model: Any = T5ForConditionalGeneration
    config = make_config(
        vocab_size=len(vocabulary),
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
    )
    make_model(config).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["full", "lora"])
def test_t5_learns_on_the_same_recipe(tmp_path: Path, model: Path, method: str) -> None:
    rng = random.Random(1)
    data = tmp_path / "train.jsonl"
    with data.open("w") as stream:
        for _ in range(96):
            words = rng.choices(WORDS, k=rng.randint(3, 8))
            row = {"dialogue": " ".join(words), "summary": " ".join(words[:2])}
            stream.write(json.dumps(row) + "\n")
    recipe = tmp_path / "recipe.yaml"
    wish = {
        "model": str(model),
        "data": str(data),
        "on": "cpu",
        "method": method,
        "seq_len": 32,
        "max_steps": 30,
        "effective_batch": 16,
        "learning_rate": 1e-2,
        "eval_fraction": 0.1,
        "log_to": [],
        "output": str(tmp_path / "run"),
        "strategy": {"weights": "fp32", "compute": "fp32", "adapter_dtype": "fp32"},
    }
    recipe.write_text(json.dumps(wish))

    done = subprocess.run(
        [sys.executable, "-m", "tightfit", "train", str(recipe), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)["report"]
    assert report["eval_after"]["loss"] < report["eval_before"]["loss"] - 0.3
    folder = tmp_path / "run" / ("model" if method == "full" else "adapter")
    assert (folder / "tokenizer.json").is_file()
    assert any(folder.glob("*.safetensors"))
