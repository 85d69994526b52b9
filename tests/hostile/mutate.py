"""Seeded mutations of bytes, texts, JSON trees and files, for tests of whatever reads them."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

NAMES = (
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "/dev/stdin",
    "a\0b",
    "a" * 300,
    "/".join(["a" * 200] * 30),
    "é" * 200,
    "a\nb",
    "\x1b[31m",
    "CON",
    "model.SAFETENSORS",
    "~nobody/x",
    "a/../../b",
    "\udc80",
    "-",
    "--json",
    "[:10%]",
    " ",
)
"""Names that no file should be opened by, or that lead elsewhere."""
NUMBERS = (
    *(0, -1, 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40, -(10**40)),
    *(10**4000, 0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, 1e18),
    *(float("inf"), float("-inf"), float("nan")),
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    {"": {}},
    *NUMBERS,
    *NAMES,
    "1e9",
    "nan",
)
_BYTES = (
    b"\x00",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\x80",
    b"[",
    b"{",
    b'"',
    b"\n",
    b"\\u",
)


def mutate_bytes(rng: Random, data: bytes) -> bytes:
    """One to four changes: bits flipped, parts cut, doubled, swapped or filled."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randint(0, len(found))
        other = min(len(found), place + rng.choice((1, 2, 8, 64, 1000)))
        match rng.randrange(7):
            case 0 if found:
                found[min(place, len(found) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del found[place:other]
            case 2:
                del found[place:]
            case 3:
                found[place:place] = rng.choice(_BYTES) * rng.choice((1, 3, 1000))
            case 4:
                found[place:other] = rng.choice((b"\0", b"\xff")) * (other - place)
            case 5:
                found += found[place:other]
            case _:
                found[place:place] = rng.randbytes(rng.choice((1, 8, 100)))
    return bytes(found)


def mutate_text(rng: Random, text: str) -> str:
    """The text with lines doubled, cut, indented, opened and never closed, or changed."""
    lines = text.split("\n")
    for _ in range(rng.randint(1, 4)):
        number = rng.randrange(len(lines))
        match rng.randrange(7):
            case 0:
                lines.insert(number, lines[rng.randrange(len(lines))])
            case 1:
                lines[number] = " " * rng.choice((1, 2, 7)) + lines[number]
            case 2:
                head, colon, _ = lines[number].partition(":")
                lines[number] = f"{head}{colon or ':'} {_spell(rng, rng.choice(VALUES))}"
            case 3:
                lines[number] = lines[number][: rng.randint(0, len(lines[number]))]
            case 4:
                lines[number] += rng.choice(
                    ("[", "{", "'", '"', "&a", "*a", "!!python/name:os", "\t")
                )
            case 5:
                lines.insert(
                    number, rng.choice(("- ", "[", "{a: ", "? ")) * rng.choice((1, 50, 5000))
                )
            case _:
                lines.insert(number, f"{_spell(rng, rng.choice(NAMES))}: {rng.randint(-9, 9)}")
    return "\n".join(lines)


def mutate_tree(rng: Random, tree: Any, *, most: int = 3, values: Sequence[Any] = VALUES) -> Any:
    """A copy of a JSON tree with one to `most` values replaced, dropped, moved or nested."""
    found = copy.deepcopy(tree)
    for _ in range(rng.randint(1, most)):
        places = list(_walk(rng, found))
        if not places:
            return rng.choice(values)
        holder, key = rng.choice(places)
        match rng.randrange(8):
            case 0:
                del holder[key]
            case 1:
                holder[key] = nest(rng.choice(values), rng.choice((1, 20, 130)), rng)
            case 2:
                other, name = rng.choice(places)
                holder[key] = copy.deepcopy(other[name])
            case 3 if isinstance(holder, dict):
                holder[rng.choice(NAMES)] = rng.choice(values)
            case 4 if isinstance(holder[key], int | float) and holder[key] not in NUMBERS:
                holder[key] = rng.choice((-holder[key], holder[key] * 10**9, f"{holder[key]}"))
            case 5 if isinstance(holder[key], list):
                holder[key] = holder[key] * rng.choice((2, 1000 if len(holder[key]) < 10 else 3))
            case _:
                holder[key] = rng.choice(values)
    return found


def nest(value: Any, depth: int, rng: Random) -> Any:
    """The value inside so many lists or mappings."""
    for _ in range(depth):
        value = {"a": value} if rng.random() < 0.5 else [value]
    return value


def write_json(rng: Random, tree: Any) -> bytes:
    """The tree as JSON text, at times with what Python never writes."""
    text = json.dumps(tree).encode("utf-8", "surrogatepass")
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: mutate_bytes(rng, text),
        lambda: b"[" * 100_000 + text,
        lambda: b'{"a":' * 50_000 + text,
        lambda: text.replace(b":", b": " + b"9" * 5000 + b", ", 1),
        lambda: text.decode("utf-8", "replace").encode("utf-16"),
        lambda: text.replace(b"e", b"\\ud800", 1),
    )
    return rng.choice(changes)() if rng.random() < 0.5 else text


SPECIAL_FILES = (
    "pipe",
    "zero",
    "folder",
    "dangling",
    "circle",
    "empty",
    "huge",
    "socket",
    "missing",
)


def plant_special(rng: Random, path: Path) -> str:
    """Put something that is no plain file in the place of a file; returns what."""
    remove(path)
    kind = rng.choice(SPECIAL_FILES)
    makers: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(path),
        "zero": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
        "dangling": lambda: path.symlink_to("nowhere"),
        "circle": lambda: path.symlink_to(path.name),
        "empty": lambda: path.write_bytes(b""),
        "huge": lambda: _make_sparse(path),
        "socket": lambda: path.symlink_to("/dev/tty"),
        "missing": lambda: None,
    }
    makers[kind]()
    return kind


def remove(path: Path) -> None:
    """Whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make_sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(2**34)


def _spell(rng: Random, value: Any) -> str:
    text = json.dumps(value) if rng.random() < 0.7 else str(value)[:500]
    return text.encode("utf-8", "replace").decode()


_MOST_KEYS = 50


def _walk(rng: Random, tree: Any) -> list[tuple[Any, Any]]:
    """Every holder with its keys; few of the many of a vocabulary, so that others have a turn."""
    found: list[tuple[Any, Any]] = []
    todo = [tree]
    while todo:
        holder = todo.pop()
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if len(keys) > _MOST_KEYS:
            keys = rng.sample(keys, 3)
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                todo.append(holder[key])
    return found
