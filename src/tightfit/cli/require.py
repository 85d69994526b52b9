"""Packages a verb cannot do without, asked for before anything starts."""

from __future__ import annotations

from tightfit.core.errors import EnvironmentFaultError


def require_packages(what: str, *names: str, extra: str = "train") -> None:
    """`what` begins the sentence: `Merging needs peft, which is not installed.`"""
    from importlib.util import find_spec

    for name in names:
        if find_spec(name) is None:
            raise EnvironmentFaultError(
                f"{what} needs {name}, which is not installed.",
                remedy=f"pip install 'tightfit[{extra}]'",
            )
