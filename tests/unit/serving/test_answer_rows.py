"""The columns of a prompt's row come back with its answer, so that answers can be joined."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.core.errors import UserError
from tightfit.data.formats import Message, recognise_format
from tightfit.data.readers import Row
from tightfit.engines.protocol import Done, FinishReason
from tightfit.farming.folder import PromptSnapshot, choose_chunk_layout, write_snapshot
from tightfit.serving.generate.journal import to_json_line
from tightfit.serving.generate.prompts import Prompt, PromptRequest, digest_prompts, read_prompts
from tightfit.serving.generate.run import FailedAnswer, make_row, write_failures

DONE = Done(
    reason=FinishReason.STOP,
    text="answer",
    num_prompt_tokens=3,
    num_new_tokens=2,
    submitted_s=0.0,
    first_token_s=1.0,
    finished_s=2.0,
)


def read(path: Path, *rows: dict[str, Any], **request: Any) -> list[Prompt]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(PromptRequest(path=str(path), **request))


def as_row(values: dict[str, Any]) -> Row:
    return Row(values, Path("answers.jsonl"), 1, "line")


def test_every_column_comes_back_and_ours_keep_their_names(tmp_path: Path) -> None:
    row = {"id": "a7", "prompt": "q", "gold": {"n": [1, None]}, "finish": "mine", "input_finish": 4}
    (prompt,) = read(tmp_path / "p.jsonl", row)

    answer = json.loads(to_json_line(make_row(prompt, 0, DONE, is_raw=False)))

    assert answer["messages"][-1] == {"role": "assistant", "content": "answer"}
    assert (answer["id"], answer["gold"]) == ("a7", {"n": [1, None]})
    assert (answer["finish"], answer["prompt_index"]) == ("stop", 0)
    assert (answer["input_prompt"], answer["input_finish"]) == ("q", 4)
    assert answer["input_input_finish"] == "mine", "a column with a free name keeps it"
    assert recognise_format(as_row(answer)).name == "chat"


@pytest.mark.parametrize(
    "row",
    [
        {"id": 1, "instruction": "do", "output": "gold"},
        {"id": 1, "messages": [{"role": "user", "content": "q"}]},
        {"id": 1, "question": "q", "context": "c", "answer": "a"},
        {"id": 1, "text": "q"},
    ],
    ids=lambda row: list(row)[1],
)
def test_train_reads_the_answer_to_raw_text_whatever_the_columns(
    row: dict[str, Any], tmp_path: Path
) -> None:
    column = "messages" if "messages" in row else list(row)[1]
    (prompt,) = read(tmp_path / "p.jsonl", row, column=column, is_raw=True)

    answer = make_row(prompt, 0, DONE, is_raw=True)

    found = recognise_format(as_row(answer))
    assert found.to_turns(as_row(answer)).answer == "answer"
    assert answer["id"] == 1
    assert answer[f"input_{column}"] == row[column]


def test_columns_that_json_lacks_come_back_as_text(tmp_path: Path) -> None:
    import pyarrow as arrow
    from pyarrow import parquet

    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc)
    table = arrow.table({"prompt": ["q"], "when": [moment], "score": [float("nan")], "n": [2]})
    parquet.write_table(table, tmp_path / "p.parquet")

    (prompt,) = read_prompts(PromptRequest(path=str(tmp_path / "p.parquet")))

    assert prompt.columns["when"].startswith("2026-01-02")
    assert (prompt.columns["score"], prompt.columns["n"]) == (None, 2)
    assert json.loads(to_json_line(make_row(prompt, 0, DONE, is_raw=False)))["score"] is None


def test_other_columns_are_another_job(tmp_path: Path) -> None:
    first = read(tmp_path / "p.jsonl", {"id": 1, "prompt": "q"})
    second = read(tmp_path / "p.jsonl", {"id": 2, "prompt": "q"})

    assert digest_prompts(first) != digest_prompts(second)


def test_a_farm_keeps_the_columns_beside_its_prompts(tmp_path: Path) -> None:
    prompts = read(tmp_path / "p.jsonl", {"id": 1, "prompt": "q"}, {"id": 2, "prompt": "r"})
    write_snapshot(tmp_path, choose_chunk_layout(2, 1), prompts)

    snapshot = PromptSnapshot(tmp_path)
    kept = [*snapshot.read(0), *snapshot.read(1)]
    snapshot.close()

    assert kept == prompts
    assert [prompt.columns["id"] for prompt in kept] == [1, 2]


def test_failed_prompts_name_their_row(tmp_path: Path) -> None:
    prompt = Prompt(index=0, place="line 1", messages=(Message("user", "q"),), columns={"id": 9})
    error = UserError("too long", remedy="shorten it")

    path = write_failures(tmp_path / "out.jsonl", [FailedAnswer(prompt, 0, error)])

    assert path is not None
    assert json.loads(path.read_text())["id"] == 9
