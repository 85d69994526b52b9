"""Messages from lines: one line, a block in triple quotes, or lines that end in a backslash."""

from __future__ import annotations

from collections.abc import Callable, Iterator

QUOTES = '"""'

ReadLine = Callable[[bool], str]
"""The next line without its line end; told whether a message goes on. Raises `EOFError` at the end,
and `KeyboardInterrupt` where the user thinks better of it."""


def read_messages(read_line: ReadLine, forget: Callable[[], None]) -> Iterator[str]:
    """Every message until the input ends. Ctrl-C forgets the message that was begun."""
    while True:
        try:
            message = _read_message(read_line)
        except EOFError:
            return
        except KeyboardInterrupt:
            forget()
            continue
        if message.strip():
            yield message


def _read_message(read_line: ReadLine) -> str:
    line = read_line(False)
    if line.lstrip().startswith(QUOTES):
        return _read_block(line.lstrip().removeprefix(QUOTES), read_line)
    lines: list[str] = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        try:
            line = read_line(True)
        except EOFError:
            return "\n".join(lines)
    return "\n".join([*lines, line]).strip()


def _read_block(line: str, read_line: ReadLine) -> str:
    lines: list[str] = []
    while not line.rstrip().endswith(QUOTES):
        lines.append(line)
        try:
            line = read_line(True)
        except EOFError:
            return "\n".join(lines).strip("\n")
    lines.append(line.rstrip().removesuffix(QUOTES))
    return "\n".join(lines).strip("\n")
