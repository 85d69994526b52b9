"""merge, convert, quantize, verify and evaluate called from Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from small_models import make_llama
from tightfit.api.convert import convert
from tightfit.api.evaluate import evaluate
from tightfit.api.merge import merge
from tightfit.api.quantize import quantize
from tightfit.api.verify import verify
from tightfit.core.errors import NotFoundError, UsageError, UserError
from tightfit.export.merge import MergeForecast
from tightfit.export.quantize.job import QuantizeStatus

pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
pytest.importorskip("xllamacpp", reason="pip install 'tightfit[gguf]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base and a LoRA adapter on it."""
    import transformers
    from peft import LoraConfig, get_peft_model

    library: Any = transformers
    make_config: Any = LoraConfig
    home = tmp_path_factory.mktemp("api-export")
    base = make_llama(home / "base", hidden_size=256, intermediate_size=256)
    model = library.AutoModelForCausalLM.from_pretrained(base)
    config = make_config(task_type="CAUSAL_LM", target_modules="all-linear")
    adapted: Any = get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(str(home / "adapter"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(base / name, home / "adapter" / name)
    return home


def test_an_adapter_becomes_a_checked_gguf_file(home: Path) -> None:
    stages: set[str] = set()
    forecasts: list[MergeForecast] = []

    merged = merge(
        str(home / "adapter"),
        out=str(home / "merged"),
        on_forecast=forecasts.append,
        progress=lambda stage, _done, _of: stages.add(stage),
    )
    merged.raise_if_rejected()
    assert merged.verdict is not None
    assert merged.verdict.is_good
    assert forecasts == [merged.predicted]
    assert "weights" in stages

    converted = convert(str(home / "merged"), to="gguf", out=str(home / "model-f16.gguf"))
    assert Path(converted.path).stat().st_size == converted.size_bytes

    verdict = verify(str(home / "merged"), others=[converted.path])
    verdict.raise_if_broken()
    assert [row.format for row in verdict.rows] == ["F16"]

    # A model of random weights loses too much at 8 bits to pass a check.
    small = home / "model-q8_0.gguf"
    summary = quantize(converted.path, to=["q8_0"], verify=False, out=str(small))
    assert [row.standing for row in summary.rows] == [QuantizeStatus.MADE]
    assert small.stat().st_size < Path(converted.path).stat().st_size


def test_a_model_is_scored(home: Path, tmp_path: Path) -> None:
    data = tmp_path / "test.jsonl"
    data.write_text(json.dumps({"instruction": "Say a word.", "output": "word"}) + "\n")

    scores = evaluate(
        str(home / "base"), data=str(data), metrics=["loss", "exact"], max_new_tokens=4
    )

    loss = scores.metric("loss")
    assert loss is not None
    assert loss.scores["model"].value > 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: merge("no-such-run"),
        lambda: convert("no-such-model"),
        lambda: quantize("no-such-model", to=["q8_0"]),
        lambda: verify("no-such-model", others=["neither"]),
        lambda: evaluate("no-such-model", data="test.jsonl"),
    ],
    ids=["merge", "convert", "quantize", "verify", "evaluate"],
)
def test_a_name_that_means_nothing_raises(call: Any) -> None:
    with pytest.raises(NotFoundError):
        call()


def test_a_wrong_word_raises_before_anything_is_looked_for() -> None:
    with pytest.raises(UsageError, match="--dtype"):
        merge("no-such-run", dtype="int3")
    with pytest.raises(UserError, match="q4_k_m"):
        quantize("no-such-model", to=["q4_k_n"])
