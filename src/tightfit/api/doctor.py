"""`doctor`: check this machine, with a remedy for each problem."""

from __future__ import annotations

from tightfit.api.call import accepts_keywords
from tightfit.api.options.catalogue import DoctorOptions
from tightfit.hardware.checkup import Checkup, run_checkup


@accepts_keywords(DoctorOptions)
def doctor(_options: DoctorOptions) -> Checkup:
    """Run all checks; `exit_code` is 6 if something will not work, else 0."""
    return run_checkup()
