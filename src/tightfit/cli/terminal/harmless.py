"""Names from files and arguments, without characters that a terminal would obey."""

from __future__ import annotations

LONGEST_VALUE = 60


def harmless(text: str) -> str:
    """Each control character, line break and direction mark as `?`; odd spaces as spaces."""
    return text if text.isprintable() else "".join(map(_shown, text))


def harmless_lines(text: str) -> str:
    """The same for text whose line breaks are ours."""
    return "\n".join(map(harmless, text.split("\n")))


def shorten(value: object) -> str:
    """A value for the middle of a sentence."""
    text = harmless(str(value))
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char == "\t" or (char.isspace() and ord(char) > 0x9F and char < "\u2028") else "?"
