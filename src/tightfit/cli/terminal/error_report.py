"""How an error reaches the user: one message, one remedy, one exit code."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from tightfit.cli.terminal.output import show_json, silence_stdout, write_err
from tightfit.core.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    SetupError,
    UsageError,
    UserError,
)
from tightfit.core.secrets import hide_secret_options, hide_secrets
from tightfit.core.text import did_you_mean, sanitize, shorten

DEBUG_VARIABLE = "TIGHTFIT_DEBUG"
_LIST_OF_ERRORS = re.compile(r".* has \d+ errors:\n|[\d,]+ rows? cannot be trained on:\n")


class UnexpectedOSError(Exception):
    """An OSError of a verb. The parser's own can then only be about stdout, where it prints."""


def describe_error(error: UserError) -> dict[str, Any]:
    """For a JSON document."""
    return {"error": error.problem, "remedy": error.remedy, "exit_code": error.exit_code}


def report_error(error: UserError, *, as_json: bool) -> int:
    """Print `error:` and `try:` to stderr; with `--json` also one object to stdout."""
    write_err(f"error: {_problem_lines(error.problem)}\n  try: {_one_line(error.remedy)}\n")
    if as_json:
        show_json(describe_error(error))
    return error.exit_code


def end_with(error: UserError, document: Mapping[str, Any], *, as_json: bool) -> typer.Exit:
    """The error on stderr; with `--json` also in the result's own document, the only one."""
    if as_json:
        show_json({**document, **describe_error(error)})
    return typer.Exit(report_error(error, as_json=False))


def report_lost_output(reason: str) -> int:
    """One line on stderr; stdout is never written to again."""
    silence_stdout()
    write_err(f"error: Cannot write the output: {reason}\n")
    return SetupError.exit_code


def report_bug(error: BaseException, *, argv: Sequence[str], as_json: bool) -> int:
    """An exception nobody foresaw: one line, and how to see the rest."""
    if _was_interrupted(error):
        return EXIT_INTERRUPTED
    if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        import traceback

        write_err("".join(traceback.format_exception(error)))
    text = sanitize(hide_secrets(" ".join(str(error).split()))[:300])
    problem = f"This is a bug in tightfit: {type(error).__name__}: {text}"
    line = sanitize(shlex.join(hide_secret_options(argv)))
    remedy = f"{DEBUG_VARIABLE}=1 tightfit {line}    (shows the traceback; please report it)"
    write_err(f"error: {problem}\n  try: {remedy}\n")
    if as_json:
        show_json({"error": problem, "remedy": remedy, "exit_code": EXIT_BUG})
    return EXIT_BUG


def usage_error(error: Any) -> UserError:
    """A complaint of the option parser in our words, with the nearest option or verb."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "tightfit"
    remedy = f"{path} --help"
    option = getattr(error, "option_name", None)
    message = _sentence(error.format_message())
    if option is not None and context is not None and "o such option" in message:
        known = [name for param in context.command.params for name in param.opts]
        known += [name for param in context.command.params for name in param.secondary_opts]
        takes_recipe = any("RECIPE" in (param.metavar or "") for param in context.command.params)
        if takes_recipe and (key := option.lstrip("-").replace("-", "_")) in _list_recipe_keys():
            return UsageError(
                f"`{path}` has no option `{shorten(option)}`: `{key}` is a key of the recipe.",
                remedy=f"write `{key}: VALUE` into the recipe    (docs/recipe.example.yaml)",
            )
        return UsageError(
            f"`{path}` has no option `{shorten(option)}`.{did_you_mean(option, known)}",
            remedy=remedy,
        )
    unknown = re.match(r"No such command '(.*?)'", message, re.DOTALL)
    if unknown is not None and context is not None:
        verbs = list(context.command.commands)
        near = did_you_mean(unknown.group(1), [*verbs, "--help"])
        suggestion = near or f" There are: {', '.join(verbs)}."
        return UsageError(
            f"There is no verb `{shorten(unknown.group(1))}`.{suggestion}", remedy=remedy
        )
    return UsageError(message, remedy=remedy)


def _list_recipe_keys() -> list[str]:
    from tightfit.core.recipe import Recipe

    return list(Recipe.model_fields)


def _sentence(message: str) -> str:
    text = " ".join(message.replace("'", "`").split()) if "No such" not in message else message
    return text if text.endswith((".", "?")) else f"{text}."


def _one_line(text: str) -> str:
    return sanitize(" ".join(text.split("\n")))


def _problem_lines(problem: str) -> str:
    """One line; a file's list of errors keeps a line for each, indented further than `try:`."""
    if not _LIST_OF_ERRORS.match(problem):
        return _one_line(" ".join(line.strip() for line in problem.split("\n")))
    first, *errors = problem.split("\n")
    return "\n".join([sanitize(first), *(f"    {sanitize(line.strip())}" for line in errors)])


def _was_interrupted(error: BaseException | None) -> bool:
    """Python before 3.12 wraps what is raised while a class is being made."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None
