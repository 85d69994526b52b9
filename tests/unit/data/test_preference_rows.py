"""Pairs and labelled answers: which columns are read, what is refused, and what is encoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="un-skip with: pip install 'tightfit[data]'")

from chat_models import make_model

from tightfit.core.errors import InvalidInputError
from tightfit.core.objectives import ExampleKind, Objective
from tightfit.core.settings import TrainOn
from tightfit.core.strategy import DataSource
from tightfit.data.encode import EncodedDataset, EncodeRequest, encode_dataset
from tightfit.data.preferences import PREFERENCE_FORMATS, Preference, read_preferences, recognise
from tightfit.data.profile import profile_dataset, profile_from_store
from tightfit.data.readers import Row
from tightfit.data.token_store import epoch_rows
from tightfit.data.tokenizer import load_tokenizer

USER = {"role": "user", "content": "hello"}
GOOD = {"role": "assistant", "content": "the quick fox"}
BAD = {"role": "assistant", "content": "the lazy dog"}
PAIR = {"prompt": "hello", "chosen": "the quick fox", "rejected": "the lazy dog"}
SPELLINGS: dict[str, dict[str, Any]] = {
    "text": PAIR,
    "messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "implicit prompt": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    # UltraFeedback binarized: the prompt as text beside whole conversations, and more columns.
    "ultrafeedback": {
        **{"prompt": "hello", "prompt_id": "1", "messages": [USER, GOOD], "score_chosen": 8.0},
        **{"chosen": [USER, GOOD], "rejected": [USER, BAD], "score_rejected": 4.0},
    },
    # Anthropic's hh-rlhf
    "one text": {
        "chosen": "\n\nHuman: hello\n\nAssistant: the quick fox",
        "rejected": "\n\nHuman: hello\n\nAssistant: the lazy dog",
    },
    # ShareGPT's, as LLaMA-Factory reads them
    "sharegpt": {
        "conversations": [{"from": "human", "value": "hello"}],
        "chosen": {"from": "gpt", "value": "the quick fox"},
        "rejected": {"from": "gpt", "value": "the lazy dog"},
    },
    "whole conversations beside one more": {
        **{"messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    },
    "one text without roles": {"chosen": "hello the quick fox", "rejected": "hello a lazy dog"},
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (PAIR | {"rejected": PAIR["chosen"]}, "are the same"),
    (PAIR | {"rejected": " "}, "`rejected` is empty"),
    (PAIR | {"prompt": " "}, "the prompt is empty"),
    (PAIR | {"chosen": None}, "`chosen` is empty"),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD | {"content": ""}]}, "is empty"),
    (
        {"chosen": [USER, GOOD], "rejected": [USER | {"content": "bye"}, BAD]},
        "do not share the prompt",
    ),
    ({"chosen": [USER, GOOD], "rejected": [USER]}, "the rejected answer is empty"),
    ({"chosen": "abc", "rejected": "xyz"}, "share no prompt"),
    ({"chosen": {"text": "a"}, "rejected": {"text": "b"}}, "`chosen` is an object"),
    ({"chosen": 1, "rejected": 2}, "`chosen` is a number"),
    (PAIR | {"prompt": None}, "`prompt` is empty"),
    (PAIR | {"chosen": []}, "`chosen` is empty"),
    (
        {"messages": [USER, GOOD], "chosen": "the quick fox", "rejected": "the lazy dog"},
        "`messages` is no prompt",
    ),
]


def row_of(values: dict[str, Any]) -> Row:
    return Row(values, Path("pairs.jsonl"), 7, "line")


def read(values: dict[str, Any], kind: ExampleKind = ExampleKind.PAIR) -> list[Preference]:
    row = row_of(values)
    row_format: Any = recognise(row, kind)
    return read_preferences(row, row_format, kind)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def encode(folder: Path, data: Path, objective: Objective, **options: Any) -> EncodedDataset:
    settings = {"seq_len": 256, "cache": folder.parent / "cache", **options}
    source = DataSource(path=str(data))
    request = EncodeRequest(sources=[source], model_folder=folder, objective=objective, **settings)
    return encode_dataset(request)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_pair_in_every_spelling(name: str) -> None:
    (found,) = read(SPELLINGS[name])

    assert [(m.role, m.content) for m in found.prompt] == [("user", "hello")]
    chosen, rejected = found.answers
    assert [m.content.replace("a lazy", "the lazy") for m in (*chosen, *rejected)] == [
        "the quick fox",
        "the lazy dog",
    ]


@pytest.mark.parametrize(("values", "reason"), REFUSED)
def test_a_pair_is_refused_with_its_row_and_the_reason(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason) as caught:
        read(values)
    assert "pairs.jsonl line 7" in caught.value.problem


def test_a_longer_conversation_shares_its_turns() -> None:
    begun = [USER, GOOD, {"role": "user", "content": "and?"}]
    (found,) = read({"chosen": [*begun, GOOD], "rejected": [*begun, BAD]})

    assert len(found.prompt) == 3
    assert [len(answer) for answer in found.answers] == [1, 1]


@pytest.mark.parametrize("label", [True, False, "true", "False"])
def test_a_labelled_answer(label: Any) -> None:
    (found,) = read({"prompt": "a", "completion": "b", "label": label}, ExampleKind.LABELLED)
    assert found.is_good is (str(label).lower() == "true")


@pytest.mark.parametrize("label", [1, 0.5, "yes", None])
def test_a_label_that_is_no_boolean_is_refused(label: Any) -> None:
    with pytest.raises(InvalidInputError, match="not a boolean"):
        read({"prompt": "a", "completion": "b", "label": label}, ExampleKind.LABELLED)


def test_a_pair_is_two_labelled_answers() -> None:
    found = read(PAIR, ExampleKind.LABELLED)
    assert [(one.answers[0][0].content, one.is_good) for one in found] == [
        ("the quick fox", True),
        ("the lazy dog", False),
    ]


@pytest.mark.parametrize(
    ("values", "wanted", "remedy"),
    [
        (PAIR, ExampleKind.ANSWER, "--objective dpo"),
        ({"prompt": "a", "completion": "b"}, ExampleKind.PAIR, "--objective sft"),
        ({"prompt": "a", "completion": "b"}, ExampleKind.LABELLED, "--objective sft"),
        ({"prompt": "a", "completion": "b", "label": True}, ExampleKind.PAIR, "--objective kto"),
    ],
)
def test_data_of_another_objective_names_that_one(
    values: dict[str, Any], wanted: ExampleKind, remedy: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        recognise(row_of(values), wanted)
    assert caught.value.remedy.startswith(remedy)


def test_a_row_of_no_format_names_those_of_the_objective() -> None:
    """Not the formats of other objectives: a pair without its other half is told what lacks."""
    with pytest.raises(InvalidInputError, match="no known format") as caught:
        read({"prompt": "a", "chosen": "b", "rejectd": "c"})
    assert "`rejectd`: did you mean `rejected`?" in caught.value.problem
    assert (
        caught.value.remedy
        == f"rename the keys to one of: pairs {PREFERENCE_FORMATS['pairs'].example}"
    )


def test_every_format_reads_its_own_example() -> None:
    for row_format in PREFERENCE_FORMATS.values():
        values = json.loads(row_format.example.replace('"..."', "null"))
        values = {key: key if value is None else value for key, value in values.items()}
        (found,) = read(values, row_format.kind)
        assert found.prompt


def test_pairs_are_encoded_side_by_side(tmp_path: Path) -> None:
    """Only the last answers are trained; both rows of a pair go to the same side of the split."""
    folder = make_model(tmp_path / "model", "chatml")
    begun = [USER, GOOD, {"role": "user", "content": "and you?"}]
    rows: list[dict[str, Any]] = [
        {"chosen": [*begun, {"role": "assistant", "content": f"me {n}"}], "rejected": [*begun, BAD]}
        for n in range(20)
    ]
    found = encode(folder, write(tmp_path / "p.jsonl", rows), Objective.DPO, eval_fraction=0.2)

    tokenizer = load_tokenizer(folder)
    assert found.eval is not None
    assert (len(found.train), len(found.eval)) == (32, 8)
    places = [found.train.place(at) for at in range(len(found.train))]
    assert places[0::2] == places[1::2]
    chosen, rejected = found.train.row(0), found.train.row(1)
    texts = [tokenizer.decode(row.tokens[row.trained].tolist()) for row in (chosen, rejected)]
    assert texts[0].startswith("me ")
    assert texts[0].endswith("<|im_end|>")
    assert texts[1] == "the lazy dog<|im_end|>"
    start = int(chosen.trained.argmax())
    assert chosen.tokens[:start].tolist() == rejected.tokens[:start].tolist()
    assert epoch_rows(found.train, seed=0, epoch=0).tolist() != list(range(0, 32, 2))
    assert sorted(epoch_rows(found.train, seed=0, epoch=0)) == list(range(0, 32, 2))
    profile = profile_from_store(found.train)
    assert profile.num_rows == 16
    assert profile.max_tokens == int(found.train.lengths.max())
    assert encode(folder, tmp_path / "p.jsonl", Objective.IPO, eval_fraction=0.2).is_cached
    counted = profile_dataset(
        tmp_path / "p.jsonl", seq_len=256, model=str(folder), example=ExampleKind.PAIR
    )
    assert counted.num_rows == 20


ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}


@pytest.mark.parametrize("objective", [Objective.DPO, Objective.KTO])
def test_pairs_have_tools_and_calls(objective: Objective, tmp_path: Path) -> None:
    """A call may be the better answer. The tools are read, as `apply_chat_template` writes them."""
    folder = make_model(tmp_path / "model", "chatml")
    result = {"role": "tool", "content": "4"}
    rows: list[dict[str, Any]] = [
        {"tools": [ADD], "prompt": [USER], "chosen": [CALL], "rejected": [BAD]},
        {"tools": json.dumps([ADD]), "prompt": "hello", "chosen": [CALL], "rejected": [BAD]},
        {
            **{"tools": [ADD], "prompt": [USER, CALL, result, GOOD, USER]},
            **{"chosen": [CALL, result, GOOD], "rejected": [BAD]},
        },
    ]
    data = write(tmp_path / "p.jsonl", rows)
    found = encode(folder, data, objective, template="hermes", seq_len=2048)

    tokenizer = load_tokenizer(folder)
    texts = [tokenizer.decode(found.train.row(at).tokens.tolist()) for at in range(6)]
    assert all('"add"' in text and "<tools>" in text for text in texts)
    rows_trained = [found.train.row(at) for at in range(6)]
    learnt = [tokenizer.decode(row.tokens[row.trained].tolist()) for row in rows_trained]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    bad, good = "the lazy dog<|im_end|>", "the quick fox<|im_end|>"
    assert learnt == [call, bad, call, bad, call + good, bad]


def test_a_call_of_a_pair_must_be_listed() -> None:
    values = {"prompt": [USER], "chosen": [CALL], "rejected": [BAD]}
    with pytest.raises(InvalidInputError, match="calls `add`, which is not listed"):
        read(values)
    (found,) = read(values | {"tools": [ADD]})
    assert found.answers[0][-1].tool_calls[0].arguments == {"a": 1}


def test_long_pairs_are_cut_alike(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "chatml")
    long = "fox " * 200
    rows = [
        {"prompt": "hello", "chosen": f"jumps {long}", "rejected": f"says {long}"},
        {"prompt": "hello", "chosen": f"{long} jumps", "rejected": f"{long} says"},
        {"prompt": long, "chosen": "jumps", "rejected": "says"},
        PAIR,
    ]
    found = encode(folder, write(tmp_path / "p.jsonl", rows), Objective.DPO, seq_len=64)

    assert found.train.lengths[:2].tolist() == [64, 64]
    assert len(found.train) == 4
    kinds = {issue.kind: issue.num_rows for issue in found.report.findings}
    assert kinds == {"truncated": 1, "cut-alike": 1, "answer-cut-off": 1}


def test_labels_are_kept(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "chatml")
    rows = [{"prompt": "a", "completion": f"fox {n}", "label": n % 2 == 0} for n in range(6)]
    found = encode(folder, write(tmp_path / "k.jsonl", rows), Objective.KTO)

    assert found.train.is_good is not None
    assert found.train.is_good.tolist() == [True, False] * 3


def test_both_answers_of_a_pair_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "chatml")
    rows = [PAIR | {"prompt": f"hello {n}"} for n in range(20)]
    data = write(tmp_path / "p.jsonl", rows)
    found = encode(folder, data, Objective.KTO, eval_fraction=0.3)

    assert found.eval is not None
    places = [found.eval.place(at) for at in range(len(found.eval))]
    assert (len(places), len(set(places))) == (12, 6)
    assert found.report.num_duplicates == 0


def test_one_labelled_answer_has_none_to_be_compared_with(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "chatml")
    data = write(tmp_path / "k.jsonl", [{"prompt": "a", "completion": "fox", "label": True}])
    with pytest.raises(InvalidInputError, match="there is only one"):
        encode(folder, data, Objective.KTO)


def test_preferences_are_between_answers(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "chatml")
    data = write(tmp_path / "p.jsonl", [PAIR])
    with pytest.raises(InvalidInputError, match="between answers"):
        encode(folder, data, Objective.DPO, train_on=TrainOn.ALL)
