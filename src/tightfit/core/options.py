"""The options of a verb, each declared once for Python, the command line, completion and docs.

A field of an options dataclass is made by `text_option`, `count_option` and the like; an option
that several verbs share is `Annotated` with one of them, and a value by position with an
`Argument`. Nothing here needs typer or pydantic: `--help` stays fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from tightfit.core.errors import UsageError
from tightfit.core.text import LONGEST_VALUE, printable, shorten

Parse = Callable[[str, "Option"], Any]
"""From what was typed to the field's value. Raises UsageError."""
Complete = Callable[[str], list[str]]
"""The words that a shell offers behind what was typed so far."""
Options = TypeVar("Options")
MAX_PATH = 4096
"""Characters of a path. Source: Linux's PATH_MAX."""
_NAMED = ("FILE", "FOLDER", "PATH", "MODEL", "RUN", "ADAPTER", "RECIPE", "SOURCE", "HARDWARE")
"""The words of a metavar that mean a path, or may mean one."""
_OPTION = "option"
"""Where the metadata of a dataclass field holds its option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A value by name."""

    help: str
    name: str = ""
    """`--lr`, or `--verify/--no-verify`. Empty: the field's name."""
    has_off: bool = False
    """A switch with a side `--no-NAME`."""
    metavar: str | None = None
    example: str = ""
    """A value that works, for messages. Without one, an empty value is accepted."""
    parse: Parse | None = None
    complete: Complete | None = None
    show_default: bool = False

    def read(self, value: Any) -> Any:
        """The field's value: of text as it was typed, or of what a Python program gave."""
        if not value and not isinstance(value, str | int | float):
            return value
        if isinstance(value, list):
            return [self._read_one(item) for item in value]
        return self._read_one(value)

    def _read_one(self, value: Any) -> Any:
        if isinstance(value, bool):
            return value
        typed = str(value)
        if "\0" in typed:
            raise UsageError(
                f"`{self.name}` was given a NUL byte, which is in no name and no text.",
                remedy=f"leave it out of {self.name}",
            )
        if not typed.isprintable() and any("\ud800" <= char <= "\udfff" for char in typed):
            # What Python makes of bytes of the command line that are not in its encoding.
            raise UsageError(
                f"`{self.name} {printable(typed, most=LONGEST_VALUE)}` is not valid UTF-8.",
                remedy=f"type it again for {self.name}; rename a file whose name is not UTF-8",
            )
        if self.example and not typed.strip():
            # Mostly a shell variable that nobody set.
            suggestion = f"{self.example} in its place"
            if self.name.startswith("-"):
                suggestion = f"{self.name} {self.example}"
            raise UsageError(
                f"`{self.name}` was given an empty value.",
                remedy=f"{suggestion}    (is a shell variable unset?)",
            )
        if len(typed) > MAX_PATH and any(word in (self.metavar or "") for word in _NAMED):
            raise UsageError(
                f"`{self.name}` was given {len(typed):,} characters; a path has at most "
                f"{MAX_PATH:,}.",
                remedy=f"{self.name} {self.example}",
            )
        return value if self.parse is None else self.parse(typed, self)

    def refuse(self, typed: str, why: str) -> UsageError:
        return UsageError(
            f"`{self.name} {shorten(typed.strip())}` {why}", remedy=f"{self.name} {self.example}"
        )


class Argument(Option):
    """A value by position; `name` is for messages."""

    __slots__ = ()


def list_declared(options_type: type[Any]) -> dict[str, Option]:
    """The declaration of each field that a user can give, by the field's name."""
    found: dict[str, Option] = {}
    hints = get_type_hints(options_type, include_extras=True)
    for field in dataclasses.fields(options_type):
        for extra in (field, *getattr(hints[field.name], "__metadata__", ())):
            option = extra
            if isinstance(extra, dataclasses.Field):
                option = extra.metadata.get(_OPTION)
            if isinstance(option, Option):
                found[field.name] = _named(option, field.name)
                break
    return found


def _named(option: Option, field_name: str) -> Option:
    word = field_name.replace("_", "-")
    name = option.name or f"--{word}"
    return dataclasses.replace(option, name=f"{name}/--no-{word}" if option.has_off else name)


def read_given(options: Options) -> Options:
    """The same options with every value read and checked as the command line does."""
    given: Any = options
    read = {
        name: option.read(getattr(options, name))
        for name, option in list_declared(type(options)).items()
    }
    changed: Options = dataclasses.replace(given, **read)
    return changed


