"""A command line again, as part of a remedy."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable

from tightfit.cli.flags.plan import PlanFlags
from tightfit.cli.flags.train import TrainFlags


def list_given(options: Iterable[tuple[str, object]]) -> list[str]:
    """The words of those options that have a value."""
    given = [(option, str(value)) for option, value in options if value is not None]
    return [word for pair in given for word in pair]


def repeat_plan(flags: PlanFlags | TrainFlags, *, without: Collection[str] = ()) -> str:
    """`tightfit plan` of the job that was asked for, less its hardware, to be continued.

    `without` are settings to leave out, as they were typed.
    """
    settings = [setting for setting in flags.settings or () if setting not in without]
    options = (
        ("--method", flags.method),
        ("--seq-len", flags.seq_len),
        ("--data", flags.data),
        ("--effective-batch", flags.effective_batch),
        *(("--set", setting) for setting in settings),
    )
    return shlex.join(["tightfit", "plan", flags.job, *list_given(options)])
