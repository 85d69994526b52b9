"""Calling a verb from Python: with its options object, or with the options as keywords."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

from tightfit.core.options import read_given

P = ParamSpec("P")
Options = TypeVar("Options")
Options_contra = TypeVar("Options_contra", contravariant=True)
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Verb(Protocol[P, Options_contra, Result_co]):
    """A function of one options object that also takes them as keywords."""

    @overload
    def __call__(self, options: Options_contra, /) -> Result_co: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result_co: ...


def accepts_keywords(
    options_type: Callable[P, Options],
) -> Callable[[Callable[[Options], Result]], Verb[P, Options, Result]]:
    """Let `merge(MergeOptions(target="runs/sql"))` also be written `merge("runs/sql")`.

    Keywords are read and checked as the command line does, so that `lr="fast"` raises the
    same UsageError. An options object is taken as it is: whoever made it has checked it.
    """

    def decorate(run: Callable[[Options], Result]) -> Verb[P, Options, Result]:
        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Result:
            if len(args) == 1 and not kwargs and isinstance(args[0], cast("type", options_type)):
                return run(cast("Options", args[0]))
            return run(read_given(options_type(*args, **kwargs)))

        call.__signature__ = inspect.signature(options_type)  # type: ignore[attr-defined]
        return cast("Verb[P, Options, Result]", call)

    return decorate
