"""Text from files and arguments, made fit for one line of a message; names near a mistyped one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

LONGEST_VALUE = 60
_OBEYED = re.compile(
    # Colours, which may be ours, are kept; then C0 but for line breaks and tabs, DEL and C1,
    # marks of direction, line and paragraph separators, halves of surrogate pairs.
    "(\x1b\\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\ud800-\udfff]"
)
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")


def sanitize(text: str) -> str:
    """Each control character, line break and direction mark as `?`; odd spaces as spaces."""
    return text if text.isprintable() else "".join(map(_shown, text))


def sanitize_lines(text: str) -> str:
    """The same for text whose line breaks are ours."""
    return "\n".join(map(sanitize, text.split("\n")))


def disarm(text: str) -> str:
    """Text as a terminal may get it: all that it would obey is spelt out, but for colours."""
    return _OBEYED.sub(lambda found: found[1] or ascii(found[0])[1:-1], text)


def escape_html(text: str) -> str:
    """Text as markup that shows this text; what has no sign or turns the direction as `\ufffd`."""
    import html  # its table of names takes a while, and only pages need it

    return html.escape(_UNSEEN.sub("\ufffd", text), quote=True)


def shorten(value: object) -> str:
    """A value for the middle of a sentence."""
    text = sanitize(str(value))
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def printable(text: str, *, most: int = 80) -> str:
    """Short, and without characters that a terminal would obey."""
    short = text if len(text) <= most else text[: most - 3] + "..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in short)


def count_of(number: int, noun: str) -> str:
    """`1 row`, `2 rows`, `12,000 rows`."""
    if number == 1:
        return f"{number:,} {noun}"
    return f"{number:,} {noun}" + ("es" if noun.endswith("s") else "s")


def list_some(names: Sequence[str], *, most: int = 4) -> str:
    """`a, b, c, d and 3 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char == "\t" or (char.isspace() and ord(char) > 0x9F and char < "\u2028") else "?"


# Did you mean: the nearest known names to a mistyped one.


def nearest(word: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """Known names close to `word`, best first, case ignored; names that contain it count too."""
    import difflib  # only a mistyped name needs it

    by_fold: dict[str, str] = {}
    for name in known:
        by_fold.setdefault(name.casefold(), name)
    fold = word.casefold()
    close = difflib.get_close_matches(fold, by_fold, n=most, cutoff=0.6)
    inside = [name for name in by_fold if fold and fold in name and name not in close]
    return [by_fold[name] for name in (close + sorted(inside, key=len))[:most]]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean a, b or c?`, or nothing where no name is near. Starts with a space."""
    names = [f"`{name}`" for name in nearest(word, known)]
    if not names:
        return ""
    listed = " or ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
    return f" Did you mean {listed}?"
