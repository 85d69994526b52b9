"""The `tightfit` command: its verbs, how each becomes a typer command, and how errors end it.

Options load when the command line names their verb; a verb loads when it is called.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Container
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from tightfit.cli.terminal.error_report import (
    UnexpectedOSError,
    report_bug,
    report_error,
    report_lost_output,
    usage_error,
)
from tightfit.cli.terminal.output import OutputLostError, PipeClosedError, silence_stdout, write_out
from tightfit.core.errors import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, UserError
from tightfit.core.files import find_write_error
from tightfit.core.packages import __version__

if TYPE_CHECKING:
    from tightfit.core.options import Option

# Makes a typer command of a frozen dataclass of options and a verb that is loaded when called.


def make_command(verb: str, options_type: type[Any], output_type: type[Any]) -> Callable[..., None]:
    """A function with one parameter per field, which calls `cli.<verb>.<verb>(options, output)`.

    A verb with thirty options so stays a function of two typed arguments, and nothing it
    needs is loaded before it runs. The options' docstring is the help text.
    """
    # Not for `--help`, which lists verbs alone.
    from tightfit.core.options import list_declared
    from tightfit.core.reading import as_user_error

    declared = {kind: list_declared(kind) for kind in (options_type, output_type)}

    def command(**given: Any) -> None:
        run = getattr(importlib.import_module(f"tightfit.cli.{verb}"), verb)
        _print_log_messages()
        try:
            run(*(kind(**{name: given[name] for name in declared[kind]}) for kind in declared))
        except BrokenPipeError:
            raise PipeClosedError from None
        except UserError:
            raise
        except OSError as error:
            raise as_user_error(error) or UnexpectedOSError() from error

    parameters = [
        _parameter(field, get_type_hints(kind)[field.name], found[field.name])
        for kind, found in declared.items()
        for field in dataclasses.fields(kind)
        if field.name in found
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__ = verb
    command.__doc__ = options_type.__doc__
    return command


def _print_log_messages() -> None:
    """Messages that the API logs go to stderr; a warning as a note."""
    import logging

    from tightfit.cli.terminal.output import write_err

    class Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            prefix = "note: " if record.levelno >= logging.WARNING else ""
            write_err(f"{prefix}{record.getMessage()}\n")

    logger = logging.getLogger("tightfit.api")
    logger.handlers = [Printer()]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _parameter(field: dataclasses.Field[Any], kind: Any, declared: Option) -> inspect.Parameter:
    # Numbers and paths reach their option's callback as they were typed, and the callback reads
    # them: typer's own messages name neither value nor bound, and it takes an empty path for this
    # folder.
    if {int, float, Path} & {kind, *get_args(kind)}:
        kind = str | None
    annotated: Any = Annotated
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
        annotation=annotated[kind, _typer_declaration(declared)],
    )


def _typer_declaration(declared: Option) -> Any:
    """The declaration of one option in typer's own terms."""
    from tightfit.core.options import Argument

    shared: dict[str, Any] = {
        "help": declared.help,
        "metavar": declared.metavar,
        "callback": declared.read,
        "autocompletion": declared.complete,
        "show_default": declared.show_default,
    }
    if isinstance(declared, Argument):
        return typer.Argument(**shared)
    return typer.Option(declared.name, **shared)


# Typer carried click as a dependency and now carries a copy of it: asking its own exported
# exception for its parents works with both.
_ParserError: type[Exception] = typer.BadParameter.__mro__[2]

_EPILOG = """\b
Examples:
  tightfit plan Llama-2-7b --on 4xV100-32GB
  tightfit estimate Qwen2.5-7B --method qlora --on RTX-4090
  tightfit doctor

Exit codes: 0 done, 1 to 8 something you can put right, 70 a bug, 75 saved and stopped;
see docs/exit-codes.md."""


def _make_app() -> typer.Typer:
    app = typer.Typer(
        name="tightfit",
        help="Will it fit, how long will it take, on what hardware? Answers before anything runs.",
        epilog=_EPILOG,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_global)
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        write_out(f"tightfit {__version__}\n")
        raise typer.Exit


