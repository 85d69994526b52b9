"""Tokens that a job adds to the model's tokenizer: their names, and the rows that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tightfit.core.errors import InvalidInputError, UsageError
from tightfit.core.reading import read_text
from tightfit.core.text import printable

NEW_TOKENS = ("add_tokens", "add_special_tokens")
"""The settings that name them."""
MAX_NEW_TOKENS = 65_536
ROWS_MULTIPLE = 64
"""Rows of a matrix that grows come in multiples of it, so that the logits' rows stay aligned for
tensor cores. Source: NVIDIA's guide to matrix multiplication performance: 64 values of 16 bit on
A100, 8 on older cards."""
FILE_MARK = "@"
_FILE_BYTES = 16 * 2**20


class NewTokens(NamedTuple):
    """Tokens to add, in the order of their numbers: the plain ones first."""

    plain: tuple[str, ...] = ()
    """Read as one token wherever a text spells them."""
    special: tuple[str, ...] = ()
    """Control tokens: only a template or plain text writes them, and decoding can leave them
    out."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.plain + self.special


def count_rows(num_rows: int, num_tokens: int) -> int:
    """Rows of embeddings and head for so many tokens: as they are where there is room, as in
    matrices that were published padded; else the next multiple."""
    if num_tokens <= num_rows:
        return num_rows
    return -(-num_tokens // ROWS_MULTIPLE) * ROWS_MULTIPLE


def read_token_files(names: Sequence[str], folder: Path | None = None) -> tuple[str, ...]:
    """The names, with those of each `@FILE` in its place, one a line. `folder`: where relative
    paths begin."""
    found: list[str] = []
    for name in names:
        if not name.startswith(FILE_MARK) or name == FILE_MARK:
            found.append(name)
            continue
        path = Path(name.removeprefix(FILE_MARK)).expanduser()
        path = path if folder is None else folder / path
        try:
            text = read_text(path, most_bytes=_FILE_BYTES)
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"The file of new tokens {path} cannot be read: {error}.",
                remedy="name a UTF-8 text file with one token a line; a token that begins with @ "
                "is written into such a file",
            ) from error
        lines = text.split("\n")
        lines = lines[:-1] if lines and not lines[-1] else lines
        for number, line in enumerate(lines, start=1):
            one = line.removesuffix("\r")
            problem = _find_problem(one)
            if problem is not None:
                raise _refuse(f"{path} line {number}", one, problem)
            found.append(one)
    return tuple(found)


def check_new_tokens(new: NewTokens) -> None:
    """Raise for the first name that can be no token, and for one that is there twice."""
    if len(new.names) > MAX_NEW_TOKENS:
        raise UsageError(
            f"{len(new.names):,} new tokens are too many; at most {MAX_NEW_TOKENS:,} are added.",
            remedy="add fewer, or train a tokenizer of your own and a model from its start",
        )
    places: dict[str, str] = {}
    for setting, names in zip(NEW_TOKENS, new, strict=True):
        for number, name in enumerate(names, start=1):
            place = f"`{setting}` entry {number}"
            problem = _find_problem(name)
            if problem is None and name in places:
                problem = f"is there already, as {places[name]}"
            if problem is not None:
                raise _refuse(place, name, problem)
            places[name] = place


def _find_problem(name: str) -> str | None:
    """Why this can be no token."""
    if not name:
        return "is empty"
    if name.isspace():
        return "is nothing but spaces"
    # Control characters, half surrogate pairs and the private plane that stands for control tokens.
    wrong = next((char for char in name if not char.isprintable() and char != " "), None)
    if wrong is not None or any(ord(char) >= 0x100000 for char in name):
        return f"holds the character {ord(wrong or name[0]):#x}, which is not printable"
    return None


def _refuse(place: str, name: str, problem: str) -> UsageError:
    shown = f", `{printable(name, most=60)}`," if name.strip() else ""
    return UsageError(
        f"{place}{shown} {problem}.", remedy="correct or remove that entry of the new tokens"
    )
