"""The version of this package, and the packages that a verb needs, checked before it starts."""

from __future__ import annotations

from tightfit.core.errors import SetupError

__version__ = "0.1.0"
TRACING = ("torch", "transformers", "peft")
"""What a trace runs."""


def has_packages(*names: str) -> bool:
    """Whether all are installed; none is imported."""
    from importlib.util import find_spec

    return all(find_spec(name) is not None for name in names)


def require_packages(what: str, *names: str, extra: str = "train") -> None:
    """`what` begins the sentence: `Merging needs peft, which is not installed.`"""
    for name in names:
        if not has_packages(name):
            raise SetupError(
                f"{what} needs {name}, which is not installed.",
                remedy=f"pip install 'tightfit[{extra}]'",
            )
