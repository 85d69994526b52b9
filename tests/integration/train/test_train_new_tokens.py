"""New tokens from their setting to a GGUF file: trained, resumed, merged, converted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_cases import Trainer, lone_place, make_plan
from small_models import make_llama
from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.core.new_tokens import NewTokens
from tightfit.core.strategy import DataSource
from tightfit.data.encode import EncodeRequest, encode_dataset
from tightfit.data.new_tokens import with_new_tokens
from tightfit.data.tokenizer import load_tokenizer
from tightfit.estimation.weights import num_trainable
from tightfit.export.convert import convert_to_gguf
from tightfit.export.merge import MergeRequest, merge_adapter
from tightfit.runs.run_folder import RunFolder
from tightfit.runtime.inference import load_for_inference
from tightfit.runtime.load import load_base
from tightfit.runtime.model_files import find_artefact
from tightfit.training.checkpoint import write_artefact

PLAIN, SPECIAL = ("<sql>", "</sql>"), ("<|table|>",)
NEW: dict[str, Any] = {"add_tokens": PLAIN, "add_special_tokens": SPECIAL}
QUESTION, ANSWER = "How many singers are there?", "<sql>SELECT name FROM singer</sql>"
LEARNING_RATE = 2e-2


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))


def _make_trainer(base: Path, home: Path, **changes: Any) -> Trainer:
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    data = home / "data.jsonl"
    data.write_text((json.dumps({"messages": messages}) + "\n") * 8)
    new = NewTokens(PLAIN, SPECIAL)
    encoded = encode_dataset(
        EncodeRequest(
            sources=(DataSource(path=str(data)),),
            model_folder=with_new_tokens(base, new),
            seq_len=64,
        )
    )
    settings = {"method": "lora", "micro_batch": 4, "seq_len": 64, **NEW, **changes}
    plan = make_plan(base, **settings)
    assert plan.training is not None
    training = plan.training.model_copy(update={"learning_rate": LEARNING_RATE})
    return Trainer(plan.model_copy(update={"training": training}), encoded.train, lone_place())


def _logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([ids])).logits
    return found


@pytest.mark.parametrize(
    ("is_tied", "changes"),
    [
        (True, {}),
        (False, {}),
        (False, {"train_embeddings": True}),
        (True, {"method": "full"}),
    ],
    ids=["rows-tied", "rows", "embeddings", "full"],
)
def test_a_new_token_is_one_token_everywhere(
    tmp_path: Path, is_tied: bool, changes: dict[str, Any]
) -> None:
    pytest.importorskip("gguf", reason="pip install 'tightfit[gguf]'")
    pytest.importorskip("xllamacpp", reason="pip install 'tightfit[gguf]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (tmp_path / "base").mkdir()
    base = make_llama(tmp_path / "base", tie_word_embeddings=is_tied)
    first = load_tokenizer(base).token_id("<pad>")
    num_old = len(AutoTokenizer.from_pretrained(base))
    assert first is not None

    # Trained, and resumed on the way as if it had never stopped.
    trainer = _make_trainer(base, tmp_path, **changes)
    losses = trainer.train(0, 8)
    (tmp_path / "state").mkdir()
    trainer.engine.save_state(tmp_path / "state")
    losses += trainer.train(8, 20)
    assert losses[-1] < 0.5 < losses[0]
    resumed = _make_trainer(base, tmp_path, **changes)
    resumed.engine.load_state(tmp_path / "state")
    assert resumed.train(8, 20) == pytest.approx(losses[8:], rel=1e-5)
    trained = sum(p.numel() for p in trainer.engine.module.parameters() if p.requires_grad)
    rows = trainer.engine.model.get_input_embeddings().weight.shape[0]
    spec = trainer.plan.model.model_copy(update={"vocab_size": rows})
    assert trained == num_trainable(spec, trainer.plan.strategy)
    assert rows % 64 == 0

    # The result, as transformers and peft read it.
    run = RunFolder(path=tmp_path / "run")
    result = write_artefact(run, trainer.engine, trainer.plan, lone_place())
    library: Any = AutoTokenizer.from_pretrained(result)
    numbers = list(range(num_old, num_old + 3))
    assert [library.encode(name) for name in (*PLAIN, *SPECIAL)] == [[n] for n in numbers]
    assert library.decode(numbers, skip_special_tokens=True) == "".join(PLAIN)
    ids = load_tokenizer(result).encode(f"<|im_start|>user\n{QUESTION}<|im_end|>\n{ANSWER}")
    assert numbers[0] in ids
    artefact = find_artefact(str(result))
    tuned = load_for_inference(artefact).model
    expected = _logits(tuned, ids)

    # Merged: the folder alone gives the same logits.
    merged = result
    if "method" not in changes:
        merged = tmp_path / "merged"
        merge_adapter(MergeRequest(artefact=artefact, target=merged))
    whole: Any = AutoModelForCausalLM.from_pretrained(merged)
    assert whole.config.vocab_size == rows
    torch.testing.assert_close(_logits(whole, ids), expected, rtol=1e-4, atol=1e-4)

    _check_gguf(merged, whole, tmp_path / "model.gguf", pad=first)


def _check_gguf(merged: Path, whole: Any, target: Path, *, pad: int) -> None:
    """llama.cpp cuts the text alike, and says the same."""
    from tightfit.runtime.llama_cpp import LlamaModel

    tokenizer = load_tokenizer(merged)
    file = convert_to_gguf(merged, target)
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    asked = tokenizer.encode(prompt)
    answer = whole.generate(
        torch.tensor([asked]), do_sample=False, max_new_tokens=16, pad_token_id=pad
    )[0, len(asked) :].tolist()
    assert answer[0] == tokenizer.token_id(PLAIN[0])
    with LlamaModel(file, num_positions=64) as model:
        text = f"{ANSWER}{SPECIAL[0]}"
        assert model.tokenize(text) == tokenizer.encode(text)
        said = list(asked)
        for _ in answer:
            said.append(int(model.logits(said)[-1].argmax()))
    assert said[len(asked) :] == answer


def test_new_rows_begin_as_the_mean_of_their_pieces(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    base = make_llama(tmp_path / "base")
    plain = make_plan(base).strategy
    old: Any = load_base(base, plain, torch.device("cpu"))
    pieces = load_tokenizer(base).encode("<sql>")

    model: Any = load_base(base, plain.model_copy(update=NEW), torch.device("cpu"))

    assert len(pieces) > 1
    for matrix, before in (
        (model.get_input_embeddings().weight, old.get_input_embeddings().weight),
        (model.get_output_embeddings().weight, old.get_output_embeddings().weight),
    ):
        torch.testing.assert_close(matrix[len(before)], before[pieces].mean(0))
        torch.testing.assert_close(matrix[: len(before)], before)
        torch.testing.assert_close(matrix[-1], before.mean(0))


def test_a_known_token_and_one_of_a_message_are_not_new(tmp_path: Path) -> None:
    base = make_llama(tmp_path)
    with pytest.raises(InvalidInputError, match=r"`add_tokens` entry 2, `<\|im_end\|>`, is a tok"):
        with_new_tokens(base, NewTokens(plain=("<new>", "<|im_end|>")))
    with pytest.raises(UsageError, match="is there already"):
        with_new_tokens(base, NewTokens(plain=("<new>", "<new>")))
    tokenizer = load_tokenizer(with_new_tokens(base, NewTokens(PLAIN, SPECIAL)))
    # A message can spell a plain token, and no control token.
    assert tokenizer.control.holds_name(SPECIAL[0])
    assert not tokenizer.control.holds_name(ANSWER)
