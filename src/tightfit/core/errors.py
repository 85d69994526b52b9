"""Errors a user can put right: one message, one remedy, one exit code by kind.

UserError                 1   anything else the user can fix
├── UsageError            2   the command line itself is wrong
├── NotFoundError         3   a model, GPU, file or partition that does not exist
├── InvalidInputError     4   a file or value that cannot be understood
├── DoesNotFitError       5   the job cannot run on this hardware
├── SetupError            6   this machine lacks something: a tool, a package, space
├── DivergedError         7   training ran, and its numbers stopped making sense
└── CheckFailedError      8   a model was made or found, and is not what it should be

Other exit codes are the `EXIT_*` constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tightfit.core.text import disarm

EXIT_BUG = 70
"""EX_SOFTWARE of sysexits.h: an error in tightfit, not the user's."""
EXIT_REQUEUE = 75
"""EX_TEMPFAIL of sysexits.h: saved and stopped on request; the same command continues."""
EXIT_OUT_OF_MEMORY = 76
"""Of a worker: the launcher continues with the next plan."""
EXIT_INTERRUPTED = 130
"""128 + SIGINT."""
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE."""


class UserError(Exception):
    """Something the user can put right.

    `problem` names the offending value. `remedy` names the next step, as a
    command where there is one; it has no default, so none can be forgotten.
    """

    exit_code = 1

    def __init__(self, problem: str, *, remedy: str) -> None:
        from tightfit.core.secrets import hide_secrets  # not before there is an error

        self.problem = hide_secrets(problem)
        self.remedy = hide_secrets(remedy)
        super().__init__(self.problem)

    def as_lines(self) -> str:
        """For the stderr of a process without the command line's own report."""
        return disarm(f"error: {self.problem}\n  try: {self.remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        """Survive pickling from a worker process, keyword-only arguments and all."""
        return (_rebuild, (type(self), self.problem, self.remedy))


def _rebuild(kind: type[UserError], problem: str, remedy: str) -> UserError:
    return kind(problem, remedy=remedy)


class UsageError(UserError):
    """The command line asks for something contradictory or unknown."""

    exit_code = 2


class NotFoundError(UserError):
    """A named thing does not exist here."""

    exit_code = 3


class InvalidInputError(UserError):
    """A file or value was found but cannot be understood."""

    exit_code = 4


class DoesNotFitError(UserError):
    """No legal strategy fits the hardware."""

    exit_code = 5


class SetupError(UserError):
    """This machine lacks something the command needs."""

    exit_code = 6


class DivergedError(UserError):
    """The loss or a gradient is not finite, or has exploded: going on would learn nothing."""

    exit_code = 7


class CheckFailedError(UserError):
    """A model was checked against the one it came from, and did not pass."""

    exit_code = 8


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without its full stop; its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


# Errors between processes that send each other JSON.


def error_to_message(error: Exception) -> dict[str, str]:
    """What `error_from_message` makes the error of again, in another process."""
    if isinstance(error, UserError):
        kind = type(error).__name__
        return {"kind": kind, "problem": error.problem, "remedy": error.remedy}
    return {"bug": f"{type(error).__name__}: {error}"[:400]}


def error_from_message(message: Mapping[str, str], *, place: str = "") -> Exception:
    """`place` stands before the problem: where it was met."""
    if "bug" in message:
        return RuntimeError(place + message["bug"])
    kinds = {kind.__name__: kind for kind in _list_kinds(UserError)}
    kind = kinds.get(message["kind"], UserError)
    return kind(place + message["problem"], remedy=message["remedy"])


def _list_kinds(kind: type[UserError]) -> Iterator[type[UserError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _list_kinds(below)
