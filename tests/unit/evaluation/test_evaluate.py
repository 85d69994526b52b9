"""The whole evaluation on a tiny model: columns, files, differences, errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eval_models import write_llama, write_sql_rows
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from made_runs import make_plan
from tightfit.cli.app import main
from tightfit.core.errors import InvalidInputError, NotFoundError, SetupError
from tightfit.core.objectives import Objective as ObjectiveKind
from tightfit.core.settings import Method
from tightfit.core.strategy import DataSource, Training
from tightfit.data.encode import EncodeRequest, encode_dataset
from tightfit.evaluation.evaluate import EvaluateRequest, evaluate_model
from tightfit.evaluation.metrics import METRICS, AnswerScore, Metric, ScoreKind
from tightfit.evaluation.scored_models import find_eval_target
from tightfit.evaluation.scores import AnswerRow, Scores, estimate_interval
from tightfit.runs.run_folder import RunFolder
from tightfit.training.batches import BatchMaker, choose_collate
from tightfit.training.preference import PreferenceObjective
from tightfit.training.rewards import describe_rewards


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def sql_rows(tmp_path: Path) -> Path:
    return write_sql_rows(tmp_path)


@pytest.fixture
def run(llama: Path, tmp_path: Path) -> RunFolder:
    """A finished LoRA run whose adapter visibly changes the model."""
    folder = RunFolder(path=tmp_path / "run")
    folder.path.mkdir()
    training = Training(model_path=str(llama), learning_rate=1e-3)
    plan = make_plan()
    strategy = plan.strategy.model_copy(update={"seq_len": 96})
    folder.write_plan(plan.model_copy(update={"training": training, "strategy": strategy}))
    base = AutoModelForCausalLM.from_pretrained(llama)
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(str(folder.adapter_path))
    return folder


def read_answers(scores: Scores) -> list[AnswerRow]:
    assert scores.answers_path is not None
    lines = Path(scores.answers_path).read_text().splitlines()
    return [AnswerRow.model_validate_json(line) for line in lines]


def write_pairs(folder: Path) -> Path:
    pairs = folder / "pairs.jsonl"
    rows = [
        {"prompt": f"pet {n}?", "chosen": f"a {word}", "rejected": f"no {word} {n}"}
        for n, word in enumerate(("name", "age", "pets", "where"))
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return pairs


@pytest.mark.parametrize("objective", [ObjectiveKind.SFT, ObjectiveKind.SIMPO])
def test_pairs_have_the_rewards_of_training(
    run: RunFolder, objective: ObjectiveKind, tmp_path: Path
) -> None:
    """As the training's own objective reports them, of the tuned model beside its base."""
    pairs = write_pairs(tmp_path)
    plan = run.read_plan()
    assert plan.training is not None
    strategy = plan.strategy.model_copy(update={"objective": objective})
    training = plan.training.model_copy(
        update={} if objective is ObjectiveKind.SFT else {"beta": 2.0}
    )
    run.write_plan(plan.model_copy(update={"strategy": strategy, "training": training}))

    scores = evaluate_model(EvaluateRequest(target=str(run.path), data=str(pairs)))

    auto: Any = AutoModelForCausalLM
    model: Any = PeftModel.from_pretrained(
        auto.from_pretrained(training.model_path), run.adapter_path
    ).eval()
    kind = ObjectiveKind.DPO if objective is ObjectiveKind.SFT else objective
    strategy = strategy.model_copy(update={"objective": kind, "method": Method.LORA})
    ours = PreferenceObjective(model, strategy, training)
    store = encode_dataset(
        EncodeRequest(
            sources=[DataSource(path=str(pairs))],
            model_folder=Path(training.model_path),
            seq_len=96,
            objective=kind,
        )
    ).train
    maker = BatchMaker(store, choose_collate(store.description, is_packed=False), seed=0)
    with torch.no_grad():
        ours(**maker.make([(0,), (2,), (4,), (6,)]))
    expected = describe_rewards(ours.take().tolist())
    found = {metric.name: metric for metric in scores.metrics}
    assert list(found) == ["reward_accuracy", "reward_margin", "likelier", "chosen_loss"]
    assert scores.num_rows == 4
    margin, accuracy = found["reward_margin"].scores, found["reward_accuracy"].scores
    assert margin["tuned"].value == pytest.approx(expected.reward_margin, abs=1e-4)
    assert accuracy["tuned"].value == expected.reward_accuracy
    assert found["chosen_loss"].scores["tuned"].value == pytest.approx(
        expected.chosen_nll, abs=1e-4
    )
    assert ("base" in margin) is (objective is ObjectiveKind.SIMPO)


