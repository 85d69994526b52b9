"""The verbs of the `tightfit` command, and what happens when one of them fails."""

from __future__ import annotations

import sys
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
from tightfit.cli.flags import (
    doctor,
    estimate,
    eval,
    hardware,
    models,
    plan,
    prepare,
    runs,
    train,
    version,
)
from tightfit.cli.output import OutputLostError, PipeClosedError, silence_stdout, write_out
from tightfit.core.errors import UserError

# Typer carried click as a dependency and now carries a copy of it: asking its own exported
# exception for its parents works with both.
_ParserFault: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="tightfit",
    help="Will it fit, how long will it take, on what hardware? Answers before anything runs.",
    epilog="""\b
Examples:
  tightfit plan Llama-2-7b --on 4xV100-32GB
  tightfit estimate Qwen2.5-7B --method qlora --on RTX-4090
  tightfit doctor

Exit codes: 0 done, 1 to 7 something you can put right, 70 a bug, 75 saved and stopped;
see docs/exit-codes.md.""",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        write_out(f"tightfit {__version__}\n")
        raise typer.Exit


@app.callback()
def _global(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


VERBS: dict[str, tuple[type, str]] = {
    "doctor": (doctor.DoctorFlags, doctor.EXAMPLES),
    "models": (models.ModelsFlags, models.EXAMPLES),
    "hardware": (hardware.HardwareFlags, hardware.EXAMPLES),
    "estimate": (estimate.EstimateFlags, estimate.EXAMPLES),
    "plan": (plan.PlanFlags, plan.EXAMPLES),
    "prepare": (prepare.PrepareFlags, prepare.EXAMPLES),
    "runs": (runs.RunsFlags, runs.EXAMPLES),
    "eval": (eval.EvalFlags, eval.EXAMPLES),
    "train": (train.TrainFlags, train.EXAMPLES),
    "version": (version.VersionFlags, version.EXAMPLES),
}
"""A verb's options and examples; the verb itself is `tightfit.cli.<verb>.<verb>`."""

for _verb, (_flags, _examples) in VERBS.items():
    app.command(_verb, epilog=_examples)(make_command(_verb, _flags))


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
    command = typer.main.get_command(app)
    try:
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
