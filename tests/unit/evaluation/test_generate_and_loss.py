"""Answers and loss against the library, one row at a time."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eval_models import write_llama, write_t5
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tightfit.core.strategy import DataSource
from tightfit.data.encode import EncodeRequest, encode_dataset
from tightfit.data.formats import Message
from tightfit.data.token_store import TokenStore
from tightfit.engines.open import EngineRequest, open_engine
from tightfit.engines.protocol import Engine
from tightfit.evaluation.scored_models import (
    MAX_LOGITS,
    Question,
    generate_answers,
    list_batches,
    measure_loss,
)
from tightfit.runtime.model_files import find_artefact

STOP = 3


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


def open_model(folder: Path) -> Engine:
    artefact = find_artefact(str(folder))
    return open_engine(EngineRequest(artefact=artefact, device="cpu", needs_logits=True))


@pytest.fixture(scope="module", params=["llama", "t5"])
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Any]]:
    folder = request.getfixturevalue(request.param)
    auto: Any = AutoModelForCausalLM if request.param == "llama" else AutoModelForSeq2SeqLM
    with contextlib.closing(open_model(folder)) as opened:
        yield opened, load(auto, folder)


def test_answers_are_the_librarys_own(engine: tuple[Engine, Any]) -> None:
    opened, model = engine
    rng = random.Random(1)
    asked = [Message("user", "ask " * rng.randint(1, 9)) for _ in range(7)]
    questions = [
        Question(
            place="", values={}, messages=(one,), num_prompt_tokens=0, gold="", num_gold_tokens=0
        )
        for one in asked
    ]
    expected = []
    for one in asked:
        prompt = opened.prompter.ask([one])
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=STOP
        )[0].tolist()
        answer = output[1:] if model.config.is_encoder_decoder else output[len(prompt) :]
        expected.append(opened.prompter.decode(answer).strip())
    reported: list[tuple[int, int]] = []

    found = generate_answers(
        opened, questions, max_new_tokens=8, progress=lambda *done: reported.append(done)
    )

    assert found == expected
    assert reported[-1] == (7, 7)


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
    monkeypatch.setattr("tightfit.evaluation.scored_models.MAX_LOGITS", max_logits)
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

    with contextlib.closing(open_model(llama)) as engine:
        found = measure_loss(engine, store)

    assert found is not None
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

    with contextlib.closing(open_model(t5)) as engine:
        found = measure_loss(engine, store)

    assert found is not None
    np.testing.assert_allclose(found.sums, expected, rtol=1e-5)


def test_batches_cover_every_row_once_within_the_limit() -> None:
    lengths = np.array([5, 100, 1, 40, 40, 7], dtype=np.int32)
    vocab_size = MAX_LOGITS // 120

    batches = list(list_batches(lengths, vocab_size))

    assert sorted(place for batch in batches for place in batch) == list(range(6))
    assert all(len(batch) * max(lengths[batch]) <= 120 for batch in batches)