def list_given(options: Any, names: Iterable[str]) -> dict[str, Any]:
    """Values by option name (`--lr`) of those fields that were given, of those that there are."""
    declared = list_declared(type(options))
    return {
        declared[name].name.partition("/")[0]: value
        for name in names
        if name in declared and (value := getattr(options, name)) not in (None, False)
    }


def repeat_options(given: Mapping[str, Any]) -> list[str]:
    """The words of a command line for these options; a list is a repeated one."""
    words: list[str] = []
    for name, value in given.items():
        if value is True:
            words.append(name)
        elif value is not None:
            items = value if isinstance(value, list) else [value]
            words += [word for item in items for word in (name, str(item))]
    return words


# The kinds of options. `default` is not used in an `Annotated` type.


def text_option(
    metavar: str,
    help: str,
    *,
    example: str = "",
    name: str = "",
    parse: Parse | None = None,
    complete: Complete | None = None,
) -> Any:
    """An option that takes text, and with an `example` refuses an empty one."""
    option = Option(
        name=name, help=help, metavar=metavar, example=example, parse=parse, complete=complete
    )
    return _field(option, None)


def path_option(help: str, *, example: str, metavar: str = "FILE") -> Any:
    """An option that takes a file, or with another metavar a folder."""
    return text_option(metavar, help, example=example, parse=lambda typed, _: Path(typed))


def word_option(
    words: tuple[str, ...],
    help: str,
    *,
    name: str = "",
    aliases: Mapping[str, str] | None = None,
) -> Any:
    """An option that takes one of a few words; the words are in the help and in the shell."""

    def parse(typed: str, option: Option) -> str:
        plain = typed.strip().lower()
        return read_word((aliases or {}).get(plain, typed), words, option=option.name)

    listed = "|".join(words)
    return text_option(listed, help, example=listed, name=name, parse=parse, complete=offer(words))


def count_option(
    help: str, *, most: int, example: int, least: int = 1, default: int | None = None
) -> Any:
    """An option that takes a whole number from `least` to `most`."""

    def parse(typed: str, option: Option) -> int:
        try:
            number = int(typed)
        except ValueError:
            raise option.refuse(typed, "is not a whole number.") from None
        if not least <= number <= most:
            raise option.refuse(typed, f"is not between {least} and {most:,}.")
        return number

    return _field(Option(help=help, metavar="N", example=f"{example}", parse=parse), default)


def number_option(help: str, *, most: float, example: float, least: float | None = None) -> Any:
    """An option that takes a number from `least` to `most`; without `least`, above 0."""

    def parse(typed: str, option: Option) -> float:
        try:
            value = float(typed)
        except ValueError:
            raise option.refuse(typed, "is not a number.") from None
        if least is None and not 0 < value <= most:
            raise option.refuse(typed, f"is not above 0 and up to {most:,g}.")
        if least is not None and not least <= value <= most:
            raise option.refuse(typed, f"is not a number from {least:g} to {most:g}.")
        return value

    return _field(Option(help=help, metavar="X", example=f"{example:g}", parse=parse), None)


def switch_option(
    help: str,
    *,
    name: str = "",
    has_off: bool = False,
    default: bool | None = False,
    show_default: bool = False,
) -> Any:
    """An option without a value; with `has_off` also `--no-NAME`."""
    return _field(Option(help=help, name=name, has_off=has_off, show_default=show_default), default)


def setting_option(name: str, *, words: tuple[str, ...] = ()) -> Any:
    """The option of a setting, as its declaration in `core/settings.py` has it."""
    from tightfit.core.settings import find_setting  # the list of verbs needs no settings

    declared = find_setting(name)
    help, example = declared.setting.help, declared.setting.example
    words = words or declared.words
    if words:
        return word_option(words, help)
    if declared.kind is bool:
        return switch_option(help, has_off=True, default=None)
    if declared.kind is int:
        return count_option(help, least=declared.least, most=declared.most, example=int(example))
    if declared.kind is float:
        return number_option(help, most=declared.most, example=float(example))
    return text_option(declared.setting.metavar, help, example=example)


def _field(option: Option, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={_OPTION: option})


def read_word(text: str, known: Iterable[str], *, option: str) -> str:
    """`text` as one of the known words, or a message that names the nearest."""
    words = list(known)
    wanted = text.strip().lower()
    if wanted in words:
        return wanted
    from tightfit.core.text import did_you_mean

    raise UsageError(
        f"`{option} {shorten(text)}` is not known.{did_you_mean(text, words)}",
        remedy=f"{option} " + "|".join(words),
    )


def offer(words: Iterable[str]) -> Complete:
    """A completion callback for a fixed set of words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete.lower())]

    return complete
