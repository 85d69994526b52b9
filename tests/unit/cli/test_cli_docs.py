"""docs/cli.md and docs/exit-codes.md say what the program does."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import typer

from tightfit.cli.command import VERBS, build_app, load_options
from tightfit.core import errors

ROOT = Path(__file__).parents[3]
TYPER_OF_THE_PAGE = "0.29."
"""Versions lay out help differently; with another one only the options are compared."""


def load_writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "write_cli_docs", ROOT / "scripts" / "write_cli_docs.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_help_prints() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    remedy = "out of date: python scripts/write_cli_docs.py"
    if typer.__version__.startswith(TYPER_OF_THE_PAGE):
        assert page == load_writer().render_page(), remedy
    for option in list_options():
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", page), f"{option}: {remedy}"


@cache
def list_options() -> frozenset[str]:
    command = typer.main.get_command(build_app())
    verbs = command.commands.values()  # type: ignore[attr-defined]
    return frozenset(
        name
        for verb in verbs
        for p in verb.params
        for name in (*p.opts, *p.secondary_opts)
        if name.startswith("--")
    )


def test_every_verb_has_help_json_and_worked_examples() -> None:
    answering = {"init", "doctor", "models", "hardware", "calibrate", "estimate", "plan", "version"}
    training = {"prepare", "bench", "train", "runs", "eval"}
    after = {"merge", "convert", "quantize", "verify", "chat", "generate", "serve", "compare", "ui"}
    cluster = {"submit", "cancel", "preflight", "stage", "farm"}
    assert set(VERBS) == answering | training | after | cluster
    for verb, summary in VERBS.items():
        options, output, examples = load_options(verb)
        assert options.__doc__
        assert options.__doc__.strip().splitlines()[0] == summary
        assert "as_json" in {field.name for field in dataclasses.fields(output)}
        assert examples.count(f"tightfit {verb}") >= 2


@pytest.mark.parametrize("verb", VERBS)
def test_examples_use_options_that_exist(verb: str) -> None:
    known = list_options()
    used = re.findall(r"(?<!\S)--[a-z-]+", load_options(verb)[2])
    assert set(used) <= known


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    listed = {int(code): text for code, text in re.findall(r"^\| (\d+) \| (.*?) \|", page, re.M)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, errors.UserError):
            assert kind.__name__ in listed[kind.exit_code]
    ours = {errors.EXIT_BUG, errors.EXIT_INTERRUPTED, errors.EXIT_BROKEN_PIPE}
    of_runs = {errors.EXIT_REQUEUE, errors.EXIT_OUT_OF_MEMORY}
    assert of_runs == {75, 76}, "batch scripts rely on these"
    assert set(listed) == {0, 1, 2, 3, 4, 5, 6, 7, 8} | ours | of_runs