def _global(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


_ORDER = (
    *("init", "doctor", "models", "hardware", "calibrate", "estimate", "plan", "prepare", "bench"),
    *("train", "preflight", "submit", "cancel", "runs", "eval", "merge", "convert", "quantize"),
    *("verify", "chat", "generate", "farm", "serve", "compare", "ui", "stage", "version"),
)
"""The verbs as `--help` lists them, in the order of a job's life; others follow by name."""
_OPTION_FILES = {
    "eval": "evaluate",
    **dict.fromkeys(("doctor", "models", "hardware", "runs", "version"), "catalogue"),
    **dict.fromkeys(
        ("calibrate", "estimate", "plan", "prepare", "bench", "train"), "options.training"
    ),
    **dict.fromkeys(("preflight", "submit", "cancel", "stage"), "options.clusters"),
    **dict.fromkeys(("chat", "generate", "farm", "serve", "compare", "ui"), "options.serving"),
}
"""The module of `api` that declares a verb's options, where that is not `api.<verb>`: there are
options that verbs share, and verbs too heavy to load for their `--help`."""


def _list_verbs() -> dict[str, str]:
    """Every verb with its summary: the first line of `cli/<verb>.py`, which is not loaded."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        with path.open(encoding="utf-8") as file:
            line = re.match(r'"""`tightfit (\w+)`: (.+)"""', file.readline())
        if line is not None:
            found[line[1]] = line[2]
    return {verb: found[verb] for verb in (*_ORDER, *found) if verb in found}


VERBS = _list_verbs()


def load_options(verb: str) -> tuple[type, type, str]:
    """A verb's options, those of its output, and examples."""
    from tightfit.api.options.common import Output  # the list of verbs needs no options

    declared = importlib.import_module(f"tightfit.api.{_OPTION_FILES.get(verb, verb)}")
    name = verb.capitalize()
    return (
        getattr(declared, f"{name}Options"),
        getattr(declared, f"{name}Output", Output),
        getattr(declared, f"{verb.upper()}_EXAMPLES"),
    )


def build_app(verbs: Container[str] = VERBS) -> typer.Typer:
    """The command with these verbs whole, and of the others no more than the list shows."""
    app = _make_app()
    for verb, summary in VERBS.items():
        if verb in verbs:
            options, output, examples = load_options(verb)
            app.command(verb, epilog=examples)(make_command(verb, options, output))
        else:
            app.command(verb, help=summary)(lambda: None)
    return app


def run(words: list[str]) -> int:
    """Run one command line to its exit code, whatever becomes of stdout."""
    if sys.stdout is None:
        return report_lost_output("stdout is closed")
    try:
        code = _run(words, as_json="--json" in words)
        sys.stdout.flush()
    except (BrokenPipeError, PipeClosedError):
        silence_stdout()  # the reader has what it wanted
        return EXIT_BROKEN_PIPE
    except OutputLostError as error:
        return report_lost_output(str(error))
    except OSError as error:
        return report_lost_output(error.strerror or str(error))
    return code


def _run(words: list[str], *, as_json: bool) -> int:
    is_completing = any(name.endswith("_COMPLETE") for name in os.environ)
    command = typer.main.get_command(build_app(VERBS if is_completing else words))
    try:
        code = command.main(args=words, prog_name="tightfit", standalone_mode=False)
    except UserError as error:
        return report_error(error, as_json=as_json)
    except _ParserError as error:
        return _report_parser_error(error, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except (OSError, PipeClosedError, OutputLostError):
        raise  # about stdout: a verb's own come as UnexpectedOSError
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # while typer printed its help
            raise PipeClosedError from None
        raise
    except UnexpectedOSError as error:
        return _report_os_error(error.__cause__ or error, words, as_json=as_json)
    except Exception as error:
        return report_bug(error, argv=words, as_json=as_json)
    return code if isinstance(code, int) else 0


def _report_os_error(error: BaseException, words: list[str], *, as_json: bool) -> int:
    found = find_write_error(error)
    if found is None:
        return report_bug(error, argv=words, as_json=as_json)
    return report_error(found, as_json=as_json)


def _report_parser_error(error: BaseException, *, as_json: bool) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        write_out(f"{error.format_message()}\n")  # type: ignore[attr-defined]
        return 0
    return report_error(usage_error(error), as_json=as_json)