def test_labelled_answers_have_the_rewards_of_training(run: RunFolder, tmp_path: Path) -> None:
    """As KTO reports them; the ROC area is that of every good answer beside every bad one."""
    labelled = tmp_path / "labelled.jsonl"
    words = ("name", "age", "no pets", "where", "1", "no")
    rows = [
        {"prompt": f"pet {n}?", "completion": word, "label": n in (0, 1, 4)}
        for n, word in enumerate(words)
    ]
    labelled.write_text("".join(json.dumps(row) + "\n" for row in rows))

    asked = EvaluateRequest(target=str(run.path), data=str(labelled))
    assert "exact" in {metric.name for metric in evaluate_model(asked).metrics}  # of an SFT run
    plan = run.read_plan()
    assert plan.training is not None
    strategy = plan.strategy.model_copy(update={"objective": ObjectiveKind.KTO})
    run.write_plan(plan.model_copy(update={"strategy": strategy}))
    scores = evaluate_model(asked)

    found = {metric.name: metric.scores for metric in scores.metrics}
    assert list(found) == ["reward_ranking", "reward_good", "reward_bad", "chosen_loss"]
    store = encode_dataset(
        EncodeRequest(
            sources=[DataSource(path=str(labelled))],
            model_folder=Path(plan.training.model_path),
            seq_len=96,
            objective=ObjectiveKind.KTO,
        )
    ).train
    auto: Any = AutoModelForCausalLM
    model: Any = PeftModel.from_pretrained(
        auto.from_pretrained(plan.training.model_path), run.adapter_path
    ).eval()

    def log_prob(row: int) -> float:
        tokens = torch.tensor(store.row(row).tokens, dtype=torch.long)
        at = torch.tensor(store.row(row).trained)[1:].nonzero()[:, 0]
        with torch.no_grad():
            scored = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        return float(scored[at, tokens[at + 1]].sum())

    tuned = [log_prob(row) for row in range(len(words))]
    with model.disable_adapter():
        base = [log_prob(row) for row in range(len(words))]
    beta = ObjectiveKind.KTO.record.beta or 0.0
    rewards = [beta * (own - other) for own, other in zip(tuned, base, strict=True)]
    good, bad = [rewards[n] for n in (0, 1, 4)], [rewards[n] for n in (2, 3, 5)]
    area = sum(one > other for one in good for other in bad) / 9
    assert found["reward_ranking"]["tuned"].value == pytest.approx(area)
    assert found["reward_good"]["tuned"].value == pytest.approx(sum(good) / 3, abs=1e-4)
    assert found["reward_bad"]["tuned"].value == pytest.approx(sum(bad) / 3, abs=1e-4)
    tokens = sum(int(store.row(n).trained.sum()) for n in (0, 1, 4))
    losses = {"base": base, "tuned": tuned}
    for name, own in losses.items():
        expected = -sum(own[n] for n in (0, 1, 4)) / tokens
        assert found["chosen_loss"][name].value == pytest.approx(expected, abs=1e-4)


