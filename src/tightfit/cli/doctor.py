"""`tightfit doctor`: what is here, and what is wrong with it."""

from __future__ import annotations

import typer

from tightfit.api.doctor import doctor as api_doctor
from tightfit.cli.flags.catalogue import DoctorFlags
from tightfit.cli.terminal.output import show_json


def doctor(flags: DoctorFlags) -> None:
    """Run the checks and print them; the exit code tells the worst."""
    checkup = api_doctor(flags)
    if flags.as_json:
        show_json(checkup.model_dump(mode="json"))
    else:
        from tightfit.cli.render.checkup import show_checkup

        show_checkup(checkup)
    if checkup.exit_code:
        raise typer.Exit(checkup.exit_code)
