"""Text from files and arguments, made fit for one line of a terminal or a message."""

from __future__ import annotations

LONGEST_VALUE = 60


def sanitize(text: str) -> str:
    """Each control character, line break and direction mark as `?`; odd spaces as spaces."""
    return text if text.isprintable() else "".join(map(_shown, text))


def sanitize_lines(text: str) -> str:
    """The same for text whose line breaks are ours."""
    return "\n".join(map(sanitize, text.split("\n")))


def shorten(value: object) -> str:
    """A value for the middle of a sentence."""
    text = sanitize(str(value))
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def count_of(number: int, noun: str) -> str:
    """`1 row`, `2 rows`, `12,000 rows`."""
    if number == 1:
        return f"{number:,} {noun}"
    return f"{number:,} {noun}" + ("es" if noun.endswith("s") else "s")


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char == "\t" or (char.isspace() and ord(char) > 0x9F and char < "\u2028") else "?"
