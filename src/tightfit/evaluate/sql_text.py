"""SQL as text: the query inside an answer, cut out by a small stated rule; no parser."""

from __future__ import annotations

import re
from typing import NamedTuple

_TAGGED = re.compile(r"\[SQL\](.*?)(?:\[/SQL\]|\Z)", re.IGNORECASE | re.DOTALL)
_FENCED = re.compile(r"```[ \t]*\w*[ \t]*\n?(.*?)(?:```|\Z)", re.DOTALL)
_QUERY = re.compile(
    r"\bSELECT\b|\bWITH\s+(?:RECURSIVE\s+)?[\w\"`\[\]]+\s*(?:\([^()]*\)\s*)?AS\s*\(", re.IGNORECASE
)
_STATEMENT = re.compile(
    r"(?:SELECT|WITH|VALUES|INSERT|UPDATE|DELETE|REPLACE|CREATE|DROP|ALTER|ATTACH|DETACH|PRAGMA"
    r"|VACUUM|REINDEX|ANALYZE|BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE|END|EXPLAIN)\b",
    re.IGNORECASE,
)
_CREATE_TABLE = re.compile(r"\bCREATE\s+TABLE\b", re.IGNORECASE)
_SKIPPED = re.compile(
    r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]\n]*\]|--[^\n]*|/\*.*?\*/", re.DOTALL
)
"""Quoted text, quoted names and comments: what is in there is not structure."""
_STRING = re.compile(r"'((?:[^']|'')*)'|\"((?:[^\"]|\"\")*)\"")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])")


class Literals(NamedTuple):
    """Values that a query compares with."""

    texts: tuple[str, ...]
    numbers: tuple[float, ...]


def extract_query(answer: str) -> str | None:
    """The one query that an answer gives; None where it gives none, or several statements.

    Looked for in this order: between `[SQL]` and `[/SQL]`; in the first code fence;
    in the whole answer from its first SELECT or WITH. The query ends at the first `;`
    outside quotes, or at the first empty line, and prose behind it is dropped.
    """
    text = _marked_part(answer).strip()
    first = _QUERY.search(text)
    if first is None or _STATEMENT.match(text, 0, first.start()):
        return None
    text = text[first.start() :]
    masked = mask_quotes(text)
    end = masked.find(";")
    if end >= 0:
        rest = text[end + 1 :].strip().lstrip(";").strip()
        return None if _STATEMENT.match(rest) else text[:end].strip()
    return re.split(r"\n[ \t]*\n", text, maxsplit=1)[0].strip()


def has_order(query: str) -> bool:
    """Whether the query itself is sorted; an ORDER BY inside parentheses sorts only its part."""
    depth, outer = 0, []
    for char in mask_quotes(query):
        depth += (char == "(") - (char == ")")
        outer.append(char if depth == 0 else " ")
    return re.search(r"\bORDER\s+BY\b", "".join(outer), re.IGNORECASE) is not None


def find_tables(text: str) -> list[str]:
    """The CREATE TABLE statements in a text, each up to where its parentheses close."""
    masked = mask_quotes(text)
    found = []
    for start in _CREATE_TABLE.finditer(masked):
        end = _closing(masked, masked.find("(", start.end()))
        if end is not None:
            found.append(text[start.start() : end])
    return found


def find_literals(query: str) -> Literals:
    """Quoted texts and bare numbers, in order, each once."""
    quoted = [first or second for first, second in _STRING.findall(query)]
    numbers = [float(text) for text in _NUMBER.findall(mask_quotes(query))]
    return Literals(tuple(dict.fromkeys(quoted)), tuple(dict.fromkeys(numbers)))


def mask_quotes(text: str) -> str:
    """The text, equally long, with quotes and comments blanked out."""
    return _SKIPPED.sub(lambda found: " " * len(found[0]), text)


def _marked_part(answer: str) -> str:
    for pattern in (_TAGGED, _FENCED):
        if found := pattern.search(answer):
            return found[1]
    return answer


def _closing(masked: str, opening: int) -> int | None:
    if opening < 0:
        return None
    depth = 0
    for place in range(opening, len(masked)):
        depth += (masked[place] == "(") - (masked[place] == ")")
        if depth == 0:
            return place + 1
    return None
