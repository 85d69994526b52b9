"""Every failure: one message, one remedy, the documented exit code, never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Run

from cli_run import run_process
from tightfit.cli import app, version
from tightfit.core import errors

INVALID = (
    ("an unknown verb", ("plna", "Llama-2-7b"), 2, "`plan`"),
    ("an unknown option", ("plan", "Llama-2-7b", "--seqlen", "3"), 2, "`--seq-len`"),
    ("an option's other half", ("estimate", "gpt2", "--no-checkpoint"), 2, "`--no-checkpointing`"),
    ("an unknown word", ("estimate", "gpt2", "--weights", "fp18"), 2, "`fp16`"),
    ("an unknown sharding", ("estimate", "gpt2", "--sharding", "zero4"), 2, "`zero3`"),
    ("a missing argument", ("plan",), 2, "MODEL"),
    ("an option without value", ("plan", "gpt2", "--seq-len"), 2, "--seq-len"),
    ("no number", ("estimate", "gpt2", "--seq-len", "long"), 2, "--seq-len"),
    ("zero", ("estimate", "gpt2", "--micro-batch", "0"), 2, "--micro-batch 0"),
    ("a negative", ("estimate", "gpt2", "--lora-rank", "-4"), 2, "--lora-rank -4"),
    ("an absurd size", ("estimate", "gpt2", "--seq-len", "99999999999"), 2, "--seq-len"),
    ("a large size", ("estimate", "gpt2", "--micro-batch", "70000"), 2, "--micro-batch"),
    (
        "an unknown setting",
        ("plan", "gpt2", "--on", "T4", "--set", "shardin=ddp"),
        2,
        "`sharding`",
    ),
    ("a setting without value", ("plan", "gpt2", "--on", "T4", "--set", "packing"), 2, "packing"),
    ("a wrong setting", ("plan", "gpt2", "--on", "T4", "--set", "packing=so"), 2, "packing=so"),
    ("no epochs", ("plan", "gpt2", "--on", "T4", "--epochs", "0"), 2, "--epochs"),
    ("epochs not a number", ("plan", "gpt2", "--on", "T4", "--epochs", "nan"), 2, "--epochs"),
    ("a chart of no kind", ("plan", "gpt2", "--on", "T4", "--chart", "a.gif"), 2, "--chart a.gif"),
    ("two questions", ("hardware", "T4", "--on", "T4"), 2, "two different things"),
    ("qlora in fp16", ("estimate", "gpt2", "--method", "qlora", "--weights", "fp16"), 2, "nf4"),
    ("a wrong target", ("estimate", "gpt2", "--lora-targets", "c_atn"), 2, "`c_attn`"),
    ("no target", ("estimate", "gpt2", "--lora-targets", ","), 2, "--lora-targets"),
    ("a table of nothing", ("estimate", "--zero-table"), 2, "--total-params"),
    ("a table of both", ("estimate", "gpt2", "--zero-table", "--total-params", "1e9"), 2, "both"),
    ("no model", ("estimate",), 2, "MODEL"),
    ("an unknown model", ("estimate", "Llama-2-7q"), 3, "`Llama-2-7b-hf`"),
    ("an empty model", ("plan", "", "--on", "T4"), 2, "`MODEL`"),
    ("an empty model to estimate", ("estimate", ""), 2, "`MODEL`"),
    ("an empty search", ("models", ""), 2, "`NAME`"),
    ("an empty chart", ("plan", "gpt2", "--on", "T4", "--chart", ""), 2, "`--chart`"),
    ("an empty save", ("plan", "gpt2", "--on", "T4", "--save", ""), 2, "`--save`"),
    ("an empty dataset", ("plan", "gpt2", "--on", "T4", "--data", ""), 2, "`--data`"),
    ("empty hardware", ("plan", "gpt2", "--on", ""), 2, "`--on`"),
    ("an empty number", ("plan", "gpt2", "--seq-len", ""), 2, "`--seq-len`"),
    ("an empty word", ("estimate", "gpt2", "--weights", ""), 2, "`--weights`"),
    ("a chart that is a folder", ("plan", "gpt2", "--on", "T4", "--chart", "."), 2, "--chart ."),
    ("a thousand too few", ("plan", "gpt2", "--seq-len", "2k"), 2, "--seq-len 2k` is not a whole"),
    ("past the bound", ("estimate", "gpt2", "--seq-len", "16777217"), 2, "1 and 16,777,216"),
    ("buying what is there", ("plan", "gpt2", "--buy", "--on", "T4"), 2, "--on would be ignored"),
    ("reasons for offers", ("plan", "gpt2", "--buy", "--explain"), 2, "--explain would be"),
    ("two methods", ("plan", "gpt2", "--method", "full", "--set", "method=lora"), 2, "both fix"),
    ("two lengths", ("estimate", "gpt2", "--seq-len", "9", "--set", "seq_len=8"), 2, "both fix"),
    ("two weights", ("estimate", "gpt2", "--weights", "nf4", "--set", "weights=bf16"), 2, "both"),
    (
        "a switch twice",
        ("estimate", "gpt2", "--no-checkpointing", "--set", "checkpointing=on"),
        2,
        "`--no-checkpointing` and `--set checkpointing=true`",
    ),
    (
        "a setting twice",
        ("estimate", "gpt2", "--set", "loss=plain", "--set", "loss=fused"),
        2,
        "twice",
    ),
    ("a method that is two", ("plan", "gpt2", "--on", "T4", "--set", "method=qlora"), 2, "qlora"),
    (
        "qlora of plain weights",
        ("plan", "gpt2", "--on", "T4", "--method", "qlora", "--set", "weights=fp16"),
        2,
        "quantized",
    ),
    ("a setting of no number", ("estimate", "gpt2", "--set", "seq_len=2k"), 2, "a whole number"),
    ("a setting past its bound", ("estimate", "gpt2", "--set", "lora_rank=70000"), 2, "65,536"),
    (
        "a network of no speed",
        ("plan", "gpt2", "--on", "T4", "--network", "fast"),
        2,
        "`--network fast`",
    ),
    ("escape codes in a name", ("plan", "a\x1b[31m\nb", "--on", "T4"), 3, "[31m"),
    ("escape codes in hardware", ("plan", "gpt2", "--on", "T4\x1b[2J\n  try: rm"), 4, "T4?[2J"),
    ("escape codes in an option", ("plan", "gpt2", "--a\x1b[31m"), 2, "`--a?[31m`"),
    ("a line break in a verb", ("pl\nan",), 2, "no verb `pl"),
    ("an unknown GPU", ("plan", "gpt2", "--on", "4xV1000"), 3, "`V100`"),
    ("no such recipe", ("plan", "none.yaml", "--on", "T4"), 3, "none.yaml"),
    ("no such data", ("plan", "gpt2", "--on", "T4", "--data", "none.jsonl"), 3, "none.jsonl"),
    ("a count of nothing", ("plan", "gpt2", "--on", "0xT4"), 4, "0"),
    ("too little hardware", ("plan", "Llama-3.1-405B", "--on", "T4"), 5, "short"),
)


@pytest.mark.parametrize(
    ("argv", "code", "named"), [row[1:] for row in INVALID], ids=[row[0] for row in INVALID]
)
def test_an_error_gives_one_message_one_remedy_and_its_code(
    run: Run, argv: tuple[str, ...], code: int, named: str
) -> None:
    answer = run(*argv)

    assert answer.code == code, answer.err
    first, second = answer.err.splitlines()
    assert first.startswith("error: ")
    assert named in first
    assert second.startswith("  try: ")
    assert "Traceback" not in answer.err
    assert (first + second).isprintable()
    assert answer.out == ""


def test_the_table_of_errors_covers_every_kind_a_plan_can_meet() -> None:
    assert {row[2] for row in INVALID} == {2, 3, 4, 5}
    assert len(INVALID) == 59


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("plan", "Llama-3.1-405B", "--on", "T4"), 5),
        (("estimate", "Llama-2-7q"), 3),
        (("estimate", "gpt2", "--sharding", "zero4"), 2),
        (("estimate", "gpt2", "--bogus"), 2),
    ],
)
def test_with_json_the_error_is_an_object_on_stdout_too(
    run: Run, argv: tuple[str, ...], code: int
) -> None:
    answer = run(*argv, "--json")

    assert answer.code == code
    assert answer.json["exit_code"] == code
    assert answer.err == f"error: {answer.json['error']}\n  try: {answer.json['remedy']}\n"


def test_each_kind_of_user_error_keeps_its_exit_code(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = (
        errors.UserError,
        errors.UsageError,
        errors.NotFoundError,
        errors.InvalidInputError,
        errors.DoesNotFitError,
        errors.SetupError,
    )
    for code, kind in enumerate(kinds, start=1):

        def fail(*_: object, kind: type[errors.UserError] = kind) -> None:
            raise kind("It broke.", remedy="mend it")

        monkeypatch.setattr(version, "version", fail)
        answer = run("version")
        assert (answer.code, answer.err) == (code, "error: It broke.\n  try: mend it\n")


def test_an_unforeseen_exception_is_one_line_and_says_how_to_see_more(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("in the\nengine room")

    monkeypatch.setattr(version, "version", fail)

    answer = run("version", "--json")
    assert answer.code == 70
    assert "bug in tightfit: ZeroDivisionError: in the engine room" in answer.err
    assert "TIGHTFIT_DEBUG=1 tightfit version --json" in answer.err
    assert "Traceback" not in answer.err
    assert answer.json["exit_code"] == 70

    monkeypatch.setenv("TIGHTFIT_DEBUG", "1")
    assert app.main(["version"]) == 70


def test_debug_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(version, "version", fail)
    monkeypatch.setenv("TIGHTFIT_DEBUG", "1")

    assert app.main(["version"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_ends_with_130_and_no_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(version, "version", interrupt)
    answer = run("version")
    assert answer.code == 130
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("verb", ["models", "models --json", "--help"])
def test_a_closed_pipe_is_met_quietly(verb: str) -> None:
    """`true` is gone long before Python has started, so the first write meets a closed pipe."""
    line = f"{sys.executable} -m tightfit.cli.app {verb} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)

    assert done.stderr == ""
    assert done.stdout.strip() == "141"


def test_no_arguments_print_the_help() -> None:
    answer = run_process()
    assert answer.code == 0
    assert answer.out.startswith("Usage: tightfit")


def test_a_mistyped_setting_is_put_right_and_an_unknown_one_listed(run: Run) -> None:
    near = run("plan", "gpt2", "--on", "T4", "--set", "shardin=ddp")
    assert near.err.endswith("try: --set sharding=ddp\n")
    far = run("plan", "gpt2", "--on", "T4", "--set", "zzz=1")
    assert "packing" in far.err.splitlines()[1]


def test_a_malformed_recipe_is_one_message(run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "job.yaml"
    recipe.write_text("model: gpt2\nsequence_len: 5\n")

    answer = run("plan", str(recipe), "--on", "T4")

    assert answer.code == 4
    assert "`seq_len`" in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("argv", "problem", "remedy"),
    [
        (["hlep"], "Did you mean `--help`?", "tightfit --help"),
        (["models", "zzz"], "No model `zzz`", "tightfit models    (lists every name"),
        (["train", "gpt2", "--save-every", "3"], "a key of the recipe", "`save_every: VALUE`"),
        (["plan", "gpt2", "--set", "save_every=3"], "a key of a recipe", "`save_every: 3`"),
        (["plan", "gpt2", "--set", "epochs=3"], "a key of a recipe", "--epochs 3"),
        (["submit", "gpt2", "--on", "moon"], "`--on moon`", "--on slurm, k8s or here"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_a_remedy_says_more_than_the_error(
    run: Run, argv: list[str], problem: str, remedy: str
) -> None:
    error, _, advice = run(*argv).err.partition("  try: ")
    assert problem in error
    assert remedy in advice


def test_an_unknown_key_of_a_data_source_lists_its_own_keys(run: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "job.yaml"
    recipe.write_text("model: gpt2\ndata:\n  - {path: a.jsonl, foo: 3}\n")
    error = run("plan", str(recipe)).err
    assert "the keys of `data[0]` are path, weight, split, take, text_rows, tools\n" in error