def test_what_is_no_preference_and_metrics_that_it_has_not(run: RunFolder, tmp_path: Path) -> None:
    """The remedy is none of training's options."""
    pairs, plain = write_pairs(tmp_path), tmp_path / "plain.jsonl"
    plain.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    for data, metrics, message in (
        (pairs, ("loss",), "line 1 holds pairs .*, which loss does not score"),
        (plain, ("preference",), "line 1 holds neither a pair"),
    ):
        with pytest.raises(InvalidInputError, match=message) as caught:
            evaluate_model(EvaluateRequest(target=str(run.path), data=str(data), metrics=metrics))
        assert "--objective" not in caught.value.remedy


def loss_by_library(model: Any, folder: Path, rows: Path) -> float:
    """Token-weighted loss on the answers, with the template written out by hand."""
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_file=str(folder / "tokenizer.json"))
    total, count = 0.0, 0
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        asked = f"{row['question']}\n\n{row['context']}"
        prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        before = tokenizer(prompt).input_ids
        answer = tokenizer(row["answer"] + "<|im_end|>").input_ids
        labels = torch.tensor([[-100] * len(before) + answer])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([before + answer]), labels=labels).loss
        total, count = total + float(loss) * len(answer), count + len(answer)
    return total / count


def test_a_run_is_scored_beside_its_base(run: RunFolder, llama: Path, sql_rows: Path) -> None:
    scores = evaluate_model(EvaluateRequest(target=str(run.path), data=str(sql_rows)))

    assert scores.columns == ("base", "tuned")
    assert [metric.name for metric in scores.metrics] == [
        "execution", "exact", "exact_words", "loss", "perplexity",
    ]  # fmt: skip
    auto: Any = AutoModelForCausalLM
    base = auto.from_pretrained(llama).eval()
    expected = loss_by_library(base, llama, sql_rows)
    tuned = PeftModel.from_pretrained(base, run.adapter_path).eval()
    expected_tuned = loss_by_library(tuned, llama, sql_rows)
    loss = scores.metric("loss")
    assert loss is not None
    assert loss.difference is not None
    assert loss.scores["base"].value == pytest.approx(expected, rel=1e-4)
    assert loss.scores["tuned"].value == pytest.approx(expected_tuned, rel=1e-4)
    assert loss.difference.value == pytest.approx(expected_tuned - expected, rel=1e-3)
    perplexity = scores.metric("perplexity")
    assert perplexity is not None
    assert perplexity.scores["tuned"].value == pytest.approx(math.exp(expected_tuned), rel=1e-3)


def test_answers_are_kept_for_people(run: RunFolder, sql_rows: Path) -> None:
    scores = evaluate_model(EvaluateRequest(target=str(run.path), data=str(sql_rows)))

    saved = Scores.model_validate_json((run.path / "eval" / "test.json").read_bytes())
    assert saved == scores
    rows = read_answers(scores)
    assert len(rows) == 4
    assert rows[1].gold == "SELECT COUNT(*) FROM pets WHERE age > 3"
    assert rows[1].prompt.startswith("Question 1?\n\nCREATE TABLE")
    assert any(row.answers["base"].text != row.answers["tuned"].text for row in rows)
    execution = scores.metric("execution")
    assert execution is not None
    assert execution.num_rows == 3
    assert "execution" not in rows[2].answers["base"].scores
    assert any("1 rows are left out" in note and "line 3" in note for note in scores.notes)
    assert any("synthetic rows" in note for note in scores.notes)


