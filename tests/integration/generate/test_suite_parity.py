"""Tasks of lm-eval on our engines: the scores of lm-eval's own `hf` model on the same rows."""

from __future__ import annotations

import json
import random
import socket
from pathlib import Path
from typing import Any

import pytest

import tightfit
from small_models import SENTENCES, make_llama
from tightfit.core.dtypes import Dtype
from tightfit.evaluation.suite import SuiteScores
from tightfit.export.convert import convert_to_gguf

TASKS = ("arc_easy", "gsm8k", "wikitext")
LIMIT = 12
NUM_STEPS = 200


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ask_sum(number: int) -> str:
    return f"How many are {number} foxes and {number + 1} dogs?"


def learn_sums(folder: Path) -> None:
    """Sure answers, every third sum wrong; those of a random model hang on its rounding."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    library: Any = AutoTokenizer
    tokenizer = library.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    told = [
        f"Question: {ask_sum(n)}\nAnswer: #### {2 * n + 1 + (n % 3 == 0)}\n\n" for n in range(LIMIT)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    drawn = random.Random(0)
    for _ in range(NUM_STEPS):
        texts = ["".join(drawn.sample(told, 3)) + drawn.choice(SENTENCES) for _ in range(8)]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def write_data(folder: Path) -> Path:
    """Rows of our own, in the form of the tasks' datasets."""
    choices = [
        {
            "question": f"Which of these is older than singer number {n}?",
            "choices": {"text": ["fox", "a lazy dog", f"band {n}", "town"], "label": list("ABCD")},
            "answerKey": "ABCD"[n % 4],
        }
        for n in range(LIMIT)
    ]
    for split in ("train", "test"):
        write_rows(folder / "allenai" / "ai2_arc" / "ARC-Easy" / f"{split}.jsonl", choices)
    sums = [{"question": ask_sum(n), "answer": f"#### {2 * n + 1}"} for n in range(LIMIT)]
    write_rows(folder / "gsm8k" / "main" / "test.jsonl", sums)
    write_rows(folder / "gsm8k" / "main" / "train.jsonl", sums)
    pages = [{"page": " ".join(SENTENCES[: 1 + n % 3] * (1 + 4 * n)) + "\n"} for n in range(6)]
    write_rows(folder / "wikitext.jsonl", pages)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_llama(tmp_path_factory.mktemp("model"), initializer_range=0.05)
    learn_sums(made)
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def gguf(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("gguf") / "small.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIGHTFIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        convert_to_gguf(folder, target, dtype=Dtype.FP32)
    return target


@pytest.fixture(scope="module")
def scores(folder: Path, gguf: Path, data: Path, tmp_path_factory: Any) -> SuiteScores:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIGHTFIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        saved = tmp_path_factory.mktemp("saved")
        return evaluate(folder, data, beside=[str(gguf)], save=str(saved))


def evaluate(target: Path, data: Path, **changes: Any) -> SuiteScores:
    options: dict[str, Any] = {
        "suite": list(TASKS),
        "suite_data": str(data),
        "suite_fewshot": 1,
    } | changes
    found: SuiteScores = tightfit.evaluate_suite(str(target), **options)
    return found


@pytest.fixture(scope="module")
def peers(folder: Path, data: Path) -> dict[str, Any]:
    """What lm-eval finds with its own model of transformers."""
    import torch
    from lm_eval.evaluator import evaluate as run
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tightfit.evaluation.suite_tasks import contained, find_data, find_tasks, open_task

    library: Any = AutoTokenizer
    with contained():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        peer = HFLM(
            pretrained=model, tokenizer=library.from_pretrained(folder), batch_size=4, device="cpu"
        )
        shots = {"arc_easy": 1, "gsm8k": 1, "wikitext": 0}
        files = find_tasks(TASKS, None, allows_code=False)
        tasks = {
            one.name: open_task(find_data(one, data, shots[one.name]), shots[one.name])
            for one in files
        }
        found: dict[str, Any] = run(
            lm=peer,
            task_dict={"tasks": tasks, "groups": {}, "group_map": {}},
            bootstrap_iters=100,
        )
    return found


def value_of(score: Any, results: dict[str, Any], suffix: str = "") -> float:
    how = score.filter or "none"
    return float(results[f"{score.metric}{suffix},{how}"])


def test_scores_equal_those_of_lm_eval(scores: SuiteScores, peers: dict[str, Any]) -> None:
    results = peers["results"]
    metrics = {f"{score.task} {score.title}" for score in scores.metrics}
    assert metrics == {
        "arc_easy acc",
        "arc_easy acc_norm",
        "gsm8k exact_match (strict-match)",
        "gsm8k exact_match (flexible-extract)",
        "wikitext word_perplexity",
        "wikitext byte_perplexity",
        "wikitext bits_per_byte",
    }
    for score in scores.metrics:
        wanted = value_of(score, results[score.task])
        assert score.scores["model"].value == pytest.approx(wanted, rel=1e-4), score.title
        assert score.scores["small"].value == pytest.approx(wanted, rel=5e-3), score.title
        if score.task == "arc_easy":
            error = value_of(score, results[score.task], "_stderr")
            assert score.scores["model"].error == pytest.approx(error, rel=1e-6)
    assert "llama.cpp" in scores.formats["small"]
    # Every answer, word by word, and a score that is neither of none nor of all of them.
    assert scores.path is not None
    own = [
        json.loads(path.read_text())["answers"]
        for path in sorted(Path(scores.path).parent.glob("*--gsm8k-*.json"))
    ]
    own_texts = [
        sample for sample in peers["samples"]["gsm8k"] if sample["filter"] == "strict-match"
    ]
    texts = [sample["resps"][0][0] for sample in own_texts]
    assert len(own) == 2
    assert own[0] == own[1] == texts
    strict = next(score for score in scores.metrics if score.filter == "strict-match")
    assert strict.scores["model"].value == pytest.approx(8 / 12)


def test_an_interrupted_evaluation_goes_on_at_the_next_pair(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def stop(stage: str, done: int, total: int) -> None:
        del done, total
        if stage not in seen:
            seen.append(stage)
        if stage.endswith("gsm8k"):
            raise KeyboardInterrupt

    options: dict[str, Any] = {"suite": ["arc_easy", "gsm8k"], "suite_fewshot": 0, "limit": 4}
    with pytest.raises(KeyboardInterrupt):
        evaluate(folder, data, save=str(tmp_path), progress=stop, **options)
    assert not (tmp_path / "suite" / "suite.json").exists()
    seen.clear()
    done = evaluate(
        folder, data, save=str(tmp_path), progress=lambda stage, *_: seen.append(stage), **options
    )
    assert set(seen) == {"model: gsm8k"}
    assert {score.num_rows for score in done.metrics} == {4}
    # Everything is there: no model is loaded, and no network is tried.
    monkeypatch.setattr(
        "tightfit.evaluation.suite.open_engine", lambda _: pytest.fail("a model was loaded")
    )
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    again = evaluate(folder, data, save=str(tmp_path), **options)
    assert again.metrics == done.metrics
    written = SuiteScores.model_validate_json((tmp_path / "suite" / "suite.json").read_text())
    assert written == again
