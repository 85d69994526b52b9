"""Batched generation and loss against the library, one row at a time."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eval_models import write_llama, write_t5
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tightfit.core.training import DataSource
from tightfit.data.encode import EncodeRequest, encode_dataset
from tightfit.data.token_store import TokenStore
from tightfit.evaluation import model_outputs
from tightfit.evaluation.model_outputs import (
    MAX_LOGITS,
    GenerateRequest,
    generate_answers,
    list_batches,
    measure_loss,
)

PAD, STOP = 0, 3


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t5(tmp_path_factory.mktemp("t5"))


def load(auto: Any, folder: Path) -> Any:
    return auto.from_pretrained(folder).eval()


def make_prompts(count: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(4, 320) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def answer_alone(model: Any, prompt: list[int], *, most: int, stops: list[int]) -> list[int]:
    """Greedy search as the definition has it: no cache, no batch, no padding."""
    tokens = list(prompt)
    for _ in range(most):
        with torch.no_grad():
            best = int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
        if best in stops:
            break
        tokens.append(best)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_batches_answer_as_single_prompts_do(llama: Path, batch: int) -> None:
    model = load(AutoModelForCausalLM, llama)
    # A penalty in the model's own settings must not leak into plain greedy search.
    model.generation_config.repetition_penalty = 2.0
    prompts = make_prompts(8)
    free = [answer_alone(model, prompt, most=12, stops=[]) for prompt in prompts]
    stops = [STOP, free[0][4], free[5][2]]
    expected = [answer_alone(model, prompt, most=12, stops=stops) for prompt in prompts]
    request = GenerateRequest(max_new_tokens=12, stop_ids=tuple(stops), pad_id=PAD, batch=batch)
    reported: list[tuple[int, int]] = []

    found = generate_answers(model, prompts, request, lambda *done: reported.append(done))

    assert found == expected
    assert {len(answer) for answer in found} != {12}, "no answer was stopped early"
    assert reported[-1] == (8, 8)


@pytest.mark.parametrize("batch", [1, 4])
def test_an_encoder_decoder_answers(t5: Path, batch: int) -> None:
    model = load(AutoModelForSeq2SeqLM, t5)
    prompts = make_prompts(6)
    request = GenerateRequest(max_new_tokens=8, stop_ids=(STOP,), pad_id=PAD, batch=batch)
    expected = []
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=STOP
        )[0].tolist()[1:]
        expected.append(output[: output.index(STOP)] if STOP in output else output)

    assert generate_answers(model, prompts, request) == expected


def test_a_batch_too_large_is_halved(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(AutoModelForCausalLM, llama)
    prompts = make_prompts(7)
    request = GenerateRequest(max_new_tokens=4, stop_ids=(STOP,), pad_id=PAD, batch=7)
    expected = generate_answers(model, prompts, request)
    real, sizes = model_outputs._generate, []

    def short_of_memory(prompts: Any, *rest: Any) -> Any:
        sizes.append(len(prompts))
        if len(prompts) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(prompts, *rest)

    monkeypatch.setattr(model_outputs, "_generate", short_of_memory)

    assert generate_answers(model, prompts, request) == expected
    assert sizes == [7, 4, 2, 2, 2, 1]


def encode(folder: Path, data: Path) -> TokenStore:
    request = EncodeRequest(sources=[DataSource(path=str(data))], model_folder=folder, seq_len=128)
    return encode_dataset(request).train


def write_rows(path: Path) -> Path:
    rng = random.Random(2)
    rows = [
        {"prompt": "ask " * rng.randint(1, 20), "completion": "say " * rng.randint(1, 12)}
        for _ in range(9)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("max_logits", [MAX_LOGITS, 320 * 150, 1])
def test_loss_is_the_models_own_row_by_row(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_logits: int
) -> None:
    monkeypatch.setattr("tightfit.evaluation.model_outputs.MAX_LOGITS", max_logits)
    store = encode(llama, write_rows(tmp_path / "rows.jsonl"))
    model = load(AutoModelForCausalLM, llama)
    expected = []
    for place in range(len(store)):
        row = store.row(place)
        tokens = torch.tensor(row.tokens.astype(np.int64))[None]
        labels = torch.where(torch.tensor(np.array(row.trained)), tokens, -100)
        with torch.no_grad():
            loss = model(input_ids=tokens, labels=labels).loss
        expected.append(float(loss) * int(row.trained.sum()))

    found = measure_loss(model, store)

    assert len(expected) == 9
    np.testing.assert_allclose(found.sums, expected, rtol=1e-5)
    assert found.mean == pytest.approx(sum(expected) / store.num_trained.sum(), rel=1e-5)


def test_loss_of_an_encoder_decoder(t5: Path, tmp_path: Path) -> None:
    store = encode(t5, write_rows(tmp_path / "rows.jsonl"))
    model = load(AutoModelForSeq2SeqLM, t5)
    assert store.description.is_encoder_decoder
    expected = []
    for place in range(len(store)):
        row = store.row(place)
        tokens, trained = torch.tensor(row.tokens.astype(np.int64)), torch.tensor(row.trained)
        with torch.no_grad():
            loss = model(input_ids=tokens[~trained][None], labels=tokens[trained][None]).loss
        expected.append(float(loss) * int(trained.sum()))

    np.testing.assert_allclose(measure_loss(model, store).sums, expected, rtol=1e-5)


def test_batches_cover_every_row_once_within_the_limit() -> None:
    lengths = np.array([5, 100, 1, 40, 40, 7], dtype=np.int32)
    vocab_size = MAX_LOGITS // 120

    batches = list(list_batches(lengths, vocab_size))

    assert sorted(place for batch in batches for place in batch) == list(range(6))
    assert all(len(batch) * max(lengths[batch]) <= 120 for batch in batches)