def test_gold_answers_score_full_marks(
    llama: Path, sql_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gold = [json.loads(line)["answer"] for line in sql_rows.read_text().splitlines()]
    gold[3] = "SELECT  MAX(age)\nFROM pets"
    monkeypatch.setattr("tightfit.evaluation.evaluate.generate_answers", lambda *_, **__: gold)

    scores = evaluate_model(
        EvaluateRequest(target=str(llama), data=str(sql_rows), save_to=tmp_path / "out")
    )

    assert scores.columns == ("model",)
    values = {metric.name: metric.scores["model"].value for metric in scores.metrics}
    assert (values["execution"], values["exact"], values["exact_words"]) == (1.0, 0.75, 1.0)
    assert scores.metrics[0].difference is None
    assert scores.metrics[0].scores["model"].low < 1.0, "three rows prove no certainty"


def test_a_score_that_no_row_has_is_said_and_left_out(
    run: RunFolder, sql_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def score_first_answer(number: int, _answer: str) -> AnswerScore:
        return AnswerScore(values={"some": 1.0} if number == 1 else {})

    silent = Metric(
        word="silent",
        help="scores one row in one of two numbers",
        kinds=(ScoreKind(name="some", title="some"), ScoreKind(name="none", title="none")),
        suits=lambda _format, _questions: False,
        make_score=lambda _questions, _databases, _notes: score_first_answer,
    )
    monkeypatch.setitem(METRICS, "silent", silent)

    scores = evaluate_model(
        EvaluateRequest(target=str(run.path), data=str(sql_rows), metrics=("silent",))
    )

    assert [(one.name, one.num_rows) for one in scores.metrics] == [("some", 1)]
    assert scores.notes[-1] == "none: no row has this score for every model"


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([{"text": "abc def " * 9}] * 3, ["loss", "perplexity"]),
        (
            [{"dialogue": "A: hi\nB: ho", "summary": "They greet."}] * 2,
            ["rouge1", "rouge2", "rougeL", "loss", "perplexity"],
        ),
        (
            [{"instruction": "Say a.", "input": "", "output": "a"}] * 2,
            ["exact", "exact_words", "loss", "perplexity"],
        ),
        (
            [{"question": "Who?", "context": "Ann came.", "answer": "Ann"}] * 2,
            ["exact", "exact_words", "loss", "perplexity"],
        ),
    ],
)
def test_metrics_by_format(
    llama: Path, tmp_path: Path, rows: list[dict[str, str]], names: list[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row | {"n": n}) + "\n" for n, row in enumerate(rows)))

    scores = evaluate_model(EvaluateRequest(target=str(llama), data=str(path), max_new_tokens=4))

    assert [metric.name for metric in scores.metrics] == names


def test_limit_takes_the_first_rows(llama: Path, sql_rows: Path) -> None:
    scores = evaluate_model(
        EvaluateRequest(
            target=str(llama),
            data=str(sql_rows),
            limit=2,
            metrics=("exact",),
            max_new_tokens=4,
        )
    )

    assert scores.num_rows == 2
    assert [metric.name for metric in scores.metrics] == ["exact", "exact_words"]


def test_prompts_beyond_the_models_positions_are_told_of(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "x!" * 700, "completion": "y"}, {"prompt": "x", "completion": "y"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    scores = evaluate_model(
        EvaluateRequest(target=str(llama), data=str(path), metrics=("exact",), max_new_tokens=4)
    )

    assert any("1 prompts are too long" in note for note in scores.notes)


def test_a_run_without_an_adapter_says_so(run: RunFolder, sql_rows: Path) -> None:
    (run.adapter_path / "adapter_config.json").unlink()

    with pytest.raises(NotFoundError, match="has not left a tuned adapter"):
        evaluate_model(EvaluateRequest(target=str(run.path), data=str(sql_rows)))


def test_a_place_that_cannot_be_written_is_found_first(
    llama: Path, sql_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tightfit.evaluation.evaluate.open_engine", lambda *_: pytest.fail("loaded")
    )
    (tmp_path / "file").touch()

    with pytest.raises(SetupError, match="Cannot write scores"):
        evaluate_model(
            EvaluateRequest(target=str(llama), data=str(sql_rows), save_to=tmp_path / "file" / "x")
        )


def test_plain_text_answers_nothing(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "abc def"}) + "\n")

    with pytest.raises(InvalidInputError, match="asks for no answers"):
        evaluate_model(EvaluateRequest(target=str(llama), data=str(path), metrics=("exact",)))


