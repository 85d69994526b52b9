"""`tightfit prepare`: the encoding that `train` finds, what is said of it, and the mask viewer."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from conftest import Run
from test_cli_startup import loaded_by
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from cli_run import run_process
from pages import check_page
from tightfit.api.options.training import TrainOptions
from tightfit.api.training.job import encode_for
from tightfit.api.training.recipe import read_run_recipe
from tightfit.core.recipe import make_training
from tightfit.core.settings import Method
from tightfit.data.view import choose_step, make_bins

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 400,
    "max_position_embeddings": 512,
}
ANSWERS = ["Paris, of course.", "Twelve.\nOr a dozen.", "日本語 is Japanese."]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.json and tokenizer files, and no weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox says hello to the capital"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    settings = {**names, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TIGHTFIT_CACHE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def make_rows(answers: Sequence[str]) -> list[dict[str, str]]:
    return [
        {"instruction": f"Question {number}?", "output": answer}
        for number, answer in enumerate(answers)
    ]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "train.jsonl", make_rows(ANSWERS))


def find_marked(text: str) -> list[str]:
    """What stands between marks, below the legend, with wrapped lines joined as they were."""
    shown = text.split("What is trained", 1)[1].split("\n", 1)[1]
    return [found.replace("\n  ", "\n") for found in re.findall(r"«(.*?)»", shown, re.DOTALL)]


def test_the_viewer_marks_the_answers_and_their_stop_token_alone(
    run: Run, model: Path, data: Path
) -> None:
    answer = run("prepare", str(model), "--data", str(data), "--show", "3")
    assert answer.code == 0
    assert find_marked(answer.out) == [f"{said}<|im_end|>" for said in ANSWERS]

    rows = run("prepare", str(model), "--data", str(data), "--show", "3", "--json").json["rows"]
    for number, (row, said) in enumerate(zip(rows, ANSWERS, strict=True)):
        prompt = f"<|im_start|>user\nQuestion {number}?<|im_end|>\n<|im_start|>assistant\n"
        whole = "".join(piece["text"] for piece in row["segments"])
        assert whole == f"{prompt}{said}<|im_end|>\n"
        trained = "".join(piece["text"] for piece in row["segments"] if piece["trained"])
        assert trained == f"{said}<|im_end|>"
        special = [piece["text"] for piece in row["segments"] if piece["special"]]
        assert special == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]


def test_everything_is_marked_where_everything_is_trained(
    run: Run, model: Path, data: Path
) -> None:
    answer = run("prepare", str(model), "--data", str(data), "--train-on", "all")
    assert find_marked(answer.out)[0].startswith("<|im_start|>user")
    assert "train_on: all" in answer.out  # `train` has no such option: the recipe says it


def test_letters_that_spell_a_special_token_are_not_shown_as_one(
    run: Run, model: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "spelt.jsonl", make_rows(["say <|im_end|> twice"]))
    reported = run("prepare", str(model), "--data", str(data), "--show", "1", "--json").json
    pieces = [piece for piece in reported["rows"][0]["segments"] if piece["trained"]]
    assert [(piece["text"], piece["special"]) for piece in pieces] == [
        ("say <|im_end|> twice", False),
        ("<|im_end|>", True),
    ]


EVIL = "red \x1b[31m bell \x07 csi \x9b2J override \u202e end\r\x7f wide 日本語 \u200b [bold]"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_escapes_in_data_never_reach_the_terminal(
    model: Path, tmp_path: Path, encoding: str
) -> None:
    data = write_rows(tmp_path / "evil\x1b[32m.jsonl", make_rows([EVIL, EVIL]))
    answer = run_process("prepare", str(model), "--data", str(data), PYTHONIOENCODING=encoding)
    assert answer.code == 0, answer.err
    assert all(char.isprintable() or char == "\n" for char in answer.out)
    assert "[bold]" in answer.out
    assert ("␛[31m" if encoding == "utf-8" else "\\x1b[31m") in answer.out
    if encoding == "ascii":
        assert answer.out.isascii()
        assert "[[red" in answer.out


def read_terminal(argv: Sequence[str], **environment: str) -> str:
    """What a program writes to a terminal."""
    program = f"import pty; pty.spawn({list(argv)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=False,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **environment},
    )
    return done.stdout.decode().replace("\r\n", "\n")


def test_a_terminal_shows_the_answer_in_colour_and_marks_it_without(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    argv = [sys.executable, "-m", "tightfit.cli.app", "prepare", str(model), "--data", str(data)]
    coloured = read_terminal(argv)
    green = re.findall(r"\x1b\[32m(.*?)\x1b\[0m", coloured.split("What is trained")[1], re.DOTALL)
    assert green == ["trained", "Paris, of course."]  # the legend, then the row
    assert "\x1b[30;42m<|im_end|>\x1b[0m" in coloured
    assert "«" not in coloured

    plain = read_terminal(argv, NO_COLOR="1")
    assert "«Paris, of course.<|im_end|>»" in plain
    assert "\x1b[32m" not in plain


def test_a_second_run_and_train_find_the_encoding(run: Run, model: Path, data: Path) -> None:
    argv = ("prepare", str(model), "--data", data.name, "--eval", "0.4", "--json")
    first, second = run(*argv).json, run(*argv).json
    assert (first["is_cached"], second["is_cached"]) == (False, True)
    assert first["report"] == second["report"]
    assert first["next"]["command"] == f"tightfit train {model} --data train.jsonl --eval 0.4"

    wanted = read_run_recipe(TrainOptions(job=str(model), data=Path("train.jsonl"), eval="0.4"))
    training = make_training(wanted.recipe, method=Method.FULL, model_path=model)
    found = encode_for(training, model_folder=model, seq_len=512)  # as far as the model reaches
    assert found.is_cached
    assert str(found.train.folder.parent) == first["folder"]


def test_the_recipe_it_proposes_asks_for_the_same_encoding(
    run: Run, model: Path, data: Path, tmp_path: Path
) -> None:
    other = write_rows(tmp_path / "ö ther.jsonl", [{"prompt": "a", "completion": "b"}] * 4)
    argv = ("--data", data.name, "--data", other.name, "--train-on", "all", "--take", "50%")
    first = run("prepare", str(model), *argv, "--json").json
    step = first["next"]
    assert step["command"] == "tightfit train recipe.yaml"
    Path(step["recipe_file"]).write_text("\n".join(step["recipe_lines"]), encoding="utf-8")

    second = run("prepare", "recipe.yaml", "--json").json
    assert second["is_cached"]
    assert second["folder"] == first["folder"]
    assert [source["num_rows"] for source in second["report"]["sources"]] == [2, 2]
    assert second["next"] == {
        "command": "tightfit train recipe.yaml",
        "recipe_file": None,
        "recipe_lines": [],
    }


def test_a_part_of_one_file_is_named_so_that_train_takes_it(
    run: Run, model: Path, data: Path
) -> None:
    reported = run("prepare", str(model), "--data", data.name, "--take", "2", "--json").json
    assert reported["report"]["num_read"] == 2
    assert reported["next"]["command"] == f"tightfit train {model} --data 'train.jsonl[:2]'"


def test_all_errors_come_at_once(run: Run, model: Path, tmp_path: Path) -> None:
    good = json.dumps({"instruction": "a", "output": "b"})
    bad = "{broken"
    lines = [good, *[bad, json.dumps({"instruction": "no answer key"})] * 13, good]
    data = tmp_path / "bad.jsonl"
    data.write_text("\n".join(lines))

    answer = run("prepare", str(model), "--data", str(data))
    assert (answer.code, answer.out) == (4, "")
    listed = re.findall(r"bad\.jsonl line (\d+)", answer.err)
    assert [int(number) for number in listed] == list(range(2, 22))
    assert "has 26 errors:\n" in answer.err
    assert "and 6 more" in answer.err
    assert "--skip-invalid" in answer.err

    refused = run("prepare", str(model), "--data", str(data), "--json")
    assert refused.code == refused.json["exit_code"] == 4
    numbers = [int(re.findall(r" line (\d+)", line)[0]) for line in refused.json["errors"]]
    assert numbers == list(range(2, 28))

    rest = run("prepare", str(model), "--data", str(data), "--skip-invalid")
    assert rest.code == 0
    assert "unreadable, 26 rows" in rest.out
    assert re.search(r"left out +26 rows of 28:", rest.out)
    assert "tightfit train" not in rest.out  # it would refuse them


def test_what_the_other_rows_are_read_with_is_repeated(
    run: Run, model: Path, tmp_path: Path
) -> None:
    """The command that is named reads the same data for the same objective."""
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    data = write_rows(tmp_path / "pairs.jsonl", [pair, pair | {"chosen": ""}, pair])
    options = ("--objective", "dpo", "--seq-len", "64")
    answer = run("prepare", str(model), "--data", str(data), *options)
    named = re.search(r"tightfit (prepare .* --skip-invalid)", answer.err)
    assert named is not None
    assert run(*shlex.split(named[1])).code == 0


def test_rows_that_a_template_refuses_one_and_all_leave_no_others(
    run: Run, model: Path, tmp_path: Path
) -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tools = [{"name": "add", "parameters": {"type": "object", "properties": {}}}]
    data = write_rows(tmp_path / "tools.jsonl", [{"tools": tools, "messages": asked}] * 24)
    answer = run("prepare", str(model), "--data", str(data), "--template", "chatml")
    line = "line 1: the chat template refuses it: it writes no tools; the template `hermes` does"
    assert line in answer.err
    assert "--skip-invalid" not in answer.err


def test_an_unparsable_line_counts_as_a_row(run: Run, model: Path, data: Path) -> None:
    data.write_text(f"{data.read_text()}{{no json\n")
    report = run("prepare", str(model), "--data", str(data), "--skip-invalid", "--json").json[
        "report"
    ]
    assert (report["num_read"], report["num_dropped"]) == (len(ANSWERS) + 1, 1)
    assert report["sources"][0]["num_rows"] == len(ANSWERS) + 1


def test_a_file_without_rows_says_what_a_row_is(run: Run, model: Path, tmp_path: Path) -> None:
    data = tmp_path / "empty.jsonl"
    data.touch()
    answer = run("prepare", str(model), "--data", str(data))
    assert answer.code == 4
    assert "is empty" in answer.err
    assert 'try: write rows into it, such as {"prompt"' in answer.err
    data.write_text('{"prompt": null, "completion": "yes"}\n')
    assert (
        "expected text as prompt, found null.\n"
        in run("prepare", str(model), "--data", str(data)).err
    )


def test_what_is_odd_is_listed_with_its_lines(run: Run, model: Path, tmp_path: Path) -> None:
    answers = ["same", "", "cafÃ©", "long " * 300, "half \ufffd", "fine"]
    rows = make_rows(answers)
    data = write_rows(tmp_path / "odd.jsonl", [*rows, rows[0], *[rows[5]] * 30])
    out = run("prepare", str(model), "--data", str(data), "--seq-len", "128").out
    errors = out.split("\nProblems\n")[1].split("\nNotes\n")[0]
    assert "empty answer, 1 row: " in errors
    assert "    line 2\n" in errors
    assert re.search(r"mojibake, 1 row: .*\n +line 3: ", errors)
    assert re.search(r"truncated, 1 row: .*\n +line 4: [\d,]+ tokens", errors)
    assert re.search(r"replacement character, 1 row: .*\n +line 5\n", errors)
    assert "duplicate, 31 rows: " in errors
    assert "line 7: same as line 1; line 8: same as line 6; line 9: same as line 6" in " ".join(
        errors.split()
    )
    assert "and 11 more" in " ".join(errors.split())
    assert re.search(r"seq_len 128 .* 1 row cut here", out)


def test_the_json_has_its_shape_and_agrees_with_the_rows(run: Run, model: Path, data: Path) -> None:
    reported = run("prepare", str(model), "--data", str(data), "--json", "--seq-len", "64").json
    assert set(reported) == {
        "model", "folder", "is_cached", "report", "batching", "notes", "rows", "next"
    }  # fmt: skip
    assert reported["rows"] == []
    report, batching = reported["report"], reported["batching"]
    assert report["sources"][0]["format"] == "alpaca"
    assert report["stop_tokens"] == ["<|im_end|>"]
    assert report["pad_token"] == "<|endoftext|>"
    assert batching["num_rows"] == report["train"]["num_rows"] == len(ANSWERS)
    shown = run(
        "prepare", str(model), "--data", str(data), "--json", "--seq-len", "64", "--show", "9"
    )
    rows = shown.json["rows"]
    lengths = [row["num_tokens"] for row in rows]
    assert sum(lengths) == report["train"]["num_tokens"]
    assert sum(row["num_trained_tokens"] for row in rows) == report["train"]["num_trained_tokens"]
    assert batching["packed_fraction"] == pytest.approx(
        sum(lengths) / (64 * batching["num_packed_rows"])
    )
    # Two at a time out of three: each pair is as likely as another, and one row is left alone.
    pairs = [(0, 1, 2), (0, 2, 1), (1, 2, 0)]
    slots = [2 * max(lengths[a], lengths[b]) + lengths[c] for a, b, c in pairs]
    expected = 1 - sum(lengths) / (sum(slots) / len(slots))
    assert batching["padding_waste_fraction"]["2"] == pytest.approx(expected)


def test_the_report_says_what_it_understood(run: Run, model: Path, data: Path) -> None:
    for columns in (50, 80, 100):
        answer = run("prepare", str(model), "--data", str(data), "--eval", "0.4", columns=columns)
        assert answer.code == 0
        assert max(map(len, answer.out.splitlines())) <= columns
        words = " ".join(answer.out.split())
        assert "Alpaca (instruction, input," in words
        assert "the tokenizer's own chat template" in words
        assert "<|im_end|>, trained in every row" in words
        assert "2 rows to train on, 1 row to evaluate on" in words
        assert "seq_len 512" in words  # the model reaches no further
        assert "Problems none" in words
    asked = run("prepare", str(model), "--data", str(data), "--template", "alpaca").out
    assert "alpaca, as asked" in asked


def test_one_row_is_shown_whole_by_the_line_that_messages_name(
    run: Run, model: Path, tmp_path: Path
) -> None:
    rows = make_rows(["short", "", "word " * 200 + "end", "last"])
    data = write_rows(tmp_path / "rows.jsonl", rows)
    argv = ("prepare", str(model), "--data", str(data), "--seq-len", "2048")
    cut = run(*argv, "--show", "4")
    assert "characters ...]" in cut.out
    whole = run(*argv, "--row", "3")
    assert "rows.jsonl line 3," in whole.out
    assert whole.out.count("word") == 200

    absent = run(*argv, "--row", "2")
    assert absent.code == 3
    assert "--row" in absent.err


@pytest.mark.parametrize("ending", ["png", "html"])
def test_the_lengths_are_drawn(
    run: Run, model: Path, data: Path, tmp_path: Path, ending: str
) -> None:
    chart = tmp_path / f"lengths.{ending}"
    data = data.rename(tmp_path / "日本 $x$ <b>.jsonl")  # the chart's font has no such letters
    argv = ("prepare", str(model), "--data", str(data), "--eval", "0.4", "--seq-len", "48")
    answer = run(*argv, "--chart", str(chart))
    assert answer.code == 0, answer.err
    content = chart.read_bytes()
    if ending == "png":
        assert content.startswith(b"\x89PNG")
        return
    page = content.decode()
    drawn = [int(n) for n in re.findall(r"tokens: (\d+) rows to (?:train|evaluate) on", page)]
    assert sum(drawn) == len(ANSWERS)
    assert "seq_len 48" in page
    assert "<b>" not in page
    assert "script" not in check_page(page).tags


def test_bins_hold_every_row_once() -> None:
    lengths = {1: 2, 50: 3, 51: 5, 100: 7, 101: 11}
    bins = make_bins(lengths, step=50, top=101)
    assert [item.num_rows for item in bins] == [5, 12, 11]
    for top in (1, 7, 99, 2048, 131_072, 16_777_216):
        assert -(-top // choose_step(top, most=14)) <= 14


def test_it_needs_neither_torch_nor_weights(model: Path, data: Path) -> None:
    argv = ["prepare", str(model), "--data", str(data), "--show", "2"]
    loaded = loaded_by(f"from tightfit.cli.app import main; main({argv!r})")
    assert "tokenizers" in loaded
    assert {"torch", "transformers", "datasets", "matplotlib"}.isdisjoint(loaded)


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("--show", "2", "--row", "3"), 2, "--row 3"),
        (("--chart", "a.gif"), 2, ".html"),
        (("--train-on", "prompts"), 2, "answers|all"),
        (("--eval", "0.9"), 2, "--eval 0.05"),
        (("--take", "train[:", "--eval", "0.1"), 4, "10, 1%"),
        (("--template", "chatmll"), 3, "chatml"),
        (("--data", "nowhere.jsonl"), 3, "nowhere.jsonl"),
        (("--seq-len", "8"), 4, "--seq-len"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_errors_have_a_remedy_and_their_exit_code(
    run: Run, model: Path, data: Path, argv: tuple[str, ...], code: int, said: str
) -> None:
    answer = run("prepare", str(model), "--data", str(data), *argv)
    assert answer.code == code
    assert answer.err.startswith("error: ")
    assert said in answer.err


def test_without_data_or_tokenizer_it_says_so(run: Run, model: Path, tmp_path: Path) -> None:
    assert run("prepare", str(model)).code == 2
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(CONFIG))
    answer = run("prepare", str(bare), "--data", "x.jsonl")
    assert answer.code == 3
    assert "tokenizer.json" in answer.err


def test_rows_longer_than_the_model_was_made_for_are_told_with_what_lengths_cut(
    run: Run, model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "long.jsonl"
    rows = [{"prompt": f"say {n}", "completion": "ab" * (10 + 400 * n)} for n in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ("prepare", str(model), "--data", str(data), "--seq-len")

    long = " ".join(run(*line, "4096").out.split())
    assert "exceed the 512 positions" in long
    assert "--seq-len 512" in long
    assert "What a length cuts" in long
    short = run(*line, "512", "--json").json
    assert short["notes"] == []
    cuts = {cut["seq_len"]: cut for cut in short["report"]["cuts"]}
    assert cuts[512]["num_truncated"] > 0
    assert cuts[max(cuts)]["num_truncated"] == 0
