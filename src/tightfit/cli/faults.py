"""How every failure reaches the user: one message, one remedy, one exit code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from tightfit.cli.json_output import show_json
from tightfit.core.errors import UsageError, UserError
from tightfit.core.suggest import did_you_mean

EXIT_BUG = 70
"""EX_SOFTWARE of sysexits.h: our fault, not the user's."""
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
DEBUG_VARIABLE = "TIGHTFIT_DEBUG"


class PipeClosedError(Exception):
    """The reader of stdout has gone. Not an OSError: typer would answer those itself."""


def report_fault(fault: UserError, *, as_json: bool) -> int:
    """Print `error:` and `try:` to stderr; with `--json` also one object to stdout."""
    print(f"error: {fault.problem}\n  try: {fault.remedy}", file=sys.stderr)
    if as_json:
        told = {"error": fault.problem, "remedy": fault.remedy, "exit_code": fault.exit_code}
        show_json(told)
    return fault.exit_code


def report_bug(fault: BaseException, *, argv: Sequence[str], as_json: bool) -> int:
    """An exception nobody foresaw: one line, and how to see the rest."""
    if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        import traceback

        traceback.print_exception(fault)
    said = " ".join(str(fault).split())[:300]
    problem = f"This is a bug in tightfit: {type(fault).__name__}: {said}"
    remedy = (
        f"{DEBUG_VARIABLE}=1 tightfit {' '.join(argv)}    (shows the traceback; please report it)"
    )
    print(f"error: {problem}\n  try: {remedy}", file=sys.stderr)
    if as_json:
        show_json({"error": problem, "remedy": remedy, "exit_code": EXIT_BUG})
    return EXIT_BUG


def usage_fault(fault: Any) -> UserError:
    """A complaint of the option parser in our words, with the nearest option or verb."""
    context = getattr(fault, "ctx", None)
    path = context.command_path if context is not None else "tightfit"
    remedy = f"{path} --help"
    option = getattr(fault, "option_name", None)
    message = _sentence(fault.format_message())
    if option is not None and context is not None and "o such option" in message:
        known = [name for param in context.command.params for name in param.opts]
        known += [name for param in context.command.params for name in param.secondary_opts]
        return UsageError(
            f"`{path}` has no option `{option}`.{did_you_mean(option, known)}", remedy=remedy
        )
    unknown = re.match(r"No such command '(.*?)'", message)
    if unknown is not None and context is not None:
        verbs = list(context.command.commands)
        suggestion = did_you_mean(unknown.group(1), verbs) or f" There are: {', '.join(verbs)}."
        return UsageError(f"There is no verb `{unknown.group(1)}`.{suggestion}", remedy=remedy)
    return UsageError(message, remedy=remedy)


def _sentence(message: str) -> str:
    text = " ".join(message.replace("'", "`").split()) if "No such" not in message else message
    return text if text.endswith((".", "?")) else f"{text}."
