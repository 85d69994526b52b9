"""`tightfit verify`: compare models with the one that they were made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from tightfit.api.verify import verify as verify_models
from tightfit.cli.flags.export import VerifyFlags
from tightfit.cli.terminal.output import announce, progress_bar, show_json
from tightfit.core.errors import CheckFailedError


def verify(flags: VerifyFlags) -> None:
    """Compare and show; the exit code is 8 where one does not pass."""
    with progress_bar() as report:
        verdict = verify_models(replace(flags, progress=report))
    if flags.as_json:
        show_json(verdict.model_dump(mode="json"))
    else:
        from tightfit.cli.render.verify import show_verdict

        show_verdict(verdict)
    if flags.html is not None:
        announce(Path(flags.html).expanduser())
    if verdict.saved_to is not None:
        announce(Path(verdict.saved_to))
    if not verdict.is_good:
        raise typer.Exit(CheckFailedError.exit_code)
