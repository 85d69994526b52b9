"""The verbs of the `tightfit` command, and what happens when one of them fails."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Container
from typing import Annotated

import typer

from tightfit import __version__
from tightfit.cli.declare import make_command
from tightfit.cli.exit_codes import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED
from tightfit.cli.faults import (
    UnforeseenOSError,
    report_bug,
    report_fault,
    report_lost_output,
    usage_fault,
)
from tightfit.cli.guarded import run_in_guard
from tightfit.cli.terminal.output import OutputLostError, PipeClosedError, silence_stdout, write_out
from tightfit.core.errors import UserError

# Typer carried click as a dependency and now carries a copy of it: asking its own exported
# exception for its parents works with both.
_ParserFault: type[Exception] = typer.BadParameter.__mro__[2]

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


VERBS = {
    "doctor": "Check this machine; each fault with its remedy.",
    "models": "List, search or show models.",
    "hardware": "List, search or show GPUs, or a cluster with --on.",
    "calibrate": "Measure this machine in under 2 minutes; plans made on it then use it.",
    "estimate": "Memory, disk and time of one configuration, part by part.",
    "plan": "The best ways to run a job on given hardware, and why.",
    "prepare": "Encode data as `train` will, and show what becomes of it.",
    "bench": "Run a plan for a few steps here; predicted beside measured.",
    "train": "Plan, show the plan, tune, and report.",
    "preflight": "Check the nodes of a job, and the ways between them, in under a minute.",
    "submit": "Plan for a cluster, submit the job, follow it, and report.",
    "runs": "List, show, compare and plot runs.",
    "eval": "Score a run or a model on a data file, before and after tuning.",
    "merge": "Add a run's adapter to its base model.",
    "convert": "Turn a model into another format, tensor by tensor.",
    "quantize": "Shrink a model to fewer bits, and measure what was lost.",
    "verify": "Hold models against the one they were made from.",
    "chat": "Talk to a model in the terminal.",
    "generate": "Answer every prompt of a file, once each.",
    "farm": "Answer the prompts of a file on many machines, once each.",
    "serve": "Answer HTTP requests as OpenAI's API does.",
    "compare": "Open a web page with two models side by side.",
    "stage": "Copy a model to the RAM disks of many nodes, the fastest way.",
    "version": "Print the version of tightfit and of Python.",
}
"""What the list of verbs says of each; the rest of it loads when it is called.

Its options are `tightfit.cli.flags.<verb>`, the verb itself is `tightfit.cli.<verb>.<verb>`.
"""


def load_flags(verb: str) -> tuple[type, str]:
    """A verb's options and examples."""
    module = importlib.import_module(f"tightfit.cli.flags.{verb}")
    return getattr(module, f"{verb.capitalize()}Flags"), module.EXAMPLES


def build_app(verbs: Container[str] = VERBS) -> typer.Typer:
    """The command with these verbs whole, and of the others no more than the list shows."""
    app = _make_app()
    for verb, summary in VERBS.items():
        if verb in verbs:
            flags, examples = load_flags(verb)
            app.command(verb, epilog=examples)(make_command(verb, flags))
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
    except OutputLostError as fault:
        return report_lost_output(str(fault))
    except OSError as fault:
        return report_lost_output(fault.strerror or str(fault))
    return code


def _run(words: list[str], *, as_json: bool) -> int:
    is_completing = any(name.endswith("_COMPLETE") for name in os.environ)
    command = typer.main.get_command(build_app(VERBS if is_completing else words))
    try:
        code = run_in_guard(words)
        if code is None:
            code = command.main(args=words, prog_name="tightfit", standalone_mode=False)
    except UserError as fault:
        return report_fault(fault, as_json=as_json)
    except _ParserFault as fault:
        return _report_parser_fault(fault, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except (OSError, PipeClosedError, OutputLostError):
        raise  # about stdout: a verb's other ones come as UnforeseenOSError
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # while typer printed its help
            raise PipeClosedError from None
        raise
    except UnforeseenOSError as fault:
        return report_bug(fault.__cause__ or fault, argv=words, as_json=as_json)
    except Exception as fault:
        return report_bug(fault, argv=words, as_json=as_json)
    return code if isinstance(code, int) else 0


def _report_parser_fault(fault: BaseException, *, as_json: bool) -> int:
    if type(fault).__name__ == "NoArgsIsHelpError":
        write_out(f"{fault.format_message()}\n")  # type: ignore[attr-defined]
        return 0
    return report_fault(usage_fault(fault), as_json=as_json)