def test_a_missing_database_is_found_before_anything_is_loaded(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tightfit.evaluation.evaluate.open_engine", lambda *_: pytest.fail("loaded")
    )
    path = tmp_path / "rows.jsonl"
    row = {"db_id": "zoo", "question": "How many?", "context": "", "answer": "SELECT 1"}
    path.write_text(json.dumps(row) + "\n")
    (tmp_path / "databases").mkdir()

    with pytest.raises(NotFoundError, match="no database `zoo`"):
        evaluate_model(EvaluateRequest(target=str(llama), data=str(path)))


def test_the_command_shows_before_and_after(
    run: RunFolder,
    sql_rows: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    argv = ["eval", str(run.path), "--data", str(sql_rows), "--max-new-tokens", "4"]

    assert main(argv) == 0
    shown, reported = capsys.readouterr()
    assert main([*argv, "--no-base", "--metric", "loss", "--json"]) == 0
    as_json = json.loads(capsys.readouterr().out)

    lines = shown.splitlines()
    assert any("base" in line and "tuned" in line and "difference" in line for line in lines)
    assert any(line.startswith("execution accuracy") and "%" in line for line in lines)
    assert "test-answers.jsonl" in reported
    assert as_json["columns"] == ["tuned"]


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        ([], "No data", 2),
        (["--data", "x.jsonl", "--metric", "rogue"], "Did you mean `rouge`", 2),
        (["--data", "x.jsonl", "--metric", "auto", "--metric", "loss"], "by itself", 2),
        (["--data", "x.jsonl", "--set", "packing=true"], "only the template", 2),
        (["--data", "x.jsonl", "--databases", "nowhere"], "no folder 'nowhere'", 3),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl", 3),
        (["--data", "x.jsonl", "--limit", "0"], "--limit", 2),
    ],
)
def test_errors_of_the_command(
    llama: Path, words: list[str], said: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(llama), *words]) == code
    error = capsys.readouterr().err
    assert said in error
    assert "try:" in error


def test_the_interval_agrees_with_the_normal_one() -> None:
    values = np.random.default_rng(0).random(400)
    spread = 1.96 * values.std() / math.sqrt(len(values))

    interval = estimate_interval(values)

    assert interval.value == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - spread, abs=0.2 * spread)
    assert interval.high == pytest.approx(values.mean() + spread, abs=0.2 * spread)


def test_weights_make_a_ratio_of_sums() -> None:
    interval = estimate_interval(np.array([10.0, 1.0]), np.array([2.0, 10.0]))

    assert interval.value == pytest.approx(11 / 12)


def test_longer_rows_than_were_trained_are_scored_whole(run: RunFolder) -> None:
    """The plan's length is that of its longest row; it says nothing about what is scored."""
    assert run.read_plan().strategy.seq_len == 96
    assert find_eval_target(str(run.path)).seq_len == 512  # all the positions the model has


def test_an_artefact_beside_is_scored_by_its_engine(
    run: RunFolder, llama: Path, sql_rows: Path, tmp_path: Path
) -> None:
    """The base model as a column of the run and as an artefact of its own: the same numbers."""
    request = EvaluateRequest(
        target=str(run.path), data=str(sql_rows), beside=(str(llama),), save_to=tmp_path / "out"
    )

    scores = evaluate_model(request)

    assert scores.columns == ("base", "tuned", llama.name)
    for metric in scores.metrics:
        assert metric.scores[llama.name].value == pytest.approx(
            metric.scores["base"].value, rel=1e-4
        )
    for row in read_answers(scores):
        assert row.answers[llama.name].text == row.answers["base"].text
    loss = scores.metric("loss")
    assert loss is not None
    assert loss.scores["tuned"].value != pytest.approx(loss.scores["base"].value, rel=1e-3)
