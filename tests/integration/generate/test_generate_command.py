"""`tightfit generate` from prompts to rows that `train` reads, with its refusals and statistics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from generate_trial import command, make_model, read_rows, run, write_prompts

from tightfit.data.formats import recognise_format
from tightfit.data.sources import read_rows as read_data
from tightfit.serving.generate.statistics import GenerateStatistics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("generate") / "model")


def test_rows_are_what_train_reads_and_samples_follow_their_seed(
    model: Path, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "prompts.txt", 6)
    settings = ("--n", "3", "--temperature", "1", "--seed", "7", "--max-new-tokens", "8")
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"

    done = run(
        command(model, prompts, first, *settings, "--system", "Be brief.", "--json"), tmp_path
    )
    again = run(
        command(model, prompts, second, *settings, "--system", "Be brief.", "--parallel", "1"),
        tmp_path,
    )

    assert (done.returncode, again.returncode) == (0, 0), done.stderr + again.stderr
    rows = read_rows(first)
    assert [(r["prompt_index"], r["sample"]) for r in rows] == [
        (i, k) for i in range(6) for k in range(3)
    ]
    texts = [row["messages"][-1]["content"] for row in rows]
    assert len(set(texts)) > 12, "samples of one prompt differ"
    same = sum(a == b for a, b in zip(rows, read_rows(second), strict=True))
    assert same >= len(rows) - 1, "a seed gives its answer whatever is computed beside it"
    for row in read_data(first):
        messages = recognise_format(row).to_messages(row)
        assert [message.role for message in messages] == ["system", "user", "assistant"]
    document = json.loads(done.stdout)
    assert document.pop("finished")
    assert document.pop("out")
    reported = GenerateStatistics.model_validate(document)
    assert reported.num_answers == 18
    assert reported.new_tokens == sum(row["num_new_tokens"] for row in rows)
    assert reported.prompt_tokens == sum(row["num_prompt_tokens"] for row in rows)
    assert reported.rates.new_per_second == pytest.approx(reported.new_tokens / reported.seconds)
    assert reported.traffic.measured_ceiling_bytes_per_second > 1e8  # type: ignore[operator]
    assert reported.memory.predicted_bytes == pytest.approx(reported.memory.device_bytes, rel=0.5)


def test_a_prompt_that_cannot_be_answered_is_set_aside_and_the_rest_goes_on(
    model: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ["short", "word " * 60, "also short"]
    prompts.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts), encoding="utf-8")
    out = tmp_path / "answers.jsonl"
    line = command(model, prompts, out, "--max-new-tokens", "4", "--context", "128")

    done = run(line, tmp_path)

    assert done.returncode == 1
    assert "1 of 3 answers could not be given" in done.stderr
    assert [row["prompt_index"] for row in read_rows(out)] == [0, 2]
    (failed,) = read_rows(Path(f"{out}.failed.jsonl"))
    assert failed["prompt_index"] == 1
    assert "128" in failed["reason"]
    assert failed["messages"][0]["content"] == texts[1]
    before = out.read_bytes()

    again = run([*line[:-1], "1024", "--json"], tmp_path)  # room enough: only that one is asked

    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["num_answers"] == 1
    rows = out.read_text("utf-8").splitlines()
    assert len(rows) == 3
    assert [rows[0], rows[2]] == before.decode().splitlines()
    assert not Path(f"{out}.failed.jsonl").exists()


def test_refusals_come_before_the_model_is_loaded(model: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.txt", 2)
    out = tmp_path / "answers.jsonl"
    line = command(model, prompts, out, "--max-new-tokens", "2")
    assert run(line, tmp_path).returncode == 0

    finished = run(line, tmp_path)
    other = run([*line, "--temperature", "0.5"], tmp_path)
    same_twice = run([*line, "--n", "2"], tmp_path)

    assert finished.returncode == 0
    assert "finished already" in finished.stderr
    assert other.returncode == 2
    assert "temperature was 0.0, now 0.5" in other.stderr
    assert "--fresh" in other.stderr
    assert same_twice.returncode == 2


def test_a_dry_run_shows_prompts_and_prediction_and_writes_nothing(
    model: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("topic\nrain\nsnow\n", encoding="utf-8")
    out = tmp_path / "answers.jsonl"

    done = run(
        command(model, rows, out, "--template-text", "Tell of {topic}.", "--dry-run"), tmp_path
    )

    assert done.returncode == 0, done.stderr
    assert "<|im_start|>user\nTell of rain.<|im_end|>\n<|im_start|>assistant" in done.stdout
    assert "kv cache" in done.stdout
    assert "fits" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} <= {"cache", "rows.csv"}


def test_raw_text_is_continued_from_stdin(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    line = command(model, Path("-"), out, "--raw", "--max-new-tokens", "3")

    done = run(line, tmp_path, input="once upon\na time\n")

    assert done.returncode == 0, done.stderr
    rows = read_rows(out)
    assert [row["prompt"] for row in rows] == ["once upon", "a time"]
    assert all(row["num_new_tokens"] == 3 or row["finish"] == "stop" for row in rows)
